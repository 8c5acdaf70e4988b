// ldmatrix: 8x8 matrices of 16-bit elements from shared memory into mma fragments (sm_75; PTX ISA "Warp Level
// Matrix Instructions: ldmatrix"). Lane l gives the address of one 16-byte row: rows 0..7 of matrix m come
// from lanes 8m..8m+7. Afterwards lane l holds in r[m] the elements (row l/4, columns 2(l%4), 2(l%4)+1) of
// matrix m, or with .trans the elements (rows 2(l%4), 2(l%4)+1, column l/4).
#pragma once

#include <cstdint>

namespace fovea::cuda::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

}  // namespace fovea::cuda::ptx
