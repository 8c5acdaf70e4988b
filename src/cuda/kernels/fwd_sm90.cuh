// The forward on Hopper: TMA, wgmma, specialised warpgroups.
//
//   S = Q K^T        P = exp2(scale log2(e) S - m)        O = P V / l        lse = m + log l
//
// A CTA stays on its SM and takes tile after tile; where all tiles find room at once, each has one. The first
// warpgroup produces: its threads find out what the next tile is and order its loads. Each other warpgroup is a
// consumer: it owns 64 rows of queries (with shared_rows all have the same) and walks over the blocks of kTileN
// keys that they see, from the last to the first. Scores, weights and outputs of a row stay in the four lanes that hold it. While one consumer takes exponentials, the others have the tensor
// cores. There are two schedules (intra_warpgroup_overlap):
//
//   queued      Q K(n) is queued behind P V(n + 1), and the softmax waits for both.
//   overlapped  softmax(n) runs while the consumer's own P V(n + 1) does, too.
//
// The maximum m of a row is raised only where a weight would exceed 2^kLazyGrowthLog2, for all rows of a warp
// at once: softmax does not depend on the maximum taken (the idea: FlashAttention-4). It may also be stale:
// once each row has a maximum (in its first block a guess from some of the keys), exponentials are taken
// against that before the block's own is known. Weights that grew too large show in their sum (kMostSum), or,
// where tensor cores add them up, in the packed weights. Queued, such a block is done again from S, which is
// still in registers; overlapped, weights have taken the place of S, and are scaled down themselves.
//
// Files
//   fwd_sm90_config.cuh     configuration, shared memory, the work tile of a consumer
//   fwd_sm90_producers.cuh  the threads that plan tiles and load Q, K and V
//   fwd_sm90_scores.cuh     terms of the score, what is not seen, what dropout keeps; fwd_sm90_alibi.cuh distances by products
//   fwd_sm90_consumer.cuh   Q K^T, softmax, P V, and the two schedules
//   fwd_sm90_softmax.cuh    weights of a block; fwd_sm90_softmax_e4m3.cuh those of 8 bits
//   fwd_sm90_sums.cuh       sums of O in shared memory, of operands of 8 bits
//   fwd_sm90_shared_rows.cuh  the sums of two consumers that have the same rows
//   fwd_sm90_epilogue.cuh   O and lse
// Shared memory (fwd_sm90_config.cuh)
//   Q 64 rows a consumer (shared_rows: 64 in all); K and V `stages` blocks each. All in strips of 64 columns: rows of 128 bytes,
//   swizzled as TMA's and wgmma's 128-byte mode. With row_sum_in_mma each stage of V has one more strip, of
//   ones. Where the score reads a tensor of pairs, two blocks of its elements for each warp. With operands of 8 bits strips have
//   128 columns, V lies as transpose_values wrote it, and each consumer has float32 sums of its O.
// Registers of a consumer's thread
//   acc_o Dv / 2, acc_s kTileN / 2, P kTileN / 4, and about 30 more. setmaxnreg moves the producers' registers
//   to the consumers.
// Barriers                                                             who arrives -> who waits
//   full_q[w]            the work tile and Q of consumer w are there    planner w, bytes -> consumer w
//   empty_q[w]           nobody reads Q any more                        4 warps of w (shared_rows: of all) -> planner w
//   full_k[s] full_v[s]  the block is there                             loader, bytes -> consumers
//   empty_k[s] empty_v[s]  nobody reads the block any more              4 warps a consumer (shared_rows: of the one that reads it) -> loader
//   full_next[t] empty_next[t]  the index of the next tile is there, or read   loader -> planners, and back
//   part_written[i] (stream_k)  a part of a tile is written            4 warps of the consumer -> producers
//   1 (shared_rows)      what the other left has been read; both have left theirs    both consumers
//   8 + w                the rows of consumer w that other sequences have are clear     its 4 warps
//   turn 1 + w (ping_pong)  the products of consumer w - 1 are done     consumer w - 1 -> consumer w
//                           (queued), or all of them queued (overlapped)
//
// The launches before may still run when the kernel begins (ptx/grid.cuh): the loader waits for their end before its first load, planners
// before they read lengths. Consumers read and write global memory behind full_q, whose bytes come behind one of these.
//
// NaN and Inf in the V of keys that a row does not see: their weights are 0, and 0 * NaN is NaN. So a warp
// with any output that is not finite computes its rows again without matrix products (warp/exact_row.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_sm90_consumer.cuh"
#include "cuda/kernels/fwd_sm90_producers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/setmaxnreg.cuh"

namespace fovea::cuda {

/// Roles: warp 0 of the first warpgroup loads K and V, of the next ones a thread each plans tiles and loads Q; the
/// other warpgroups are consumers.
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.ctas_per_sm)
    fwd_sm90(const __grid_constant__ TmaForwardArgs args) {
  using Consumer = FwdSm90Consumer<Instance>;
  constexpr FwdSm90Config kConfig = Instance::kConfig;
  static_assert(sizeof(FwdSm90WorkTile) <= kConfig.work_tile_bytes());
  static_assert(kConfig.shared_bytes() <= kConfig.kMostShared);

  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdSm90Memory<Instance> memory{ptx::shared_address(shared), shared};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // a shuffle marks it warp-uniform
  if (thread == 0) memory.init_barriers();
  if constexpr (kConfig.dropout || kConfig.stream_k)
    ptx::wait_for_launches_before();  // rng_state may be written, lengths may be read
  if constexpr (kConfig.dropout) write_rng_state(args.f.p);
  if constexpr (kConfig.row_sum_in_mma)
    memory.fill_ones(thread, std::is_same_v<typename Consumer::Operand, __half> ? 0x3c003c00u : 0x3f803f80u);
  if constexpr (kConfig.alibi)
    AlibiColumns::fill(memory.base + kConfig.columns_at(), kConfig.tile_n, thread, kConfig.threads());
  if constexpr (kConfig.stream_k) count_units(args.f, memory);
  // The next launch waits, and has its CTAs where those of this one end. A launch that merges has few, which would share the first SM.
  if (kConfig.stream_k || args.f.num_splits == 1) ptx::let_next_launch_begin();
  __syncthreads();  // the barriers are ready, the ones, the columns' numbers, and the units

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (!kConfig.pages() && lane != 0) return;
    if (role == 0) {
      fwd_sm90_load_keys<Instance>(args, memory);
    } else if (role > 0 && role <= kConfig.planners() && lane == 0) {
      fwd_sm90_plan(args, memory, role - 1);
    }
    if constexpr (kConfig.stream_k) {
      if (role == kConfig.planners() + 1) clear_unused_of_share<typename Instance::Element>(args.f.p);
      __syncwarp();  // lane 0 has done its loads
      merge_share<typename Instance::Element>(args.f, memory, thread);
    }
    return;
  }
  ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
  Consumer(args, memory, warpgroup - 1, lane).run();
}

}  // namespace fovea::cuda
