// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline void barrier_arrive(int barrier, int threads) {
  emulation::barrier(barrier, threads, false);
}
inline void barrier_wait(int barrier, int threads) {
  emulation::barrier(barrier, threads, true);
}
inline bool barrier_wait_any(int barrier, int threads, bool own) {
  return emulation::barrier(barrier, threads, true, own);
}

}  // namespace fovea::cuda::ptx
