// cp.async: 16 bytes from global to shared memory without a register in between (sm_80; PTX ISA "Data
// Movement and Conversion Instructions: cp.async"). On sm_75 the same calls copy through registers, and
// waiting is free: what follows a wait is a barrier anyway.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr bool kHasCpAsync = false;
#else
inline constexpr bool kHasCpAsync = true;
#endif

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
/// Writes 16 bytes to shared address `to`: the first `bytes` of `from`, 0 to 16, and zeros behind them. `from` is a multiple
/// of 16 bytes. From sm_80 on.
__device__ __forceinline__ void cp_async_16_part(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
#endif

/// Copies 16 bytes to shared address `to`, or zeros when not `valid` (then `from` is not read). Bypasses
/// L1 (.cg): a CTA reads a tile once.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  uint4 word = make_uint4(0, 0, 0, 0);
  if (valid) word = __ldg(static_cast<const uint4*>(from));
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
#endif
}

/// The same for 4 bytes, where data allow no wider access (.ca is the only kind for fewer than 16).
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  uint32_t word = 0;
  if (valid) word = __ldg(static_cast<const uint32_t*>(from));
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
#endif
}

/// Closes the group of the copies that this thread issued since the last commit.
__device__ __forceinline__ void cp_async_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most `kPending` of this thread's latest groups are unfinished.
/// Other threads see the data after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace fovea::cuda::ptx
