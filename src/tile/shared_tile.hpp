// A tile in shared memory: kRows rows of kColumns elements without gaps. The 16-byte chunks of each row are
// swizzled so that neither the copies that fill the tile nor the reads of fragments have bank conflicts:
//
//   16-bit elements   chunk ^ swizzle_of_row(kRowBytes, row)   ldmatrix reads one chunk of eight rows
//   float32           chunk ^ swizzle_of_pairs(row)            lanes read 16 bytes (tf32 has no ldmatrix.trans)
//
// tests/host/swizzle_test.cpp counts the bank conflicts of these tiles.
#pragma once

#include <cstdint>

#include "tile/fragment_map.hpp"
#include "tile/swizzle.hpp"

namespace fovea::tile {

template <int kRows_, int kColumns_, int kElementBytes_ = 2>
struct SharedTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kElementBytes = kElementBytes_;
  static constexpr int kRowBytes = kColumns * kElementBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunkElements = kChunkBytes / kElementBytes;
  static constexpr int kChunks = kRowBytes / kChunkBytes;  ///< of a row
  /// Chunks that the swizzle permutes among themselves.
  static constexpr int kGroup = swizzle_group(kRowBytes);
  static_assert(kElementBytes == 2 || kElementBytes == 4);
  static_assert(kRowBytes % kChunkBytes == 0);
  static_assert(kElementBytes == 2 || kGroup == kBankedChunks,
                "swizzle_of_pairs permutes groups of eight chunks");

  /// The swizzle xors the chunk indices of a row with this.
  static constexpr int swizzle(int row) {
    return kElementBytes == 2 ? swizzle_of_row(kRowBytes, row) : swizzle_of_pairs(row);
  }
  /// Offset of the first element of a chunk, in elements.
  static constexpr int index(int row, int chunk) {
    return row * kColumns + (chunk ^ swizzle(row)) * kChunkElements;
  }
  /// Byte offset of a chunk, and of an element.
  static constexpr uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + (chunk ^ swizzle(row)) * kChunkBytes);
  }
  static constexpr uint32_t element(int row, int column) {
    return offset(row, column / kChunkElements) +
           static_cast<uint32_t>(column % kChunkElements * kElementBytes);
  }
  /// The address of the chunk `rows` (a multiple of 8) below and `chunks` to the right of the chunk at `address`. Rows
  /// add a constant and the low bits of the chunk enter by exclusive or, so a lane keeps one address for all its
  /// fragments. `chunks` must share no bit below kGroup with the chunk at `address`, and the tile must start at a
  /// multiple of 128 bytes.
  static constexpr uint32_t moved(uint32_t address, int rows, int chunks) {
    return (address ^ static_cast<uint32_t>(chunks % kGroup * kChunkBytes)) +
           static_cast<uint32_t>(rows * kRowBytes + chunks / kGroup * kGroup * kChunkBytes);
  }
};

/// Addresses of fragments of 16 x 16 elements of 16 bits, as a lane hands them to ldmatrix.
template <class Tile, LdmatrixOrder kOrder>
struct FragmentAddresses {
  static_assert(Tile::kElementBytes == 2 && Tile::kGroup >= 4);
  uint32_t offset;

  /// Positions count from the fragment at `row` (a multiple of 8) and `chunk` (even).
  constexpr explicit FragmentAddresses(int lane, int row = 0, int chunk = 0)
      : offset(Tile::offset(row + ldmatrix_chunk(kOrder, lane).row,
                            chunk + ldmatrix_chunk(kOrder, lane).chunk)) {}

  /// The fragment `rows` (a multiple of 8) down and `step` times 16 columns to the right, in the tile at `base`.
  constexpr uint32_t at(uint32_t base, int rows, int step) const {
    return Tile::moved(base + offset, rows, 2 * step);
  }
};

/// The chunks of a tile that one of kThreads threads copies: one column of chunks, every kRowsAtOnce-th row.
/// Addresses then differ by multiples of one stride, and eight neighbouring threads copy 128 bytes of a row.
template <class Tile, int kThreads>
struct CopyShare {
  static constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  static constexpr int kSteps = (Tile::kRows + kRowsAtOnce - 1) / kRowsAtOnce;
  static_assert(kRowsAtOnce >= 1);
  int row, chunk;  ///< of step 0; step s is kRowsAtOnce * s rows further down

  /// Pass an unsigned `thread` where the compiler cannot see that it is not negative: divisions then become shifts.
  template <class Index>
  constexpr explicit CopyShare(Index thread)
      : row(static_cast<int>(thread / Index{Tile::kChunks})),
        chunk(static_cast<int>(thread % Index{Tile::kChunks})) {}
  /// Whether the thread copies at all: threads that make no whole row of chunks are left over.
  constexpr bool exists() const { return kThreads % Tile::kChunks == 0 || row < kRowsAtOnce; }
  constexpr bool has(int step) const {
    return Tile::kRows % kRowsAtOnce == 0 || step * kRowsAtOnce + row < Tile::kRows;
  }
};

}  // namespace fovea::tile
