// How a lane reads float32 tiles (tile/shared_tile.hpp) as operands of m16n8k8: 16 bytes at a time, without
// ldmatrix, which cannot transpose 32-bit elements.
//
// A product may sum over k in any order on which both operands agree. So a lane (g = lane / 4, t = lane % 4) takes four
// adjacent elements in memory for four fragments:
//
//   k along the rows (Q and K of Q K^T)
//     The chunk (16 bytes) 4 kk + t of row g holds k = t and k = t + 4 of the steps 2 kk (its elements 0, 1) and
//     2 kk + 1 (elements 2, 3).
//   k down the rows (V of P V)
//     The k of a step are eight rows: k = t is row 2 t and k = t + 4 is row 2 t + 1, so the accumulators of S are the
//     operand P as they stand. The chunk 8 block + g holds column n = g of the four n8 tiles of a block: column
//     32 block + 4 g + i of the tile is n = g of n8 tile i. The accumulators of a lane, (row g, n = 2 t and 2 t + 1),
//     are for i = 0..3 columns 32 block + 8 t + i and 32 block + 8 t + 4 + i: eight adjacent ones.
#pragma once

#include <cstdint>

#include "cuda/ptx/opaque.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace fovea::cuda {

/// Returns x, hidden from the compiler. In a loop, a branch on the result stays a branch (otherwise the compiler copies the
/// whole loop for each outcome), and values derived from it are computed where they are used, not kept in registers.
__device__ __forceinline__ int opaque(int x) {
  ptx::make_opaque(x);
  return x;
}
__device__ __forceinline__ bool opaque(bool x) {
  return opaque(static_cast<int>(x)) != 0;
}

/// What a lane reads of a tile with k along its rows.
template <int kColumns>
struct Tf32AlongRows {
  using Tile = SharedTile<8, kColumns, 4>;
  const float* from;  ///< chunk t of row g
  int odd_step;       ///< from chunk t to chunk 4 + t: the swizzle may have exchanged them

  /// `row` is a multiple of 8.
  __device__ __forceinline__ Tf32AlongRows(const float* s, int row, int lane)
      : from(s + Tile::index(row + tile::tf32_chunk_along_rows(lane).row,
                             tile::tf32_chunk_along_rows(lane).chunk)),
        odd_step((Tile::swizzle(lane / 4) & 4) != 0 ? -16 : 16) {}
  /// The same in a tile `floats` further.
  __device__ __forceinline__ Tf32AlongRows moved(int floats) const {
    Tf32AlongRows other = *this;
    other.from += floats;
    return other;
  }
  /// Chunk 4 kk + t of row `rows` + g; `rows` is a multiple of 8.
  __device__ __forceinline__ float4 at(int rows, int kk) const {
    return *reinterpret_cast<const float4*>(from + rows * kColumns + kk / 2 * 32 + kk % 2 * odd_step);
  }
};

/// What a lane reads of a tile with k down its rows.
template <int kColumns>
struct Tf32DownRows {
  using Tile = SharedTile<8, kColumns, 4>;
  const float* even;  ///< chunk g of row 2 t
  const float* odd;   ///< and of row 2 t + 1

  __device__ __forceinline__ Tf32DownRows(const float* s, int lane)
      : even(s +
             Tile::index(tile::tf32_chunk_down_rows(lane, 0).row, tile::tf32_chunk_down_rows(lane, 0).chunk)),
        odd(s + Tile::index(tile::tf32_chunk_down_rows(lane, 1).row,
                            tile::tf32_chunk_down_rows(lane, 1).chunk)) {}
  /// The same in a tile `floats` further.
  __device__ __forceinline__ Tf32DownRows moved(int floats) const {
    Tf32DownRows other = *this;
    other.even += floats;
    other.odd += floats;
    return other;
  }
  /// Chunk 8 block + g of rows 8 step + 2 t (+ 1).
  __device__ __forceinline__ float4 even_at(int step, int block) const {
    return *reinterpret_cast<const float4*>(even + step * 8 * kColumns + block * 32);
  }
  __device__ __forceinline__ float4 odd_at(int step, int block) const {
    return *reinterpret_cast<const float4*>(odd + step * 8 * kColumns + block * 32);
  }
};

/// Calls visit(row of the warp) for the rows of `broken`, whose words are the same in all lanes: bits 4 g to 4 g + 3 of broken[mt][half] are
/// those of row mt * 16 + half * 8 + g. There is one copy of what it does, for all tiles. `broken` is 0 afterwards.
template <int kMTiles, class Visit>
__device__ __forceinline__ void for_each_broken_row(uint32_t (&broken)[kMTiles][2], const Visit& visit) {
#pragma unroll 1
  for (;;) {
    int row = -1;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      uint32_t& rows = broken[i / 2][i % 2];
      if (row >= 0 || rows == 0) continue;
      const int g = (__ffs(static_cast<int>(rows)) - 1) / 4;
      rows &= ~(15u << (4 * g));
      row = i * 8 + g;
    }
    if (row < 0) return;
    visit(row);
  }
}

}  // namespace fovea::cuda
