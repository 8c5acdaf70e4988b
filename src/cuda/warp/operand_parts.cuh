// Accumulators as operand A of wgmma in parts: one of 16 bits, or the three of bf16x3.
#pragma once

#include <cstdint>

#include "cuda/warp/mma_tile.cuh"

namespace fovea::cuda {

/// Pair `x` of a lane's elements as operand A: kParts of T (bf16x3: three), each the rest of those before.
template <class T, int kParts, int kSteps>
__device__ __forceinline__ void set_parts(uint32_t (&to)[kParts][kSteps][4], int x, float low, float high) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t pair = to[part][x / 4][x % 4] = pack<T>(low, high);
    if (part + 1 < kParts) {
      const float2 taken = unpack<T>(pair);
      low -= taken.x;
      high -= taken.y;
    }
  }
}

}  // namespace fovea::cuda
