// Matrix products of a warpgroup: operands in shared memory or registers, asynchronous (sm_90a; PTX ISA
// "Asynchronous Warpgroup Level Matrix Instructions: wgmma"). D (+)= A B with D (64 x N), A (64 x 16) and
// B (16 x N), 16-bit operands, float32 accumulators; or A (64 x 32) and B (32 x N) of float8_e4m3fn, both K-major;
// layouts in tile/wgmma_map.hpp. All four warps of the warpgroup execute each of these functions.
//
// Between wgmma_fence() and the wgmma_wait() that covers a product neither its accumulators nor its A
// registers may be touched; its shared memory may be overwritten after the wait.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/dtype.hpp"

namespace fovea::cuda::ptx {

/// Makes earlier writes of registers visible to the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until all but the last `kPending` groups are done. Then pass their accumulators to wgmma_done().
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from reading accumulators before the wait:
/// it takes them for results of the product itself.
template <int kRegs>
__device__ __forceinline__ void wgmma_done(float (&d)[kRegs]) {
#pragma unroll
  for (int i = 0; i < kRegs; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Whether D starts from 0 or from what it holds. From 0, its registers are free until the product.
enum class WgmmaStart : bool { kZero, kAccumulate };
/// Whether rows of B in shared memory run along k (K^T from rows of K) or along n (V).
enum class WgmmaMajor : int { kK = 0, kMN = 1 };

/// Products of N columns:
///   ss<T, kStart, kMajorB>(d, a, b)   A and B by descriptor, A K-major
///   rs<T, kStart, kMajorB>(d, a, b)   A in registers
/// and of float8_e4m3fn, T being E4M3, which have no kMN. Of those the accumulator keeps 13 to 14 bits.
template <int kN>
struct Wgmma;

// An asm statement needs each operand spelled out: placeholders "%0, %1, ..." by tens, and the operands of each.
#define FOVEA_P2(t) "%" #t "0, %" #t "1"
#define FOVEA_P4(t) FOVEA_P2(t) ", %" #t "2, %" #t "3"
#define FOVEA_P6(t) FOVEA_P4(t) ", %" #t "4, %" #t "5"
#define FOVEA_P8(t) FOVEA_P6(t) ", %" #t "6, %" #t "7"
#define FOVEA_P10(t) FOVEA_P8(t) ", %" #t "8, %" #t "9, "
#define FOVEA_O2(c, i) c(d[i]), c(d[i + 1])
#define FOVEA_O4(c, i) FOVEA_O2(c, i), FOVEA_O2(c, i + 2)
#define FOVEA_O8(c, i) FOVEA_O4(c, i), FOVEA_O4(c, i + 4)
#define FOVEA_O16(c, i) FOVEA_O8(c, i), FOVEA_O8(c, i + 8)
#define FOVEA_O32(c, i) FOVEA_O16(c, i), FOVEA_O16(c, i + 16)
#define FOVEA_O64(c, i) FOVEA_O32(c, i), FOVEA_O32(c, i + 32)

#define FOVEA_WGMMA_ONE(k_types, n, placeholders, operands, direction, tail, ...)          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n k_types " {" placeholders "}, " tail \
               : operands(direction)                                                       \
               : __VA_ARGS__)
// `majors`: what of the tail only 16-bit types have.
#define FOVEA_WGMMA_TYPED(n, placeholders, operands, direction, tail, majors, ...)                          \
  if constexpr (std::is_same_v<T, E4M3>) {                                                                  \
    static_assert(kMajorB == WgmmaMajor::kK);                                                               \
    FOVEA_WGMMA_ONE("k32.f32.e4m3.e4m3", n, placeholders, operands, direction, tail ";", __VA_ARGS__);      \
  } else if constexpr (std::is_same_v<T, __half>) {                                                         \
    FOVEA_WGMMA_ONE("k16.f32.f16.f16", n, placeholders, operands, direction, tail majors ";", __VA_ARGS__); \
  } else {                                                                                                  \
    static_assert(std::is_same_v<T, __nv_bfloat16>);                                                        \
    FOVEA_WGMMA_ONE("k16.f32.bf16.bf16", n, placeholders, operands, direction, tail majors ";",             \
                    __VA_ARGS__);                                                                           \
  }
// p0 .. p5: the numbers of the operands behind the n / 2 registers of D. In the tail: A, B, whether to
// accumulate, signs of A and B, and which of A (from shared memory) and B are MN-major.
#define FOVEA_WGMMA(n, placeholders, operands, p0, p1, p2, p3, p4, p5)                                  \
  template <>                                                                                           \
  struct Wgmma<n> {                                                                                     \
    template <class T, WgmmaStart kStart, WgmmaMajor kMajorB>                                           \
    __device__ static __forceinline__ void ss(float (&d)[n / 2], uint64_t a, uint64_t b) {              \
      constexpr int kB = static_cast<int>(kMajorB);                                                     \
      if constexpr (kStart == WgmmaStart::kZero) {                                                      \
        FOVEA_WGMMA_TYPED(n, placeholders, operands, "=f", "%" #p0 ", %" #p1 ", 0, 1, 1", ", 0, %" #p2, \
                          "l"(a), "l"(b), "n"(kB))                                                      \
      } else {                                                                                          \
        FOVEA_WGMMA_TYPED(n, placeholders, operands, "+f", "%" #p0 ", %" #p1 ", 1, 1, 1", ", 0, %" #p2, \
                          "l"(a), "l"(b), "n"(kB))                                                      \
      }                                                                                                 \
    }                                                                                                   \
    template <class T, WgmmaStart kStart, WgmmaMajor kMajorB>                                           \
    __device__ static __forceinline__ void rs(float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b) {  \
      constexpr int kB = static_cast<int>(kMajorB);                                                     \
      if constexpr (kStart == WgmmaStart::kZero) {                                                      \
        FOVEA_WGMMA_TYPED(n, placeholders, operands, "=f",                                              \
                          "{%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", 0, 1, 1", ", %" #p5,     \
                          "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kB))                  \
      } else {                                                                                          \
        FOVEA_WGMMA_TYPED(n, placeholders, operands, "+f",                                              \
                          "{%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", 1, 1, 1", ", %" #p5,     \
                          "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kB))                  \
      }                                                                                                 \
    }                                                                                                   \
  }
