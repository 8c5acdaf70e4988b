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
template <class T>
void red_add_16(T* to, uint4 x) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0)
    emulation::fail("red.add of 16 bytes to %p", static_cast<void*>(to));
  const auto* const of_x = reinterpret_cast<const T*>(&x);
  for (int i = 0; i < 8; ++i) to[i] = static_cast<T>(static_cast<float>(to[i]) + static_cast<float>(of_x[i]));
}

}  // namespace fovea::cuda::ptx
