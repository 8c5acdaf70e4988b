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
inline void f16x4_of_e4m3x4(uint32_t& first, uint32_t& second, uint32_t four) {
  first = f16x2_of_e4m3x2(four), second = f16x2_of_e4m3x2(four >> 16);
}
inline uint32_t e4m3x2_of_f16x2(uint32_t x) {
  return static_cast<uint32_t>(e4m3_of(float_of_f16(static_cast<uint16_t>(x)))) |
         static_cast<uint32_t>(e4m3_of(float_of_f16(static_cast<uint16_t>(x >> 16)))) << 8;
}
/// Products and sums are exact in double but for few, and rounded to float first.
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  const auto half = [](uint32_t x, int i) {
    return static_cast<double>(float_of_f16(static_cast<uint16_t>(x >> 16 * i)));
  };
  const auto of = [&](int i) { return static_cast<float>(half(a, i) * half(b, i) + half(c, i)); };
  return f16x2_of(of(0), of(1));
}

}  // namespace fovea::cuda::ptx
