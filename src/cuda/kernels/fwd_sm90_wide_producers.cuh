// The producers of fwd_sm90_wide: a thread loads K, one for each consumer loads its half of V. fwd_sm90_producers.cuh has
// the planner and the tiles of a CTA.
#pragma once

#include "cuda/kernels/fwd_sm90_producers.cuh"
#include "cuda/kernels/fwd_sm90_wide_config.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace fovea::cuda {

/// Calls visit(first row of keys, head, batch, number of the block) for each block of keys of each tile, the last of a
/// tile first. Blocks are counted over all tiles of the CTA, as the consumers do.
template <bool kTakes, class Memory, class Visit>
__device__ __forceinline__ void for_each_wide_block(const TmaForwardArgs& args, const Memory& memory,
                                                    Visit&& visit) {
  const tile::AttentionParams& p = args.f.p;
  uint32_t block = 0;
  for_each_tile<kTakes>(
      args, memory,
      [&](const tile::WorkTile& work, const tile::SequenceSpan& span, int, const tile::KvBlocks& loads) {
        const int batch = p.cu_seqlens_k != nullptr ? 0 : work.batch;
        const int head =
            args.f.pack_group ? work.head : static_cast<int>(static_cast<unsigned>(work.head) / p.group);
#pragma unroll 1
        for (int n = loads.end - 1; n >= loads.begin; --n, ++block)
          visit(static_cast<int>(span.row_k) + n * Memory::kConfig.tile_n, head, batch, block);
      });
}

/// Loads K: one thread.
template <class Memory>
__device__ __forceinline__ void fwd_sm90_wide_load_keys(const TmaForwardArgs& args, const Memory& memory) {
  constexpr FwdSm90WideConfig kConfig = Memory::kConfig;
  ptx::tma_prefetch(args.k);
  for_each_wide_block<true>(args, memory, [&](int row, int head, int batch, uint32_t block) {
    const int c = static_cast<int>(block & 1);
#pragma unroll
    for (int piece = 0; piece < kConfig.pieces_k(); ++piece) {
      // The piece of the block before, which is the other consumer's; before the first that counts as done.
      ptx::mbarrier_wait(memory.empty_k(1 - c, piece), (block - 1) / 2 & 1);
      const uint32_t full = memory.full_k(c, piece);
      ptx::mbarrier_arrive_expect(full, kConfig.strips_of(piece) * kConfig.kStripBytes);
      for (int s = 0; s < kConfig.strips_of(piece); ++s) {
        ptx::tma_load(memory.k(piece) + s * kConfig.kStripBytes, args.k, full,
                      (piece * kConfig.kPieceStrips + s) * kConfig.kStrip, row, head, batch);
      }
    }
  });
}

/// Loads the half of V that consumer c multiplies: one thread.
template <class Memory>
__device__ __forceinline__ void fwd_sm90_wide_load_values(const TmaForwardArgs& args, const Memory& memory,
                                                          int c) {
  constexpr FwdSm90WideConfig kConfig = Memory::kConfig;
  ptx::tma_prefetch(args.v);
  for_each_wide_block<false>(args, memory, [&](int row, int head, int batch, uint32_t block) {
#pragma unroll
    for (int piece = 0; piece < kConfig.pieces_v(); ++piece) {
      ptx::mbarrier_wait(memory.empty_v(c, piece), (block & 1) ^ 1);
      ptx::mbarrier_arrive_expect(memory.full_v(c, piece), kConfig.kPieceBytes);
      for (int s = 0; s < kConfig.kPieceStrips; ++s) {
        const int strip = (c * kConfig.pieces_v() + piece) * kConfig.kPieceStrips + s;
        ptx::tma_load(memory.v(c, piece) + s * kConfig.kStripBytes, args.v, memory.full_v(c, piece),
                      strip * kConfig.kStrip, row, head, batch);
      }
    }
  });
}

}  // namespace fovea::cuda
