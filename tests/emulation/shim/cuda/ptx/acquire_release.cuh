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
// CTAs run one after the other, so a flag that no thread of this CTA sets either is never set: a hang.
inline void wait_for(const int* flag, int value) {
  struct Wait {
    const int* flag;
    int value;
  } wait{flag, value};
  emulation::wait_until(
      [](const void* of) {
        const auto& w = *static_cast<const Wait*>(of);
        return *w.flag == w.value;
      },
      &wait, "ld.acquire of a flag");
}

}  // namespace fovea::cuda::ptx
