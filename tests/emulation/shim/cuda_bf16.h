// __nv_bfloat16 for the host's compiler: what the kernels use of CUDA's header.
#pragma once

#include "core/dtype.hpp"
#include "cuda_device.hpp"

struct __nv_bfloat16 {
  fovea::Bf16 value;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) : value(fovea::from_float<fovea::Bf16>(x)) {}
  operator float() const { return fovea::to_float(value); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {x, y};
}
inline float2 __bfloat1622float2(__nv_bfloat162 a) {
  return {a.x, a.y};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {std::fma(float{a.x}, float{b.x}, float{c.x}), std::fma(float{a.y}, float{b.y}, float{c.y})};
}
