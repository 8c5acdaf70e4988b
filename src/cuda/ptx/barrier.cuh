// Named barriers of a CTA: some of its warps wait for some others (PTX ISA "Parallel Synchronization and
// Communication Instructions: bar"). Barrier 0 is __syncthreads(). `threads`: those that arrive and those
// that wait, a multiple of 32.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// Arrives without waiting. The warps that wait see what this warp wrote to shared memory before.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// The same, and says whether any of the threads, all of which wait, has `own`.
__device__ __forceinline__ bool barrier_wait_any(int barrier, int threads, bool own) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, one;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred one, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(own)), "r"(barrier), "r"(threads)
      : "memory");
  return any != 0;
}

}  // namespace fovea::cuda::ptx
