// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"
#include "tile/fragment_map.hpp"

namespace fovea::cuda::ptx {

template <bool kTrans>
inline void stmatrix(uint32_t row_address, const uint32_t (&r)[4]) {
  struct In {
    uint32_t address, r[4];
  };
  emulation::collective<char>("stmatrix", In{row_address, {r[0], r[1], r[2], r[3]}}, [](const In* in, char*) {
    for (int m = 0; m < 4; ++m) {
      uint16_t matrix[8][8];
      for (int l = 0; l < emulation::kLanes; ++l) {
        for (int half = 0; half < 2; ++half) {
          const tile::Coord at = tile::Ldmatrix::at(l, half, kTrans);
          matrix[at.row][at.col] = static_cast<uint16_t>(in[l].r[m] >> (16 * half));
        }
      }
      for (int l = 8 * m; l < 8 * m + 8; ++l)
        std::memcpy(emulation::shared_bytes(in[l].address, 16, 16, "stmatrix"),
                    matrix[tile::Ldmatrix::row_of_address(l)], 16);
    }
  });
}

inline void stmatrix_x4(uint32_t row_address, const uint32_t (&r)[4]) {
  stmatrix<false>(row_address, r);
}
inline void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&r)[4]) {
  stmatrix<true>(row_address, r);
}

}  // namespace fovea::cuda::ptx
