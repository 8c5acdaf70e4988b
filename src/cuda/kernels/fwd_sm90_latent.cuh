// The forward on Hopper where values are the first columns of the keys: multi-head latent attention, absorbed.
//
//   S = Q K^T        P = exp2(scale log2(e) S - m)        O = P V / l        lse = m + log l        V = K[:, :head_dim_v]
//
// As fwd_sm90_wide, whose head says how two consumers share 64 rows, but each block of keys comes to the SM once: its strips are
// operands of Q K, with rows along k, and of P V, with rows along n. That halves what shared memory takes in, and leaves room for two
// blocks.
//
// Where queries meet values (qv), K holds the columns of keys alone, and V the others: the same kernel, with other tensor maps.
//
// Files
//   fwd_sm90_latent_memory.cuh     shared memory
//   fwd_sm90_latent_producers.cuh  the warp that loads K; fwd_sm90_producers.cuh plans tiles and loads Q
//   fwd_sm90_latent_consumer.cuh   the order of products; fwd_sm90_wide_rows.cuh has the rest of a consumer
//   fwd_sm90_epilogue.cuh          O and lse
// Shared memory: Q, two blocks of 64 keys, P of one block. All in strips of 64 columns, as in fwd_sm90_wide: the strips of values, half of
//   them for each consumer, and behind them the columns of keys alone. Even blocks lie in stage 0, and consumer 0 makes their
//   weights; odd ones in stage 1.
// Registers of a consumer's thread: acc_o 128, acc_s 32, P 16, and about 30 more.
// Barriers                                                             who arrives -> who waits
//   full_q            the work tile and Q are there                    planner, bytes -> both consumers
//   empty_q           nobody reads Q any more                          8 warps -> planner
//   full[s][h]        half h of the values' columns of stage s is there, and for h = 1 the columns of keys alone
//                     loader, bytes -> consumer s for Q K, consumer h for P V
//   empty[s][h]       nobody reads it any more: P V of consumer h has, which comes after Q K
//                     4 warps of h -> loader
//   full_p[c]         P, maxima and sums of consumer c's block         4 warps of c -> the other
//   full_next[t] empty_next[t]  the index of the next tile is there, or read   loader -> planner, and back
//   named 1 + c       all warps of consumer c have read P, maxima and sums of the block before, so that it may write its own
//                     4 warps of c -> the same
//
// NaN and Inf: as in fwd_sm90_wide.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/fwd_sm90_latent_consumer.cuh"
#include "cuda/kernels/fwd_sm90_latent_memory.cuh"
#include "cuda/kernels/fwd_sm90_latent_producers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/setmaxnreg.cuh"

namespace fovea::cuda {

/// Roles: warp 0 of the first warpgroup loads keys, a thread of warp 3 plans tiles and loads Q; the other warpgroups are consumers.
template <class Instance>
__global__ void __cluster_dims__(Instance::kConfig.cluster, 1, 1)
    __launch_bounds__(Instance::kConfig.threads(), 1)
        fwd_sm90_latent(const __grid_constant__ TmaForwardArgs args) {
  constexpr FwdSm90WideConfig kConfig = Instance::kConfig;
  static_assert(sizeof(FwdSm90WorkTile) <= kConfig.work_tile_bytes());
  static_assert(FwdSm90LatentMemory<Instance>::shared_bytes() <= kConfig.kMostShared);

  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdSm90LatentMemory<Instance> memory{ptx::shared_address(shared)};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // a shuffle marks it warp-uniform
  if (thread == 0) memory.init_barriers();
  ptx::wait_for_launches_before();  // what they have written may be read
  ptx::cluster_barrier();           // the barriers are ready in all CTAs

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (role == 0) {
      fwd_sm90_latent_load(args, memory);
    } else if (role == 3 && lane == 0) {
      fwd_sm90_plan(args, memory, 0);
      // Nobody reads Q any more: what is left are the last weights times V, and O.
      ptx::let_next_launch_begin();
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    FwdSm90LatentConsumer<Instance>(args, memory, warpgroup - 1, lane).run();
  }
  ptx::cluster_barrier();  // nobody copies to a CTA any more, or arrives at its barriers: it may end
}

}  // namespace fovea::cuda
