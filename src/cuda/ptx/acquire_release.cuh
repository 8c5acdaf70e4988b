// Flags between CTAs (PTX ISA "Memory Consistency Model": ld.acquire, st.release; ld.relaxed, st.relaxed, fence).
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// Sets a flag. A thread that sees its value through wait_for also sees the earlier memory writes of this
/// thread, and of the threads that met it at a barrier after theirs.
__device__ __forceinline__ void st_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ void st_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

/// What a flag holds now.
__device__ __forceinline__ int ld_acquire(const int* flag) {
  int seen;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return seen;
}

__device__ __forceinline__ uint64_t ld_acquire(const uint64_t* flag) {
  uint64_t seen;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
  return seen;
}

/// Sets a flag without an order between it and other memory, which fence_acq_rel in front of it makes.
__device__ __forceinline__ void st_relaxed(int* flag, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

/// What a flag holds, likewise; fence_acq_rel behind it makes the order.
__device__ __forceinline__ int ld_relaxed(const int* flag) {
  int seen;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return seen;
}

/// Clears a flag that has this value. Says whether it had: of several threads one.
__device__ __forceinline__ bool take_flag(uint64_t* flag, uint64_t value) {
  uint64_t seen;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, 0;"
               : "=l"(seen)
               : "l"(flag), "l"(value)
               : "memory");
  return seen == value;
}

/// What this thread has written or seen before comes before what it writes to a flag behind this; and behind what it has read from a
/// flag before, what it does behind this.
__device__ __forceinline__ void fence_acq_rel() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/// Between a write and a read: of two threads that each write, pass this and read what the other wrote, one sees it.
__device__ __forceinline__ void fence_sc() {
  asm volatile("fence.sc.gpu;" ::: "memory");
}

/// Waits until a flag has this value, which another CTA sets by st_release.
template <class Word>
__device__ __forceinline__ void wait_for(const Word* flag, Word value) {
  while (ld_acquire(flag) != value) {
  }
}

/// Waits until a word has come to a number, which another device or a stream writes behind memory that this thread may then read, and
/// TMA at its word (fence.proxy.async). Both numbers go round.
__device__ __forceinline__ void wait_for_arrival(const uint32_t* word, uint32_t number) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
  } while (static_cast<int32_t>(seen - number) < 0);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace fovea::cuda::ptx
