// Clears the gradients of named tensors, which named_gradients adds to. Grid and block as in named_elements.cuh.
#pragma once

#include "cuda/kernels/named_elements.cuh"

namespace fovea::cuda {

template <int kThreads>
__global__ void __launch_bounds__(kThreads) named_zeros(const __grid_constant__ BackwardArgs args) {
  static_assert(kThreads == kNamedElementsThreads);
  const tile::NamedTensor& t = args.p.expression.at[blockIdx.y];
  if (t.gradient == nullptr) return;
  for_each_named_element(t, t.gradient_stride, [&](int64_t, int64_t offset) { t.gradient[offset] = 0.0f; });
}

}  // namespace fovea::cuda
