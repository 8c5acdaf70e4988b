// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

// CTAs run one after the other, so nothing needs to be atomic.
inline void fovea_red_add(float* to, const float* x, int count) {
  if (reinterpret_cast<uintptr_t>(to) % (sizeof(float) * static_cast<size_t>(count)) != 0)
    emulation::fail("red.add of %d floats to %p", count, static_cast<void*>(to));
  for (int i = 0; i < count; ++i) to[i] += x[i];
}
inline void red_add(float* to, float x) {
  fovea_red_add(to, &x, 1);
}
inline void red_add_v4(float* to, float x, float y, float z, float w) {
  const float all[] = {x, y, z, w};
  fovea_red_add(to, all, 4);
}

}  // namespace fovea::cuda::ptx
