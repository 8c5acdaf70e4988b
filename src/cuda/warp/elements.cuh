// Elements of any type as float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fovea::cuda {

template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return static_cast<float>(x);
  }
}

/// An element of a tensor that holds float32 or T.
template <class T>
__device__ __forceinline__ float load_either(const char* data, int64_t offset, bool is_f32) {
  return is_f32 ? __ldg(reinterpret_cast<const float*>(data) + offset)
                : to_float(__ldg(reinterpret_cast<const T*>(data) + offset));
}

}  // namespace fovea::cuda
