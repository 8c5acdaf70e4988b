// Tiles of float32 in shared memory whose fragments for m16n8k8 are read 16 bytes a lane, without ldmatrix.
//
// A product does not mind in which order its k runs, if both operands agree. So a lane (g = lane / 4, t =
// lane % 4) takes four neighbours in memory for four fragments:
//
//   kAlongK  k lies along the rows: Q and K of Q K^T. The chunk (16 bytes) 4 kk + t of row g holds k = t and
//   k = t + 4 of
//            the steps 2 kk (its elements 0, 1) and 2 kk + 1 (elements 2, 3).
//   kAlongN  k goes down the rows: V of P V. The k of a step are its eight rows, k = t being row 2 t and k =
//   t + 4 row
//            2 t + 1: then the accumulators of S are the operand P as they stand. The chunk 8 block + g holds
//            column g of the four n8 tiles of the block: column 32 block + 4 g + i of the tile is n = g of n8
//            tile i.
//
// Bank conflicts. A 16-byte access is served in four phases of eight lanes, here rows or columns g = 2 m, 2 m
// + 1 with t = 0..3; a phase is free of conflicts when its chunks differ modulo 8, rows being multiples of 8
// chunks.
//   kAlongK  chunk ^ 4 (row mod 2):      {4 kk + t} ^ 0 and {4 kk + t} ^ 4 for even and odd g: all eight.
//   kAlongN  chunk ^ 2 (row / 2 mod 4):  row / 2 mod 4 = t, so g ^ 2 t: for t = 0..3 the even numbers with
//   bit 0 of g, in
//            both values of that bit: all eight.
// Both permute aligned groups of eight chunks, so that copies of eight neighbouring chunks into a row meet no
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

enum class Tf32Order : uint8_t { kAlongK, kAlongN };

template <int kRows_, int kColumns_, Tf32Order kOrder_>
struct Tf32Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr Tf32Order kOrder = kOrder_;
  static constexpr int kChunks = kColumns / 4;  ///< of a row
  static constexpr int kFloats = kRows * kColumns;
  static_assert(kColumns % 32 == 0, "rows are whole groups of eight chunks");

  __device__ static __forceinline__ int swizzle(int row) {
    return kOrder == Tf32Order::kAlongK ? 4 * (row & 1) : 2 * ((row >> 1) & 3);
  }
  /// Offset in floats of a chunk (4 elements) of a row.
  __device__ static __forceinline__ int offset(int row, int chunk) {
    return row * kColumns + ((chunk ^ swizzle(row)) << 2);
  }
  __device__ static __forceinline__ int element(int row, int column) {
    return offset(row, column >> 2) + (column & 3);
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
