// The gradients of named tensors from the integer sums that named_sums leaves. Grid and block as in named_elements.cuh.
#pragma once

#include <cmath>

#include "cuda/kernels/named_elements.cuh"
#include "cuda/kernels/named_sums_args.hpp"

namespace fovea::cuda {

/// The sum of numbers of this peak, rounded once.
__device__ __forceinline__ float fixed_sum_value(const tile::FixedSum& format, uint32_t peak,
                                                 unsigned long long sum) {
  using tile::FixedSum;
  if (peak < FixedSum::kInfinity)
    return ldexpf(static_cast<float>(static_cast<int64_t>(sum)), format.unit(peak));
  if (peak > FixedSum::kInfinity || sum == (FixedSum::kPositive | FixedSum::kNegative)) return NAN;
  return sum == FixedSum::kPositive ? INFINITY : -INFINITY;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) named_results(const __grid_constant__ NamedSumsArgs args) {
  static_assert(kThreads == kNamedElementsThreads);
  const NamedSumsArgs::Output& to = args.outputs[blockIdx.y];
  if (to.gradient == nullptr) return;
  const tile::NamedTensor& t = args.b.p.expression.at[blockIdx.y];
  const uint32_t* const peaks = reinterpret_cast<const uint32_t*>(t.gradient);
  const unsigned long long* const sums = args.sums + (peaks - args.peaks);
  for_each_named_element(t, to.stride, [&](int64_t i, int64_t offset) {
    to.gradient[offset] = fixed_sum_value(args.format, peaks[i], sums[i]);
  });
}

}  // namespace fovea::cuda
