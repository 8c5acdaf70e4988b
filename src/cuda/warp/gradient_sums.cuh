// How kernels add to the gradients of named tensors: the last argument of add_gradients (warp/expression.cuh).
#pragma once

#include <cstdint>

#include "tile/fixed_sum.hpp"

namespace fovea::cuda {

/// To float32 sums; the order of additions, and so the last bits, differ from run to run.
struct AddInAnyOrder {
  __device__ __forceinline__ void operator()(float* sum, float x) const {
    if (x != 0.0f) atomicAdd(sum, x);
  }
};

/// To integer sums (tile/fixed_sum.hpp): the same bits in any order. A first launch finds the peaks, a second one adds, and both
/// are to run the same code, so that both see the same numbers.
struct AddFixed {
  uint32_t* peaks;  ///< where the places of add_gradients begin; 0 at first
  unsigned long long* sums;
  tile::FixedSum format;
  bool adds;  ///< the second launch

  __device__ __forceinline__ void operator()(float* place, float x) const {
    uint32_t* const peak = reinterpret_cast<uint32_t*>(place);
    const uint32_t bits = __float_as_uint(x), magnitude = tile::FixedSum::magnitude(bits);
    if (magnitude == 0) return;
    // A peak that is out of date is lower than it is now.
    const uint32_t known = *const_cast<volatile uint32_t*>(peak);
    if (!adds) {
      if (magnitude > known) atomicMax(peak, magnitude);
    } else if (known < tile::FixedSum::kInfinity) {
      atomicAdd(sums + (peak - peaks), static_cast<unsigned long long>(format.units(bits, known)));
    } else if (magnitude == tile::FixedSum::kInfinity) {
      const auto infinity = bits >> 31 != 0 ? tile::FixedSum::kNegative : tile::FixedSum::kPositive;
      atomicOr(sums + (peak - peaks), static_cast<unsigned long long>(infinity));
    }
  }
};

}  // namespace fovea::cuda
