// Few rows: their elements as float32, and how many are computed with at a time.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_ROW_ELEMENTS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_ROW_ELEMENTS_INL_HPP
#undef FOVEA_CPU_OPS_ROW_ELEMENTS_INL_HPP
#else
#define FOVEA_CPU_OPS_ROW_ELEMENTS_INL_HPP
#endif

#include <bit>
#include <type_traits>

#include "cpu/ops_tiles-inl.hpp"
#include "cpu/ops_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

/// How often for_each_rows() calls.
template <int kMost>
constexpr int64_t passes_of_rows(int64_t count) {
  return count / kMost + std::popcount(static_cast<uint64_t>(count % kMost));
}
/// Calls pass(rows, first) for the rows kMost at a time, then for half as many, at last for one; `rows` is a constant.
template <int kMost, class Pass>
HWY_INLINE void for_each_rows(int64_t count, Pass&& pass) {
  int64_t r = 0;
  const auto all_of = [&](auto rows) HWY_ATTR {
    for (; r + rows() <= count; r += rows()) pass(rows, r);
  };
  if constexpr (kMost == 8) all_of(std::integral_constant<int, 8>());
  if constexpr (kMost >= 4) all_of(std::integral_constant<int, 4>());
  all_of(std::integral_constant<int, 2>());
  all_of(std::integral_constant<int, 1>());
}

/// Two vectors of a row as float32. 32 bfloat16 come as (even, odd) elements: one shift and one mask, no
/// shuffles; the float32 operands are de-interleaved to match, once a pass. Few instructions per cache line
/// let the out-of-order window reach over the next page, which keeps memory busy.
template <class T>
struct TwoVectors {
  static constexpr float kFactor = 1;  ///< what values() are to be multiplied by
  static HWY_INLINE void values(const T* p, V& a, V& b) {
    a = load_as_float(p);
    b = load_as_float(p + kLanes);
  }
  static HWY_INLINE void load(const float* p, V& a, V& b) {
    a = hn::LoadU(D(), p);
    b = hn::LoadU(D(), p + kLanes);
  }
  static HWY_INLINE void store(V a, V b, float* p) {
    hn::StoreU(a, D(), p);
    hn::StoreU(b, D(), p + kLanes);
  }
};
#if HWY_TARGET != HWY_SCALAR
/// Vectors of even and of odd elements.
struct EvenAndOdd {
  static constexpr float kFactor = 1;
  static HWY_INLINE void load(const float* p, V& a, V& b) { hn::LoadInterleaved2(D(), p, a, b); }
  static HWY_INLINE void store(V a, V b, float* p) { hn::StoreInterleaved2(a, b, D(), p); }
};
template <>
struct TwoVectors<Bf16> : EvenAndOdd {
  static HWY_INLINE void values(const Bf16* p, V& a, V& b) {
    const auto words =
        hn::BitCast(DU(), hn::LoadU(hn::Repartition<uint8_t, D>(), reinterpret_cast<const uint8_t*>(p)));
    a = hn::BitCast(D(), hn::ShiftLeft<16>(words));
    b = hn::BitCast(D(), hn::And(words, hn::Set(DU(), 0xffff0000u)));
  }
};
#endif

struct SumOf {
  template <class Vec>
  HWY_INLINE Vec operator()(Vec a, Vec b) const {
    return hn::Add(a, b);
  }
};
struct LargestOf {
  template <class Vec>
  HWY_INLINE Vec operator()(Vec a, Vec b) const {
    return hn::Max(a, b);
  }
};

#if HWY_TARGET != HWY_SCALAR
/// Combines the blocks of four lanes.
template <class Combine, class DV, class Vec>
HWY_INLINE auto all_blocks(DV, Vec v) {
  if constexpr (hn::MaxLanes(DV()) <= 4) {
    return v;
  } else {
    const hn::Half<DV> half;
    return all_blocks<Combine>(half, Combine()(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
/// Combines the lanes of each of four vectors; the results are side by side.
template <class Combine>
HWY_INLINE auto lanes_of_four(const V* v) {
  const D d;
  const hn::Repartition<double, D> pairs;
  const auto fold = [&](V a, V b) HWY_ATTR {
    return Combine()(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const auto low = hn::BitCast(pairs, fold(v[0], v[1])), high = hn::BitCast(pairs, fold(v[2], v[3]));
  // Each block of four lanes holds a part of the four results.
  return all_blocks<Combine>(d, Combine()(hn::BitCast(d, hn::InterleaveLower(pairs, low, high)),
                                          hn::BitCast(d, hn::InterleaveUpper(pairs, low, high))));
}

/// The sums of the lanes of four vectors, times `factor`, side by side.
HWY_INLINE void sums_of_four(const V* v, float factor, bool first, float* out) {
  const hn::Full128<float> four;
  auto sums = lanes_of_four<SumOf>(v);
  if (factor != 1.0f) sums = hn::Mul(sums, hn::Set(four, factor));
  if (!first) sums = hn::Add(sums, hn::LoadU(four, out));
  hn::StoreU(sums, four, out);
}
#endif

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
/// A float8_e4m3fn that is a number: its bits, moved, are the float16 that is 256 times smaller.
struct E4M3Number : E4M3 {};
template <>
struct TwoVectors<E4M3Number> : EvenAndOdd {
  static constexpr float kFactor = 256;
  static HWY_INLINE void values(const E4M3Number* p, V& a, V& b) {
    const hn::Rebind<int16_t, D> pairs;
    const auto both = hn::LoadU(pairs, reinterpret_cast<const int16_t*>(p));
    const auto half = [&](auto high) HWY_ATTR {
      const auto bits = hn::And(hn::ShiftRight<1>(high), hn::Set(pairs, static_cast<int16_t>(0xbf80)));
      return hn::PromoteTo(D(), hn::BitCast(DH(), bits));
    };
    a = half(hn::ShiftLeft<8>(both));
    b = half(both);
  }
};

/// Whether some of n rows of d float8_e4m3fn is NaN.
bool any_nan(const E4M3* rows, int64_t ld, int64_t n, int64_t d) {
  const hn::ScalableTag<uint8_t> bytes;
  const auto size = hn::Set(bytes, 0x7f);
  auto largest = hn::Zero(bytes);
  constexpr auto kBytes = static_cast<int64_t>(hn::MaxLanes(bytes));
  bool nan = false;
  for (int64_t j = 0; j < n; ++j) {
    const auto* row = reinterpret_cast<const uint8_t*>(rows + j * ld);
    int64_t c = 0;
    for (; c + kBytes <= d; c += kBytes) largest = hn::Max(largest, hn::And(hn::LoadU(bytes, row + c), size));
    for (; c < d; ++c) nan = nan || (row[c] & 0x7f) == 0x7f;
  }
  return nan || !hn::AllFalse(bytes, hn::Eq(largest, size));
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_ROW_ELEMENTS_INL_HPP
