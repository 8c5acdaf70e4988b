// Flags between CTAs (PTX ISA "Memory Consistency Model": ld.acquire, st.release).
#pragma once

namespace fovea::cuda::ptx {

/// Sets a flag. A thread that sees its value through wait_for also sees the earlier memory writes of this
/// thread, and of the threads that met it at a barrier after theirs.
__device__ __forceinline__ void st_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

/// What a flag holds now.
__device__ __forceinline__ int ld_acquire(const int* flag) {
  int seen;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return seen;
}

/// Waits until a flag has this value, which another CTA sets by st_release.
__device__ __forceinline__ void wait_for(const int* flag, int value) {
  while (ld_acquire(flag) != value) {
  }
}

}  // namespace fovea::cuda::ptx
