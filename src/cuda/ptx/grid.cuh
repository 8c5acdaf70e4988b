// Launches that follow each other in a stream (PTX ISA "Parallel Synchronization and Communication Instructions:
// griddepcontrol"). One that is launched with the attribute of programmatic stream serialization may begin before the one
// before it has ended, once each of its CTAs has begun and said so, or has ended. Code for chips before sm_90 is without both:
// it must not be launched so.
#pragma once

namespace fovea::cuda::ptx {

/// The launch behind this one may begin: none of this grid's results is promised by it.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the launches before this one have ended, and their writes can be read.
__device__ __forceinline__ void wait_for_launches_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fovea::cuda::ptx
