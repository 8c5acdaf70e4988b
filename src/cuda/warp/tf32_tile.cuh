// Tiles of float32 in shared memory whose fragments for m16n8k8 are read 16 bytes a lane, without ldmatrix.
//
// A product does not mind in which order its k runs, if both operands agree. So a lane (g = lane / 4, t =
// lane % 4) takes four neighbours in memory for four fragments:
//
//   k along the rows (Q and K of Q K^T): the chunk (16 bytes) 4 kk + t of row g holds k = t and k = t + 4 of
//   the steps 2 kk
//     (its elements 0, 1) and 2 kk + 1 (elements 2, 3).
//   k down the rows (V of P V): the k of a step are eight rows, k = t being row 2 t and k = t + 4 row 2 t +
//   1: then the
//     accumulators of S are the operand P as they stand. The chunk 8 block + g holds column g of the four n8
//     tiles of a block: column 32 block + 4 g + i of the tile is n = g of n8 tile i. So what accumulates,
//     (row g, n = 2 t and 2 t + 1), is for i = 0..3 columns 32 block + 8 t + i and 32 block + 8 t + 4 + i:
//     eight neighbours a lane.
//
// Bank conflicts. A 16-byte access is served in four phases of eight lanes: two values of g, 2 m and 2 m + 1,
// with t = 0..3. A phase is free of conflicts when the places of its chunks differ modulo 8, rows being
// multiples of 8 chunks. Chunk c of row r lies at c ^ f(r), f(r) = 2 (r / 2 mod 4) ^ 4 (r mod 2).
//   along the rows: chunks 4 kk + t of rows g: f(2 m) and f(2 m + 1) differ by 4, so one row gives the lower
//   four of eight
//     places, and the other the upper.
//   down the rows: chunks g of rows 2 t: f(2 t) = 2 t, so t gives bits 1 and 2, and the two values of g bit
//   0. Rows 2 t + 1:
//     the same ^ 4.
// f permutes aligned groups of eight chunks, so that copies of eight neighbouring chunks into a row meet no
// bank twice.
#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/opaque.cuh"

namespace fovea::cuda {

/// The same value, of which the compiler knows nothing from here on. In a loop it keeps a branch on an
/// invariant a branch (else there is a copy of the whole loop for each outcome), and keeps what is derived
/// from it out of the registers that are held throughout.
__device__ __forceinline__ int opaque(int x) {
  ptx::make_opaque(x);
  return x;
}
__device__ __forceinline__ bool opaque(bool x) {
  return opaque(static_cast<int>(x)) != 0;
}

template <int kRows_, int kColumns_>
struct Tf32Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kChunks = kColumns / 4;  ///< of a row
  static constexpr int kFloats = kRows * kColumns;
  static_assert(kColumns % 32 == 0, "rows are whole groups of eight chunks");

  __device__ static __forceinline__ int swizzle(int row) { return (row & 6) ^ ((row & 1) << 2); }
  /// Offset in floats of a chunk (4 elements) of a row.
  __device__ static __forceinline__ int offset(int row, int chunk) {
    return row * kColumns + ((chunk ^ swizzle(row)) << 2);
  }
  __device__ static __forceinline__ int element(int row, int column) {
    return offset(row, column >> 2) + (column & 3);
  }
};

/// What a lane reads of a tile with k along its rows.
template <int kColumns>
struct Tf32AlongRows {
  const float* from;  ///< chunk t of row g
  int odd_step;       ///< from chunk t to chunk 4 + t: the swizzle may have exchanged them

  /// `row` is a multiple of 8.
  __device__ __forceinline__ Tf32AlongRows(const float* tile, int row, int lane)
      : from(tile + Tf32Tile<8, kColumns>::offset(row + lane / 4, lane % 4)),
        odd_step((Tf32Tile<8, kColumns>::swizzle(lane / 4) & 4) != 0 ? -16 : 16) {}
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
  const float* even;  ///< chunk g of row 2 t
  const float* odd;   ///< and of row 2 t + 1

  __device__ __forceinline__ Tf32DownRows(const float* tile, int lane)
      : even(tile + Tf32Tile<8, kColumns>::offset(lane % 4 * 2, lane / 4)),
        odd(tile + Tf32Tile<8, kColumns>::offset(lane % 4 * 2 + 1, lane / 4)) {}
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

/// Rows of one head of a (batch, seqlen, heads, size) tensor, from which tiles are copied.
struct Tf32Rows {
  const float* data = nullptr;  ///< row 0
  int64_t stride = 0;           ///< of rows
  int columns = 0;              ///< elements of a row; the rest of a tile is zeros
  bool aligned16 = false;       ///< 16-byte copies are safe
};

/// Starts copying rows [first, first + kRows) with kThreads threads; those from `end` on are zeros. The
/// caller commits, waits, and passes a barrier before anyone reads.
template <class Tile, int kThreads>
__device__ __forceinline__ void copy_tf32_rows(uint32_t tile, const Tf32Rows& rows, int first, int end,
                                               int thread) {
  if (rows.aligned16) {
    // Neighbouring threads take neighbouring chunks; a thread stays in its column of chunks.
    static_assert(kThreads % Tile::kChunks == 0);
    constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
    const int r = thread / Tile::kChunks, chunk = thread % Tile::kChunks;
    const float* from = rows.data + (first + r) * rows.stride + chunk * 4;
    const int64_t step = kRowsAtOnce * rows.stride;
    const int valid = chunk * 4 < rows.columns ? end - first - r : 0;
#pragma unroll
    for (int it = 0; it * kRowsAtOnce < Tile::kRows; ++it) {
      if (Tile::kRows % kRowsAtOnce != 0 && it * kRowsAtOnce + r >= Tile::kRows) break;
      ptx::cp_async_16(tile + 4 * static_cast<uint32_t>(Tile::offset(r + it * kRowsAtOnce, chunk)), from,
                       it * kRowsAtOnce < valid);
      from += step;
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < Tile::kFloats; index += kThreads) {
      const int r = index / Tile::kColumns, column = index % Tile::kColumns;
      ptx::cp_async_4(tile + 4 * static_cast<uint32_t>(Tile::element(r, column)),
                      rows.data + (first + r) * rows.stride + column,
                      first + r < end && column < rows.columns);
    }
  }
}

/// The same where neighbouring rows of the tile are no neighbours in memory: row r comes from `row_of(r)`, or
/// is zeros where that is null.
template <class Tile, int kThreads, class RowOf>
__device__ __forceinline__ void gather_tf32_rows(uint32_t tile, int columns, bool aligned16, int thread,
                                                 const RowOf& row_of) {
  if (aligned16) {
#pragma unroll 1
    for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
      const int r = index / Tile::kChunks, chunk = index % Tile::kChunks;
      const float* row = row_of(r);
      ptx::cp_async_16(tile + 4 * static_cast<uint32_t>(Tile::offset(r, chunk)), row + chunk * 4,
                       row != nullptr && chunk * 4 < columns);
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < Tile::kFloats; index += kThreads) {
      const int r = index / Tile::kColumns, column = index % Tile::kColumns;
      const float* row = row_of(r);
      ptx::cp_async_4(tile + 4 * static_cast<uint32_t>(Tile::element(r, column)), row + column,
                      row != nullptr && column < columns);
    }
  }
}

}  // namespace fovea::cuda
