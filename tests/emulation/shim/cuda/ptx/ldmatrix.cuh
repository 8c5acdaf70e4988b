// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

#include "tile/fragment_map.hpp"

namespace fovea::cuda::ptx {

/// `kMatrices` matrices of 8 x 8 elements of 16 bits.
template <int kMatrices, bool kTrans>
inline void ldmatrix(uint32_t (&r)[kMatrices], uint32_t row_address) {
  struct Out {
    uint32_t r[kMatrices];
  };
  const char* what = kTrans ? "ldmatrix.trans" : "ldmatrix";
  const Out out = emulation::collective<Out>(what, row_address, [what](const uint32_t* in, Out* lanes) {
    for (int m = 0; m < kMatrices; ++m) {
      uint16_t matrix[8][8];
      for (int l = 8 * m; l < 8 * m + 8; ++l)
        std::memcpy(matrix[tile::Ldmatrix::row_of_address(l)], emulation::shared_bytes(in[l], 16, 16, what),
                    16);
      for (int l = 0; l < emulation::kLanes; ++l) {
        uint32_t word = 0;
        for (int half = 0; half < 2; ++half) {
          const tile::Coord at = tile::Ldmatrix::at(l, half, kTrans);
          word |= static_cast<uint32_t>(matrix[at.row][at.col]) << (16 * half);
        }
        lanes[l].r[m] = word;
      }
    }
  });
  std::memcpy(r, out.r, sizeof out.r);
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_address) {
  ldmatrix<4, false>(r, row_address);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_address) {
  ldmatrix<4, true>(r, row_address);
}

}  // namespace fovea::cuda::ptx
