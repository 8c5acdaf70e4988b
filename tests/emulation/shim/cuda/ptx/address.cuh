// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline uint32_t shared_address(const void* pointer) {
  return emulation::shared_address(pointer);
}

inline unsigned char* shared_pointer(uint32_t address) {
  return emulation::shared_bytes(address, 1, 1, "cvta.shared");
}

}  // namespace fovea::cuda::ptx
