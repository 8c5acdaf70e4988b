// Instructions of the special-function unit (PTX ISA "Floating Point Instructions: ex2, tanh, lg2, rcp"), and special
// registers.
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// 1 / x within 1 ulp; of subnormal x infinity (rcp.approx.ftz).
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 2^x within 2 ulp; 2^-inf = 0, subnormal results are 0 (ex2.approx.ftz).
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2 x, absolute error 2^-22 near 1, else relative 2^-22 (lg2.approx.ftz).
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Reads threadIdx.x here: the compiler does not keep it in a register from an earlier read.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

/// Until so many clocks of the SM have passed.
__device__ __forceinline__ void wait_clocks(uint32_t clocks) {
  uint32_t begin, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(begin));
  do {
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  } while (now - begin < clocks);
}

}  // namespace fovea::cuda::ptx
