// Float32 products on tensor cores, which multiply tf32. A tf32 has 11 significant bits and a float32 24, so each float32
// becomes two tf32 numbers, x = hi + lo + rest with |lo| <= 2^-11 |x| and |rest| <= 2^-23 |x|, and
//
//   a b = a_hi b_hi + (a_hi b_lo + a_lo b_hi) + rest      |rest| <= 2^-22 |a b|, the level of float32's rounding
//
// These are three products, over the whole range of float32. Where x is NaN or Inf, lo is NaN, so sums with x are NaN or
// Inf, though not always the one that float32 gives: kernels compute such rows again.
#pragma once

#include <cstdint>

#include "cuda/ptx/mma.cuh"

namespace fovea::cuda {

/// The bits of a float32 that tf32 lacks: the tensor core ignores them.
inline constexpr uint32_t kTf32Ignored = 0x1fffu;

struct Tf32Pair {
  uint32_t hi, lo;
};

/// hi is rounded to nearest, ties away from zero, so that lo has at most 12 bits, of which the tensor core
/// drops one. (cvt.rna.tf32 is the same two instructions.)
__device__ __forceinline__ Tf32Pair split_tf32(float x) {
  const uint32_t hi = (__float_as_uint(x) + (kTf32Ignored + 1) / 2) & ~kTf32Ignored;
  return {hi, __float_as_uint(x - __uint_as_float(hi))};
}

/// Operand A of m16n8k8, both parts.
struct Tf32Fragment {
  uint32_t hi[4], lo[4];

  __device__ __forceinline__ void set(int index, float x) {
    const Tf32Pair pair = split_tf32(x);
    hi[index] = pair.hi;
    lo[index] = pair.lo;
  }
};

/// corrections += a_hi b_lo + a_lo b_hi, sum += a_hi b_hi. The tensor core truncates what it adds at the magnitude of the
/// accumulator, so small terms have one of their own. Where few steps are added, both may be the same.
__device__ __forceinline__ void mma_3xtf32(float (&sum)[4], float (&corrections)[4], const Tf32Fragment& a,
                                           const Tf32Pair& b0, const Tf32Pair& b1) {
  ptx::mma_m16n8k8_tf32(corrections, a.lo, b0.hi, b1.hi);
  ptx::mma_m16n8k8_tf32(corrections, a.hi, b0.lo, b1.lo);
  ptx::mma_m16n8k8_tf32(sum, a.hi, b0.hi, b1.hi);
}

}  // namespace fovea::cuda
