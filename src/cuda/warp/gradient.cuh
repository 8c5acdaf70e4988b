// Elements of dq, dk and dv: of the type of q, or float32.
#pragma once

#include <cstdint>

namespace fovea::cuda {

/// Writes an element of a gradient of T, or of float32.
template <class T>
__device__ __forceinline__ void store_gradient(char* data, int64_t offset, bool is_f32, float value) {
  if (is_f32) {
    reinterpret_cast<float*>(data)[offset] = value;
  } else {
    reinterpret_cast<T*>(data)[offset] = T(value);
  }
}

}  // namespace fovea::cuda
