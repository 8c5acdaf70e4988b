// What an instruction of a program does with vectors, and the loops over the elements of its operands.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_PROGRAM_FUNCTIONS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_PROGRAM_FUNCTIONS_INL_HPP
#undef FOVEA_CPU_OPS_PROGRAM_FUNCTIONS_INL_HPP
#else
#define FOVEA_CPU_OPS_PROGRAM_FUNCTIONS_INL_HPP
#endif

#include <limits>
#include <type_traits>

#include "cpu/ops_tiles-inl.hpp"
#include "cpu/ops_vectors-inl.hpp"
#include "cpu/program.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

using VI = hn::Vec<DI>;
template <class T>
using TagOf = std::conditional_t<std::is_same_v<T, float>, D, DI>;

/// The rows that instructions on pairs compute now, and where the registers are.
struct Strip {
  const ProgramInputs* in;
  char *column_registers, *row_registers, *pair_registers;
  int64_t row, rows, width;

  /// Rows and elements a row of an instruction.
  int64_t rows_of(const Instruction& i) const { return i.count > 0 ? 1 : rows; }
  int64_t width_of(const Instruction& i) const { return i.count > 0 ? i.count : width; }
};

/// Element (r, x) at data[r * stride + x]; of a value of each row at data[r].
template <class T>
struct Elements {
  T* data = nullptr;
  int64_t stride = 0;
  bool each = false;

  Elements(const Strip& s, Place place) {
    switch (place.space) {
      case Space::kNone:
        break;
      case Space::kColumn:
        data = reinterpret_cast<T*>(s.column_registers + place.offset);
        break;
      case Space::kRow:
        data = reinterpret_cast<T*>(s.row_registers + place.offset);
        break;
      case Space::kEachRow:
        data = reinterpret_cast<T*>(s.row_registers + place.offset) + s.row;
        each = true;
        break;
      case Space::kPair:
        data = reinterpret_cast<T*>(s.pair_registers + place.offset);
        stride = s.width;
        break;
      case Space::kTile:
        data = reinterpret_cast<T*>(s.in->tiles[place.offset] + s.row * s.width);
        stride = s.width;
        break;
    }
  }
  explicit operator bool() const { return data != nullptr; }
  T at(int64_t r, int64_t x) const { return each ? data[r] : data[r * stride + x]; }
  hn::Vec<TagOf<T>> vector(int64_t r, int64_t x) const {
    return each ? hn::Set(TagOf<T>(), data[r]) : hn::LoadU(TagOf<T>(), data + r * stride + x);
  }
  template <bool kEach>
  HWY_INLINE hn::Vec<TagOf<T>> get(int64_t r, int64_t x) const {
    if constexpr (kEach) return hn::Set(TagOf<T>(), data[r]);
    return hn::LoadU(TagOf<T>(), data + r * stride + x);
  }
};

HWY_INLINE void store(V v, void* to) {
  hn::StoreU(v, D(), static_cast<float*>(to));
}
HWY_INLINE void store(VI v, void* to) {
  hn::StoreU(v, DI(), static_cast<int32_t*>(to));
}

// --- operations ---

struct Same {
  V operator()(V a) const { return a; }
};
struct Sum {
  template <class X>
  X operator()(X a, X b) const {
    return hn::Add(a, b);
  }
};
struct Difference {
  template <class X>
  X operator()(X a, X b) const {
    return hn::Sub(a, b);
  }
};
struct Product {
  template <class X>
  X operator()(X a, X b) const {
    return hn::Mul(a, b);
  }
};
struct Quotient {
  V operator()(V a, V b) const { return hn::Div(a, b); }
};
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
/// The processor's minimum and maximum are their second operand when one is NaN, so only the first has to be looked at.
HWY_INLINE V min_or_nan(V a, V b) {
  return hn::IfThenElse(hn::Eq(a, a), hn::Min(a, b), a);
}
HWY_INLINE V max_or_nan(V a, V b) {
  return hn::IfThenElse(hn::Eq(a, a), hn::Max(a, b), a);
}
#else
/// a + b is NaN when one of them is.
HWY_INLINE V min_or_nan(V a, V b) {
  return hn::IfThenElse(hn::And(hn::Eq(a, a), hn::Eq(b, b)), hn::Min(a, b), hn::Add(a, b));
}
HWY_INLINE V max_or_nan(V a, V b) {
  return hn::IfThenElse(hn::And(hn::Eq(a, a), hn::Eq(b, b)), hn::Max(a, b), hn::Add(a, b));
}
#endif
struct Smaller {
  V operator()(V a, V b) const { return min_or_nan(a, b); }
  VI operator()(VI a, VI b) const { return hn::Min(a, b); }
};
struct Larger {
  V operator()(V a, V b) const { return max_or_nan(a, b); }
  VI operator()(VI a, VI b) const { return hn::Max(a, b); }
};
struct Negated {
  template <class X>
  X operator()(X a) const {
    return hn::Neg(a);
  }
};
struct Absolute {
  template <class X>
  X operator()(X a) const {
    return hn::Abs(a);
  }
};
struct AbsDifference {
  template <class X>
  X operator()(X a, X b) const {
    return hn::Abs(hn::Sub(a, b));
  }
};
struct Root {
  V operator()(V a) const { return hn::Sqrt(a); }
};
struct Floored {
  V operator()(V a) const { return hn::Floor(a); }
};
struct Tangent {
  V operator()(V a) const { return tanh_fast(a); }
};

