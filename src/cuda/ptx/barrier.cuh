// Named barriers of a CTA: some of its warps wait for some others (PTX ISA "Parallel Synchronization and
// Communication Instructions: bar"). Barrier 0 is __syncthreads(). `threads`: those that arrive and those
// that wait, a multiple of 32.
#pragma once

namespace fovea::cuda::ptx {

/// Arrives without waiting. The warps that wait see what this warp wrote to shared memory before.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace fovea::cuda::ptx
