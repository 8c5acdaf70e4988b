// Of fwd_decode_e4m3: what a thread that multiplies holds of a block, whichever way products are made. S and O lie transposed in the
// accumulators of a warpgroup:
//
//   keys      64 i + 16 warp + lane / 4 + 8 half of a block, half 2 i + half of the thread's
//   columns   64 m + 16 warp + 2 (lane / 4) + half of O
//   rows      a quarter of the tile's, for each way its own
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_decode_e4m3_config.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "tile/byte_strips.hpp"

namespace fovea::cuda {

template <class Instance>
struct FwdDecodeE4M3Shape {
  static constexpr auto kConfig = Instance::kConfig;
  static constexpr int kOwnRows = kConfig.tile_m / 4, kParts = kConfig.head_dim_v / 64,
                       kBlockKeys = kConfig.block_keys, kKeySteps = kBlockKeys / 32,
                       kHalves = kBlockKeys / 32;
  static constexpr int kOfLane = kConfig.head_dim / 32;  ///< columns of a row of Q
  using Scores = float[kHalves][kOwnRows];               ///< of the thread's keys
  /// Of V: keys 32 step + 8 i + 2 (lane % 4) and the next; where i is even column 2 (lane / 4), else the next one; of that i and the other.
  using Values = uint32_t[kParts][kKeySteps][4];
  using Strips = tile::ByteStrips<kConfig.head_dim>;
  using StripsOfV = tile::ByteStrips<kConfig.head_dim_v>;

  const FwdDecodeE4M3Memory<Instance>& memory;
  const int warp_in_group, lane;
  /// Where the lane finds key `lane` of the warp's columns.
  const uint32_t lane_in_v = StripsOfV::chunk_at(0, kBlockKeys, lane, warp_in_group);

  __device__ __forceinline__ FwdDecodeE4M3Shape(const FwdDecodeE4M3Memory<Instance>& memory_, int warp,
                                                int lane_)
      : memory(memory_), warp_in_group(warp % 4), lane(lane_) {}

  __device__ __forceinline__ void load_v(Values& v, uint32_t values) const {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      constexpr int kOfStrip = StripsOfV::kStripColumns / 64;
      const uint32_t part = values + m / kOfStrip * (kBlockKeys * StripsOfV::kStripColumns) +
                            (m % kOfStrip == 0 ? lane_in_v : lane_in_v ^ 64u);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step)
        ptx::ldmatrix_x4_trans(v[m][step], part + 32 * step * StripsOfV::kStripColumns);
    }
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const uint32_t first = v[m][step][i], second = v[m][step][i + 1];
          v[m][step][i] = __byte_perm(first, second, 0x6420);
          v[m][step][i + 1] = __byte_perm(first, second, 0x7531);
        }
      }
    }
  }
};

}  // namespace fovea::cuda
