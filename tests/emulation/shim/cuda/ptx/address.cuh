// Emulated: see src/cuda/ptx for what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline uint32_t shared_address(const void* pointer) {
  return emulation::shared_address(pointer);
}

}  // namespace fovea::cuda::ptx
