// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline void st_release(int* flag, int value) {
  *flag = value;
}
inline int ld_acquire(const int* flag) {
  return *flag;
}
// CTAs run one after the other, so a flag that is not set when a CTA looks is never set.
inline void wait_for(const int* flag, int value) {
  if (*flag != value) emulation::fail("waits for %d where another CTA has left %d", value, *flag);
}

}  // namespace fovea::cuda::ptx
