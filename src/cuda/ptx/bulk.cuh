// Copies of contiguous bytes between global and shared memory by the asynchronous proxy (sm_90; PTX ISA "Data Movement
// and Conversion Instructions: cp.async.bulk, cp.reduce.async.bulk"). Addresses and sizes are multiples of 16 bytes. One
// thread issues a copy.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// `bytes` from global memory to shared memory at `to`; `barrier` counts them.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Adds `bytes` of float32 in shared memory at `from` to global memory, in this thread's open group.
__device__ __forceinline__ void bulk_add_f32(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}
/// Stores them there instead.
__device__ __forceinline__ void bulk_store_f32(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
/// Closes this thread's group of additions and stores.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Until all but the last `kPending` groups of this thread have read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Until all but the last `kPending` groups of this thread are done: their sums are in global memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fovea::cuda::ptx
