// What all vector operations share: types, the register tile, and exponentials.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_VECTORS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_VECTORS_INL_HPP
#undef FOVEA_CPU_OPS_VECTORS_INL_HPP
#else
#define FOVEA_CPU_OPS_VECTORS_INL_HPP
#endif

#include <hwy/highway.h>

#include <limits>

#include "cpu/ops.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using V = hn::Vec<D>;
#if HWY_TARGET != HWY_SCALAR
using D4 = hn::FixedTag<float, 4>;
#endif

// Vector width and the register tile of the products. 32 registers: 8 x 3 accumulators; 16 registers: 4 x 3.
// Each leaves room for 3 right operands and a broadcast, and has at least the 8 independent chains that two
// pipes with a latency of 4 cycles need.
constexpr int kLanes = static_cast<int>(HWY_LANES(float));
constexpr int kVectors = kPanel / kLanes;
constexpr int kTileRows = (HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64) ? 8 : 4;
static_assert(kPanel % (3 * kLanes) == 0 || kLanes == 1);

/// 2^x for x <= 127: x = n + f with n whole, a minimax polynomial in f (relative error, our own Remez run), then
/// the exponent n. Below -126 the result is 0, so that no subnormal slows the products down; NaN stays NaN.
/// The relative error is 2e-9 at degree 6, less than the rounding of float, and 8e-8 at degree 5, enough where
/// the weights are rounded to bfloat16 next.
template <int kDegree>
HWY_INLINE V exp2_fast(V x) {
  const D d;
#if HWY_TARGET == HWY_AVX3
  const V safe = x;
#else
  // Without VSCALEF the exponent is added as an integer, which is right only inside the range of float.
  const auto in_range = hn::And(hn::Ge(x, hn::Set(d, -126.0f)), hn::Le(x, hn::Set(d, 127.0f)));
  const V safe = hn::IfThenElseZero(in_range, x);
#endif
  const V n = hn::Round(safe);
  const V f = hn::Sub(safe, n);
  V p;
  if constexpr (kDegree == 6) {
    p = hn::MulAdd(hn::Set(d, 0.000153458121613f), f, hn::Set(d, 0.001339993117724f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.009618488956331f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.055503287771054f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.240226468906455f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.693147205737196f));
    p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  } else {
    p = hn::MulAdd(hn::Set(d, 0.001327647263195f), f, hn::Set(d, 0.009675541343121f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.055507132718556f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.240221197237107f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.693146967065035f));
    p = hn::MulAdd(p, f, hn::Set(d, 1.000000071654714f));
  }
#if HWY_TARGET == HWY_AVX3
  return V{
      _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p.raw, n.raw)};
#else
  const DI di;
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, n));
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  const V above = hn::IfThenElse(hn::Eq(x, x), hn::Set(d, std::numeric_limits<float>::infinity()), x);
  const V outside = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), above);
  return hn::IfThenElse(in_range, scaled, outside);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_VECTORS_INL_HPP
