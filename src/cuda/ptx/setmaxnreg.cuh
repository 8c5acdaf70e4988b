// Registers handed from the warps that need few to those that need many (sm_90a; PTX ISA "Miscellaneous
// Instructions: setmaxnreg"). Every warp of a warpgroup executes it. The sum over all warpgroups may not
// exceed what the launch allocated: a warpgroup that asks for more waits for ever.
#pragma once

namespace fovea::cuda::ptx {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fovea::cuda::ptx
