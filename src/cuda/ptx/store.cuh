// Stores to global memory (PTX ISA "Data Movement and Conversion Instructions: st").
#pragma once

namespace fovea::cuda::ptx {

/// Four numbers at a multiple of 16 bytes, as one vector: where registers are short the compiler makes four stores of a float4.
__device__ __forceinline__ void store_v4(float* to, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

}  // namespace fovea::cuda::ptx
