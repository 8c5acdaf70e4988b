// Flags between CTAs (PTX ISA "Memory Consistency Model": ld.acquire, st.release).
#pragma once

namespace fovea::cuda::ptx {

/// Sets a flag. Whoever sees its value by wait_for also sees what this thread, and threads that have met it
/// at a barrier since, have done to memory before.
__device__ __forceinline__ void st_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

/// Waits until a flag has this value, which another CTA is to set by st_release.
__device__ __forceinline__ void wait_for(const int* flag, int value) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (seen != value);
}

}  // namespace fovea::cuda::ptx
