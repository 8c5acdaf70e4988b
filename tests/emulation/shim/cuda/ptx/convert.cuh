// Conversions between float32 and smaller floats by the host: as src/cuda/ptx/convert.cuh.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"

namespace fovea::cuda::ptx {

inline uint16_t f16_of(float x) {
  return from_float<F16>(x).bits;
}
inline float float_of_f16(uint16_t x) {
  return to_float(F16{x});
}
inline uint32_t f16x2_of(float low, float high) {
  return f16_of(low) | static_cast<uint32_t>(f16_of(high)) << 16;
}
inline uint16_t bf16_of(float x) {
  return from_float<Bf16>(x).bits;
}
inline float float_of_bf16(uint16_t x) {
  return to_float(Bf16{x});
}
inline uint32_t bf16x2_of(float low, float high) {
  return bf16_of(low) | static_cast<uint32_t>(bf16_of(high)) << 16;
}
inline uint8_t e4m3_of(float x) {
  return from_float<E4M3>(x).bits;
}
inline uint32_t e4m3x4_of(float a, float b, float c, float d) {
  return static_cast<uint32_t>(e4m3_of(a)) | static_cast<uint32_t>(e4m3_of(b)) << 8 |
         static_cast<uint32_t>(e4m3_of(c)) << 16 | static_cast<uint32_t>(e4m3_of(d)) << 24;
}
inline uint32_t f16x2_of_e4m3x2(uint32_t pair) {
  return f16x2_of(to_float(E4M3{static_cast<uint8_t>(pair)}),
                  to_float(E4M3{static_cast<uint8_t>(pair >> 8)}));
}

}  // namespace fovea::cuda::ptx
