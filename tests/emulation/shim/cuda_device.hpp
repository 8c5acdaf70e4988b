// The part of the CUDA language that the kernels use, for the host's compiler: included before each of their units
// (g++ -include).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulation/scheduler.hpp"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// CTAs run one after the other on a thread of the process, so its variables are theirs.
#define __shared__ thread_local

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(uint32_t x, uint32_t y) {
  return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}

#define threadIdx (::fovea::emulation::position.thread)
#define blockIdx (::fovea::emulation::position.block)
#define blockDim (::fovea::emulation::position.block_size)
#define gridDim (::fovea::emulation::position.grid)

template <class To, class From>
inline To fovea_bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  return fovea_bits_of<uint32_t>(x);
}
inline int __float_as_int(float x) {
  return fovea_bits_of<int>(x);
}
inline float __uint_as_float(uint32_t x) {
  return fovea_bits_of<float>(x);
}
inline float __int_as_float(int x) {
  return fovea_bits_of<float>(x);
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __popc(uint32_t x) {
  return __builtin_popcount(x);
}
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;  // never part of an fma
  return product;
}
inline float __fdividef(float a, float b) {
  return a / b;
}

/// Accesses past caches: the same value, and as aligned as the hardware wants it.
template <class T>
inline T fovea_load(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0)
    fovea::emulation::fail("a load of %zu bytes from %p", sizeof(T), static_cast<const void*>(from));
  return *from;
}
template <class T>
inline T __ldg(const T* from) {
  return fovea_load(from);
}
template <class T>
inline T __ldcs(const T* from) {
  return fovea_load(from);
}

#define FOVEA_MIN_MAX(A, B, R)                                                            \
  inline R min(A a, B b) {                                                                \
    return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b); \
  }                                                                                       \
  inline R max(A a, B b) {                                                                \
    return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); \
  }
FOVEA_MIN_MAX(int, int, int)
FOVEA_MIN_MAX(unsigned, unsigned, unsigned)
FOVEA_MIN_MAX(int, unsigned, unsigned)
FOVEA_MIN_MAX(unsigned, int, unsigned)
FOVEA_MIN_MAX(int64_t, int64_t, int64_t)
FOVEA_MIN_MAX(float, float, float)
#undef FOVEA_MIN_MAX
using std::isfinite;
using std::isinf;
using std::isnan;

inline void __syncthreads() {
  fovea::emulation::barrier(0, fovea::emulation::kAllThreads, true);
}
inline int __syncthreads_or(int vote) {
  return fovea::emulation::barrier(0, fovea::emulation::kAllThreads, true, vote != 0);
}

inline void fovea_check_mask(unsigned mask) {
  if (mask != 0xffffffffu) fovea::emulation::fail("a part of a warp: mask %#x is not emulated", mask);
}
/// CTAs run one after the other, and a thread runs until it waits, so nothing needs to be atomic.
template <class T>
inline T atomicAdd(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
template <class T>
inline T atomicMax(T* to, T x) {
  const T before = *to;
  *to = before < x ? x : before;
  return before;
}
template <class T>
inline T atomicOr(T* to, T x) {
  const T before = *to;
  *to |= x;
  return before;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  fovea_check_mask(mask);
  fovea::emulation::collective<char>("__syncwarp", char{}, [](const char*, char*) {});
}
/// The larger of each half.
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  const unsigned low_a = a & 0xffff, low_b = b & 0xffff, high_a = a >> 16, high_b = b >> 16;
  return (high_a > high_b ? high_a : high_b) << 16 | (low_a > low_b ? low_a : low_b);
}
/// Bytes of b and a, 7 to 0, by the digits of `selector`. Digits above 7 replicate signs, which nothing here asks for.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> ((selector >> (4 * i) & 7) * 8) & 0xff) << (8 * i);
  return result;
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int distance) {
  fovea_check_mask(mask);
  return fovea::emulation::collective<T>("__shfl_xor_sync", x, [distance](const T* in, T* out) {
    for (int l = 0; l < 32; ++l) out[l] = in[l ^ distance];
  });
}
template <class T>
inline T __shfl_sync(unsigned mask, T x, int source) {
  fovea_check_mask(mask);
  struct In {
    T x;
    int source;
  };
  return fovea::emulation::collective<T>("__shfl_sync", In{x, source}, [](const In* in, T* out) {
    for (int l = 0; l < 32; ++l) out[l] = in[in[l].source & 31].x;
  });
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  fovea_check_mask(mask);
  return fovea::emulation::collective<unsigned>("a vote", vote, [](const bool* in, unsigned* out) {
    unsigned all = 0;
    for (int l = 0; l < 32; ++l) all |= static_cast<unsigned>(in[l]) << l;
    for (int l = 0; l < 32; ++l) out[l] = all;
  });
}
inline bool __any_sync(unsigned mask, bool vote) {
  return __ballot_sync(mask, vote) != 0;
}
inline bool __all_sync(unsigned mask, bool vote) {
  return __ballot_sync(mask, vote) == 0xffffffffu;
}
inline int __reduce_min_sync(unsigned mask, int x) {
  fovea_check_mask(mask);
  return fovea::emulation::collective<int>("a minimum", x, [](const int* in, int* out) {
    for (int l = 0; l < 32; ++l) out[l] = *std::min_element(in, in + 32);
  });
}
inline int __reduce_max_sync(unsigned mask, int x) {
  fovea_check_mask(mask);
  return fovea::emulation::collective<int>("a maximum", x, [](const int* in, int* out) {
    for (int l = 0; l < 32; ++l) out[l] = *std::max_element(in, in + 32);
  });
}
