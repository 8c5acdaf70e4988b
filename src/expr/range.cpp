// Interval arithmetic of ints, bools and floats.
#include "expr/range.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "expr/scalar.hpp"

namespace fovea::expr {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr IntRange kNoInts = {1, 0};

// --- ints ---

/// The smallest and the largest of some ints; every int where one of them has wrapped around.
class Corners {
 public:
  void add(bool wrapped, int64_t value) {
    wrapped_ = wrapped_ || wrapped;
    range_ = {std::min(range_.lowest, value), std::max(range_.highest, value)};
  }
  IntRange range() const { return wrapped_ ? IntRange{} : range_; }

 private:
  IntRange range_ = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  bool wrapped_ = false;
};

IntRange product(const IntRange& a, const IntRange& b) {
  Corners corners;
  for (const int64_t x : {a.lowest, a.highest}) {
    for (const int64_t y : {b.lowest, b.highest}) {
      int64_t value = 0;
      const bool wrapped = __builtin_mul_overflow(x, y, &value);
      corners.add(wrapped, value);
    }
  }
  return corners.range();
}

IntRange sum(const IntRange& a, const IntRange& b) {
  Corners corners;
  for (const auto& [x, y] : {std::pair{a.lowest, b.lowest}, std::pair{a.highest, b.highest}}) {
    int64_t value = 0;
    const bool wrapped = __builtin_add_overflow(x, y, &value);
    corners.add(wrapped, value);
  }
  return corners.range();
}

IntRange difference(const IntRange& a, const IntRange& b) {
  Corners corners;
  for (const auto& [x, y] : {std::pair{a.lowest, b.highest}, std::pair{a.highest, b.lowest}}) {
    int64_t value = 0;
    const bool wrapped = __builtin_sub_overflow(x, y, &value);
    corners.add(wrapped, value);
  }
  return corners.range();
}

IntRange join(const IntRange& a, const IntRange& b) {
  if (a.empty()) return b;
  return b.empty() ? a : IntRange{std::min(a.lowest, b.lowest), std::max(a.highest, b.highest)};
}

/// The parts of a divisor's range below and above 0; either may be empty.
std::array<IntRange, 2> around_zero(const IntRange& b) {
  return {{{b.lowest, std::min<int64_t>(b.highest, -1)}, {std::max<int64_t>(b.lowest, 1), b.highest}}};
}

/// Rounding down keeps the order of quotients, so the extremes are at the corners.
IntRange quotient(const IntRange& a, const IntRange& b) {
  IntRange all = kNoInts;
  for (const IntRange& part : around_zero(b)) {
    if (part.empty()) continue;
    Corners corners;
    for (const int64_t x : {a.lowest, a.highest}) {
      for (const int64_t y : {part.lowest, part.highest}) {
        corners.add(x == std::numeric_limits<int64_t>::min() && y == -1, floor_quotient(x, y));
      }
    }
    // -1 may lie inside, at the smallest int.
    const bool wraps =
        a.lowest == std::numeric_limits<int64_t>::min() && part.lowest <= -1 && part.highest >= -1;
    all = join(all, wraps ? IntRange{} : corners.range());
  }
  return all;
}

/// Between 0 and the divisor; exact where all dividends have one quotient by one divisor, as in aligned blocks.
IntRange remainder(const IntRange& a, const IntRange& b) {
  IntRange all = kNoInts;
  for (const IntRange& part : around_zero(b)) {
    if (part.empty()) continue;
    const int64_t divisor = part.lowest;
    const bool fixed = part.lowest == part.highest && divisor != -1;
    if (fixed && floor_quotient(a.lowest, divisor) == floor_quotient(a.highest, divisor)) {
      all = join(all, {floor_remainder(a.lowest, divisor), floor_remainder(a.highest, divisor)});
    } else if (part.lowest > 0) {
      // A dividend that is smaller than every divisor is its own remainder.
      const bool itself = a.lowest >= 0 && a.highest < part.lowest;
      const int64_t most = a.lowest >= 0 ? std::min(a.highest, part.highest - 1) : part.highest - 1;
      all = join(all, itself ? a : IntRange{0, most});
    } else {
      all = join(all, {part.lowest + 1, 0});
    }
  }
  return all;
}

IntRange absolute(const IntRange& a) {
  const IntRange negated = difference({0, 0}, a);
  if (a.lowest >= 0) return a;
  if (a.lowest == std::numeric_limits<int64_t>::min())
    return {};  // its absolute value wraps around to itself
  return a.highest <= 0 ? negated : IntRange{0, std::max(negated.highest, a.highest)};
}

template <class T>
T smaller(const T& a, const T& b) {
  return {std::min(a.lowest, b.lowest), std::min(a.highest, b.highest)};
}
template <class T>
T larger(const T& a, const T& b) {
  return {std::max(a.lowest, b.lowest), std::max(a.highest, b.highest)};
}

// --- comparisons ---

/// What comparing may give, apart from NaN.
template <class T>
Range compare(Op op, const T& a, const T& b) {
  if (a.empty() || b.empty()) return Range::of_bool(false, false);
  const bool meet = a.lowest <= b.highest && b.lowest <= a.highest;
  const bool same = a.lowest == a.highest && b.lowest == b.highest && a.lowest == b.lowest;
  switch (op) {
    case Op::kLess:
      return Range::of_bool(a.highest >= b.lowest, a.lowest < b.highest);
    case Op::kLessEqual:
      return Range::of_bool(a.highest > b.lowest, a.lowest <= b.highest);
    case Op::kGreater:
      return compare(Op::kLess, b, a);
    case Op::kGreaterEqual:
      return compare(Op::kLessEqual, b, a);
    case Op::kEqual:
      return Range::of_bool(!same, meet);
    default:
      return Range::of_bool(meet, !same);
  }
}

Range with_nan(Op op, Range result, bool nan) {
  if (!nan) return result;
  const bool value = op == Op::kNotEqual;  // every other comparison with NaN is false
  return Range::of_bool(result.may_be_false() || !value, result.may_be_true() || value);
}

// --- floats ---

/// Bounds of what float32 makes of a result between the bounds: rounded, flushed to 0, or beyond its largest value.
FloatRange rounded(double lowest, double highest, bool nan) {
  if (std::isnan(lowest) || std::isnan(highest)) return {};
  constexpr double kTiny = 0x1p-126, kLargest = 0x1.fffffep127;
  const auto outward = [](double x) { return std::isinf(x) ? x : x + std::fabs(x) * kRounding + kTiny; };
  // Rounding never changes a sign.
  double low = -outward(-lowest), high = outward(highest);
  if (lowest >= 0) low = std::max(low, 0.0);
  if (highest <= 0) high = std::min(high, 0.0);
  if (low < -kLargest) low = -kInfinity;
  if (high > kLargest) high = kInfinity;
  // What is infinite in float64 may be the largest value of float32 before it is rounded.
  if (low > kLargest) low = kLargest;
  if (high < -kLargest) high = -kLargest;
  return {low, high, nan};
}

bool infinite(const FloatRange& a) {
  return std::isinf(a.lowest) || std::isinf(a.highest);
}
bool contains_zero(const FloatRange& a) {
  return a.lowest <= 0 && a.highest >= 0;
}

FloatRange from_ints(const IntRange& a) {
  const auto low = static_cast<double>(a.lowest), high = static_cast<double>(a.highest);
  if (a.lowest >= -kExactInFloat32 && a.highest <= kExactInFloat32) return {low, high, false};
  return rounded(low, high, false);
}

FloatRange literal(const FloatRange& a) {
  const bool exact = static_cast<double>(static_cast<float>(a.lowest)) == a.lowest;
  return exact && a.lowest == a.highest ? a : rounded(a.lowest, a.highest, a.nan);
}

FloatRange sum(const FloatRange& a, const FloatRange& b) {
  const bool opposite = (a.lowest == -kInfinity && b.highest == kInfinity) ||
                        (a.highest == kInfinity && b.lowest == -kInfinity);
  return rounded(a.lowest + b.lowest, a.highest + b.highest, a.nan || b.nan || opposite);
}

FloatRange negated(const FloatRange& a) {
  return {-a.highest, -a.lowest, a.nan};
}

template <class Combine>
FloatRange of_corners(const FloatRange& a, const FloatRange& b, bool nan, const Combine& combine) {
  double lowest = kInfinity, highest = -kInfinity;
  for (const double x : {a.lowest, a.highest}) {
    for (const double y : {b.lowest, b.highest}) {
      const double value = combine(x, y);
      if (std::isnan(value)) return {};
      lowest = std::min(lowest, value);
      highest = std::max(highest, value);
    }
  }
  return rounded(lowest, highest, nan);
}

FloatRange product(const FloatRange& a, const FloatRange& b) {
  const bool zero_times_infinity = (infinite(a) && contains_zero(b)) || (infinite(b) && contains_zero(a));
  if (zero_times_infinity) return {};
  return of_corners(a, b, a.nan || b.nan, [](double x, double y) { return x * y; });
}

FloatRange quotient(const FloatRange& a, const FloatRange& b) {
  if (contains_zero(b) || (infinite(a) && infinite(b))) return {};
  return of_corners(a, b, a.nan || b.nan, [](double x, double y) { return x / y; });
}

FloatRange absolute(const FloatRange& a) {
  if (a.lowest >= 0) return a;
  if (a.highest <= 0) return negated(a);
  return {0, std::max(-a.lowest, a.highest), a.nan};
}

/// Of functions that grow with their operand.
FloatRange growing(Op op, const FloatRange& a) {
  switch (op) {
    case Op::kExp:
      return rounded(std::exp(a.lowest), std::exp(a.highest), a.nan);
    case Op::kTanh: {
      const FloatRange range = rounded(std::tanh(a.lowest), std::tanh(a.highest), a.nan);
      return {std::max(range.lowest, -1.0), std::min(range.highest, 1.0), range.nan};
    }
    case Op::kFloor:
      return {std::floor(a.lowest), std::floor(a.highest), a.nan};
    default:
      break;
  }
  // log and sqrt, NaN below 0
  const bool nan = a.nan || a.lowest < 0;
  if (a.highest < 0) return {kInfinity, -kInfinity, nan};
  const double low = std::max(a.lowest, 0.0);
  return op == Op::kLog ? rounded(std::log(low), std::log(a.highest), nan)
                        : rounded(std::sqrt(low), std::sqrt(a.highest), nan);
}

FloatRange minimum(FloatRange a, const FloatRange& b) {
  return {std::min(a.lowest, b.lowest), std::min(a.highest, b.highest), a.nan || b.nan};
}
FloatRange maximum(FloatRange a, const FloatRange& b) {
  return {std::max(a.lowest, b.lowest), std::max(a.highest, b.highest), a.nan || b.nan};
}

FloatRange join(const FloatRange& a, const FloatRange& b) {
  const bool nan = a.nan || b.nan;
  if (a.empty()) return {b.lowest, b.highest, nan};
  return b.empty() ? FloatRange{a.lowest, a.highest, nan}
                   : FloatRange{std::min(a.lowest, b.lowest), std::max(a.highest, b.highest), nan};
}

Range of_floats(Op op, std::span<const Range> x) {
  const FloatRange& a = x[0].number;
  const FloatRange& b = x[x.size() > 1 ? 1 : 0].number;
  if (is_comparison(op)) return with_nan(op, compare(op, a, b), a.nan || b.nan);
  bool nan = false, empty = false;
  for (const Range& operand : x) {
    nan = nan || operand.number.nan;
    empty = empty || operand.number.empty();
  }
  if (empty) return {{}, {kInfinity, -kInfinity, nan}, false};
  const auto result = [&] {
    switch (op) {
      case Op::kNegate:
        return negated(a);
      case Op::kAbs:
        return absolute(a);
      case Op::kAdd:
        return sum(a, b);
      case Op::kSubtract:
        return sum(a, negated(b));
      case Op::kMultiply:
        return product(a, b);
      case Op::kDivide:
        return quotient(a, b);
      case Op::kMin:
        return minimum(a, b);
      case Op::kMax:
        return maximum(a, b);
      case Op::kClamp:
        return minimum(maximum(a, b), x[2].number);
      case Op::kFloat:
        return literal(a);
      default:
        return growing(op, a);
    }
  }();
  return {{}, result, false};
}

Range of_ints(Op op, std::span<const Range> x) {
  const IntRange& a = x[0].integer;
  const IntRange& b = x[x.size() > 1 ? 1 : 0].integer;
  if (is_comparison(op)) return compare(op, a, b);
  for (const Range& operand : x) {
    if (operand.integer.empty()) return {kNoInts, {kInfinity, -kInfinity, false}, false};
  }
  if (op == Op::kToFloat) return {{}, from_ints(a), false};
  const bool divides = op == Op::kDivide || op == Op::kRemainder;
  const auto result = [&] {
    switch (op) {
      case Op::kNegate:
        return difference({0, 0}, a);
      case Op::kAbs:
        return absolute(a);
      case Op::kAdd:
        return sum(a, b);
      case Op::kSubtract:
        return difference(a, b);
      case Op::kMultiply:
        return product(a, b);
      case Op::kDivide:
        return quotient(a, b);
      case Op::kRemainder:
        return remainder(a, b);
      case Op::kMin:
        return smaller(a, b);
      case Op::kMax:
        return larger(a, b);
      default:
        return smaller(larger(a, b), x[2].integer);  // clamp
    }
  }();
  return {result, {}, divides && b.lowest <= 0 && b.highest >= 0};
}

/// where(c, a, b); `&&` and `||` are where(c, a, false) and where(c, true, b).
Range choice(const Range& c, const Range& a, const Range& b) {
  Range result{kNoInts, {kInfinity, -kInfinity, false}, c.invalid};
  const auto take = [&](const Range& taken) {
    result.integer = join(result.integer, taken.integer);
    result.number = join(result.number, taken.number);
    result.invalid = result.invalid || taken.invalid;
  };
  if (c.may_be_true()) take(a);
  if (c.may_be_false()) take(b);
  return result;
}

}  // namespace

Range apply(Op op, Type type, std::span<const Range> x) {
  if (op == Op::kWhere) return choice(x[0], x[1], x[2]);
  if (op == Op::kAnd) return choice(x[0], x[1], Range::of_bool(true, false));
  if (op == Op::kOr) return choice(x[0], Range::of_bool(false, true), x[1]);
  Range result;
  if (op == Op::kNot) {
    result = Range::of_bool(x[0].may_be_true(), x[0].may_be_false());
  } else {
    result = type == Type::kFloat ? of_floats(op, x) : of_ints(op, x);
  }
  for (const Range& operand : x) result.invalid = result.invalid || operand.invalid;
  return result;
}

}  // namespace fovea::expr
