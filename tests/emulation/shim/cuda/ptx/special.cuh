// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline float flush_subnormal(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}
inline float rcp(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(INFINITY, x) : 1.0f / x;
}
inline float ex2(float x) {
  return flush_subnormal(std::exp2(flush_subnormal(x)));
}
inline float lg2(float x) {
  return flush_subnormal(std::log2(flush_subnormal(x)));
}

inline uint32_t thread_index() {
  return emulation::position.thread.x;
}

/// There is no clock: threads take turns in any order anyhow.
inline void wait_clocks(uint32_t) {}

}  // namespace fovea::cuda::ptx
