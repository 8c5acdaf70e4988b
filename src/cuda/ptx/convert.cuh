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

/// float8_e4m3fn, to nearest even; what is too large becomes 448. From sm_89 on one instruction.
__device__ __forceinline__ uint8_t e4m3_of(float x) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return static_cast<uint8_t>(pair);
#else
  // By selections: branches inside of loops cost registers of convergence.
  const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const uint32_t rebased = magnitude - (120u << 23);
  const uint32_t normal = (rebased + 0x7ffffu + (rebased >> 20 & 1u)) >> 20;
  // Below 2^-6: beside 2^14 the last bit of a float is worth 2^-9.
  const uint32_t subnormal = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) - 0x46800000u;
  const uint32_t finite = magnitude < 0x3c800000u ? subnormal : normal;
  const uint32_t bounded = magnitude >= 0x43e00000u ? 0x7eu : finite;  // 448 and more
  return static_cast<uint8_t>(sign | (magnitude > 0x7f800000u ? 0x7fu : bounded));
#endif
}
/// Four float8_e4m3fn, likewise, the first in the lowest byte.
__device__ __forceinline__ uint32_t e4m3x4_of(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
#else
  return static_cast<uint32_t>(e4m3_of(a)) | static_cast<uint32_t>(e4m3_of(b)) << 8 |
         static_cast<uint32_t>(e4m3_of(c)) << 16 | static_cast<uint32_t>(e4m3_of(d)) << 24;
#endif
}
/// Two float16 as float8_e4m3fn, likewise, in the lower half (sm_89).
__device__ __forceinline__ uint32_t e4m3x2_of_f16x2(uint32_t x) {
  uint16_t y = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(y) : "r"(x));
#endif
  return y;
}
/// Two float8_e4m3fn as float16; the upper half of `pair` is not read. From sm_89 on one instruction.
__device__ __forceinline__ uint32_t f16x2_of_e4m3x2(uint32_t pair) {
#if __CUDA_ARCH__ >= 890
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<uint16_t>(pair)));
  return y;
#else
  // Seven bits further left they are those of the float16 that is 256 times smaller; NaN has all bits set.
  const uint32_t apart = (pair & 0xffu) | (pair & 0xff00u) << 8, magnitude = apart & 0x007f007fu;
  const uint32_t nan = (magnitude + 0x00010001u & 0x00800080u) >> 7;
  const uint32_t half = (apart & 0x00800080u) << 8 | magnitude << 7 | nan * 0x7fffu;
  const uint16_t low = f16_of(256 * float_of_f16(static_cast<uint16_t>(half)));
  return low | static_cast<uint32_t>(f16_of(256 * float_of_f16(static_cast<uint16_t>(half >> 16)))) << 16;
#endif
}

/// Four float8_e4m3fn as float16, two in each register (sm_89).
__device__ __forceinline__ void f16x4_of_e4m3x4(uint32_t& first, uint32_t& second, uint32_t four) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(four));
#else
  first = f16x2_of_e4m3x2(four), second = f16x2_of_e4m3x2(four >> 16);
#endif
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
