// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include <cstdint>

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline void st_release(int* flag, int value) {
  *flag = value;
}
inline void st_release(uint64_t* flag, uint64_t value) {
  *flag = value;
}
inline int ld_acquire(const int* flag) {
  return *flag;
}
inline uint64_t ld_acquire(const uint64_t* flag) {
  return *flag;
}
inline void st_relaxed(int* flag, int value) {
  *flag = value;
}
inline int ld_relaxed(const int* flag) {
  return *flag;
}
inline bool take_flag(uint64_t* flag, uint64_t value) {
  const bool had = *flag == value;
  if (had) *flag = 0;
  return had;
}
inline void fence_acq_rel() {}
inline void fence_sc() {}
// A flag that no thread of the CTAs that run together sets is never set: a hang.
template <class Word>
void wait_for(const Word* flag, Word value) {
  struct Wait {
    const Word* flag;
    Word value;
  } wait{flag, value};
  emulation::wait_until(
      [](const void* of) {
        const auto& w = *static_cast<const Wait*>(of);
        return *w.flag == w.value;
      },
      &wait, "the load of a flag");
}

// What arrives is there before the kernel begins.
inline void wait_for_arrival(const uint32_t* word, uint32_t number) {
  if (static_cast<int32_t>(*word - number) < 0)
    emulation::fail("ld.acquire: a word that nobody writes any more");
}

}  // namespace fovea::cuda::ptx
