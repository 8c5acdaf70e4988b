// The shared memory of fwd_sm90_latent and its barriers.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_wide_config.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Where things lie in shared memory: addresses in the shared window. Barriers: see fwd_sm90_latent.cuh.
template <class Instance>
struct FwdSm90LatentMemory {
  static constexpr FwdSm90WideConfig kConfig = Instance::kConfig;
  static_assert(kConfig.values_in_keys && kConfig.head_dim == kConfig.head_dim_v + kConfig.kStrip);
  static constexpr int kConsumers = kConfig.kConsumers;
  static constexpr int kStages = 2;  ///< blocks of keys: the even ones, and the odd ones
  static constexpr int kValueStrips = kConsumers * kConfig.strips_v();
  /// K comes in two pieces, the consumers' halves of the values; the columns of keys alone are with the second.
  static constexpr int strips_of(int piece) { return kConfig.strips_v() + piece; }

  static constexpr int kStageBytes = kConfig.strips() * kConfig.kStripBytes;
  static constexpr int kK = kConfig.q_bytes(), kP = kK + kStages * kStageBytes,
                       kStatistics = kP + kConfig.kStripBytes, kBarriers = kStatistics + kConfig.kRows * 8;
  static constexpr int kBarrierCount = 2 + 2 * kStages * kConsumers + kConsumers + 4;
  static constexpr int kWorkTiles = kBarriers + (kBarrierCount * 8 + 15) / 16 * 16,
                       kNextTiles = kWorkTiles + 2 * kConfig.work_tile_bytes();
  static constexpr int shared_bytes() { return kNextTiles + 2 * 4; }
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int) const { return base; }
  __device__ __forceinline__ uint32_t k(int stage, int strip) const {
    return base + kK + stage * kStageBytes + strip * kConfig.kStripBytes;
  }
  /// P of the last block, and the maxima and sums of its rows, 8 bytes a row; whose block it is does not matter.
  __device__ __forceinline__ uint32_t p(int) const { return base + kP; }
  __device__ __forceinline__ uint32_t statistics(int, int row) const { return base + kStatistics + row * 8; }

  /// Operands of products as if shared memory began at 0: the first strip of Q and of K, and of K as V; P.
  static constexpr tile::WgmmaDescriptor first_q() { return tile::wgmma_k_major(0, tile::SwizzleMode::k128); }
  static constexpr tile::WgmmaDescriptor first_k() {
    return tile::wgmma_k_major(kK, tile::SwizzleMode::k128);
  }
  static constexpr tile::WgmmaDescriptor first_v() {
    return tile::wgmma_mn_major(kK, tile::SwizzleMode::k128, kConfig.tile_n);
  }
  static constexpr tile::WgmmaDescriptor first_p() {
    return tile::wgmma_k_major(kP, tile::SwizzleMode::k128);
  }

  __device__ __forceinline__ uint32_t full_q(int) const { return barrier(0); }
  __device__ __forceinline__ uint32_t empty_q(int) const { return barrier(1); }
  __device__ __forceinline__ uint32_t full(int stage, int half) const {
    return barrier(kFull + kConsumers * stage + half);
  }
  __device__ __forceinline__ uint32_t empty(int stage, int half) const {
    return barrier(kEmpty + kConsumers * stage + half);
  }
  __device__ __forceinline__ uint32_t full_p(int c) const { return barrier(kFullP + c); }
  __device__ __forceinline__ uint32_t full_next(uint32_t turn) const { return barrier(kFullNext + turn % 2); }
  __device__ __forceinline__ uint32_t empty_next(uint32_t turn) const { return full_next(turn) + 16; }
  /// The index of the tile after the one of this turn.
  __device__ __forceinline__ uint32_t next(uint32_t turn) const { return base + kNextTiles + turn % 2 * 4; }

  /// By one thread; the others see the barriers after a __syncthreads().
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4;  // of a consumer
    ptx::mbarrier_init(full_q(0), 1);
    ptx::mbarrier_init(empty_q(0), kConsumers * kWarps);
    for (int i = 0; i < kStages * kConsumers; ++i) {
      ptx::mbarrier_init(barrier(kFull + i), 1);
      ptx::mbarrier_init(barrier(kEmpty + i), kWarps * kConfig.cluster);
    }
    for (int c = 0; c < kConsumers; ++c) ptx::mbarrier_init(full_p(c), kWarps);
    for (uint32_t turn = 0; turn < 2; ++turn) {
      ptx::mbarrier_init(full_next(turn), 1);
      ptx::mbarrier_init(empty_next(turn), kConfig.next_readers());
    }
    ptx::mbarrier_init_fence();
  }

  /// Tile number `tile` of the CTA, which the planner overwrites two tiles later.
  __device__ __forceinline__ FwdSm90WorkTile* work_tile(int, uint32_t tile) const {
    return reinterpret_cast<FwdSm90WorkTile*>(ptx::shared_pointer(base + kWorkTiles)) + (tile & 1);
  }

 private:
  static constexpr int kFull = 2, kEmpty = kFull + kStages * kConsumers,
                       kFullP = kEmpty + kStages * kConsumers, kFullNext = kFullP + kConsumers;
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + kBarriers + 8 * i; }
};

}  // namespace fovea::cuda
