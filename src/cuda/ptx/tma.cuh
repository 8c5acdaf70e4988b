// Copies of boxes of a tensor between global and shared memory by the tensor memory accelerator (sm_90; PTX
// ISA "Data Movement and Conversion Instructions: cp.async.bulk.tensor"). `map` describes the tensor and the
// box (cuTensorMapEncodeTiled) and lies in the parameters of the kernel; coordinates are in elements,
// innermost first, and may be outside of the tensor: such elements are read as 0 and not written. One thread
// issues a copy.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fovea::cuda::ptx {

/// Fetches the map ahead of its first use.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

/// The box at the coordinates to shared memory at `to`; `barrier` counts its bytes.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0,
                                         int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0,
                                         int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6, %7}], "
      "[%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

/// The same into each CTA of the cluster whose bit in `ctas` is set: at the same address, counted by the barrier at the same
/// address of each.
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                                   int c0, int c1, int c2, int c3, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ctas)
      : "memory");
}

/// Adds a box of shared memory at `from` to the tensor, whose elements are float16 or bfloat16, each sum rounded to that, in any
/// order with other additions (cp.reduce.async.bulk.tensor). In the groups of bulk.cuh.
__device__ __forceinline__ void tma_add(const CUtensorMap& map, uint32_t from, int c0, int c1, int c2,
                                        int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(reinterpret_cast<uint64_t>(&map)),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// What this thread wrote to shared memory by ordinary stores becomes visible to wgmma.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// The same, of global memory as well, and of what this thread has seen of other threads'.
__device__ __forceinline__ void async_proxy_fence_all() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace fovea::cuda::ptx
