// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline uint32_t shared_address(const void* pointer) {
  return emulation::shared_address(pointer);
}

}  // namespace fovea::cuda::ptx
