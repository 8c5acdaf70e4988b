// Barriers in shared memory that count arrivals and bytes of asynchronous copies (sm_90; PTX ISA "Parallel
// Synchronization and Communication Instructions: mbarrier"). A phase completes once all arrivals and all
// bytes expected in it are there; phases have parities 0, 1, 0, ... `barrier`: shared address of 8 bytes, a
// multiple of 8.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// Comes before any use of the barrier. A phase completes after `arrivals` arrivals.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// After mbarrier_init, by the thread that did it: asynchronous copies see the barrier. Other threads see it after a
/// __syncthreads().
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives. Threads that wait for this phase then see what this thread did to memory before.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and makes the phase wait for `bytes` of asynchronous copies as well.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// Waits until the phase of this parity is complete. The phase before the first counts as complete with parity 1.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace fovea::cuda::ptx
