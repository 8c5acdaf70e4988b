// Rows of bytes in strips of up to 128 columns, as wgmma reads operands of 8 bits from shared memory (tile/wgmma_map.hpp), and as warps copy
// them there: fwd_decode_e4m3. And the columns of its products, which are pieces of rows.
#pragma once

#include <cstdint>

#include "tile/wgmma_map.hpp"

namespace fovea::tile {

/// A matrix of rows of kColumns bytes: strip after strip, of as many rows each.
template <int kColumns>
struct ByteStrips {
  static constexpr int kStripColumns = kColumns < 128 ? kColumns : 128,
                       kStripChunks = kStripColumns / kChunkBytes;
  static constexpr SwizzleMode kMode = swizzle_of_rows(kStripColumns);
  static_assert(kStripColumns == swizzle_row_bytes(kMode) && kColumns % kStripColumns == 0);
  static constexpr int kChunks = kColumns / kChunkBytes;
  /// Rows that a warp copies at once, a chunk a lane.
  static constexpr int kRowsAtOnce = 32 / kChunks, kCopies = 16 / kRowsAtOnce;

  /// Where chunk `chunk` of row `row` lies, `rows` rows of each strip being there, from a multiple of an atom on.
  static constexpr uint32_t chunk_at(uint32_t base, int rows, int row, int chunk) {
    return base + static_cast<uint32_t>(chunk / kStripChunks * rows * kStripColumns) +
           swizzled_address(kMode,
                            static_cast<uint32_t>(row * kStripColumns + chunk % kStripChunks * kChunkBytes));
  }
  /// Of row `row` + kRowsAtOnce * i, for row < kRowsAtOnce: these have no bits in common, so that a lane keeps one address.
  static constexpr uint32_t copied_to(uint32_t base, int rows, int row, int chunk, int i) {
    const auto of_rows = static_cast<uint32_t>(kRowsAtOnce * i * kStripColumns);
    return (chunk_at(base, rows, row, chunk) ^ (swizzled_address(kMode, of_rows) ^ of_rows)) + of_rows;
  }
  /// Step `step` of 32 columns of all rows, or of 64 from a multiple of 64 on, whose first is at `base`.
  static constexpr WgmmaDescriptor step_of(uint32_t base, int rows, int step) {
    constexpr int kSteps = kStripColumns / 32;
    return wgmma_k_major(
        base + static_cast<uint32_t>(step / kSteps * rows * kStripColumns + step % kSteps * 32), kMode);
  }
};

/// Operands of 16 bits are cut into this many of 8: each is what the one before leaves, times kPieceStep, rounded to the 4 bits of
/// float8_e4m3fn. Three have all bits of a float16; a fourth, for which there is a place, has those of small ones.
inline constexpr int kPieces = 4;
inline constexpr float kPieceStep = 16.0f;

/// The column of a piece of a row among those of a product: a thread, which has every fourth row, has all of its pieces.
constexpr int column_of_piece(int row, int piece) {
  return row / 4 * 16 + piece / 2 * 8 + row % 4 * 2 + piece % 2;
}
/// The register of a thread's accumulators with a piece of its row `own`, row 4 own + lane % 4, in row lane / 4 + 8 half of the warp's.
constexpr int register_of_piece(int own, int piece, int half) {
  return 8 * own + 4 * (piece / 2) + 2 * half + piece % 2;
}

/// Rows of bytes that become operand A of 16 bits: ldmatrix gives a lane elements 4 t to 4 t + 3 of 16, t being lane % 4, and operand A wants of
/// it those at places 2 t, 2 t + 1, 8 + 2 t and 8 + 2 t + 1. So where element `at` of 16, or of a multiple of 16, stands.
constexpr int place_of_widened(int at) {
  return at / 16 * 16 + at % 4 / 2 * 8 + at % 16 / 4 * 2 + at % 2;
}

}  // namespace fovea::tile