/// e^x = 2^n 2^f with n = round(x log2 e). f is computed with log2 e in two parts: in one, its error would grow with x.
struct Exponential {
  V operator()(V x) const {
    const D d;
    const V safe = hn::Min(hn::Max(x, hn::Set(d, -150.0f)), hn::Set(d, 150.0f));
    const V n = hn::Round(hn::Mul(safe, hn::Set(d, 1.44269504f)));
    V f = hn::MulSub(safe, hn::Set(d, 1.44269502f), n);
    f = hn::MulAdd(safe, hn::Set(d, 1.92596303e-8f), f);
    // 2^n in two factors, each of which is a float where 2^n is none.
    const VI power = hn::ConvertTo(DI(), n), half = hn::ShiftRight<1>(power);
    const V value = hn::Mul(hn::Mul(exp2_fast<6>(f), power_of_2(half)), power_of_2(hn::Sub(power, half)));
    return hn::IfThenElse(hn::Eq(x, x), value, x);
  }
  static HWY_INLINE V power_of_2(VI n) {
    return hn::BitCast(D(), hn::ShiftLeft<23>(hn::Add(n, hn::Set(DI(), 127))));
  }
};

/// log x = e log 2 + log m with m in [sqrt(1/2), sqrt(2)); log m by the polynomial of Cephes' logf (error 1e-7).
struct Logarithm {
  V operator()(V x) const {
    const D d;
    const DI di;
    const V one = hn::Set(d, 1.0f), infinity = hn::Set(d, std::numeric_limits<float>::infinity());
    const auto subnormal = hn::Lt(x, hn::Set(d, 1.17549435e-38f));
    const VI bits = hn::BitCast(di, hn::IfThenElse(subnormal, hn::Mul(x, hn::Set(d, 8388608.0f)), x));
    // The exponent of m * sqrt(2), so that m is near 1.
    const VI shifted = hn::Sub(bits, hn::Set(di, 0x3f3504f3));
    const VI exponent = hn::ShiftRight<23>(shifted);
    const V m = hn::Sub(hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(exponent))), one);
    const V e = hn::Sub(hn::ConvertTo(d, exponent), hn::IfThenElseZero(subnormal, hn::Set(d, 23.0f)));
    const V m2 = hn::Mul(m, m);
    V p = hn::Set(d, 7.0376836292e-2f);
    p = hn::MulAdd(p, m, hn::Set(d, -1.1514610310e-1f));
    p = hn::MulAdd(p, m, hn::Set(d, 1.1676998740e-1f));
    p = hn::MulAdd(p, m, hn::Set(d, -1.2420140846e-1f));
    p = hn::MulAdd(p, m, hn::Set(d, 1.4249322787e-1f));
    p = hn::MulAdd(p, m, hn::Set(d, -1.6668057665e-1f));
    p = hn::MulAdd(p, m, hn::Set(d, 2.0000714765e-1f));
    p = hn::MulAdd(p, m, hn::Set(d, -2.4999993993e-1f));
    p = hn::MulAdd(p, m, hn::Set(d, 3.3333331174e-1f));
    V y = hn::Mul(hn::Mul(p, m), m2);
    y = hn::MulAdd(e, hn::Set(d, -2.12194440e-4f), y);
    y = hn::MulAdd(m2, hn::Set(d, -0.5f), y);
    y = hn::MulAdd(e, hn::Set(d, 0.693359375f), hn::Add(m, y));
    // Infinity and NaN stay; 0 gives -infinity, what is below it NaN.
    y = hn::IfThenElse(hn::Lt(x, infinity), y, x);
    const V nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
    const V outside = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Neg(infinity), nan);
    return hn::IfThenElse(hn::Le(x, hn::Zero(d)), outside, y);
  }
};

