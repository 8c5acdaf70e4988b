// ladder/harness/hopper.cuh for the emulated device: the same names, of the instructions that tests/emulation has.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "emulation/hopper.hpp"
#include "ladder/harness/descriptor.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/tensor_map.hpp"

namespace ladder::ptx {

inline void tma_load(uint32_t to, const CUtensorMap& map, uint32_t barrier, int column, int row,
                     int sequence) {
  const int at[] = {column, row, sequence};
  fovea::emulation::tma_load(to, map, barrier, at, 3);
}
inline void tma_store(const CUtensorMap& map, uint32_t from, int column, int row, int sequence) {
  const int at[] = {column, row, sequence};
  fovea::emulation::tma_store(map, from, at, 3);
}
inline void tma_store_commit() {
  fovea::emulation::tma_store_commit();
}
inline void tma_store_wait_read() {
  fovea::emulation::tma_store_wait_read(0);
}
inline void async_proxy_fence() {}

template <int kRegisters>
inline void give_registers() {
  setmaxnreg_dec<kRegisters>();
}
template <int kRegisters>
inline void take_registers() {
  setmaxnreg_inc<kRegisters>();
}
inline void named_arrive(int barrier, int threads) {
  fovea::emulation::barrier(barrier, threads, false);
}
inline void named_wait(int barrier, int threads) {
  fovea::emulation::barrier(barrier, threads, true);
}

template <int kTiles>
inline void wgmma_done(float (&)[kTiles][4]) {}
template <bool kFirst, int kTiles>
inline void wgmma(float (&d)[kTiles][4], uint64_t a, uint64_t b) {
  fovea::emulation::wgmma({d[0], nullptr, a, b, 8 * kTiles, !kFirst, false});
}
template <int kTiles>
inline void wgmma(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  fovea::emulation::wgmma({d[0], a, 0, b, 8 * kTiles, true, true});
}

}  // namespace ladder::ptx
