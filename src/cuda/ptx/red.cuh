// Additions to global memory that return nothing (PTX ISA "Parallel Synchronization and Communication
// Instructions: red"). Vectors of float32 are one transaction on sm_90 and two or four on older chips.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace fovea::cuda::ptx {

__device__ __forceinline__ void red_add(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

/// `to` is aligned to 16 bytes.
__device__ __forceinline__ void red_add_v4(float* to, float x, float y, float z, float w) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
#else
  red_add(to, x);
  red_add(to + 1, y);
  red_add(to + 2, z);
  red_add(to + 3, w);
#endif
}

/// Eight elements of T, 16 bits each, to `to`, which is aligned to 16 bytes. From sm_90 on.
template <class T>
__device__ __forceinline__ void red_add_16(T* to, uint4 x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x),
                 "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  }
}

}  // namespace fovea::cuda::ptx
