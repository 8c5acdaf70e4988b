// ladder/harness/ptx.cuh for the emulated device: the same names, of the instructions that tests/emulation has.
#pragma once

#include <cuda_bf16.h>

#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/special.cuh"

namespace ladder::ptx {

using namespace fovea::cuda::ptx;

inline uint32_t to_tf32(float x) {
  return (__float_as_uint(x) + 0x1000u) & 0xffffe000u;  // to nearest, ties away from zero
}
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k8_tf32(d, a, b0, b1);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_m16n8k16<__nv_bfloat16>(d, a, b0, b1);
}

}  // namespace ladder::ptx
