// fwd_decode_e4m3 where few tiles leave most of a GPU idle: a tile is a cluster's, as in fwd_decode_cluster, which says how CTAs share
// keys and merge rows.
#pragma once

#include "cuda/kernels/fwd_decode_cluster.cuh"
#include "cuda/kernels/fwd_decode_e4m3.cuh"

namespace fovea::cuda {

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), 1)
    fwd_decode_e4m3_cluster(const __grid_constant__ TmaDecodeArgs all) {
  const ForwardArgs& args = all.f;
  using T = typename Instance::Element;
  constexpr auto kConfig = Instance::kConfig;
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t base = ptx::shared_address(shared);
  const FwdDecodeE4M3Memory<Instance> memory{{base, ptx::shared_pointer(base)}};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32,
            warp = __shfl_sync(0xffffffffu, thread / 32, 0);
  if (thread == 0) {
    prefetch_maps(all);
    ptx::mbarrier_init(memory.inbox_full(), 1);
    init_ring<Instance>(memory);
  }
  ptx::cluster_arrive();  // waited for below: the barrier is initialised, and this CTA has begun
  const bool lengths_are_known = tile::lengths_are_known(args.p);
  if (!lengths_are_known) ptx::wait_for_launches_before();  // lengths may be read
  const ClusterShare share(args, kConfig.unit_keys());
  if (lengths_are_known) ptx::wait_for_launches_before();  // what they have written may be read
  ptx::let_next_launch_begin();  // it waits, and has its CTAs where those of this one end
  if (!share.takes_part) return;
  __syncthreads();  // the barriers of the ring are initialised
  if (warp >= kConfig.warps) {
    FwdDecodeE4M3Producer<Instance>(all, memory, lane).copy(share.work, share.own);
    ptx::cluster_wait();
    return;
  }
  FwdDecodeE4M3Consumer<Instance> own(args, memory, warp, lane);
  own.sum_up(share.work, share.own, [] { ptx::cluster_wait(); });
  merge_in_cluster<T>(args, own.results(), share, thread);
}

}  // namespace fovea::cuda
