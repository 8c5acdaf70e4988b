// The backward on Hopper for head sizes above 256: TMA, wgmma, and two consumers that share the sums of 64 rows.
//
//   dV = P^T dO      dK = dS^T Q      dQ = dS K      P = exp2(scale_log2 S - lse_log2)      dS = P o (dP - delta)
//
// The sums of dK and dV of 64 keys and 512 columns are 256 KB, all registers of an SM. So each gradient has a launch of its own
// (`mode`), which computes S, and dP where it needs it, again: eight products for five, but no sums in global memory, and the
// same bits each time. In each, 64 rows stay and others are streamed past them:
//
//   mode   X stays   Y stays   Z streamed   W streamed   scores                   sums
//   dV     K                   Q            dO           S^T = X Z^T              P^T W
//   dK     K         V         Q            dO           S^T = X Z^T, dP^T = Y W^T   dS^T Z
//   dQ     Q         dO        K            V            S = X Z^T, dP = Y W^T       dS Z
//
// Sums of 64 rows and 512 columns are 128 registers a thread of two consumers, each of which has half of the columns. Consumer 0
// computes S and P; consumer 1 dP at the same time, and dS. P passes through the place of dS in shared memory, in 16 bits. Both
// read dS from there. Terms of the score are consumer 0's: it hands over P times the score's derivative, or -P where dropout drops
// the weight. Two CTAs of a cluster, with neighbouring rows, share what is streamed: each loads every second
// strip for both.
//
// Files
//   bwd_sm90_wide_config.cuh     configuration, shared memory, barriers, the tile, the rings
//   bwd_sm90_wide_producers.cuh  the threads that load
//   bwd_sm90_wide_scores.cuh     S, dP, P, dS, terms, masks, what is not finite
//   bwd_sm90_wide_pairs.cuh      a lane's queries and keys, for expressions
//   bwd_sm90_wide_consumer.cuh   the mainloop, the sums, the gradient
// Shared memory: X and Y but for the strips that registers keep; rings of pieces of Z and W, 128 columns each; P and dS, 64 x 64;
//   lse_log2 and delta of the streamed queries, four stages. Strips of 64 columns, rows of 128 bytes, swizzled as TMA's and wgmma's
//   128-byte mode.
// Registers of a consumer's thread: sums 128 (160 of consumer 0 at 576 columns), scores streamed / 2, strips kept of X or Y 16
//   each, and about 30 more.
// Barriers                                                            who arrives -> who waits
//   full_x full_y         X, or Y, is there                           bytes -> the consumer that multiplies it
//   full_z[s] full_w[s]   a piece is there, its first with lse (and delta)   loader, bytes of both CTAs -> consumers
//   empty_z[s] empty_w[s] no product reads the piece any more: scores' alone, or those of the sums, which come last
//                                                                     4 or 8 warps of each CTA -> loaders of both
//   full_p                P is written                                4 warps of consumer 0 -> consumer 1 (dK, dQ)
//   full_weights          dS, or P in dV, is written                  4 warps -> both consumers
//   empty_weights         the sums' products have read it             8 warps -> consumer 0
//   kBwdSm90WideOwn + c   rows that were made finite or zero are so   among the warps of consumer c
//
// What is not finite. A row of the sums sees its own row of X and Y, and all of Z or W, where a weight of 0 does not keep out NaN.
//   dK, dV  Queries whose lse is not finite become zeros in Z and W before any product reads them (P of the keys that they see is
//           NaN by lse, or 0 where they take no part). Keys become finite: 0 times infinity would be NaN where the row takes no part.
//   dQ      A key that is not finite makes all of its scores so. Whoever finds such a score makes K of the step finite before the sums
//           read it: an infinity becomes the largest finite number; P of the queries that see it is NaN by lse, or 0.
//   Masked pairs get dS = 0 (P = 0 in dV) by selection, whatever V, dO and delta hold.
//
// Launch
//   grid    bwd_sm90_wide_grid
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_preprocess (lse_log2, delta)
//   after   none: rows that take no part are written as zeros
#pragma once

#include "cuda/kernels/bwd_sm90_wide_config.cuh"
#include "cuda/kernels/bwd_sm90_wide_consumer.cuh"
#include "cuda/kernels/bwd_sm90_wide_producers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/setmaxnreg.cuh"

namespace fovea::cuda {

/// Roles: two warps of the first warpgroup load, a thread each; the other warpgroups are consumers.
template <class Instance>
__global__ void __cluster_dims__(Instance::kConfig.kCluster, 1, 1)
    __launch_bounds__(Instance::kConfig.threads(), 1)
        bwd_sm90_wide(const __grid_constant__ TmaBackwardArgs args) {
  constexpr BwdSm90WideConfig kConfig = Instance::kConfig;
  static_assert(kConfig.head_dim % 64 == 0 && kConfig.head_dim_v % 64 == 0);
  static_assert(kConfig.shared_bytes() <= kConfig.kMostShared);

  extern __shared__ __align__(1024) unsigned char shared[];
  const BwdSm90WideMemory<Instance> memory{ptx::shared_address(shared)};
  const int thread = static_cast<int>(threadIdx.x);
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // warp-uniform
  if (thread == 0) {
    memory.init_barriers();
    memory.work() = bwd_sm90_wide_work<kConfig>(args.b);
  }
  ptx::cluster_barrier();  // the barriers are ready in all CTAs

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (thread % 32 != 0) return;
    if (role == 0) BwdSm90WideLoader<Instance, true>{args, memory}.run();
    if (role == 1) BwdSm90WideLoader<Instance, false>{args, memory}.run();
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    if (warpgroup == 1) {
      BwdSm90WideConsumer<Instance, 0>(args, memory).run();
    } else {
      BwdSm90WideConsumer<Instance, 1>(args, memory).run();
    }
  }
  ptx::cluster_barrier();  // nobody copies to a CTA any more, or arrives at its barriers: it may end
}

}  // namespace fovea::cuda
