// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

namespace fovea::cuda::ptx {

template <class T>
inline void store(uint32_t to, const T& x) {
  emulation::interruption();
  std::memcpy(emulation::shared_bytes(to, sizeof(T), sizeof(T), "st.shared"), &x, sizeof(T));
}
template <class T>
inline T load(uint32_t from) {
  emulation::interruption();
  T x;
  std::memcpy(&x, emulation::shared_bytes(from, sizeof(T), sizeof(T), "ld.shared"), sizeof(T));
  return x;
}
inline void st_shared_16(uint32_t to, uint4 x) {
  store(to, x);
}
inline void st_shared_8(uint32_t to, uint2 x) {
  store(to, x);
}
inline void st_shared_2(uint32_t to, uint16_t x) {
  store(to, x);
}
inline void st_shared_4(uint32_t to, uint32_t x) {
  store(to, x);
}
inline uint4 ld_shared_16(uint32_t from) {
  return load<uint4>(from);
}
inline uint2 ld_shared_8(uint32_t from) {
  return load<uint2>(from);
}
inline uint32_t ld_shared_4(uint32_t from) {
  return load<uint32_t>(from);
}

}  // namespace fovea::cuda::ptx
