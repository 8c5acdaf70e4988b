// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"
#include "emulation/hopper.hpp"

namespace fovea::cuda::ptx {

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulation::mbarrier_init(barrier, arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) {
  emulation::mbarrier_arrive(barrier, 0);
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  emulation::mbarrier_arrive(barrier, bytes);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emulation::mbarrier_wait(barrier, parity);
}

}  // namespace fovea::cuda::ptx
