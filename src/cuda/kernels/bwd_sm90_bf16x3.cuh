// The backward in float32 on Hopper: TMA, wgmma, specialised warpgroups, operands as bf16x3.
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
  if (thread == 0) memory.init_barriers(BwdSm90Turn::wanted(args.b));
  __syncthreads();  // the barriers are ready

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (thread % 32 != 0) return;
    if (role == 0) bwd_sm90_load<Instance, true>(args, memory);
    if (role == 1) bwd_sm90_load<Instance, false>(args, memory);
    return;
  }
  const int base16 = __shfl_sync(0xffffffffu, static_cast<int>(memory.base / 16), 0);
  ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
  BwdSm90Bf16x3Consumer<Instance>{{{args, memory, base16}}, warpgroup - 1}.run();
}

}  // namespace fovea::cuda
