// Configuration of fwd_decode, and its shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/dtype.hpp"
#include "cuda/kernels/fwd_stream_k.cuh"
#include "cuda/warp/key_fragments.cuh"

namespace fovea::cuda {

struct FwdDecodeConfig {
  int head_dim, head_dim_v;  ///< padded to multiples of 32
  int tile_m;                ///< rows of queries: a multiple of 16
  int stages;                ///< of 16 keys and their values, each warp its own
  int warps = 8;
  bool e4m3 = false;         ///< keys and values of 8 bits
  bool q_in_shared = false;  ///< fragments of Q lie in shared memory, where registers are too few
  bool cluster =
      false;            ///< a tile is a cluster's (fwd_decode_cluster.cuh); else CTAs have shares of all keys
  int ctas_per_sm = 1;  ///< what registers and shared memory are kept for
  // Where keys may lie. A loop that nobody enters takes 2 to 8 % of a short problem: its instructions lie between those of the others.
  bool one_piece = true, pages = true;

  static constexpr int kWarpKeys = 16;  ///< keys of a piece: the k of mma
  constexpr int threads() const { return 32 * warps; }
  constexpr int tile_n() const { return kWarpKeys * warps; }
  constexpr int key_bytes() const { return e4m3 ? 1 : 2; }
  constexpr int stage_bytes() const { return kWarpKeys * (head_dim + head_dim_v) * key_bytes(); }
  /// The ring of a warp, where its rows of O lie at the end of a tile.
  constexpr int ring_bytes() const {
    const int ring = stages * stage_bytes(), o = tile_m * head_dim_v * 4;
    return ring > o ? ring : o;
  }
  /// Results that are merged at the end of a tile, and the distance of their rows of O.
  constexpr int results() const { return warps; }
  constexpr int result_step() const { return ring_bytes(); }
  static constexpr int results_at() { return 0; }
  constexpr int warp_step() const {
    return ring_bytes();
  }  ///< from the stages of a warp to those of the next
  constexpr int copying_warps() const { return warps; }
  static constexpr bool copies_pieces() {
    return false;
  }                                                       ///< and leaves rows that are apart to other kernels
  static constexpr int unit_keys() { return kWarpKeys; }  ///< of blocks that CTAs share
  /// How a warp's keys and values lie in a stage, and how far the latter are behind the former.
  template <class Key, int kColumns, int kRows>
  using RowsInStage = KeyFragments<Key, kColumns>;
  static constexpr int stage_keys() { return kWarpKeys; }
  constexpr int values_behind() const { return kWarpKeys * head_dim * key_bytes(); }
  constexpr int q_at() const { return warps * ring_bytes(); }
  /// A fragment of 16 rows and 16 columns: 16 bytes a lane.
  constexpr int q_bytes() const { return q_in_shared ? tile_m * head_dim * 2 : 0; }
  /// Rows of O that other CTAs send, their states, and an mbarrier.
  constexpr int inbox_at() const { return q_at() + q_bytes(); }
  constexpr int inbox_row_bytes() const { return head_dim_v * 4 + 8; }
  constexpr int inbox_rows() const { return tile_m; }
  constexpr int inbox_bytes() const { return cluster ? inbox_rows() * inbox_row_bytes() + 16 : 0; }
  constexpr int units_at() const { return inbox_at() + inbox_bytes(); }
  constexpr int units_bytes() const { return cluster ? 0 : (kStreamSequences + 4) * 4 + 48; }
  constexpr int states_at() const { return units_at() + units_bytes(); }
  constexpr int work_tiles_at() const { return states_at() + warps * tile_m * 8; }
  constexpr int shared_bytes() const { return work_tiles_at() + warps * kWorkTileBytes; }
  static constexpr int kWorkTileBytes = 64;             ///< of FwdWorkTile
  static constexpr int kWorkTileStep = kWorkTileBytes;  ///< from that of a warp to the next
  static_assert(sizeof(StreamShare) <= 48 && sizeof(FwdWorkTile) <= kWorkTileBytes);
};

/// A CTA for each share.
template <class Grid>
constexpr Grid fwd_decode_grid(const ForwardArgs& args) {
  return {args.num_splits};
}

/// The maximum of a row's exponents of 2 over some keys, -inf without any, and the sum of its weights against that.
struct RowState {
  float base, sum;
};

template <class Instance>
using ConfigOf = std::remove_cvref_t<decltype(Instance::kConfig)>;

template <class Instance>
struct FwdDecodeMemory {
  struct Config : ConfigOf<Instance> {
    int tile_n = ConfigOf<Instance>::tile_n();
  };
  static constexpr Config kConfig{Instance::kConfig};
  uint32_t base;
  unsigned char* bytes;

  __device__ __forceinline__ uint32_t stage(int warp, int s) const {
    return base + warp * kConfig.warp_step() + s * kConfig.stage_bytes();
  }
  /// Fragment `step` of rows 16 m to 16 m + 15 of Q.
  __device__ __forceinline__ uint32_t q(int m, int step, int lane) const {
    return base + kConfig.q_at() + ((m * (kConfig.head_dim / 16) + step) * 32 + lane) * 16;
  }
  /// Rows of O of a result: that of a warp lies over its ring.
  __device__ __forceinline__ float* o(int result) const {
    return reinterpret_cast<float*>(bytes + kConfig.results_at() + result * kConfig.result_step());
  }
  __device__ __forceinline__ RowState* states(int result) const {
    return reinterpret_cast<RowState*>(bytes + kConfig.states_at()) + result * kConfig.tile_m;
  }
  /// Of each warp: registers are few.
  __device__ __forceinline__ FwdWorkTile* work_tile(int warp) const {
    return reinterpret_cast<FwdWorkTile*>(bytes + kConfig.work_tiles_at() + warp * kConfig.kWorkTileStep);
  }

  // --- of clusters ---

  static constexpr int kInboxStates = kConfig.inbox_at() + kConfig.inbox_rows() * kConfig.head_dim_v * 4;
  __device__ __forceinline__ uint32_t inbox_o(int slot) const {
    return base + kConfig.inbox_at() + slot * kConfig.head_dim_v * 4;
  }
  __device__ __forceinline__ uint32_t inbox_state(int slot) const {
    return base + kInboxStates + slot * static_cast<int>(sizeof(RowState));
  }
  __device__ __forceinline__ const float* inbox() const {
    return reinterpret_cast<const float*>(bytes + kConfig.inbox_at());
  }
  __device__ __forceinline__ const RowState* inbox_states() const {
    return reinterpret_cast<const RowState*>(bytes + kInboxStates);
  }
  __device__ __forceinline__ uint32_t inbox_full() const {
    return base + kConfig.inbox_at() + kConfig.inbox_rows() * kConfig.inbox_row_bytes();
  }
  /// How many CTAs share the keys (a word).
  __device__ __forceinline__ uint32_t sharing() const { return inbox_full() + 8; }
  /// The length of the CTA's sequence, as a tensor has it (a word).
  __device__ __forceinline__ uint32_t length() const { return inbox_full() + 12; }

  // --- of shares of all keys ---

  __device__ __forceinline__ int* units() const { return reinterpret_cast<int*>(bytes + kConfig.units_at()); }
  __device__ __forceinline__ int* all_parts() const { return units() + kStreamSequences + 1; }
  __device__ __forceinline__ StreamShare* share() const {
    return reinterpret_cast<StreamShare*>(units() + kStreamSequences + 4);
  }
  /// Parts are merged behind a barrier of the CTA.
  __device__ __forceinline__ void wait_for_part(int) const {}
};

}  // namespace fovea::cuda
