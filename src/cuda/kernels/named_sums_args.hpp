// The parameter of the kernels that sum gradients of named tensors in integers (warp/gradient_sums.cuh).
#pragma once

#include "cuda/kernels/args.hpp"
#include "tile/fixed_sum.hpp"

namespace fovea::cuda {

struct NamedSumsArgs {
  /// Gradients and their strides are those of `peaks`: its elements lie side by side, a tensor behind the other.
  BackwardArgs b;
  uint32_t* peaks = nullptr;
  unsigned long long* sums = nullptr;  ///< in the order of `peaks`
  tile::FixedSum format;
  bool adds = false;  ///< false: finds the peaks
  struct Output {
    float* gradient = nullptr;  ///< the caller's; null where nobody asks for it
    int64_t stride[4] = {};
  };
  Output outputs[tile::kMaxNamedTensors];
};

}  // namespace fovea::cuda
