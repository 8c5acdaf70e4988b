// Which weights of a lane dropout keeps: cells of tile/philox.hpp, whose rows are queries, or keys.
#pragma once

#include <cstdint>

#include "cuda/ptx/packed.cuh"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// The dropout of this run, in registers that the compiler knows to be uniform.
__device__ __forceinline__ tile::Dropout uniform_dropout(const tile::AttentionParams& p) {
  tile::Dropout dropout = tile::dropout_of(p);
#pragma unroll
  for (size_t i = 0; i < 4; ++i) dropout.start[i] = __shfl_sync(~0u, dropout.start[i], 0);
  return dropout;
}

/// Dropout of the weights of a query row.
struct DropoutRow {
  const tile::Dropout& dropout;  ///< outlives it
  uint32_t head;                 ///< tile::dropout_head
  uint32_t row;

  __device__ __forceinline__ DropoutRow(const tile::Dropout& d, const tile::AttentionParams& p, int batch,
                                        int head_q, int query)
      : dropout(d), head(tile::dropout_head(p, batch, head_q)), row(static_cast<uint32_t>(query)) {}

  /// Of keys j to j + 3, j a multiple of 4: bits 7, 15, 23 and 31.
  __device__ __forceinline__ uint32_t kept_four(int j) const {
    return dropout.kept_four(head, row, static_cast<uint32_t>(j));
  }
  __device__ __forceinline__ bool keeps(int j) const {
    return dropout.keep(head, row, static_cast<uint32_t>(j));
  }
  /// Of the weight of key j: 0, or 1 / (1 - p).
  __device__ __forceinline__ float factor(int j) const { return keeps(j) ? dropout.keep_scale : 0.0f; }
};

/// The first pair of a block of 16 x 16.
struct FirstPair {
  int query, key;
};

/// Which of a lane's weights are kept: a bit for each, of kSteps operands A of m16n8k16 that lie side by side. Bit 16 h + 8 (i % 2) +
/// 4 (i / 2 % 2) + r of word i / 4 is of half h of register r of step i.
template <int kSteps>
struct KeptWeights {
  static constexpr int kWords = (kSteps + 3) / 4;
  uint32_t of[kWords];

  /// Of register r of step i: bits 15 and 31.
  __device__ __forceinline__ uint32_t signs(int i, int r) const {
    return of[i / 4] << (15 - 8 * (i % 2) - 4 * (i / 2 % 2) - r);
  }
  /// The other elements of operands become 0.
  __device__ __forceinline__ void keep(uint32_t (&operand)[kSteps][4]) const {
#pragma unroll
    for (int x = 0; x < 4 * kSteps; ++x) operand[x / 4][x % 4] &= ptx::halves_by_signs(signs(x / 4, x % 4));
  }

  /// Rows are queries. block_of(i) is the FirstPair of step i, multiples of 16. Two lanes have the weights
  /// of a cell: each finds every other one, and they exchange what they found. kAtOnce cells hide each other's latency, and take
  /// registers. The whole warp calls it.
  template <int kAtOnce, class BlockOf>
  __device__ __forceinline__ void of_queries(const tile::Dropout& dropout, uint32_t head, int lane,
                                             const BlockOf& block_of) {
    const bool odd = lane % 2 != 0;
    const FirstPair of_lane = {lane / 4, 2 * (lane % 4)};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t own = every_other<kAtOnce, 1, 2>(dropout, head, of_lane, w, odd, block_of);
      // The even lane has the steps 0 and 2, and wants the keys 0 and 1 of all.
      const uint32_t theirs = __shfl_xor_sync(~0u, own, 1);
      of[w] = __byte_perm(own, theirs, odd ? 0x3726 : 0x5140);
    }
  }
  /// The same of rows that are keys. Four lanes have the weights of two cells.
  template <int kAtOnce, class BlockOf>
  __device__ __forceinline__ void of_keys(const tile::Dropout& dropout, uint32_t head, int lane,
                                          const BlockOf& block_of) {
    const int key = lane / 4;
    const bool odd = key % 2 != 0, upper = key / 2 % 2 != 0;
    const FirstPair of_lane = {2 * (lane % 4) + static_cast<int>(upper), key};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t own = every_other<kAtOnce, 2, 1>(dropout, head, of_lane, w, odd, block_of);
      // Byte b is of key b of the four lanes', of one query and two steps: lane b wants it as byte key % 4.
      uint32_t theirs = __shfl_xor_sync(~0u, own, 4);
      own = __byte_perm(own, theirs, odd ? 0x3715 : 0x6240);
      theirs = __shfl_xor_sync(~0u, own, 8);
      of[w] = __byte_perm(own, theirs, upper ? 0x3276 : 0x5410);
    }
  }

 private:
  /// Of the lane's cells of the even or the odd steps of word w, those which hold the pair `of_lane` of the step's block: byte b of the
  /// result is of key b of a cell, its lower half of the first such step. In a half the words of the cell follow each other; kSecond and
  /// kThird are the second and third.
  template <int kAtOnce, int kSecond, int kThird, class BlockOf>
  __device__ __forceinline__ static uint32_t every_other(const tile::Dropout& dropout, uint32_t head,
                                                         FirstPair of_lane, int w, bool odd,
                                                         const BlockOf& block_of) {
    constexpr uint32_t kSigns = 0x80808080u;
    const int cells = kSteps - 4 * w > 2 ? 2 : 1;
    uint32_t found = 0;
#pragma unroll kAtOnce
    for (int c = 0; c < cells; ++c) {
      const FirstPair even_block = block_of(4 * w + 2 * c), odd_block = block_of(4 * w + 2 * c + 1);
      const auto query = static_cast<uint32_t>((odd ? odd_block.query : even_block.query) + of_lane.query);
      const auto key = static_cast<uint32_t>((odd ? odd_block.key : even_block.key) + of_lane.key);
      const tile::Dropout::Cell cell =
          dropout.cell(head, tile::Dropout::row_of_cell(query), tile::Dropout::column_of_cell(key));
      uint32_t bits = cell.kept(0) & kSigns;
      bits = bits >> 1 | (cell.kept(kSecond) & kSigns);
      bits = bits >> 1 | (cell.kept(kThird) & kSigns);
      bits = bits >> 1 | (cell.kept(3) & kSigns);
      found = found >> 4 | bits;
    }
    return cells == 2 ? found : found >> 4;
  }
};

/// Two weights, which become negative where dropout drops them (bits 15 and 31 of `kept`): one word says what dS and what dV needs.
__device__ __forceinline__ uint32_t with_dropped_negative(uint32_t weights, uint32_t kept) {
  return weights | (~kept & 0x80008000u);
}
/// dP of a pair, which becomes 0, whatever it is, where dropout has made the weight negative.
__device__ __forceinline__ float zero_where_negative(float weight, float dp) {
  return __int_as_float(__float_as_int(dp) & ~(__float_as_int(weight) >> 31));
}

}  // namespace fovea::cuda
