// Fragments of K and V for mma.sync m16n8k16 (ptx/mma.cuh) from rows of 16-bit or 8-bit elements in shared memory, 16 keys of one
// warp at a time. Elements of 8 bits become float16 in registers, which has all of their values.
//
//   S = Q K^T    A: 16 queries x 16 columns      B: 16 columns x 8 keys         a step is 16 columns of the head size
//   O = P V      A: 16 queries x 16 keys         B: 16 keys x 8 columns of V    a pair of accumulators has 16 columns
//
// With 8 bits, ldmatrix (which moves 16) gives a lane four columns side by side of a key, where the products want two and two. What
// order the columns of a step are in does not matter as long as Q has the same, and columns of O may lie in any order:
//
//                     16 bits                                8 bits
//   step of Q K^T     columns 2t, 2t+1 and 2t+8, 2t+9        columns 4t, 4t+1 and 4t+2, 4t+3       t = lane % 4
//   pair of O         first the lower 8 columns, then the    first the even columns, then the odd ones
//                     upper 8
//
// tests/host/key_fragments_test.cpp proves the maps (tile/key_columns.hpp).
#pragma once

#include <cstdint>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "tile/key_columns.hpp"
#include "tile/shared_tile.hpp"

namespace fovea::cuda {

/// 16 rows of kColumns elements, chunks of 16 bytes swizzled as in tile::SharedTile, from a multiple of 128 bytes on.
template <class Key, int kColumns>
struct KeyFragments {
  static constexpr bool kE4M3 = sizeof(Key) == 1;
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(Key)), kChunks = kRowBytes / 16;
  static constexpr int kBytes = 16 * kRowBytes;
  /// Steps (or pairs) that one ldmatrix gives.
  static constexpr int kAtOnce = kE4M3 ? 2 : 1;
  static constexpr int kLoads = kColumns / 16 / kAtOnce;
  static_assert(kColumns % (16 * kAtOnce) == 0);

  using Tile = tile::SharedTile<16, kRowBytes / 2>;
  /// Rows that a warp copies at once, a chunk a lane.
  static constexpr int kRowsAtOnce = 32 / kChunks, kCopies = 16 / kRowsAtOnce;
  static_assert(32 % kChunks == 0, "whole rows");

  /// Where chunk `chunk` of row `row` + kRowsAtOnce * i lies, for row < kRowsAtOnce: the swizzle of a sum of rows without common bits
  /// is that of both, so that a lane keeps one address.
  static __device__ __forceinline__ uint32_t copied_to(uint32_t rows, int row, int chunk, int i) {
    const uint32_t first = rows + Tile::offset(row, chunk);
    return (first ^ static_cast<uint32_t>(Tile::swizzle(kRowsAtOnce * i) * tile::kChunkBytes)) +
           static_cast<uint32_t>(kRowsAtOnce * i * kRowBytes);
  }

  /// K: b[step][keys 0..7, keys 8..15][2] of load `load`.
  static __device__ __forceinline__ void load_k(uint32_t (&b)[kAtOnce][2][2], uint32_t rows, int load,
                                                int lane) {
    uint32_t r[4];
    if constexpr (kE4M3) {
      ptx::ldmatrix_x4(r, Tile::moved(rows + Tile::offset(lane % 16, lane / 16), 0, 2 * load));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int keys = 0; keys < 2; ++keys) {
          b[step][keys][0] = ptx::f16x2_of_e4m3x2(r[2 * step + keys]);
          b[step][keys][1] = ptx::f16x2_of_e4m3x2(r[2 * step + keys] >> 16);
        }
      }
    } else {
      ptx::ldmatrix_x4(r,
                       Tile::moved(rows + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2), 0, 2 * load));
      b[0][0][0] = r[0], b[0][0][1] = r[1], b[0][1][0] = r[2], b[0][1][1] = r[3];
    }
  }
  /// V: b[pair][accumulator of the pair][2] of load `load`.
  static __device__ __forceinline__ void load_v(uint32_t (&b)[kAtOnce][2][2], uint32_t rows, int load,
                                                int lane) {
    uint32_t r[4];
    if constexpr (kE4M3) {
      ptx::ldmatrix_x4_trans(r, Tile::moved(rows + Tile::offset(lane % 16, lane / 16), 0, 2 * load));
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
        for (int keys = 0; keys < 2; ++keys) {
          // Bytes: (column, key), (column + 1, key), (column, key + 1), (column + 1, key + 1).
          const uint32_t x = r[2 * pair + keys];
          b[pair][0][keys] = ptx::f16x2_of_e4m3x2(__byte_perm(x, 0, 0x4420));
          b[pair][1][keys] = ptx::f16x2_of_e4m3x2(__byte_perm(x, 0, 0x4431));
        }
      }
    } else {
      ptx::ldmatrix_x4_trans(r, Tile::moved(rows + Tile::offset(lane % 16, lane / 16), 0, 2 * load));
      b[0][0][0] = r[0], b[0][0][1] = r[1], b[0][1][0] = r[2], b[0][1][1] = r[3];
    }
  }
};

}  // namespace fovea::cuda