#define FOVEA_D16(c) FOVEA_O8(c, 0)
FOVEA_WGMMA(16, FOVEA_P8(), FOVEA_D16, 8, 9, 10, 11, 12, 13);
#define FOVEA_D32(c) FOVEA_O16(c, 0)
FOVEA_WGMMA(32, FOVEA_P10() FOVEA_P6(1), FOVEA_D32, 16, 17, 18, 19, 20, 21);
#define FOVEA_D48(c) FOVEA_O16(c, 0), FOVEA_O8(c, 16)
FOVEA_WGMMA(48, FOVEA_P10() FOVEA_P10(1) FOVEA_P4(2), FOVEA_D48, 24, 25, 26, 27, 28, 29);
#define FOVEA_D64(c) FOVEA_O32(c, 0)
FOVEA_WGMMA(64, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P2(3), FOVEA_D64, 32, 33, 34, 35, 36, 37);
#define FOVEA_D72(c) FOVEA_O32(c, 0), FOVEA_O4(c, 32)
FOVEA_WGMMA(72, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P6(3), FOVEA_D72, 36, 37, 38, 39, 40, 41);
#define FOVEA_D80(c) FOVEA_O32(c, 0), FOVEA_O8(c, 32)
FOVEA_WGMMA(80, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P8(3) ", %38, %39", FOVEA_D80, 40, 41, 42, 43, 44,
            45);
#define FOVEA_D96(c) FOVEA_O32(c, 0), FOVEA_O16(c, 32)
FOVEA_WGMMA(96, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P8(4), FOVEA_D96, 48, 49, 50, 51, 52,
            53);
