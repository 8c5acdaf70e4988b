// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline void store_v4(float* to, float x, float y, float z, float w) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulation::fail("st.v4 to %p", static_cast<void*>(to));
  to[0] = x, to[1] = y, to[2] = z, to[3] = w;
}

}  // namespace fovea::cuda::ptx
