// Arithmetic of ints and floats.
#include "expr/scalar.hpp"

#include <cmath>

namespace fovea::expr {
namespace {

// Unsigned arithmetic wraps around; signed overflow would be undefined.
int64_t add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
int64_t subtract(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
int64_t multiply(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

int64_t smaller(int64_t a, int64_t b) {
  return b < a ? b : a;
}
int64_t larger(int64_t a, int64_t b) {
  return b > a ? b : a;
}
double smaller(double a, double b) {
  return std::isnan(b) || b < a ? b : a;
}
double larger(double a, double b) {
  return std::isnan(b) || b > a ? b : a;
}

template <class T>
bool compare(Op op, T a, T b) {
  switch (op) {
    case Op::kLess:
      return a < b;
    case Op::kLessEqual:
      return a <= b;
    case Op::kGreater:
      return a > b;
    case Op::kGreaterEqual:
      return a >= b;
    case Op::kEqual:
      return a == b;
    default:
      return a != b;
  }
}

Value of_ints(Op op, std::span<const Value> x) {
  const int64_t a = x[0].integer, b = x.size() > 1 ? x[1].integer : 0;
  switch (op) {
    case Op::kToFloat:
      return {0, static_cast<double>(a)};
    case Op::kNegate:
      return {subtract(0, a)};
    case Op::kAbs:
      return {a < 0 ? subtract(0, a) : a};
    case Op::kAdd:
      return {add(a, b)};
    case Op::kSubtract:
      return {subtract(a, b)};
    case Op::kMultiply:
      return {multiply(a, b)};
    case Op::kDivide:
      return b == 0 ? Value{0, 0, false} : Value{floor_quotient(a, b)};
    case Op::kRemainder:
      return b == 0 ? Value{0, 0, false} : Value{floor_remainder(a, b)};
    case Op::kMin:
      return {smaller(a, b)};
    case Op::kMax:
      return {larger(a, b)};
    case Op::kClamp:
      return {smaller(larger(a, b), x[2].integer)};
    default:
      return {compare(op, a, b)};
  }
}

Value of_floats(Op op, std::span<const Value> x) {
  const double a = x[0].number, b = x.size() > 1 ? x[1].number : 0;
  switch (op) {
    case Op::kNegate:
      return {0, -a};
    case Op::kAbs:
      return {0, std::fabs(a)};
    case Op::kAdd:
      return {0, a + b};
    case Op::kSubtract:
      return {0, a - b};
    case Op::kMultiply:
      return {0, a * b};
    case Op::kDivide:
      return {0, a / b};
    case Op::kMin:
      return {0, smaller(a, b)};
    case Op::kMax:
      return {0, larger(a, b)};
    case Op::kClamp:
      return {0, smaller(larger(a, b), x[2].number)};
    case Op::kExp:
      return {0, std::exp(a)};
    case Op::kLog:
      return {0, std::log(a)};
    case Op::kTanh:
      return {0, std::tanh(a)};
    case Op::kSqrt:
      return {0, std::sqrt(a)};
    case Op::kFloor:
      return {0, std::floor(a)};
    default:
      return {compare(op, a, b)};
  }
}

}  // namespace

int64_t floor_quotient(int64_t a, int64_t b) {
  if (b == -1) return subtract(0, a);  // the processor's division traps on the smallest int
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

int64_t floor_remainder(int64_t a, int64_t b) {
  if (b == -1) return 0;
  const int64_t remainder = a % b;
  return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
}

Value apply(Op op, Type type, std::span<const Value> x) {
  // These three do not look at the operand that they do not choose.
  if (op == Op::kWhere) {
    if (!x[0].valid) return x[0];
    return x[0].integer != 0 ? x[1] : x[2];
  }
  if (op == Op::kAnd) return !x[0].valid || x[0].integer == 0 ? x[0] : x[1];
  if (op == Op::kOr) return !x[0].valid || x[0].integer != 0 ? x[0] : x[1];
  for (const Value& operand : x) {
    if (!operand.valid) return {0, 0, false};
  }
  if (op == Op::kNot) return {x[0].integer == 0};
  return type == Type::kFloat ? of_floats(op, x) : of_ints(op, x);
}

}  // namespace fovea::expr
