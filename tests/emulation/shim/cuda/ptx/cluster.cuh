// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"
#include "emulation/hopper.hpp"

namespace fovea::cuda::ptx {

inline void cluster_arrive() {
  emulation::cluster_arrive();
}
inline void cluster_wait() {
  emulation::cluster_wait();
}
inline void cluster_barrier() {
  emulation::cluster_arrive();
  emulation::cluster_wait();
}
inline int cta_rank() {
  return emulation::cluster_rank();
}
inline uint32_t address_in_cta(uint32_t address, int rank) {
  return emulation::remote_address(address, rank);
}
inline void st_cluster_4(uint32_t to, uint32_t x) {
  emulation::store_remote(to, x);
}
inline void st_cluster_16(uint32_t to, uint4 x) {
  emulation::store_remote(to, x.x), emulation::store_remote(to + 4, x.y);
  emulation::store_remote(to + 8, x.z), emulation::store_remote(to + 12, x.w);
}
inline void st_async_8(uint32_t to, uint2 x, uint32_t barrier) {
  emulation::store_remote(to, x.x), emulation::store_remote(to + 4, x.y);
  emulation::mbarrier_complete_remote(barrier, sizeof x);
}
inline void st_async_16(uint32_t to, uint4 x, uint32_t barrier) {
  st_cluster_16(to, x);
  emulation::mbarrier_complete_remote(barrier, sizeof x);
}
inline void mbarrier_arrive_in_cta(uint32_t barrier) {
  emulation::mbarrier_arrive_remote(barrier);
}
inline void mbarrier_arrive_cluster(uint32_t barrier) {
  emulation::mbarrier_arrive_remote(barrier);
}
inline void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  emulation::mbarrier_wait(barrier, parity);
}

}  // namespace fovea::cuda::ptx
