// Shared-memory addresses as the asynchronous and matrix instructions take them: 32 bits, in the shared window.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// The 32-bit shared-state-space address of a generic pointer into shared memory (PTX: cvta.to.shared).
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// The generic pointer (PTX: cvta.shared).
__device__ __forceinline__ unsigned char* shared_pointer(uint32_t address) {
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

}  // namespace fovea::cuda::ptx
