// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

template <class T>
inline uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t c = 0;
  for (int half = 0; half < 2; ++half) {
    const auto x = static_cast<uint16_t>(a >> (16 * half)), y = static_cast<uint16_t>(b >> (16 * half));
    const float fx = fovea_bits_of<T>(x), fy = fovea_bits_of<T>(y);
    c |= uint32_t{std::isnan(fx) || fx < fy ? y : x} << (16 * half);
  }
  return c;
}

inline uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  const auto x = fovea_bits_of<__nv_bfloat162>(a), y = fovea_bits_of<__nv_bfloat162>(b);
  return fovea_bits_of<uint32_t>(__nv_bfloat162{float{x.x} * float{y.x}, float{x.y} * float{y.y}});
}

inline uint32_t bf16_pairs_not_zero(uint32_t a) {
  return ((a & 0x7fff) != 0 ? 0x0000ffffu : 0) | ((a & 0x7fff0000) != 0 ? 0xffff0000u : 0);
}

inline uint32_t halves_by_signs(uint32_t signs) {
  return ((signs >> 15 & 1) != 0 ? 0x0000ffffu : 0) | ((signs >> 31) != 0 ? 0xffff0000u : 0);
}

inline uint32_t word_by_sign(uint32_t signs, int half) {
  return (signs >> (half == 0 ? 15 : 31) & 1) != 0 ? 0xffffffffu : 0;
}

}  // namespace fovea::cuda::ptx
