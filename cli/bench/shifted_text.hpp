// An expression for a part of a problem.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "cli/data/expressions.hpp"

namespace fovea::cli {

/// Where a part of a problem lies in the whole: first batch, heads and query, and how many queries the whole has.
struct PartOrigin {
  int64_t b = 0, h = 0, hk = 0, q = 0, nq = 0;
};

/// The same expressions with names that count from the part's origin: h becomes (h + 4). The copy has the tensors of the whole.
Expressions shifted(const Expressions& whole, const PartOrigin& origin);
/// Of one text.
std::string shifted(const std::string& text, const std::vector<Array>& tensors, const PartOrigin& origin);

}  // namespace fovea::cli
