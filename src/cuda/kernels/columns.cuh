// Neighbouring numbers of a row, in registers as float32, whatever the type in memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/dtype.hpp"
#include "cuda/kernels/columns.hpp"

namespace fovea::cuda {

/// Eight neighbouring numbers of a row.
struct Columns {
  float x[kColumns] = {};
};

template <class T>
__device__ __forceinline__ void load_columns(Columns& to, const T* from, bool vectors, int64_t count) {
  if (vectors) {
    alignas(16) T values[kColumns];
    constexpr int kVectors = static_cast<int>(sizeof(values) / sizeof(uint4));
    for (int i = 0; i < kVectors; ++i)
      reinterpret_cast<uint4*>(values)[i] = reinterpret_cast<const uint4*>(from)[i];
    for (int i = 0; i < kColumns; ++i) to.x[i] = static_cast<float>(values[i]);
  } else {
    for (int i = 0; i < kColumns; ++i) to.x[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
  }
}
template <class T>
__device__ __forceinline__ void store_columns(const Columns& from, T* to, bool vectors, int64_t count) {
  if (vectors) {
    alignas(16) T values[kColumns];
    for (int i = 0; i < kColumns; ++i) values[i] = T(from.x[i]);
    constexpr int kVectors = static_cast<int>(sizeof(values) / sizeof(uint4));
    for (int i = 0; i < kVectors; ++i)
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(values)[i];
  } else {
    for (int i = 0; i < kColumns; ++i) {
      if (i < count) to[i] = T(from.x[i]);
    }
  }
}

/// Four neighbouring numbers, which lie at a multiple of their size where `kVectors`; else `count` of them exist, or more. They are read
/// once, and leave L2 before others do.
template <bool kVectors, class T>
__device__ __forceinline__ void load_four(float (&to)[4], const T* from, int64_t count) {
  union alignas(4 * sizeof(T)) Four {
    std::conditional_t<sizeof(T) == 4, float4, uint2> all;
    T x[4];
    __device__ Four() : all{} {}
  };
  static_assert(sizeof(Four) == 4 * sizeof(T));
  if constexpr (kVectors) {
    Four four;
    four.all = __ldcs(reinterpret_cast<const decltype(four.all)*>(from));
    for (int i = 0; i < 4; ++i) to[i] = static_cast<float>(four.x[i]);
  } else {
    for (int i = 0; i < 4; ++i) to[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
  }
}
template <bool kVectors, class T>
__device__ __forceinline__ void store_four(const float (&from)[4], T* to, int64_t count) {
  struct alignas(4 * sizeof(T)) Four {
    T x[4];
  };
  if constexpr (kVectors) {
    *reinterpret_cast<Four*>(to) = {T(from[0]), T(from[1]), T(from[2]), T(from[3])};
  } else {
    for (int i = 0; i < 4; ++i) {
      if (i < count) to[i] = T(from[i]);
    }
  }
}

/// Calls `use` with memory of a type (float32, float16 or bfloat16) as a pointer to it, `offset` elements on. The address is read where it
/// is used: a copy of it before the branches spills in `merge` on sm_75.
template <class Use>
__device__ __forceinline__ void with_type(DType type, char* const& memory, int64_t offset, Use&& use) {
  if (type == DType::kF16) {
    use(reinterpret_cast<__half*>(memory) + offset);
  } else if (type == DType::kBF16) {
    use(reinterpret_cast<__nv_bfloat16*>(memory) + offset);
  } else {
    use(reinterpret_cast<float*>(memory) + offset);
  }
}

}  // namespace fovea::cuda
