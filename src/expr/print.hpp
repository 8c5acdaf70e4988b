// An expression as text.
#pragma once

#include <cstddef>
#include <string>

#include "expr/graph.hpp"

namespace fovea::expr {

/// The text of the tree under `node`, with the fewest parentheses: parsing it gives the same tree. Conversions of ints are written,
/// as float(x), only where the rules of types would not add them. A tree shares subtrees, which its text repeats: a
/// text longer than `most` characters is cut and ends in "...".
std::string print(const Expression& expression, NodeId node, size_t most = size_t{1} << 20);
inline std::string print(const Expression& expression) {
  return print(expression, expression.root);
}

}  // namespace fovea::expr
