// The backward in float32 on Hopper: TMA, wgmma, specialised warpgroups, operands as bf16x3.
//
//   S^T = K Q^T    P = exp2(scale_log2 S - lse_log2)    dP^T = V dO^T    dS = P o (dP - delta)
//   dV += P^T dO   dK += dS^T Q   (in registers, over all query blocks and heads of the group)
//   dQ += dS K     (float32 sums in global memory)
//
// Every product is six of parts of its operands (bf16x3.hpp), the smallest first. bwd_to_bf16x3 has written the parts of Q,
// K, V and dO once; P and dS become parts in registers. Planner, loaders and tiles are those of bwd_sm90: a CTA stays and
// takes tile after tile, 128 keys of one key head, against all blocks of 64 queries that see any of them. Each of two
// consumers, warpgroups, sums dK and dV of its own 64 keys. What differs:
//
//   dQ          A consumer adds dQ of its own 64 keys, straight from registers, in the step itself. So dS needs no exchange
//               between consumers, K no second place, and nothing is staged; shared memory has no room for either.
//   sums        Tensor cores truncate what they add to. dV and dK of a step start at zero, and FADD adds them.
//   what is     K is finite, and Q and dO of rows that take no part are zeros, before the kernel sees them. What else is
//   not finite  not finite makes gradients so; bwd_postprocess_exact computes such rows again.
//
// Files
//   bwd_sm90_bf16x3_consumer.cuh   the products and what is done element by element
//   bwd_sm90_config.cuh, bwd_sm90_producers.cuh, bwd_sm90_keys.cuh   shared with bwd_sm90
// Shared memory, 217 KB (bwd_sm90_config.cuh), in strips of 64 columns, rows of 128 bytes, a strip a part
//   K 48, V 48, Q two stages of 24, dO one of 24, dS (queries, own keys) of each consumer 24. lse_log2 and delta.
//   Q has the two stages, as it is needed from the first product of a step to the last; dO is free after two thirds.
// Registers of a consumer's thread, of 232
//   sums of dK and dV 64, dV of the step 32, P in parts 48, dP 32 that becomes dS in parts 48
// Clocks a step
//   products 7,680 (120 of 32 for each consumer). Shared memory, of 128 B a clock: S, dP and dQ 192 KB each, dV and dK 96
//   each, dS written 48, Q and dO arriving 48: 864 KB, 6,912.
// Barriers                                                                    who arrives -> who waits
//   full_work[t] empty_work[t]  the tile is planned, or has been read             a loader -> all, and back
//   full_k full_v               K, or V, is there                                 loaders, bytes -> consumers
//   empty_k empty_v             no product reads them any more                    consumers -> loaders
//   full_q[s] full_do           Q and lse_log2, or dO and delta, are there        loaders, bytes -> consumers
//   empty_q[s] empty_do         nobody reads them any more                        consumers -> loaders
//   full_ds[w]                  the warps of consumer w have written dS           among its warps
//   empty_ds[w]                 its dQ is computed: dS may be written             among its warps
// dS is written by ordinary stores and read by the asynchronous proxy: each warp fences behind full_ds.
//
// The same bits each time, where that is asked (BwdSm90Turn): key blocks add to a tile of dQ from the last to the first, and
// of a block the second consumer before the first.
//
// Launch
//   grid    bwd_sm90_grid: at most as many CTAs as the GPU holds at a time
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_preprocess (lse_log2, delta, zeros in dq_sum, dq_semaphore and not_finite), bwd_to_bf16x3
//   after   bwd_postprocess_exact (dq; zeros in rows of dk, dv beyond used_k; rows that are not finite)
#pragma once

#include "cuda/kernels/bwd_sm90_bf16x3_consumer.cuh"
#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_producers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/setmaxnreg.cuh"

namespace fovea::cuda {

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), 1)
    bwd_sm90_bf16x3(const __grid_constant__ TmaBackwardArgs args) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  static_assert(kConfig.parts == kBf16x3Parts && !kConfig.one_gradient);
  static_assert(4 * BwdSm90Work::kFields <= kConfig.kWorkBytes);
  static_assert(kConfig.shared_bytes() <= kConfig.kMostShared);

  extern __shared__ __align__(1024) unsigned char shared[];
  const BwdSm90Memory<Instance> memory{ptx::shared_address(shared)};
  const int thread = static_cast<int>(threadIdx.x);
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // warp-uniform
  if (thread == 0) memory.init_barriers(BwdSm90Turn::wanted(args.b), false);
  __syncthreads();  // the barriers are ready

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (thread % 32 != 0) return;
    if (role == 0) bwd_sm90_load<Instance, true>(args, memory);
    if (role == 1) bwd_sm90_load<Instance, false>(args, memory);
    return;
  }
  // Not marked warp-uniform by a shuffle: the compiler works it out again where it is needed, and keeps no register for it.
  const int base16 = static_cast<int>(memory.base / 16);
  ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
  BwdSm90Bf16x3Consumer<Instance>{{{args, memory, base16}}, warpgroup - 1}.run();
}

}  // namespace fovea::cuda
