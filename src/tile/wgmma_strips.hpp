// A tile of 16-bit elements that TMA fills, as wgmma and ldmatrix find it in shared memory: strips of 64, 32 or 16 columns, as many as a
// swizzled row holds, one after the other.
#pragma once

#include <cstdint>

#include "tile/swizzle.hpp"

namespace fovea::tile {

template <int kWidth>
struct WgmmaStrips {
  static_assert(kWidth == 64 || kWidth == 32 || kWidth == 16);
  static constexpr int kColumns = kWidth;  ///< of a strip
  static constexpr int kRowBytes = 2 * kColumns;
  static constexpr SwizzleMode kSwizzle = swizzle_of_rows(kRowBytes);

  /// Strips that hold `columns`.
  static constexpr int of(int columns) { return (columns + kColumns - 1) / kColumns; }
  /// Bytes from the begin of a tile of `rows` to a column, without the swizzle: what a descriptor's start moves by.
  static constexpr int column_at(int column, int rows) {
    return column / kColumns * rows * kRowBytes + column % kColumns * 2;
  }
  /// Bytes to what `lane` tells ldmatrix_x4 (without transposition) of 16 columns from `column` on and 16 rows from `row` on: the lanes of
  /// a warp get them as operand A of wgmma. The tile begins at a multiple of swizzle_atom_bytes.
  static constexpr uint32_t operand_a_at(int column, int rows, int row, int lane) {
    const int at = column_at(column + lane / 16 * 8, rows) + (row + lane % 16) * kRowBytes;
    return swizzled_address(kSwizzle, static_cast<uint32_t>(at));
  }
};

}  // namespace fovea::tile
