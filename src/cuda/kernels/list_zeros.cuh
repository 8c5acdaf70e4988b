// Before bwd_lists: zeros in the float32 sums of dk and dv.
//
// Grid     list_zeros_ctas(args).
// Block    kListZerosThreads threads. No shared memory.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

inline constexpr int kListZerosThreads = 256;

/// At most some waves of the largest chip: memory limits.
constexpr int64_t list_zeros_ctas(const BackwardArgs& args) {
  constexpr int64_t kMost = 4096, kOfCta = int64_t{kListZerosThreads} * 4;
  const int64_t ctas = (args.key_rows * (args.dk_columns + args.dv_columns) + kOfCta - 1) / kOfCta;
  return ctas < kMost ? ctas : kMost;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) list_zeros(const __grid_constant__ BackwardArgs args) {
  auto* const sums = reinterpret_cast<float4*>(args.key_sums);
  const int64_t count = args.key_rows * (args.dk_columns + args.dv_columns) / 4;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads)
    sums[i] = make_float4(0, 0, 0, 0);
}

}  // namespace fovea::cuda
