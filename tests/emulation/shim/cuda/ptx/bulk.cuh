// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"
#include "emulation/hopper.hpp"

namespace fovea::cuda::ptx {

inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  emulation::bulk_load(to, from, bytes, barrier);
}
inline void bulk_add_f32(float* to, uint32_t from, uint32_t bytes) {
  emulation::bulk_add_f32(to, from, bytes);
}
inline void bulk_store_f32(float* to, uint32_t from, uint32_t bytes) {
  emulation::bulk_store_f32(to, from, bytes);
}
inline void bulk_commit() {
  emulation::tma_store_commit();
}
template <int kPending>
inline void bulk_wait_read() {
  emulation::tma_store_wait_read(kPending);
}
template <int kPending>
inline void bulk_wait() {
  emulation::tma_store_wait_read(kPending);
}

}  // namespace fovea::cuda::ptx
