// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include <cuda.h>

#include "cuda_device.hpp"
#include "emulation/hopper.hpp"

namespace fovea::cuda::ptx {

inline void tma_prefetch(const CUtensorMap&) {}
inline void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3) {
  const int at[] = {c0, c1, c2, c3};
  emulation::tma_load(to, map, barrier, at, 4);
}
inline void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3,
                     int c4) {
  const int at[] = {c0, c1, c2, c3, c4};
  emulation::tma_load(to, map, barrier, at, 5);
}
inline void tma_load_multicast(uint32_t to, const CUtensorMap& map, uint32_t barrier, int c0, int c1, int c2,
                               int c3, uint16_t ctas) {
  const int at[] = {c0, c1, c2, c3};
  emulation::tma_load_multicast(to, map, barrier, at, 4, ctas);
}
inline void tma_add(const CUtensorMap& map, uint32_t from, int c0, int c1, int c2, int c3) {
  const int at[] = {c0, c1, c2, c3};
  emulation::tma_add(map, from, at, 4);
}
inline void async_proxy_fence() {}
inline void async_proxy_fence_all() {}

}  // namespace fovea::cuda::ptx