#define FOVEA_D104(c) FOVEA_O32(c, 0), FOVEA_O16(c, 32), FOVEA_O4(c, 48)
FOVEA_WGMMA(104, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P2(5), FOVEA_D104, 52,
            53, 54, 55, 56, 57);
#define FOVEA_D112(c) FOVEA_O32(c, 0), FOVEA_O16(c, 32), FOVEA_O8(c, 48)
FOVEA_WGMMA(112, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P6(5), FOVEA_D112, 56,
            57, 58, 59, 60, 61);
#define FOVEA_D128(c) FOVEA_O64(c, 0)
FOVEA_WGMMA(128, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P10(5) FOVEA_P4(6),
            FOVEA_D128, 64, 65, 66, 67, 68, 69);
#define FOVEA_D136(c) FOVEA_O64(c, 0), FOVEA_O4(c, 64)
FOVEA_WGMMA(136, FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P10(5) FOVEA_P8(6),
            FOVEA_D136, 68, 69, 70, 71, 72, 73);
#define FOVEA_D144(c) FOVEA_O64(c, 0), FOVEA_O8(c, 64)
FOVEA_WGMMA(144,
            FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P10(5) FOVEA_P10(6)
                FOVEA_P2(7),
            FOVEA_D144, 72, 73, 74, 75, 76, 77);
#define FOVEA_D160(c) FOVEA_O64(c, 0), FOVEA_O16(c, 64)
FOVEA_WGMMA(160,
            FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P10(5) FOVEA_P10(6)
                FOVEA_P8(7) ", %78, %79",
            FOVEA_D160, 80, 81, 82, 83, 84, 85);
#define FOVEA_D176(c) FOVEA_O64(c, 0), FOVEA_O16(c, 64), FOVEA_O8(c, 80)
FOVEA_WGMMA(176,
            FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P10(5) FOVEA_P10(6)
                FOVEA_P10(7) FOVEA_P8(8),
            FOVEA_D176, 88, 89, 90, 91, 92, 93);
#define FOVEA_D192(c) FOVEA_O64(c, 0), FOVEA_O32(c, 64)
FOVEA_WGMMA(192,
            FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P10(5) FOVEA_P10(6)
                FOVEA_P10(7) FOVEA_P10(8) FOVEA_P6(9),
            FOVEA_D192, 96, 97, 98, 99, 100, 101);
#define FOVEA_D256(c) FOVEA_O64(c, 0), FOVEA_O64(c, 64)
FOVEA_WGMMA(256,
            FOVEA_P10() FOVEA_P10(1) FOVEA_P10(2) FOVEA_P10(3) FOVEA_P10(4) FOVEA_P10(5) FOVEA_P10(6)
                FOVEA_P10(7) FOVEA_P10(8) FOVEA_P10(9) FOVEA_P10(10) FOVEA_P10(11) FOVEA_P8(12),
            FOVEA_D256, 128, 129, 130, 131, 132, 133);

#undef FOVEA_D32
#undef FOVEA_D48
#undef FOVEA_D64
#undef FOVEA_D72
#undef FOVEA_D80
#undef FOVEA_D96
#undef FOVEA_D104
#undef FOVEA_D112
#undef FOVEA_D128
#undef FOVEA_D136
#undef FOVEA_D144
#undef FOVEA_D160
#undef FOVEA_D176
#undef FOVEA_D192
#undef FOVEA_D256
#undef FOVEA_P2
#undef FOVEA_P4
#undef FOVEA_P6
#undef FOVEA_P8
#undef FOVEA_P10
#undef FOVEA_O2
#undef FOVEA_O4
#undef FOVEA_O8
#undef FOVEA_O16
#undef FOVEA_O32
#undef FOVEA_O64
#undef FOVEA_WGMMA_ONE
#undef FOVEA_WGMMA_TYPED
#undef FOVEA_WGMMA

}  // namespace fovea::cuda::ptx
