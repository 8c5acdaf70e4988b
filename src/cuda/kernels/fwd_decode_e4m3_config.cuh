// Configuration of fwd_decode_e4m3, and its shared memory.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_decode_config.cuh"
#include "tile/byte_strips.hpp"

namespace fovea::cuda {

/// Rows of a block in a stage, for a warp that copies 16 of them.
template <int kRows, int kColumns>
struct BytesOfStage : tile::ByteStrips<kColumns> {
  static constexpr uint32_t copied_to(uint32_t rows, int row, int chunk, int i) {
    return tile::ByteStrips<kColumns>::copied_to(rows, kRows, row, chunk, i);
  }
};

struct FwdDecodeE4M3Config {
  int head_dim, head_dim_v;  ///< padded to 64, 128 or 256
  int tile_m;                ///< rows of queries: 4 or 8, or where K and V are widened 16 or 32
  int block_keys;            ///< 64 or 128: more hide latencies of each other, as far as there are registers
  int stages;                ///< of a block, a multiple of the warpgroups
  int warpgroups = 2;        ///< that multiply
  bool widens = false;  ///< K and V become float16 in registers; else Q and weights become pieces of 8 bits
  bool values_last =
      false;             ///< V is read behind the weights: fewer registers at once, stages are held longer
  bool cluster = false;  ///< a tile is a cluster's; else CTAs have shares of all keys

  static constexpr bool e4m3 = true, one_piece = true, pages = true;
  static constexpr int kWarpKeys = 16;  ///< a piece of a block whose keys do not all exist
  static constexpr int copying_warps() { return 1; }
  static constexpr bool copies_pieces() { return true; }
  constexpr int pieces() const { return block_keys / kWarpKeys; }  ///< of a block
  constexpr int unit_keys() const { return block_keys; }
  constexpr int stage_keys() const { return block_keys; }
  constexpr int tile_n() const { return block_keys; }
  template <class Key, int kColumns, int kRows>
  using RowsInStage = BytesOfStage<kRows, kColumns>;
  int warps = 4 * warpgroups;  ///< that multiply, and merge

  /// Registers are given out to four warps at a time: 288 leave 168 each, 416 leave 128, 544 leave 96.
  constexpr int threads() const { return 32 * (warps + copying_warps()); }
  /// Columns of S and of O transposed, where they are the pieces of all rows.
  constexpr int columns() const { return tile::kPieces * tile_m; }
  /// Of an operand of all rows, a column of which is an element of K or V.
  constexpr int column_bytes() const { return widens ? 2 * tile_m : columns(); }
  constexpr int values_behind() const { return block_keys * head_dim; }
  constexpr int stage_bytes() const { return block_keys * (head_dim + head_dim_v); }
  /// From a piece to the next.
  constexpr int warp_step() const { return kWarpKeys * (head_dim < 128 ? head_dim : 128); }
  constexpr int q_at() const { return stages * stage_bytes(); }
  constexpr int q_bytes() const { return column_bytes() * head_dim; }
  /// Weights of a block, two of each warpgroup.
  constexpr int weights_at() const { return q_at() + q_bytes(); }
  constexpr int weights_bytes() const { return column_bytes() * block_keys; }
  constexpr int results() const { return warpgroups; }
  /// Of many rows they leave no room for stages, and lie over these at the end of a tile, where no other follows.
  constexpr bool results_over_stages() const { return cluster && widens; }
  constexpr int weights_end() const { return weights_at() + 2 * warpgroups * weights_bytes(); }
  constexpr int results_at() const { return results_over_stages() ? 0 : weights_end(); }
  constexpr int result_step() const { return tile_m * head_dim_v * 4; }
  /// Rows of O that other CTAs send, their states, and an mbarrier.
  constexpr int inbox_at() const {
    return weights_end() + (results_over_stages() ? 0 : warpgroups * result_step());
  }
  constexpr int inbox_row_bytes() const { return head_dim_v * 4 + 8; }
  /// A CTA has a slot for each row of the tile, or one for each CTA where these are more.
  constexpr int inbox_rows() const { return tile_m < kMostDecodeCtas ? kMostDecodeCtas : tile_m; }
  constexpr int inbox_bytes() const { return cluster ? inbox_rows() * inbox_row_bytes() + 16 : 0; }
  constexpr int units_at() const { return inbox_at() + inbox_bytes(); }
  constexpr int units_bytes() const { return cluster ? 0 : (kStreamSequences + 4) * 4 + 48; }
  constexpr int states_at() const { return units_at() + units_bytes(); }
  /// Of each warp, of its keys: maxima, then sums.
  constexpr int warp_rows_at() const { return states_at() + warpgroups * tile_m * 8; }
  constexpr int scales_at() const { return warp_rows_at() + warps * tile_m * 4; }
  constexpr int barriers_at() const { return scales_at() + tile_m * 4; }
  constexpr int work_tiles_at() const { return barriers_at() + 2 * stages * 8; }
  constexpr int shared_bytes() const { return work_tiles_at() + FwdDecodeConfig::kWorkTileBytes; }
  static constexpr int kWorkTileStep = 0;  ///< all warps read one
};

/// Stages in the order of blocks, in which they are filled. A tile's go to several readers in turn, and the next tile's follow.
template <int kStages>
struct DecodeRing {
  int stage = 0;  ///< the own next one
  uint32_t parity = 0;
  int first = 0;  ///< of the tile
  uint32_t first_parity = 0;

  __device__ __forceinline__ void begin_tile(int own = 0) {
    stage = first, parity = first_parity;
    advance(own);
  }
  __device__ __forceinline__ void advance(int blocks) {
    stage += blocks;
    if (stage >= kStages) stage -= kStages, parity ^= 1;
  }
  __device__ __forceinline__ void end_tile(int blocks) {
    const int rounds = (first + blocks) / kStages;
    first += blocks - rounds * kStages;
    first_parity ^= rounds & 1;
  }
};

template <class Instance>
struct FwdDecodeE4M3Memory : FwdDecodeMemory<Instance> {
  using Base = FwdDecodeMemory<Instance>;
  using Base::base, Base::bytes, Base::kConfig;

  /// A block has been copied; it has been read.
  __device__ __forceinline__ uint32_t full(int stage) const {
    return base + kConfig.barriers_at() + stage * 8;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kConfig.stages + stage); }
  __device__ __forceinline__ uint32_t weights(int warpgroup, int buffer) const {
    return base + kConfig.weights_at() + (2 * warpgroup + buffer) * kConfig.weights_bytes();
  }
  /// Of a warp, for its keys, a number a row.
  __device__ __forceinline__ float* warp_rows(int warp) const {
    return reinterpret_cast<float*>(bytes + kConfig.warp_rows_at()) + warp * kConfig.tile_m;
  }
  /// What takes scores of a row to exponents of 2.
  __device__ __forceinline__ float* scales() const {
    return reinterpret_cast<float*>(bytes + kConfig.scales_at());
  }
};

}  // namespace fovea::cuda
