// Which weights of a lane dropout keeps: cells of tile/philox.hpp, whose rows are queries, or keys.
#pragma once

#include <cstdint>

#include "cuda/warp/pair_bits.cuh"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// The dropout of this run, in registers that the compiler knows to be uniform.
__device__ __forceinline__ tile::Dropout uniform_dropout(const tile::AttentionParams& p) {
  tile::Dropout dropout = tile::dropout_of(p);
#pragma unroll
  for (size_t i = 0; i < 4; ++i) dropout.start[i] = __shfl_sync(~0u, dropout.start[i], 0);
  return dropout;
}

/// The factors of the two weights of Dropout::kept(): 0, or 1 / (1 - p).
__device__ __forceinline__ float2 keep_factors(const tile::Dropout& dropout, uint32_t kept) {
  return {(kept >> 15 & 1) != 0 ? dropout.keep_scale : 0.0f, kept >> 31 != 0 ? dropout.keep_scale : 0.0f};
}

/// Dropout of the weights of a query row.
struct DropoutRow {
  const tile::Dropout& dropout;  ///< outlives it
  uint32_t head;                 ///< tile::dropout_head
  uint32_t row;

  __device__ __forceinline__ DropoutRow(const tile::Dropout& d, const tile::AttentionParams& p, int batch,
                                        int head_q, int query)
      : dropout(d), head(tile::dropout_head(p, batch, head_q)), row(static_cast<uint32_t>(query)) {}

  /// Dropout::kept() of keys j and j + 1, j even.
  __device__ __forceinline__ uint32_t kept_pair(int j) const {
    return dropout.kept_pair(head, row, static_cast<uint32_t>(j));
  }
  /// Their factors.
  __device__ __forceinline__ float2 factors(int j) const { return keep_factors(dropout, kept_pair(j)); }
  __device__ __forceinline__ bool keeps(int j) const {
    return dropout.keep(head, row, static_cast<uint32_t>(j));
  }
};

/// Which of a lane's weights are kept.
template <int kSteps>
struct KeptWeights : PairBits<kSteps> {
  /// find(i, kept) sets Dropout::kept() of the four registers of step i. kAtOnce steps hide each other's latency, and take
  /// registers.
  template <int kAtOnce, class Find>
  __device__ __forceinline__ void set(Find&& find) {
#pragma unroll
    for (int w = 0; w < (kSteps + 3) / 4; ++w) {
      uint32_t word = 0;
#pragma unroll kAtOnce
      for (int i = 0; i < (kSteps - 4 * w < 4 ? kSteps - 4 * w : 4); ++i) {
        uint32_t kept[4];
        find(4 * w + i, kept);
#pragma unroll
        for (int r = 0; r < 4; ++r) word |= (kept[r] >> 15 & 0x00010001u) << (4 * i + r);
      }
      this->of[w] = word;
    }
  }
};

/// Of a lane's eight weights in a block of 16 x 16 whose rows are keys: those of keys g and g + 8 and queries 2 t, 2 t + 1,
/// 2 t + 8 and 2 t + 9, with g = lane / 4 and t = lane % 4. Word 2 u + h of the result is Dropout::kept() of key g + 8 h and
/// queries 8 u + 2 t and 8 u + 2 t + 1. Two cells have them, which the lane of key g ^ 1 needs, too: each computes one,
/// and they exchange halves. The whole warp calls it. `first_query` and `first_key`: the block's; multiples of 16.
__device__ __forceinline__ void kept_of_keys(const tile::Dropout& dropout, uint32_t head,
                                             uint32_t first_query, uint32_t first_key, int lane,
                                             uint32_t (&kept)[4]) {
  const auto g = static_cast<uint32_t>(lane) / 4, t = static_cast<uint32_t>(lane) % 4, odd = g % 2;
  const tile::PhiloxWords words = dropout.cell(head, tile::Dropout::row_of_cell(first_query) + 2 * t + odd,
                                               tile::Dropout::column_of_cell(first_key) + g / 2);
  // The low halves are of even keys. The cell of query 2 t goes to the low halves of the result.
  const unsigned own = odd != 0 ? 0x7632 : 0x5410, others = odd != 0 ? 0x5410 : 0x7632;
  const unsigned low = odd != 0 ? 0x1054 : 0x5410, high = odd != 0 ? 0x3276 : 0x7632;
#pragma unroll
  for (size_t u = 0; u < 2; ++u) {
    const uint32_t mine = __byte_perm(words[u], words[2 + u], own);
    const uint32_t theirs = __shfl_xor_sync(~0u, __byte_perm(words[u], words[2 + u], others), 4);
    kept[2 * u] = dropout.kept(__byte_perm(mine, theirs, low));
    kept[2 * u + 1] = dropout.kept(__byte_perm(mine, theirs, high));
  }
}

/// The same of a block whose rows are queries, of which the lane has queries g and g + 8: those of a cell.
__device__ __forceinline__ void kept_of_queries(const tile::Dropout& dropout, uint32_t head,
                                                uint32_t row_of_cell, uint32_t column_of_cell,
                                                uint32_t (&kept)[4]) {
  const tile::PhiloxWords words = dropout.cell(head, row_of_cell, column_of_cell);
#pragma unroll
  for (size_t r = 0; r < 4; ++r) kept[r] = dropout.kept(words[r]);
}

/// Two weights, which become negative where dropout drops them (bits 15 and 31 of `kept`): one word says what dS and what dV needs.
__device__ __forceinline__ uint32_t with_dropped_negative(uint32_t weights, uint32_t kept) {
  return weights | (~kept & 0x80008000u);
}
/// dP of a pair, which becomes 0, whatever it is, where dropout has made the weight negative.
__device__ __forceinline__ float zero_where_negative(float weight, float dp) {
  return __int_as_float(__float_as_int(dp) & ~(__float_as_int(weight) >> 31));
}

}  // namespace fovea::cuda
