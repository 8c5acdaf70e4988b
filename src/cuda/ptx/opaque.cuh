// Hiding a value's origin from the optimiser. No instruction: an empty volatile statement that may have
// changed the register, so what is derived from it behind the statement is derived there, instead of being
// kept in registers from before a loop.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

__device__ __forceinline__ void make_opaque(uint32_t& x) {
  asm volatile("" : "+r"(x));
}
__device__ __forceinline__ void make_opaque(const char*& x) {
  asm volatile("" : "+l"(x));
}
__device__ __forceinline__ void make_opaque(int& x) {
  asm volatile("" : "+r"(x));
}

}  // namespace fovea::cuda::ptx
