// CTAs of a cluster reach each other's shared memory and barriers (sm_90; PTX ISA "barrier.cluster", "mapa", and the
// .shared::cluster forms of st and mbarrier.arrive).
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// Waits for all threads of the cluster that have not ended; each sees what the others wrote before.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

/// The two halves of a barrier that says that all CTAs run, and whose memory of barriers has been initialised
/// (mbarrier_init_fence); it says nothing of other writes. All threads of a warp together.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Of this CTA in its cluster; looked up each time, so that it takes no register in between.
__device__ __forceinline__ int cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
/// Where CTA `rank` of the cluster has what this CTA has at `address`: an address for the functions below.
__device__ __forceinline__ uint32_t address_in_cta(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void st_cluster_4(uint32_t to, uint32_t x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void st_cluster_16(uint32_t to, uint4 x) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
/// Stores to another CTA, whose mbarrier counts the bytes when they are there: who waits for it sees them, without a fence.
__device__ __forceinline__ void st_async_16(uint32_t to, uint4 x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void st_async_8(uint32_t to, uint2 x, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(to),
      "r"(x.x), "r"(x.y), "r"(barrier)
      : "memory");
}

/// Arrives, and no more: what this thread has read may be overwritten, but what it wrote need not be seen yet.
__device__ __forceinline__ void mbarrier_arrive_in_cta(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives. Threads of the cluster that wait by mbarrier_wait_cluster() then see what this thread wrote before: a fence of
/// the whole GPU's memory, so not for inner loops.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// mbarrier_wait() of a barrier of this CTA at which other CTAs arrive.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace fovea::cuda::ptx
