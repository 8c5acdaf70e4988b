// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

inline constexpr bool kHasCpAsync = true;

inline void cp_async_16(uint32_t to, const void* from, bool valid) {
  emulation::copy_async(to, from, 16, valid);
}
inline void cp_async_16_part(uint32_t to, const void* from, int bytes) {
  const auto* begin = static_cast<const unsigned char*>(from);
  alignas(16) unsigned char part[16] = {};
  for (int i = 0; i < bytes; ++i) part[i] = begin[i];
  emulation::copy_async(to, part, 16, true);
}
inline void cp_async_4(uint32_t to, const void* from, bool valid) {
  emulation::copy_async(to, from, 4, valid);
}
inline void cp_async_commit() {
  emulation::copy_async_commit();
}
template <int kPending>
inline void cp_async_wait() {
  emulation::copy_async_wait(kPending);
}

}  // namespace fovea::cuda::ptx
