// <cuda_bf16.h> for NVRTC, as far as the kernels use it: CUDA's own header may be missing at run time, and takes longer.
#pragma once

#include "cuda/ptx/convert.cuh"

struct __nv_bfloat16 {
  uint16_t bits;

  __nv_bfloat16() = default;
  __device__ __forceinline__ __nv_bfloat16(float x) : bits(fovea::cuda::ptx::bf16_of(x)) {}
  __device__ __forceinline__ operator float() const { return fovea::cuda::ptx::float_of_bf16(bits); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 x) {
  return x;
}
__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float x) {
  return x;
}
__device__ __forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return __builtin_bit_cast(__nv_bfloat162, fovea::cuda::ptx::bf16x2_of(x, y));
}
__device__ __forceinline__ __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __builtin_bit_cast(__nv_bfloat162, fovea::cuda::ptx::fma_bf16x2(__builtin_bit_cast(uint32_t, a),
                                                                         __builtin_bit_cast(uint32_t, b),
                                                                         __builtin_bit_cast(uint32_t, c)));
}
__device__ __forceinline__ __nv_bfloat16 __ldg(const __nv_bfloat16* from) {
  return __builtin_bit_cast(__nv_bfloat16, __ldg(reinterpret_cast<const unsigned short*>(from)));
}
