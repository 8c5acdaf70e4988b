// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"
#include "emulation/hopper.hpp"

namespace fovea::cuda::ptx {

inline void cluster_barrier() {
  emulation::cluster_barrier();
}
inline uint32_t address_in_cta(uint32_t address, int rank) {
  return emulation::remote_address(address, rank);
}
inline void st_cluster_4(uint32_t to, uint32_t x) {
  emulation::store_remote(to, x);
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
