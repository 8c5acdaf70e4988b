// Sets of values that contain all values of a node over a block: intervals, and whether NaN or pairs that are not valid occur.
//
// Ranges of floats contain what float32 and float64 give, so that a kernel may skip a block that this arithmetic
// excludes: each operation that rounds widens its range by kRounding.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "expr/operation.hpp"

namespace fovea::expr {

/// float32 has every int up to here.
inline constexpr int64_t kExactInFloat32 = int64_t{1} << 24;

/// Relative to the result: 8 units of float32, above the errors of exp, log, tanh and sqrt of the backends.
inline constexpr double kRounding = 0x1p-20;

/// Bounds include both ends. An interval is empty when lowest > highest: then no pair of the block has a value.
struct IntRange {
  int64_t lowest = std::numeric_limits<int64_t>::min(), highest = std::numeric_limits<int64_t>::max();
  bool empty() const { return lowest > highest; }
};
struct FloatRange {
  double lowest = -std::numeric_limits<double>::infinity(), highest = std::numeric_limits<double>::infinity();
  bool nan = true;  ///< whether a value may be NaN
  bool empty() const { return lowest > highest; }
};

/// Of any type; a bool uses `integer`, 0 for false and 1 for true.
struct Range {
  IntRange integer;
  FloatRange number;
  bool invalid = true;  ///< whether pairs may be not valid

  static Range of_int(int64_t lowest, int64_t highest) { return {{lowest, highest}, {}, false}; }
  static Range of_bool(bool may_be_false, bool may_be_true) {
    return of_int(may_be_false ? 0 : 1, may_be_true ? 1 : 0);
  }
  static Range of_float(double lowest, double highest, bool nan) {
    return {{}, {lowest, highest, nan}, false};
  }
  bool may_be_true() const { return !integer.empty() && integer.highest == 1; }
  bool may_be_false() const { return !integer.empty() && integer.lowest == 0; }
};

/// The values of an operation whose operands take any values of their ranges, independently of each other.
/// `type` is that of the first operand that is no condition.
Range apply(Op op, Type type, std::span<const Range> operands);

}  // namespace fovea::expr
