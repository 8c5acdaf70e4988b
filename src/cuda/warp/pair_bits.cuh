// A bit for each of a lane's pairs of a block: found beside products, whose operands and sums take the registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/packed.cuh"

namespace fovea::cuda {

/// Of kSteps operands A of m16n8k16, 16 columns each; or of the 8 kSteps elements of a sum of m16n8 or wgmma, of which element
/// 2 x + e is half e of register x % 4 of operand x / 4.
template <int kSteps>
struct PairBits {
  /// Of register r of step i: bits x = 4 (i % 4) + r and 16 + x of word i / 4, its low and its high half.
  uint32_t of[(kSteps + 3) / 4];

  /// Of register r of step i: bits 15 and 31.
  __device__ __forceinline__ uint32_t signs(int i, int r) const {
    return of[i / 4] << (15 - 4 * (i % 4) - r);
  }
  /// Of element i of a sum.
  __device__ __forceinline__ bool operator[](int i) const {
    return (of[i / 32] >> (i % 2 * 16 + i / 2 % 16) & 1) != 0;
  }

  /// Those that a launch before has written: the lane's word w at 32 w.
  __device__ __forceinline__ void load(const uint32_t* words) {
#pragma unroll
    for (int w = 0; w < (kSteps + 3) / 4; ++w) of[w] = __ldg(words + 32 * w);
  }
  /// holds(i) for element i of a sum, kAtOnce at once: what they read takes registers.
  template <int kAtOnce, class Holds>
  __device__ __forceinline__ void ask(Holds&& holds) {
#pragma unroll
    for (int w = 0; w < (kSteps + 3) / 4; ++w) {
      of[w] = 0;
#pragma unroll kAtOnce
      for (int i = 32 * w; i < (32 * w + 32 < 8 * kSteps ? 32 * w + 32 : 8 * kSteps); ++i)
        if (holds(i)) of[w] |= 1u << (i % 2 * 16 + i / 2 % 16);
    }
  }

  /// What the other elements of a sum become.
  __device__ __forceinline__ void keep(float (&sum)[8 * kSteps], float other) const {
#pragma unroll
    for (int i = 0; i < 8 * kSteps; ++i)
      if (!(*this)[i]) sum[i] = other;
  }
  /// The other elements of operands become 0.
  __device__ __forceinline__ void keep(uint32_t (&operand)[kSteps][4]) const {
#pragma unroll
    for (int x = 0; x < 4 * kSteps; ++x) operand[x / 4][x % 4] &= ptx::halves_by_signs(signs(x / 4, x % 4));
  }
};

/// A lane's 16 bits of columns [32 c, 32 c + 32) in word c / 2, in bits 8 (c % 2) to 8 (c % 2) + 7 and 16 more: of its two rows of 16,
/// whose words hold a bit for each of these columns.
__device__ __forceinline__ uint32_t pair_bits_of_rows(const uint32_t (&rows)[2], int lane, int c) {
  uint32_t bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // Columns 8 t + 2 (lane % 4) + e: bits 8 t, which the product moves to bits 24 + 2 t, and no others beside them.
      const uint32_t x = rows[half] >> (2 * (lane % 4) + e) & 0x01010101u;
      bits |= x * 0x01041040u >> 24 << (half + 16 * e + 8 * (c % 2));
    }
  }
  return bits;
}

}  // namespace fovea::cuda
