// What the consumers of Hopper's forward kernels have in common: marks of warp-uniform values, the start of a tile, and the
// mask of a block.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
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
