// Configuration of bwd_sm90, its shared memory and barriers, what its warps are told of a tile, and the grid.
#pragma once

#include <cstdint>

#include "cuda/kernels/tma_args.hpp"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "tile/kv_blocks.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

struct BwdSm90Config {
  int head_dim, head_dim_v;  ///< padded to multiples of 64
  int tile_m;                ///< queries of a step: 64, or 128 where S and dP of 128 fit the registers

  static constexpr int kConsumers = 2, kRows = 64;  ///< warpgroups, and keys of each: the m of wgmma
  static constexpr int kTileN = kConsumers * kRows;
  static constexpr int kStages = 2;                   ///< of Q, and of dO
  static constexpr int kStrip = 64, kRowBytes = 128;  ///< columns of a strip, and their bytes
  static constexpr int kMostShared = 227 * 1024;
  static constexpr int threads() { return 128 * (1 + kConsumers); }

  /// setmaxnreg: 65536 registers / 384 threads are 168 each at launch. Steps of 128 queries need 240 a thread, which
  /// leaves producers 24, the least that the instruction takes; those of 64 do with 232.
  constexpr int producer_registers() const { return tile_m == 128 ? 24 : 40; }
  constexpr int consumer_registers() const { return tile_m == 128 ? 240 : 232; }

  /// dQ of a step, tile_m x head_dim, is shared out by columns where a step has 64 queries, else by queries.
  constexpr bool splits_columns() const { return tile_m == kRows; }
  constexpr int dq_columns() const { return splits_columns() ? head_dim / kConsumers : head_dim; }
  /// One buffer costs a barrier more a step, two cost 16 KB more at 64 queries. At 128 queries a second would take 32 KB
  /// and has not been measured.
  constexpr int ds_buffers() const { return tile_m == kRows ? 2 : 1; }

  static constexpr int strips(int columns) { return (columns + kStrip - 1) / kStrip; }
  constexpr int k_bytes() const { return strips(head_dim) * kTileN * kRowBytes; }
  constexpr int v_bytes() const { return strips(head_dim_v) * kTileN * kRowBytes; }
  constexpr int q_bytes() const { return strips(head_dim) * tile_m * kRowBytes; }
  constexpr int do_bytes() const { return strips(head_dim_v) * tile_m * kRowBytes; }
  constexpr int ds_bytes() const { return kConsumers * tile_m * kRowBytes; }
  constexpr int dq_bytes() const { return tile_m * head_dim * 4; }
  constexpr int statistics_bytes() const { return tile_m * 4; }

  constexpr int v_at() const { return k_bytes(); }
  constexpr int q_at() const { return v_at() + v_bytes(); }
  constexpr int do_at() const { return q_at() + kStages * q_bytes(); }
  constexpr int ds_at() const { return do_at() + kStages * do_bytes(); }
  constexpr int dq_at() const { return ds_at() + ds_buffers() * ds_bytes(); }
  constexpr int statistics_at() const { return dq_at() + dq_bytes(); }
  constexpr int work_at() const { return statistics_at() + 2 * kStages * statistics_bytes(); }
  static constexpr int kWorkBytes = 48;  ///< of BwdSm90Work::kFields words
  constexpr int barriers_at() const { return work_at() + 2 * kWorkBytes; }
  static constexpr int barriers() { return 3 + 4 * kStages + 4; }
  constexpr int shared_bytes() const { return barriers_at() + barriers() * 8; }
};

/// What the warps are told of a tile, in shared memory: 128 keys of one key head, and the blocks of queries that see any
/// of them. By address, as a generic pointer would take two registers of every warp that reads it.
struct BwdSm90Work {
  enum Field : int {
    kRowQ,
    kRowK,  ///< first rows of the sequence (0 unless packed)
    kUsedQ,
    kUsedK,  ///< its rows that take part
    kBatch,
    kHeadKv,
    kFirstKey,  ///< of the tile
    kMBegin,
    kMEnd,  ///< blocks of queries
    kFullBegin,
    kFullEnd,  ///< those that need no mask
    kSteps,    ///< blocks times query heads; -1: there is no tile any more
    kFields
  };
  uint32_t at;

