// A tile in shared memory: kRows rows of kColumns elements without gaps, the 16-byte chunks of each row
// swizzled.
#pragma once

#include "tile/swizzle.hpp"

namespace fovea::tile {

struct Coord {
  int row = 0, col = 0;
  friend constexpr bool operator==(const Coord&, const Coord&) = default;
};

template <int kRows_, int kColumns_, int kElementBytes_>
struct TileLayout {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kElementBytes = kElementBytes_;
  static constexpr int kRowBytes = kColumns * kElementBytes;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunkElements = kChunkBytes / kElementBytes;
  static constexpr int kChunks = kRowBytes / kChunkBytes;  ///< of a row
  static_assert(kRowBytes % kChunkBytes == 0);

  /// Byte offset of a chunk.
  static constexpr int chunk_offset(int row, int chunk) {
    return row * kRowBytes + swizzled_chunk<kRowBytes>(row, chunk) * kChunkBytes;
  }
  /// Byte offset of an element.
  static constexpr int offset(int row, int col) {
    return chunk_offset(row, col / kChunkElements) + col % kChunkElements * kElementBytes;
  }
  /// The element at a byte offset (a multiple of kElementBytes).
  static constexpr Coord at(int offset) {
    const int row = offset / kRowBytes, chunk = offset % kRowBytes / kChunkBytes;
    return {row,
            swizzled_chunk<kRowBytes>(row, chunk) * kChunkElements + offset % kChunkBytes / kElementBytes};
  }

  /// Chunk number `index` of the tile in the order of a copy: lane l of a warp copies chunk 32 i + l, so that
  /// eight neighbouring lanes read 128 bytes of global memory and store whole groups of the swizzle.
  static constexpr Coord copied_chunk(int index) { return {index / kChunks, index % kChunks}; }
};

}  // namespace fovea::tile