HWY_INLINE VI as_mask(hn::Mask<D> m) {
  return hn::VecFromMask(DI(), hn::RebindMask(DI(), m));
}
struct Less {
  VI operator()(V a, V b) const { return as_mask(hn::Lt(a, b)); }
  VI operator()(VI a, VI b) const { return hn::VecFromMask(DI(), hn::Lt(a, b)); }
};
struct LessEqual {
  VI operator()(V a, V b) const { return as_mask(hn::Le(a, b)); }
  VI operator()(VI a, VI b) const { return hn::Not(hn::VecFromMask(DI(), hn::Lt(b, a))); }
};
struct Equal {
  VI operator()(V a, V b) const { return as_mask(hn::Eq(a, b)); }
  VI operator()(VI a, VI b) const { return hn::VecFromMask(DI(), hn::Eq(a, b)); }
};
/// True for NaN, which Highway's Ne is not everywhere.
struct NotEqual {
  VI operator()(V a, V b) const { return hn::Not(as_mask(hn::Eq(a, b))); }
  VI operator()(VI a, VI b) const { return hn::Not(hn::VecFromMask(DI(), hn::Eq(a, b))); }
};
struct Both {
  VI operator()(VI a, VI b) const { return hn::And(a, b); }
};
struct Either {
  VI operator()(VI a, VI b) const { return hn::Or(a, b); }
};
struct Inverted {
  VI operator()(VI a) const { return hn::Not(a); }
};
struct ProductPlus {
  V operator()(V a, V b, V c) const { return hn::MulAdd(a, b, c); }
};
struct MinusProduct {
  V operator()(V a, V b, V c) const { return hn::NegMulAdd(a, b, c); }
};
struct ProductMinus {
  V operator()(V a, V b, V c) const { return hn::MulSub(a, b, c); }
};

// --- loops ---
// Columns outside, rows inside: what is the same in all rows stays in a register.

template <class T, class F>
void unary(const Instruction& i, const Strip& s) {
  const Elements<T> a(s, i.operand[0]);
  const Elements<int32_t> to(s, i.to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t x = 0; x < width; x += kLanes) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) store(F()(a.template get<false>(r, x)), to.data + r * to.stride + x);
  }
}

template <class T, class F, bool kEachA, bool kEachB>
HWY_INLINE void binary_loop(const Instruction& i, const Strip& s) {
  const Elements<T> a(s, i.operand[0]), b(s, i.operand[1]);
  const Elements<int32_t> to(s, i.to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t x = 0; x < width; x += kLanes) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) {
      store(F()(a.template get<kEachA>(r, x), b.template get<kEachB>(r, x)), to.data + r * to.stride + x);
    }
  }
}
template <class T, class F>
void binary(const Instruction& i, const Strip& s) {
  if (i.operand[0].space == Space::kEachRow) {
    binary_loop<T, F, true, false>(i, s);
  } else if (i.operand[1].space == Space::kEachRow) {
    binary_loop<T, F, false, true>(i, s);
  } else {
    binary_loop<T, F, false, false>(i, s);
  }
}

template <class F, bool kEachA, bool kEachB, bool kEachC>
HWY_INLINE void ternary_loop(const Instruction& i, const Strip& s) {
  const Elements<float> a(s, i.operand[0]), b(s, i.operand[1]), c(s, i.operand[2]), to(s, i.to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t x = 0; x < width; x += kLanes) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) {
      store(F()(a.template get<kEachA>(r, x), b.template get<kEachB>(r, x), c.template get<kEachC>(r, x)),
            to.data + r * to.stride + x);
    }
  }
}
template <class F>
void ternary(const Instruction& i, const Strip& s) {
  const bool a = i.operand[0].space == Space::kEachRow, b = i.operand[1].space == Space::kEachRow,
             c = i.operand[2].space == Space::kEachRow;
  if (c)
    return a   ? ternary_loop<F, true, false, true>(i, s)
           : b ? ternary_loop<F, false, true, true>(i, s)
               : ternary_loop<F, false, false, true>(i, s);
  if (a) return ternary_loop<F, true, false, false>(i, s);
  if (b) return ternary_loop<F, false, true, false>(i, s);
  ternary_loop<F, false, false, false>(i, s);
}

void select(const Instruction& i, const Strip& s) {
  const Elements<int32_t> mask(s, i.operand[0]), a(s, i.operand[1]), b(s, i.operand[2]), to(s, i.to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t x = 0; x < width; x += kLanes) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) {
      store(hn::IfThenElse(hn::MaskFromVec(mask.get<false>(r, x)), a.get<false>(r, x), b.get<false>(r, x)),
            to.data + r * to.stride + x);
    }
  }
}

void shift_right(const Instruction& i, const Strip& s) {
  const Elements<int32_t> a(s, i.operand[0]), to(s, i.to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t x = 0; x < width; x += kLanes) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) {
      store(hn::ShiftRightSame(a.get<false>(r, x), static_cast<int>(i.payload)), to.data + r * to.stride + x);
    }
  }
}

void low_bits(const Instruction& i, const Strip& s) {
  const Elements<int32_t> a(s, i.operand[0]), to(s, i.to);
  const VI bits = hn::Set(DI(), static_cast<int32_t>(i.payload));
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t x = 0; x < width; x += kLanes) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) store(hn::And(a.get<false>(r, x), bits), to.data + r * to.stride + x);
  }
}

void int_to_float(const Instruction& i, const Strip& s) {
  const Elements<int32_t> a(s, i.operand[0]);
  const Elements<float> to(s, i.to);
  const int64_t rows = s.rows_of(i), width = s.width_of(i);
  for (int64_t x = 0; x < width; x += kLanes) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r)
      store(hn::ConvertTo(D(), a.get<false>(r, x)), to.data + r * to.stride + x);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_PROGRAM_FUNCTIONS_INL_HPP
