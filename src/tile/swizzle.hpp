// Where a 16-byte chunk of a row lies in shared memory, so that accesses along a row and down a column of chunks
// meet no bank twice.
//
// Shared memory has 32 banks of 4 bytes: eight 16-byte chunks side by side use each bank once, and hardware
// serves a 16-byte access of a warp as four phases of eight lanes. So eight chunks are free of conflicts when
// their addresses / 16 differ modulo 8. Chunks of one row do; chunks of eight consecutive rows in one column
// (ldmatrix) do only if the row length in chunks is odd. Else, with 2^b the largest power of two in it (at
// most 8), rows repeat every 8 / 2^b, and the chunk index is xored with the number of the repetition: it
// permutes aligned groups of 2^b chunks, and nothing leaves its row. For rows of 128, 64 and 32 bytes this is
// the swizzle that TMA and wgmma name 128B, 64B and 32B.
#pragma once

#include <cstdint>

namespace fovea::tile {

/// Widest access of a lane, and a row of an 8x8 matrix of 16-bit elements.
inline constexpr int kChunkBytes = 16;
inline constexpr int kBankedChunks = 8;  ///< chunks that cover the 32 banks once

/// Chunks that the swizzle of a row of `row_bytes` permutes among themselves: 8, 4, 2 or 1.
constexpr int swizzle_group(int row_bytes) {
  const int chunks = row_bytes / kChunkBytes;
  const int power = chunks & -chunks;
  return power < kBankedChunks ? power : kBankedChunks;
}

/// What the chunk indices of a row are xored with.
constexpr int swizzle_of_row(int row_bytes, int row) {
  const int group = swizzle_group(row_bytes);
  return (row / (kBankedChunks / group)) & (group - 1);
}
/// The same for rows of multiples of 128 bytes that lanes read 16 bytes at a time (tf32_chunk_along_rows,
/// tf32_chunk_down_rows). A phase of eight lanes is two values of g = lane / 4, 2 m and 2 m + 1, with t = 0..3.
///   along the rows: chunks t of rows g. The swizzles of rows 2 m and 2 m + 1 differ by 4, so one row covers the
///     lower four of eight places and the other the upper.
///   down the rows: chunks g of rows 2 t. The swizzle of row 2 t is 2 t: t sets bits 1 and 2, g bit 0. Rows
///     2 t + 1: the same ^ 4.
constexpr int swizzle_of_pairs(int row) {
  return (row & 6) ^ ((row & 1) << 2);
}

/// The swizzle modes of TMA boxes and wgmma descriptors.
enum class SwizzleMode : uint8_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

/// Length of the rows whose chunks a mode permutes; one chunk without swizzle.
constexpr int swizzle_row_bytes(SwizzleMode mode) {
  return mode == SwizzleMode::k128  ? 128
         : mode == SwizzleMode::k64 ? 64
         : mode == SwizzleMode::k32 ? 32
                                    : kChunkBytes;
}
/// Eight such rows are the atom of wgmma's layouts, after
/// which the pattern repeats: tiles start at multiples of it.
constexpr int swizzle_atom_bytes(SwizzleMode mode) {
  return swizzle_row_bytes(mode) * 8;
}

/// Physical byte address of a logical one under TMA's modes: bits 4.. are xored with the bits from 7 on.
constexpr uint32_t swizzled_address(SwizzleMode mode, uint32_t address) {
  const auto mask = static_cast<uint32_t>(swizzle_row_bytes(mode) - kChunkBytes);
  return address ^ ((address >> 3) & mask);
}

}  // namespace fovea::tile
