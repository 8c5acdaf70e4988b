// mma.sync: D = A B + D in one warp, float32 accumulators (PTX ISA "Warp Level Matrix Instructions: mma").
// With g = lane / 4 and t = lane % 4, a lane holds:
//
//   m16n8k16, 16-bit  A: a[0] (g, 2t..2t+1)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)
//                     B: b[0] (k = 2t..2t+1, n = g)  b[1] (k = 2t+8.., n = g)
//   m16n8k8, 16-bit   A: a[0] (g, 2t..)  a[1] (g+8, 2t..)         B: b[0] (k = 2t.., n = g)
//   m16n8k8, tf32     A: a[0] (g, t)  a[1] (g+8, t)  a[2] (g, t+4)  a[3] (g+8, t+4)
//                     B: b[0] (k = t, n = g)  b[1] (k = t+4, n = g)
//   D of all:         d[0] (g, 2t)  d[1] (g, 2t+1)  d[2] (g+8, 2t)  d[3] (g+8, 2t+1)
//
// Not volatile: an mma is a function of its operands, so the compiler may move it among loads.
// tile/fragment_map.hpp has the same tables as functions of the lane.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fovea::cuda::ptx {

/// sm_80. T is __half or __nv_bfloat16.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// sm_75, float16 only.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

/// sm_80. Operands are float32 bit patterns, of which the tensor core reads the upper 19 bits.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fovea::cuda::ptx
