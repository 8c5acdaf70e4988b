// Before bwd_lists: zeros in the float32 sums of dk and dv, or in the counters of list_inverse.cuh.
//
// Grid     list_zeros_ctas(args).
// Block    kListZerosThreads threads. No shared memory.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

inline constexpr int kListZerosThreads = 256;

/// Words of 16 bytes that are to be cleared.
constexpr int64_t list_zeros_words(const BackwardArgs& args) {
  return args.inverse.chunks > 0 ? (args.inverse.words_to_clear() + 3) / 4
                                 : args.key_rows * (args.dk_columns + args.dv_columns) / 4;
}
/// At most some waves of the largest chip: memory limits.
constexpr int64_t list_zeros_ctas(const BackwardArgs& args) {
  constexpr int64_t kMost = 4096;
  const int64_t ctas = (list_zeros_words(args) + kListZerosThreads - 1) / kListZerosThreads;
  return ctas < kMost ? ctas : kMost;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) list_zeros(const __grid_constant__ BackwardArgs args) {
  auto* const words = args.inverse.chunks > 0 ? reinterpret_cast<float4*>(args.inverse.end)
                                              : reinterpret_cast<float4*>(args.key_sums);
  const int64_t count = list_zeros_words(args);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads)
    words[i] = make_float4(0, 0, 0, 0);
}

}  // namespace fovea::cuda
