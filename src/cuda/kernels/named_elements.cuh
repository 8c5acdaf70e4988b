// The elements of the gradient of a named tensor, for kernels that go over all of them.
//
// Grid     named_elements_grid(args): kNamedElementsCtas CTAs for each tensor that a problem may name.
// Block    kNamedElementsThreads threads, which go over the elements together.
#pragma once

#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

inline constexpr int kNamedElementsThreads = 256;
inline constexpr int kNamedElementsCtas =
    132;  ///< a wave on the largest chip; the elements are few, or memory limits

template <class Grid>
constexpr Grid named_elements_grid(const BackwardArgs&) {
  return {kNamedElementsCtas, tile::kMaxNamedTensors};
}

/// visit(i, offset) for this thread's elements: i in a dense tensor, `offset` by the strides of a gradient.
template <class Visit>
__device__ __forceinline__ void for_each_named_element(const tile::NamedTensor& t, const int64_t (&stride)[4],
                                                       const Visit& visit) {
  // A dimension that stands for all has one element.
  int64_t size[4], count = 1;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    size[d] = stride[d] == 0 ? 1 : t.extent[d];
    count *= size[d];
  }
  for (int64_t i = int64_t{blockIdx.x} * kNamedElementsThreads + threadIdx.x; i < count;
       i += int64_t{kNamedElementsCtas} * kNamedElementsThreads) {
    int64_t rest = i, offset = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      offset += rest % size[d] * stride[d];
      rest /= size[d];
    }
    visit(i, offset);
  }
}

}  // namespace fovea::cuda
