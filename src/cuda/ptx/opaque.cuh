// make_opaque hides where a value comes from. It is no instruction: an empty volatile statement that may have
// changed the register, so the compiler derives values from it behind the statement instead of keeping them in
// registers from before a loop.
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
