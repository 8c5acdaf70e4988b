// __half for the host's compiler: what the kernels use of CUDA's header.
#pragma once

#include "core/dtype.hpp"
#include "cuda_device.hpp"

struct __half {
  fovea::F16 value;
  __half() = default;
  __half(float x) : value(fovea::from_float<fovea::F16>(x)) {}
  operator float() const { return fovea::to_float(value); }
};
struct alignas(4) __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float x, float y) {
  return {x, y};
}
inline float2 __half22float2(__half2 a) {
  return {a.x, a.y};
}
/// A product of two float16 is exact in float32, so this rounds twice where the hardware does once.
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {std::fma(float{a.x}, float{b.x}, float{c.x}), std::fma(float{a.y}, float{b.y}, float{c.y})};
}
