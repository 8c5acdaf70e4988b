// The loader of fwd_sm90_latent: a warp. fwd_sm90_producers.cuh has the planner and the tiles of a CTA.
#pragma once

#include "cuda/kernels/fwd_sm90_latent_memory.cuh"
#include "cuda/kernels/fwd_sm90_producers.cuh"
#include "cuda/kernels/fwd_sm90_wide_producers.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace fovea::cuda {

/// Loads the blocks of keys, in halves of the values' columns: one warp. Each lane looks up the page of a box of the block, before the warp waits
/// for a free stage; then each loads a strip, of one box after the other.
template <class Memory>
__device__ __forceinline__ void fwd_sm90_latent_load(const TmaForwardArgs& args, const Memory& memory) {
  constexpr FwdSm90WideConfig kConfig = Memory::kConfig;
  static_assert(kConfig.tile_n <= 32 * kTmaFewestKeys, "a lane for each box");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    ptx::tma_prefetch(args.k);
    ptx::tma_prefetch(args.v);
  }
  for_each_wide_block<Taker::kWarp>(args, memory, [&](const TmaKeys& keys, int key, uint32_t block) {
    const int stage = static_cast<int>(block & 1), own_box = lane * args.box_keys;
    tile::PageRow of_lane = {};
    if (own_box < kConfig.tile_n) of_lane = keys.box(key, own_box);
#pragma unroll 1
    for (int piece = 0; piece < kConfig.kConsumers; ++piece) {
      const int begin = piece * kConfig.strips_v(), count = Memory::strips_of(piece);
      const int strip = begin + cta_rank<Memory>() + lane * kConfig.cluster;
      const uint32_t full = memory.full(stage, piece);
      ptx::mbarrier_wait(memory.empty(stage, piece), (block / 2 & 1) ^ 1);
      if (lane == 0) ptx::mbarrier_arrive_expect(full, count * kConfig.kStripBytes);
      __syncwarp();  // bytes are expected before any arrives
#pragma unroll 1
      for (int first = 0, box = 0; first < kConfig.tile_n; first += args.box_keys, ++box) {
        const int row = __shfl_sync(~0u, of_lane.row, box), page = __shfl_sync(~0u, of_lane.page, box);
        if (strip >= begin + count) continue;
        load_box<Memory>(score_strip<Memory>(args, args.k, args.v, strip),
                         memory.k(stage, strip) + first * kConfig.kRowBytes, full, row, keys.head, page);
      }
    }
  });
}

}  // namespace fovea::cuda
