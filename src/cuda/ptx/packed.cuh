// Arithmetic on two 16-bit floats in a register (PTX ISA "Half Precision Floating Point Instructions"; sm_80 for the
// maximum, sm_90 for products of bfloat16), and their masks ("Data Movement and Conversion Instructions: prmt").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fovea::cuda::ptx {

/// The larger of each pair; a number where one is NaN.
template <class T>
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t c;
  if constexpr (std::is_same_v<T, __half>) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  }
  return c;
}

/// The product of each pair of bfloat16, rounded to nearest even.
__device__ __forceinline__ uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}

/// A mask of two halves: all bits of those where a bfloat16 is not zero, or NaN.
__device__ __forceinline__ uint32_t bf16_pairs_not_zero(uint32_t a) {
  uint32_t mask;
  asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(a), "r"(0));
  return mask;
}

/// A mask of two halves: bit 15 of `signs` fills the low one, bit 31 the high one.
__device__ __forceinline__ uint32_t halves_by_signs(uint32_t signs) {
  uint32_t mask;
  // Bytes 3 3 1 1, the sign of each in all its bits.
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(signs));
  return mask;
}

/// All bits of a word where bit 15 (half 0) or 31 (half 1) of `signs` is 1.
__device__ __forceinline__ uint32_t word_by_sign(uint32_t signs, int half) {
  uint32_t mask;
  if (half == 0) {
    asm("prmt.b32 %0, %1, 0, 0x9999;" : "=r"(mask) : "r"(signs));  // the sign of byte 1 in all bits
  } else {
    asm("prmt.b32 %0, %1, 0, 0xbbbb;" : "=r"(mask) : "r"(signs));
  }
  return mask;
}

}  // namespace fovea::cuda::ptx
