// Matrices of 8 x 8 elements of 16 bits from fragments to shared memory (sm_90; PTX ISA "Warp Level Matrix
// Instructions: stmatrix"): ldmatrix the other way round (tile/fragment_map.hpp: Ldmatrix).
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

/// Lane l gives the address of row l % 8 of matrix l / 8; register m holds matrix m.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

/// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace fovea::cuda::ptx
