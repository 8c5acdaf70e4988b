// Products of warp tiles on tensor cores: 16-bit operands in fragments of m16n8k16, float32 accumulators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/mma.cuh"

namespace fovea::cuda {

/// The instruction that multiplies. sm_75 has m16n8k8 only, for float16, whose fragments are the halves of those of
/// m16n8k16.
enum class MmaShape : uint8_t { kM16N8K16, kM16N8K8 };

template <class T, MmaShape kShape>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kShape == MmaShape::kM16N8K16) {
    ptx::mma_m16n8k16<T>(d, a, b0, b1);
  } else {
    static_assert(std::is_same_v<T, __half>, "m16n8k8 multiplies float16 only");
    ptx::mma_m16n8k8_f16(d, a[0], a[1], b0);
    ptx::mma_m16n8k8_f16(d, a[2], a[3], b1);
  }
}

/// Two float32 rounded to T, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 x = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(x);
  } else {
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(x);
  }
}

template <class T>
__device__ __forceinline__ float2 unpack(uint32_t x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(x));
  } else {
    // One instruction each; __bfloat1622float2 takes three for both.
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  }
}

template <int kM16, int kN8>
__device__ __forceinline__ void clear(float (&acc)[kM16][kN8][4]) {
#pragma unroll
  for (int m = 0; m < kM16; ++m) {
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0;
    }
  }
}

/// acc += A B over an inner dimension of kK16 * 16. `load_a(fragment, k, m)` and `load_b(fragment, k, pair of n)` read
/// shared memory. A step loads all its fragments before its products, which then follow each other.
template <class T, MmaShape kShape, int kM16, int kN16, int kK16, class LoadA, class LoadB>
__device__ __forceinline__ void multiply(float (&acc)[kM16][2 * kN16][4], LoadA&& load_a, LoadB&& load_b) {
#pragma unroll
  for (int k = 0; k < kK16; ++k) {
    uint32_t a[kM16][4], b[kN16][4];
#pragma unroll
    for (int m = 0; m < kM16; ++m) load_a(a[m], k, m);
#pragma unroll
    for (int n = 0; n < kN16; ++n) load_b(b[n], k, n);
#pragma unroll
    for (int n = 0; n < kN16; ++n) {
#pragma unroll
      for (int m = 0; m < kM16; ++m) {
        mma<T, kShape>(acc[m][2 * n], a[m], b[n][0], b[n][1]);
        mma<T, kShape>(acc[m][2 * n + 1], a[m], b[n][2], b[n][3]);
      }
    }
  }
}

}  // namespace fovea::cuda