  __device__ __forceinline__ int operator[](Field field) const {
    return static_cast<int>(ptx::ld_shared_4(at + 4 * field));
  }
  __device__ __forceinline__ void set(Field field, int x) const {
    ptx::st_shared_4(at + 4 * field, static_cast<uint32_t>(x));
  }
};

/// CTAs of a launch: at most as many as the GPU holds at a time.
template <class Grid>
constexpr Grid bwd_sm90_grid(const BackwardArgs& args) {
  const int64_t tiles = int64_t{args.key_blocks} * args.p.heads_kv * args.p.batch;
  return {tiles < args.slots ? tiles : args.slots};
}

/// Where things lie in shared memory: addresses in the shared window. Barriers: see bwd_sm90.cuh.
template <class Instance>
struct BwdSm90Memory {
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  static constexpr int kStages = kConfig.kStages;
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return base + kConfig.v_at(); }
  __device__ __forceinline__ uint32_t q(int s) const { return base + kConfig.q_at() + s * kConfig.q_bytes(); }
  __device__ __forceinline__ uint32_t d_o(int s) const {
    return base + kConfig.do_at() + s * kConfig.do_bytes();
  }
  /// dS as (queries, 64 keys of a consumer): its strip.
  __device__ __forceinline__ uint32_t ds(int buffer, int w) const {
    return base + kConfig.ds_at() + buffer * kConfig.ds_bytes() + w * kConfig.tile_m * kConfig.kRowBytes;
  }
  /// dQ in float32, in the order of dq_sum.
  __device__ __forceinline__ uint32_t dq() const { return base + kConfig.dq_at(); }
  __device__ __forceinline__ uint32_t lse(int s) const {
    return base + kConfig.statistics_at() + s * kConfig.statistics_bytes();
  }
  __device__ __forceinline__ uint32_t delta(int s) const { return lse(kStages + s); }

  __device__ __forceinline__ uint32_t full_k() const { return barrier(0); }
  __device__ __forceinline__ uint32_t full_v() const { return barrier(1); }
  __device__ __forceinline__ uint32_t empty_kv() const { return barrier(2); }
  __device__ __forceinline__ uint32_t full_q(int s) const { return barrier(3 + s); }
  __device__ __forceinline__ uint32_t full_do(int s) const { return barrier(3 + kStages + s); }
  __device__ __forceinline__ uint32_t empty_q(int s) const { return barrier(3 + 2 * kStages + s); }
  __device__ __forceinline__ uint32_t empty_do(int s) const { return barrier(3 + 3 * kStages + s); }
  __device__ __forceinline__ uint32_t full_work(uint32_t tile) const {
    return barrier(3 + 4 * kStages + static_cast<int>(tile & 1));
  }
  __device__ __forceinline__ uint32_t empty_work(uint32_t tile) const { return full_work(tile) + 16; }

  /// What the warps of this CTA are told of tile number `tile`; overwritten two tiles later.
  __device__ __forceinline__ BwdSm90Work work(uint32_t tile) const {
    return {base + kConfig.work_at() + (tile & 1) * kConfig.kWorkBytes};
  }

  /// One thread; the others see them behind a barrier of the CTA.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerWarps = 4 * kConfig.kConsumers;
    ptx::mbarrier_init(full_k(), 1);
    ptx::mbarrier_init(full_v(), 1);
    ptx::mbarrier_init(empty_kv(), kConsumerWarps);
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full_q(s), 1);
      ptx::mbarrier_init(full_do(s), 1);
      ptx::mbarrier_init(empty_q(s), kConsumerWarps);
      ptx::mbarrier_init(empty_do(s), kConsumerWarps);
    }
    for (uint32_t tile = 0; tile < 2; ++tile) {
      ptx::mbarrier_init(full_work(tile), 1);
      ptx::mbarrier_init(empty_work(tile), kConsumerWarps + 3);  // and the other three producers
    }
    ptx::mbarrier_init_fence();
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + kConfig.barriers_at() + 8 * i; }
};

}  // namespace fovea::cuda
