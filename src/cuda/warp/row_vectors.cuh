// Writes rows of accumulators to global memory. In an accumulator of mma or wgmma the four lanes of a
// row have two columns each of every eight (tile/fragment_map.hpp: AccumulatorM16N8).
#pragma once

#include <cstdint>

#include "cuda/warp/mma_tile.cuh"

namespace fovea::cuda {

/// Writes row `half` (0: row lane / 4 of the 16, 1: eight rows further) times `factor` in vectors of 16 bytes; `columns` of
/// kColumns exist. Lanes swap with one neighbour and then with another, so that each has eight adjacent columns of every
/// 32. All lanes of the warp call it.
template <int kColumns, class T, int kRegs>
__device__ __forceinline__ void store_row_vectors(T* row, int columns, const float (&acc)[kRegs], int half,
                                                  float factor, int lane) {
  static_assert(kColumns % 32 == 0 && kRegs >= kColumns / 2);
  const bool odd_lane = lane % 2 != 0, upper = lane % 4 >= 2;
  const int first_column = (upper ? 16 : 0) + (odd_lane ? 8 : 0);
#pragma unroll
  for (int n32 = 0; n32 < kColumns / 32; ++n32) {
    uint32_t words[2][2];  // of 16 columns each
#pragma unroll
    for (int n16 = 0; n16 < 2; ++n16) {
      const float* x = acc + (2 * n32 + n16) * 8 + 2 * half;
      const uint32_t low = pack<T>(x[0] * factor, x[1] * factor),
                     high = pack<T>(x[4] * factor, x[5] * factor);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd_lane ? low : high, 1);
      words[n16][0] = odd_lane ? other : low, words[n16][1] = odd_lane ? high : other;
    }
    const uint32_t x = __shfl_xor_sync(0xffffffffu, upper ? words[0][0] : words[1][0], 2),
                   y = __shfl_xor_sync(0xffffffffu, upper ? words[0][1] : words[1][1], 2);
    const uint4 out = upper ? uint4{x, y, words[1][0], words[1][1]} : uint4{words[0][0], words[0][1], x, y};
    if (first_column + n32 * 32 < columns) *reinterpret_cast<uint4*>(row + first_column + n32 * 32) = out;
  }
}

/// The same in float32, in vectors of 8 bytes: the four lanes of a row write a sector of 32. `columns` is even.
template <int kColumns, int kRegs>
__device__ __forceinline__ void store_row_pairs(float* row, int columns, const float (&acc)[kRegs], int half,
                                                float factor, int lane) {
  const int first = 2 * (lane % 4);
#pragma unroll
  for (int n8 = 0; n8 < kColumns / 8; ++n8) {
    const float* const x = acc + 4 * n8 + 2 * half;
    if (first + n8 * 8 < columns)
      *reinterpret_cast<float2*>(row + first + n8 * 8) = make_float2(x[0] * factor, x[1] * factor);
  }
}

/// The same element by element: any alignment, any number of columns.
template <int kColumns, class T, int kRegs>
__device__ __forceinline__ void store_row_elements(T* row, int columns, const float (&acc)[kRegs], int half,
                                                   float factor, int lane) {
  const int first = 2 * (lane % 4);
#pragma unroll
  for (int n8 = 0; n8 < kColumns / 8; ++n8) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (first + n8 * 8 + e < columns)
        row[first + n8 * 8 + e] = static_cast<T>(acc[4 * n8 + 2 * half + e] * factor);
    }
  }
}

/// Writes row `half` of a gradient, whose first element is that at `offset` in `data`: in T, or in float32, which is rare and element by
/// element always. `aligned`: vectors of 16 bytes are.
template <int kColumns, class T, int kRegs>
__device__ __forceinline__ void store_gradient_row(char* data, int64_t offset, bool is_f32, bool aligned,
                                                   int columns, const float (&acc)[kRegs], int half,
                                                   float factor, int lane) {
  if (is_f32) {
    store_row_elements<kColumns>(reinterpret_cast<float*>(data) + offset, columns, acc, half, factor, lane);
  } else {
    T* const row = reinterpret_cast<T*>(data) + offset;
    if (aligned) {
      store_row_vectors<kColumns>(row, columns, acc, half, factor, lane);
    } else {
      store_row_elements<kColumns>(row, columns, acc, half, factor, lane);
    }
  }
}

}  // namespace fovea::cuda
