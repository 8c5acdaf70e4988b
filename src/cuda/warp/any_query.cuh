// A row of q whose type is known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/dtype.hpp"
#include "cuda/ptx/convert.cuh"

namespace fovea::cuda {

/// Elements of T, or of 8 bits.
template <class T>
struct AnyQuery {
  const char* data;
  bool e4m3;

  __device__ __forceinline__ AnyQuery(const char* q, int64_t offset, bool is_e4m3)
      : data(q + offset * (is_e4m3 ? 1 : static_cast<int64_t>(sizeof(T)))), e4m3(is_e4m3) {}
  __device__ __forceinline__ float operator[](int c) const {
    // Loads under predicates: branches inside of loops cost registers of convergence.
    const uint8_t bits = e4m3 ? reinterpret_cast<const uint8_t*>(data)[c] : uint8_t{0};
    const float wide = e4m3 ? 0.0f : static_cast<float>(reinterpret_cast<const T*>(data)[c]);
    return e4m3 ? ptx::float_of_f16(static_cast<uint16_t>(ptx::f16x2_of_e4m3x2(bits))) : wide;
  }
};

}  // namespace fovea::cuda
