// <cuda_fp16.h> for NVRTC, as far as the kernels use it: CUDA's own header may be missing at run time, and takes longer.
#pragma once

#include "cuda/ptx/convert.cuh"

struct __half {
  uint16_t bits;

  __half() = default;
  __device__ __forceinline__ __half(float x) : bits(fovea::cuda::ptx::f16_of(x)) {}
  __device__ __forceinline__ operator float() const { return fovea::cuda::ptx::float_of_f16(bits); }
};
struct alignas(4) __half2 {
  __half x, y;
};

__device__ __forceinline__ float __half2float(__half x) {
  return x;
}
__device__ __forceinline__ __half __float2half_rn(float x) {
  return x;
}
__device__ __forceinline__ __half2 __floats2half2_rn(float x, float y) {
  return __builtin_bit_cast(__half2, fovea::cuda::ptx::f16x2_of(x, y));
}
__device__ __forceinline__ float2 __half22float2(__half2 a) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, a);
  return {fovea::cuda::ptx::float_of_f16(static_cast<uint16_t>(bits)),
          fovea::cuda::ptx::float_of_f16(static_cast<uint16_t>(bits >> 16))};
}
__device__ __forceinline__ __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __builtin_bit_cast(
      __half2, fovea::cuda::ptx::fma_f16x2(__builtin_bit_cast(uint32_t, a), __builtin_bit_cast(uint32_t, b),
                                           __builtin_bit_cast(uint32_t, c)));
}
__device__ __forceinline__ __half __ldg(const __half* from) {
  return __builtin_bit_cast(__half, __ldg(reinterpret_cast<const unsigned short*>(from)));
}
