// The value of one operation: the one definition that folding of constants and the oracle share.
#pragma once

#include <cstdint>
#include <span>

#include "expr/operation.hpp"

namespace fovea::expr {

/// A value of any type. A pair for which the value is not `valid` has no value: ints were divided by zero, or an index
/// is outside its tensor. What uses such a value is not valid either, but for the choices that were not taken of where,
/// && and ||.
struct Value {
  int64_t integer = 0;  ///< of ints and bools
  double number = 0;    ///< of floats
  bool valid = true;
};

/// Ints have 64 bits and wrap around. Division rounds down, and a remainder has the sign of the divisor. Floats follow
/// IEEE 754. min, max and clamp are NaN when an operand is; where operands are equal, they take the first.
/// `type` is that of the operands.
Value apply(Op op, Type type, std::span<const Value> operands);

/// Quotient rounded down and remainder with the divisor's sign; the divisor is not zero.
int64_t floor_quotient(int64_t a, int64_t b);
int64_t floor_remainder(int64_t a, int64_t b);

}  // namespace fovea::expr
