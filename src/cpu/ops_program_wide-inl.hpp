// Instructions on ints of 64 bits, and divisions of ints: element by element, as they are rare.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_PROGRAM_WIDE_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_PROGRAM_WIDE_INL_HPP
#undef FOVEA_CPU_OPS_PROGRAM_WIDE_INL_HPP
#else
#define FOVEA_CPU_OPS_PROGRAM_WIDE_INL_HPP
#endif

#include <cmath>

#include "cpu/ops_program_functions-inl.hpp"
#include "expr/scalar.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

// Unsigned arithmetic wraps around.
struct WideSum {
  int64_t operator()(int64_t a, int64_t b) const {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
struct WideDifference {
  int64_t operator()(int64_t a, int64_t b) const {
    return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
  }
};
struct WideProduct {
  int64_t operator()(int64_t a, int64_t b) const {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
/// Where the divisor is 0 the pair is not valid, and any value will do.
struct WideQuotient {
  int64_t operator()(int64_t a, int64_t b) const { return b == 0 ? 0 : expr::floor_quotient(a, b); }
};
struct WideRemainder {
  int64_t operator()(int64_t a, int64_t b) const { return b == 0 ? 0 : expr::floor_remainder(a, b); }
};
struct WideSmaller {
  int64_t operator()(int64_t a, int64_t b) const { return b < a ? b : a; }
};
struct WideLarger {
  int64_t operator()(int64_t a, int64_t b) const { return b > a ? b : a; }
};
struct WideNegated {
  int64_t operator()(int64_t a) const { return WideDifference()(0, a); }
};
struct WideAbsolute {
  int64_t operator()(int64_t a) const { return a < 0 ? WideDifference()(0, a) : a; }
};
struct WideLess {
  bool operator()(int64_t a, int64_t b) const { return a < b; }
};
struct WideLessEqual {
  bool operator()(int64_t a, int64_t b) const { return a <= b; }
};
struct WideEqual {
  bool operator()(int64_t a, int64_t b) const { return a == b; }
};
struct WideNotEqual {
  bool operator()(int64_t a, int64_t b) const { return a != b; }
};

/// The quotient of two int32 in float64 is no whole number that the exact one is not: whole numbers are 2^-31 apart from
/// it at least, relative to their size.
struct IntQuotient {
  int32_t operator()(int32_t a, int32_t b) const {
    if (b == 0) return 0;
    return static_cast<int32_t>(static_cast<int64_t>(std::floor(static_cast<double>(a) / b)));
  }
};
struct IntRemainder {
  int32_t operator()(int32_t a, int32_t b) const {
    if (b == 0) return 0;
    return static_cast<int32_t>(a - static_cast<int64_t>(std::floor(static_cast<double>(a) / b)) * b);
  }
};

/// to(r, x) = value(r, x) for all elements.
template <class Out, class Value>
HWY_INLINE void for_elements(const Instruction& i, const Strip& s, const Value& value) {
  const Elements<Out> to(s, i.to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t x = 0; x < width; ++x) to.data[r * to.stride + x] = value(r, x);
  }
}

template <class F>
void wide_binary(const Instruction& i, const Strip& s) {
  const Elements<int64_t> a(s, i.operand[0]), b(s, i.operand[1]);
  for_elements<int64_t>(i, s, [&](int64_t r, int64_t x) { return F()(a.at(r, x), b.at(r, x)); });
}
template <class F>
void wide_unary(const Instruction& i, const Strip& s) {
  const Elements<int64_t> a(s, i.operand[0]);
  for_elements<int64_t>(i, s, [&](int64_t r, int64_t x) { return F()(a.at(r, x)); });
}
template <class F>
void wide_compare(const Instruction& i, const Strip& s) {
  const Elements<int64_t> a(s, i.operand[0]), b(s, i.operand[1]);
  for_elements<int32_t>(i, s, [&](int64_t r, int64_t x) { return F()(a.at(r, x), b.at(r, x)) ? -1 : 0; });
}
template <class F>
void int_binary(const Instruction& i, const Strip& s) {
  const Elements<int32_t> a(s, i.operand[0]), b(s, i.operand[1]);
  for_elements<int32_t>(i, s, [&](int64_t r, int64_t x) { return F()(a.at(r, x), b.at(r, x)); });
}
void wide_select(const Instruction& i, const Strip& s) {
  const Elements<int32_t> mask(s, i.operand[0]);
  const Elements<int64_t> a(s, i.operand[1]), b(s, i.operand[2]);
  for_elements<int64_t>(i, s,
                        [&](int64_t r, int64_t x) { return mask.at(r, x) != 0 ? a.at(r, x) : b.at(r, x); });
}
template <class Out>
void wide_to(const Instruction& i, const Strip& s) {
  const Elements<int64_t> a(s, i.operand[0]);
  for_elements<Out>(i, s, [&](int64_t r, int64_t x) { return static_cast<Out>(a.at(r, x)); });
}
void int_to_wide(const Instruction& i, const Strip& s) {
  const Elements<int32_t> a(s, i.operand[0]);
  for_elements<int64_t>(i, s, [&](int64_t r, int64_t x) { return int64_t{a.at(r, x)}; });
}
template <class T>
void spread(const Instruction& i, const Strip& s) {
  const Elements<T> a(s, i.operand[0]);
  for_elements<T>(i, s, [&](int64_t r, int64_t x) { return a.at(r, x); });
}
template <class T>
void constant(const Instruction& i, const Strip& s) {
  for_elements<T>(i, s, [&](int64_t, int64_t) { return static_cast<T>(i.payload); });
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_PROGRAM_WIDE_INL_HPP
