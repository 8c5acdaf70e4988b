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

/// Shared memory at `from` to the box at the coordinates; part of the issuing thread's open group of stores.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t from, int c0, int c1, int c2,
                                          int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          reinterpret_cast<uint64_t>(&map)),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Until all but `kPending` groups of this thread have read their shared memory, which may then be written
/// again.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// What this thread wrote to shared memory by ordinary stores becomes visible to tma_store and wgmma.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fovea::cuda::ptx
