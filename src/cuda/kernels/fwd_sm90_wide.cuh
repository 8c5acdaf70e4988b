// The forward on Hopper for head sizes above 256: TMA, wgmma, and two consumers that share 64 rows.
//
//   S = Q K^T (+ QV V^T)        P = exp2(scale log2(e) S - m)        O = P V / l        lse = m + log l
//
// O of 64 rows and 512 columns in float32 is 128 KB, the registers of two warpgroups. So the two consumers of a CTA
// work on the same rows, each with half of V's columns. They take the blocks of keys by turns: one makes the weights of a
// block (Q K and the softmax), keeps them in registers for its own half of V, and hands a copy and the rows' maxima and
// sums over in shared memory for the other half. Each adds all blocks to its half of O, in order. (The idea of two
// warpgroups that share O and exchange P: FlashMLA.) While one consumer takes exponentials, the other has the tensor
// cores. The maximum of a row is raised only where a weight would exceed 2^kLazyGrowthLog2 (warp/online_rows.cuh).
//
// Where queries meet values (qv), Q and K here are the rows [Q | QV] and [K | V]: the producers take the strips behind those of q and k from
// other tensor maps, and V then comes to the SM for both products; memory is read once.
//
// Files
//   fwd_sm90_wide_config.cuh     configuration, shared memory
//   fwd_sm90_wide_producers.cuh  the threads that load K and V; fwd_sm90_producers.cuh plans tiles and loads Q
//   fwd_sm90_wide_consumer.cuh   Q K^T, softmax, P V; fwd_sm90_wide_rows.cuh what it shares with fwd_sm90_latent
//   fwd_sm90_pairs.cuh           expressions and dropout, by a lane's pairs
//   fwd_sm90_epilogue.cuh        O and lse
// Shared memory: Q, one block of 64 keys of K and of V, P of each consumer. All in strips of 64 columns: rows of 128 bytes,
//   swizzled as TMA's and wgmma's 128-byte mode. K comes and goes in pieces of 128 columns, so that the next block's
//   first pieces arrive while this one's last are read; V in the consumers' halves.
// Registers of a consumer's thread: acc_o 128, acc_s 32, P 16, and about 30 more.
// Barriers                                                             who arrives -> who waits
//   full_q            the work tile and Q are there                    planner, bytes -> both consumers
//   empty_q           nobody reads Q any more                          8 warps -> planner
//   full_k[c][i]      piece i of K is there, of a block of consumer c  loader, bytes -> consumer c
//   empty_k[c][i]     nobody reads it any more                         4 warps of c -> loader
//   full_v[c] empty_v[c]  the same of consumer c's half of V           loader, bytes -> consumer c, and back
//   full_p[c]         P, maxima and sums of consumer c's block         4 warps of c -> the other
//   empty_p[c]        the other's products have read P                 4 warps of the other -> c
//   full_next[t] empty_next[t]  the index of the next tile is there, or read   loader of K -> planner and loaders of V,
//                     and back
//
// NaN and Inf: as in fwd_sm90.cuh. Both consumers see those of the scores; those of V concern its half alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/fwd_sm90_wide_config.cuh"
#include "cuda/kernels/fwd_sm90_wide_consumer.cuh"
#include "cuda/kernels/fwd_sm90_wide_producers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/setmaxnreg.cuh"

namespace fovea::cuda {

/// Roles: warp 0 of the first warpgroup loads K, 1 and 2 the halves of V, 3 plans tiles and loads Q, a thread each; the other
/// warpgroups are consumers.
template <class Instance>
__global__ void __cluster_dims__(Instance::kConfig.cluster, 1, 1)
    __launch_bounds__(Instance::kConfig.threads(), 1)
        fwd_sm90_wide(const __grid_constant__ TmaForwardArgs args) {
  constexpr FwdSm90WideConfig kConfig = Instance::kConfig;
  static_assert(sizeof(FwdSm90WorkTile) <= kConfig.work_tile_bytes());
  static_assert(kConfig.shared_bytes() <= kConfig.kMostShared);

  extern __shared__ __align__(1024) unsigned char shared[];
  const FwdSm90WideMemory<Instance> memory{ptx::shared_address(shared)};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // a shuffle marks it warp-uniform
  if (thread == 0) memory.init_barriers();
  if constexpr (kConfig.dropout) write_rng_state(args.f.p);
  ptx::cluster_barrier();  // the barriers are ready in all CTAs

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (lane != 0) return;
    if (role == 0) {
      fwd_sm90_wide_load_keys(args, memory);
    } else if (role <= kConfig.kConsumers) {
      fwd_sm90_wide_load_values(args, memory, role - 1);
    } else {
      fwd_sm90_plan(args, memory, 0);
    }
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    FwdSm90WideConsumer<Instance>(args, memory, warpgroup - 1, lane).run();
  }
  ptx::cluster_barrier();  // nobody copies to a CTA any more, or arrives at its barriers: it may end
}

}  // namespace fovea::cuda
