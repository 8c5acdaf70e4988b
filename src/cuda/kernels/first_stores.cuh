// Whether the first block of keys to add to a sum of dq stores its part (BackwardArgs::turn_rows).
#pragma once

#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

/// No kernel for chips before Hopper does, so nothing is compiled for it there: it costs registers.
constexpr bool first_stores(const BackwardArgs& args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  (void)args;
  return false;
#else
  return args.turn_rows > 0;
#endif
}

}  // namespace fovea::cuda
