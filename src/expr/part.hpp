// Expressions over a whole problem, as expressions over a part of it: some of its sequences, heads, queries and keys.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "expr/pair_expressions.hpp"

namespace fovea::expr {

/// The names that count something of which a part has a range, from 0 in the part: b, h, hk, q and k.
constexpr bool counts_pairs(Variable name) {
  return name != Variable::kS && name != Variable::kNq && name != Variable::kNk;
}

/// How the expressions of a problem index one dimension of a tensor.
struct Dimension {
  /// The one name that counts pairs and indexes the dimension alone, wherever it is read. A part sees its own elements of it.
  std::optional<Variable> name;
  /// Otherwise: its one element stands for all values of the names that index it alone.
  bool stands_for_all = false;
};
using Dimensions = std::array<Dimension, kMaxRank>;
/// Of each tensor that the expressions declare; `is_one` says which dimensions have one element.
std::vector<Dimensions> dimensions_of(const PairExpressions& all,
                                      const std::vector<std::array<bool, kMaxRank>>& is_one);

/// The place of a name among the numbers of a part: what is added to b, h, hk, q and k, and what nq and nk are.
constexpr size_t number_of(Variable name) {
  return static_cast<size_t>(name) - static_cast<size_t>(Variable::kB);
}
inline constexpr size_t kPartNumbers = number_of(Variable::kNk) + 1;

/// What a part is to an expression.
struct PartNames {
  std::array<bool, kVariableNames.size()>
      is_moved{};                              ///< by Variable: the part's is another than the whole's
  std::array<int64_t, kPartNumbers> limits{};  ///< above which no part has a number
  std::string numbers;                         ///< the name of the tensor of numbers
};

/// The expression with names of the part in the place of moved names of the whole. It reads the numbers of the part from an int32 tensor
/// of kPartNumbers elements behind the tensors that it has, which only expressions that read it declare. So all parts
/// that move the same names have the same text. Limits clamp what is read, which changes nothing but lets ranges prove that ints are
/// small.
Expression in_part(const Expression& whole, const std::vector<Dimensions>& dimensions, const PartNames& part);

}  // namespace fovea::expr
