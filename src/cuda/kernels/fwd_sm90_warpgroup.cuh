// What the consumers of Hopper's forward kernels have in common: marks of warp-uniform values, the start of a tile, and the
// mask of a block.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/online_rows.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Marks a value warp-uniform: the compiler knows that a shuffle from lane 0 gives all lanes the same.
/// Everything that bounds a loop has to be such. Then its counter, the ring and the descriptors made of it
/// stay in uniform registers, products follow each other without a move, and no branch needs a BSSY.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}
// Read again at each use, which is rare: registers are what limits these kernels.
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(ptx::thread_index() / 32 % 4);
}
__device__ __forceinline__ int lane_index() {
  return static_cast<int>(ptx::thread_index() % 32);
}

/// Waits for the work tile and its Q. Each lane leaves the loop of a wait for itself. Behind an .aligned
/// instruction the compiler takes the warp for converged again; without it nothing from here on could be in
/// uniform registers.
__device__ __forceinline__ void wait_for_tile(uint32_t full_q, uint32_t tile_count) {
  ptx::mbarrier_wait(full_q, tile_count & 1);
  ptx::wgmma_fence();
}

/// Of 64 rows of Q, in `strips` strips of 128 bytes from `q` on, those behind the sequence's last become zeros: TMA has loaded packed queries
/// of other sequences there. A warp raises its maxima for all rows at once, and rounds differently then, so that bits would depend on
/// those. The whole warpgroup, number `w` of the CTA, calls it before anything reads Q.
__device__ __forceinline__ void clear_rows_of_others(const ForwardArgs& f, const FwdWorkTile& work,
                                                     uint32_t q, int strips, int w) {
  constexpr int kRows = 64, kRowBytes = 128, kChunkBytes = 16, kFirstBarrier = 8;
  if (f.p.cu_seqlens_q == nullptr) return;
  const int rows = uniform(work.end_row - work.first_row);
  if (rows <= 0 || rows >= kRows) return;
  const int thread = 32 * warp_index() + lane_index(), bytes = (kRows - rows) * kRowBytes;
#pragma unroll 1
  for (int strip = 0; strip < strips; ++strip) {
#pragma unroll 1
    for (int at = thread * kChunkBytes; at < bytes; at += 128 * kChunkBytes)
      ptx::st_shared_16(q + strip * kRows * kRowBytes + rows * kRowBytes + at, uint4{});
  }
  ptx::async_proxy_fence();  // products read Q, and the next one is copied, by the asynchronous proxy
  ptx::barrier_wait(kFirstBarrier + w, 128);  // all rows are clear
}

/// Scores of keys that a row of the block that begins with key `first_key` does not see become -inf.
template <int kRegs>
__device__ __forceinline__ void mask_window(float (&acc_s)[kRegs], const ForwardArgs& f,
                                            const FwdWorkTile& work, int first_key) {
  const int lane = lane_index(), lane_row = 16 * warp_index() + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = query_of_row(f, work.first_row + lane_row + 8 * half);
    const tile::Span32 seen = tile::keys_of(f.p, work.span, i);
    mask_row(acc_s, half, first_key + 2 * (lane % 4), seen);
  }
}

}  // namespace fovea::cuda
