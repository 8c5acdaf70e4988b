// Conversions between float32 and the 16-bit floats, as bits (PTX ISA "Data Movement and Conversion Instructions: cvt"), and
// fma on pairs of them. Kernels compiled at run time use them in place of CUDA's headers (launch/nvrtc_std), and get the same
// instructions.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

__device__ __forceinline__ uint16_t f16_of(float x) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float float_of_f16(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
/// The first in the lower half.
__device__ __forceinline__ uint32_t f16x2_of(float low, float high) {
  uint32_t y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(low), "f"(high));
#else
  y = f16_of(low) | static_cast<uint32_t>(f16_of(high)) << 16;
#endif
  return y;
}

__device__ __forceinline__ uint16_t bf16_of(float x) {
#if __CUDA_ARCH__ >= 800
  uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}
__device__ __forceinline__ float float_of_bf16(uint16_t x) {
  float y;
#if __CUDA_ARCH__ >= 900
  asm("cvt.f32.bf16 %0, %1;" : "=f"(y) : "h"(x));
#else
  asm("mov.b32 %0, {0, %1};" : "=f"(y) : "h"(x));
#endif
  return y;
}
/// The first in the lower half.
__device__ __forceinline__ uint32_t bf16x2_of(float low, float high) {
  uint32_t y;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(y) : "f"(low), "f"(high));
#else
  y = bf16_of(low) | static_cast<uint32_t>(bf16_of(high)) << 16;
#endif
  return y;
}

__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
/// sm_80.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
#if __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
  return d;
}

}  // namespace fovea::cuda::ptx
