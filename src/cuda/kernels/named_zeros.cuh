// Clears the gradients of named tensors, which named_gradients adds to.
//
// Grid     kNamedZerosCtas CTAs for each tensor that a problem may name.
// Block    kNamedZerosThreads threads, which go over the elements together.
#pragma once

#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

inline constexpr int kNamedZerosThreads = 256;
inline constexpr int kNamedZerosCtas =
    132;  ///< a wave on the largest chip; the elements are few, or memory limits

template <class Grid>
constexpr Grid named_zeros_grid(const BackwardArgs&) {
  return {kNamedZerosCtas, tile::kMaxNamedTensors};
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) named_zeros(const __grid_constant__ BackwardArgs args) {
  const tile::NamedTensor& t = args.p.expression.at[blockIdx.y];
  if (t.gradient == nullptr) return;
  // A dimension that stands for all has one element.
  int64_t size[4], count = 1;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    size[d] = t.gradient_stride[d] == 0 ? 1 : t.extent[d];
    count *= size[d];
  }
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{kNamedZerosCtas} * kThreads) {
    int64_t rest = i, offset = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      offset += rest % size[d] * t.gradient_stride[d];
      rest /= size[d];
    }
    t.gradient[offset] = 0.0f;
  }
}

}  // namespace fovea::cuda
