// Reductions over the lanes of a warp, packing of bfloat16, and the state of an online softmax.
#pragma once

#include "ladder/harness/launch.cuh"

namespace ladder {

inline constexpr unsigned kWholeWarp = 0xffffffffu;

/// Reduces over the 32 lanes; every lane gets the result. Lanes exchange with the lane whose number differs in
/// one bit.
__device__ __forceinline__ float warp_max(float x) {
  for (int bit = 16; bit > 0; bit /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, bit));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(kWholeWarp, x, bit);
  return x;
}

/// Reduces over the four lanes that hold a row of an accumulator of mma: 4 g to 4 g + 3.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}

/// Two float32 as a pair of bfloat16, the first in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

/// Online softmax of a row: the largest score so far, and the sum of exp(score - largest).
struct OnlineRow {
  float max = -INFINITY, sum = 0;

  /// Merges another state, or a block of scores, whose `other.sum` is relative to `other.max`. Returns the
  /// factor by which earlier sums and outputs of this row must be multiplied.
  __device__ __forceinline__ float merge(OnlineRow other) {
    const float largest = fmaxf(max, other.max);
    const float base = largest == -INFINITY ? 0.0f : largest;  // -inf - -inf would be NaN
    const float mine = expf(max - base);
    sum = sum * mine + other.sum * expf(other.max - base);
    max = largest;
    return mine;
  }
};

}  // namespace ladder
