// Emulated. src/cuda/ptx has the same functions, with what the instructions do.
#pragma once

#include "cuda_device.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tile/fragment_map.hpp"

namespace fovea::cuda::ptx {

/// The element in a half of a register. For tf32 the upper 19 bits of a float32 count, whatever the others hold.
struct Tf32 {};
template <class T>
inline float element_of(uint32_t word, int half) {
  if constexpr (std::is_same_v<T, Tf32>) {
    return __uint_as_float(word & 0xffffe000u);
  } else {
    const auto bits = static_cast<uint16_t>(word >> (16 * half));
    return float{fovea_bits_of<T>(bits)};
  }
}

template <class Map>
struct MmaOperands {
  uint32_t a[Map::kRegsA], b[Map::kRegsB];
  float d[4];
};
struct MmaResult {
  float d[4];
};

/// D += A B with the layouts of `Map` (tile/fragment_map.hpp).
template <class T, class Map>
inline void multiply_fragments(const char* what, float (&d)[4], const MmaOperands<Map>& operands) {
  const auto compute = [](const MmaOperands<Map>* in, MmaResult* out) {
    float a[Map::kM][Map::kK], b_columns[Map::kN][Map::kK];
    for (int l = 0; l < emulation::kLanes; ++l) {
      for (int half = 0; half < Map::kHalves; ++half) {
        for (int reg = 0; reg < Map::kRegsA; ++reg) {
          const tile::Coord at = Map::a(l, reg, half);
          a[at.row][at.col] = element_of<T>(in[l].a[reg], half);
        }
        for (int reg = 0; reg < Map::kRegsB; ++reg) {
          const tile::Coord at = Map::b(l, reg, half);
          b_columns[at.col][at.row] = element_of<T>(in[l].b[reg], half);
        }
      }
    }
    for (int l = 0; l < emulation::kLanes; ++l) {
      for (int reg = 0; reg < 4; ++reg) {
        const tile::Coord at = tile::AccumulatorM16N8::at(l, reg);
        float sum = in[l].d[reg];
        for (int k = 0; k < Map::kK; ++k) sum += a[at.row][k] * b_columns[at.col][k];
        out[l].d[reg] = sum;
      }
    }
  };
  const MmaResult result = emulation::collective<MmaResult>(what, operands, compute);
  std::memcpy(d, result.d, sizeof d);
}

template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments<T, tile::MmaM16N8K16>("mma.m16n8k16", d,
                                           {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}});
}
inline void mma_m16n8k8_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
  multiply_fragments<__half, tile::MmaM16N8K8>("mma.m16n8k8.f16", d,
                                               {{a0, a1}, {b0}, {d[0], d[1], d[2], d[3]}});
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply_fragments<Tf32, tile::MmaM16N8K8Tf32>(
      "mma.m16n8k8.tf32", d, {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}});
}

}  // namespace fovea::cuda::ptx
