// The backward on Hopper for head sizes above 256: TMA, wgmma, and two consumers that share the sums of 64 rows.
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
