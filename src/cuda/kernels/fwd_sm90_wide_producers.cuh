// The producers of fwd_sm90_wide: a thread loads K, one for each consumer loads its half of V. fwd_sm90_producers.cuh has
// the planner and the tiles of a CTA.
#pragma once

#include "cuda/kernels/fwd_sm90_producers.cuh"
#include "cuda/kernels/fwd_sm90_wide_config.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace fovea::cuda {

/// Calls visit(keys of the tile, first key, number of the block) for each block of keys of each tile, the last of a tile
/// first. Blocks are counted over all tiles of the CTA, as the consumers do. Serves fwd_sm90_latent, too.
template <Taker kTaker, class Memory, class Visit>
__device__ __forceinline__ void for_each_wide_block(const TmaForwardArgs& args, const Memory& memory,
                                                    Visit&& visit) {
  uint32_t block = 0;
  for_each_tile<kTaker>(
      args, memory,
      [&](const tile::WorkTile& work, const tile::SequenceSpan& span, int, const tile::KvBlocks& loads) {
        const TmaKeys keys(args, work, span);
#pragma unroll 1
        for (int n = loads.end - 1; n >= loads.begin; --n, ++block)
          visit(keys, n * Memory::kConfig.tile_n, block);
      });
}

/// Loads a box of a strip to `to`, where CTAs share their loads for all of them.
template <class Memory>
__device__ __forceinline__ void load_box(const TmaStrip& strip, uint32_t to, uint32_t full, int row, int head,
                                         int batch) {
  constexpr int kCluster = Memory::kConfig.cluster;
  if constexpr (kCluster == 1) {
    ptx::tma_load(to, strip.map, full, strip.column, row, head, batch);
  } else {
    ptx::tma_load_multicast(to, strip.map, full, strip.column, row, head, batch, (1u << kCluster) - 1);
  }
}

/// Loads `strips` strips of the block of keys from `key` on to `to`, strip s from what strip_at(s) says: where CTAs share their loads,
/// each those of its rank, for all of them.
template <class Memory, class StripAt>
__device__ __forceinline__ void load_strips(const StripAt& strip_at, uint32_t to, uint32_t full, int strips,
                                            const TmaKeys& keys, int key) {
  keys.for_each_box<FwdSm90WideConfig::tile_n>(key, [&](int first, int row, int head, int batch) {
    constexpr FwdSm90WideConfig kConfig = Memory::kConfig;
    for (int s = cta_rank<Memory>(); s < strips; s += kConfig.cluster)
      load_box<Memory>(strip_at(s), to + s * kConfig.kStripBytes + first * kConfig.kRowBytes, full, row, head,
                       batch);
  });
}

/// Loads K, or [K | V] where queries meet values: one thread.
template <class Memory>
__device__ __forceinline__ void fwd_sm90_wide_load_keys(const TmaForwardArgs& args, const Memory& memory) {
  constexpr FwdSm90WideConfig kConfig = Memory::kConfig;
  ptx::tma_prefetch(args.k);
  for_each_wide_block<Taker::kThread>(args, memory, [&](const TmaKeys& keys, int key, uint32_t block) {
    const int c = static_cast<int>(block & 1);
    // Unrolled, its addresses need more than the 40 registers of a producer.
#pragma unroll 1
    for (int piece = 0; piece < kConfig.pieces_k(); ++piece) {
      // The piece of the block before, which is the other consumer's; before the first that counts as done.
      ptx::mbarrier_wait(memory.empty_k(1 - c, piece), (block - 1) / 2 & 1);
      const uint32_t full = memory.full_k(c, piece);
      ptx::mbarrier_arrive_expect(full, kConfig.strips_of(piece) * kConfig.kStripBytes);
      load_strips<Memory>(
          [&](int s) { return score_strip<Memory>(args, args.k, args.v, piece * kConfig.kPieceStrips + s); },
          memory.k(piece), full, kConfig.strips_of(piece), keys, key);
    }
  });
}

/// Loads the half of V that consumer c multiplies: one thread.
template <class Memory>
__device__ __forceinline__ void fwd_sm90_wide_load_values(const TmaForwardArgs& args, const Memory& memory,
                                                          int c) {
  constexpr FwdSm90WideConfig kConfig = Memory::kConfig;
  ptx::tma_prefetch(args.v);
  for_each_wide_block<Taker::kNo>(args, memory, [&](const TmaKeys& keys, int key, uint32_t block) {
    ptx::mbarrier_wait(memory.empty_v(c), (block & 1) ^ 1);
    ptx::mbarrier_arrive_expect(memory.full_v(c), kConfig.strips_v() * kConfig.kStripBytes);
    load_strips<Memory>(
        [&](int s) {
          return TmaStrip{args.v, (c * kConfig.strips_v() + s) * kConfig.kStrip};
        },
        memory.v(c), memory.full_v(c), kConfig.strips_v(), keys, key);
  });
}

}  // namespace fovea::cuda
