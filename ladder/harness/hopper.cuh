// Instructions of Hopper (sm_90a; PTX ISA, the section of each is named). tests/ladder/emulated has the same
// functions for a machine without a GPU. `barrier`, `to`, `from`: addresses in shared memory, as
// ptx::shared_address gives them.
//
// A tile for TMA and wgmma is made of strips of 64 columns: rows of 128 bytes, one below the other, in which
// the chunk of 16 bytes number c of row r lies at c xor (r mod 8). A strip begins at a multiple of 1024.
#pragma once

#include <cstdint>

#include "ladder/harness/descriptor.cuh"
#include "ladder/harness/tensor_map.hpp"

namespace ladder::ptx {

// --- mbarrier: counts arrivals, and bytes of copies. Phases have parities 0, 1, 0, ... ---

/// Each phase completes after `arrivals` arrivals.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// After the inits, by the same thread: makes the barriers visible to TMA. Other threads also need
/// __syncthreads().
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and makes the phase also wait for `bytes` of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity is complete. On a new barrier that of parity 1 counts as complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred complete;\n"
      "try:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
      "@!complete bra try;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- TMA (Data Movement: cp.async.bulk.tensor). One thread copies a whole box. ---

/// Loads the box that begins at (column, row) of a sequence; `barrier` counts all of its bytes, those outside
/// the matrix included.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, int column,
                                         int row, int sequence) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(barrier), "r"(column), "r"(row), "r"(sequence)
      : "memory");
}
/// Stores a box. Stores belong to the group that tma_store_commit() closes.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, uint32_t from, int column, int row,
                                          int sequence) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(&map)),
               "r"(from), "r"(column), "r"(row), "r"(sequence)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Makes this thread's ordinary stores to shared memory visible to TMA and wgmma (Membar: fence.proxy).
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// The inverse of ldmatrix: lanes 8 m to 8 m + 7 give the rows of matrix m, r[m] holds elements (g, 2t)
/// and (g, 2t+1) of it (Warp Level Matrix Instructions: stmatrix).
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// --- Warpgroups: registers, and barriers of some of a block's warps ---

/// All warps of a warpgroup set the registers of each of their threads. An increase waits until other
/// warpgroups have released as many (Miscellaneous Instructions: setmaxnreg).
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Named barriers 1 to 15 of a block; `threads`: those that arrive and those that wait (Parallel
/// Synchronization: bar).
__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// --- wgmma (Asynchronous Warpgroup Level Matrix Instructions): D (64 x N) += A (64 x 16) B (16 x N) by four
// warps. d[i] of a lane are columns 8 i to 8 i + 7 of its warp's 16 rows, as mma_bf16 has them; so is A when
// it comes from registers. No code may touch the registers of a product between its fence and its wait.

/// Makes registers written before visible to the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending groups are unfinished. Then call wgmma_done() for each D of the finished ones.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// The compiler takes D as written once the product is issued. This makes it read D after the wait.
template <int kTiles>
__device__ __forceinline__ void wgmma_done(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// An asm statement names each of its operands.
#define LADDER_D1(how, i) how(d[i][0]), how(d[i][1]), how(d[i][2]), how(d[i][3])
#define LADDER_D4(how, i) \
  LADDER_D1(how, i), LADDER_D1(how, i + 1), LADDER_D1(how, i + 2), LADDER_D1(how, i + 3)
#define LADDER_D8(how) LADDER_D4(how, 0), LADDER_D4(how, 4)
#define LADDER_D16(how) LADDER_D8(how), LADDER_D4(how, 8), LADDER_D4(how, 12)
#define LADDER_N32                                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LADDER_N64                                                                                         \
  LADDER_N32                                                                                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// After the operands: whether to add to D, the signs of A and B, and which of A (in shared memory) and B are
// MN-major.
#define LADDER_WGMMA(n, operands) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" operands "}, "

/// A and B in shared memory, both K-major. kFirst: D = A B, whatever D held before.
template <bool kFirst>
__device__ __forceinline__ void wgmma(float (&d)[16][4], uint64_t a, uint64_t b) {
  if constexpr (kFirst) {
    asm volatile(LADDER_WGMMA(128, LADDER_N64) "%64, %65, 0, 1, 1, 0, 0;"
                 : LADDER_D16("=f")
                 : "l"(a), "l"(b));
  } else {
    asm volatile(LADDER_WGMMA(128, LADDER_N64) "%64, %65, 1, 1, 1, 0, 0;"
                 : LADDER_D16("+f")
                 : "l"(a), "l"(b));
  }
}
template <bool kFirst>
__device__ __forceinline__ void wgmma(float (&d)[8][4], uint64_t a, uint64_t b) {
  if constexpr (kFirst) {
    asm volatile(LADDER_WGMMA(64, LADDER_N32) "%32, %33, 0, 1, 1, 0, 0;" : LADDER_D8("=f") : "l"(a), "l"(b));
  } else {
    asm volatile(LADDER_WGMMA(64, LADDER_N32) "%32, %33, 1, 1, 1, 0, 0;" : LADDER_D8("+f") : "l"(a), "l"(b));
  }
}
/// A in registers, B in shared memory, MN-major.
__device__ __forceinline__ void wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(LADDER_WGMMA(128, LADDER_N64) "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : LADDER_D16("+f")
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef LADDER_D1
#undef LADDER_D4
#undef LADDER_D8
#undef LADDER_D16
#undef LADDER_N32
#undef LADDER_N64
#undef LADDER_WGMMA

}  // namespace ladder::ptx
