// make_opaque hides where a value comes from. It emits no instruction: to the compiler an empty volatile
// statement may have changed the register, so it recomputes what it derives from the value after the
// statement instead of keeping it in registers from before a loop.
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
