// Where a 16-byte chunk of a row lies in shared memory, so that accesses along a row and down a column of chunks have no
// bank conflicts.
//
// Shared memory has 32 banks of 4 bytes, so eight 16-byte chunks side by side use each bank once. Hardware serves a
// 16-byte access of a warp in four phases of eight lanes. A phase is free of conflicts when the addresses / 16 of its
// chunks differ modulo 8. Eight chunks of one row differ. Chunks of eight consecutive rows in one column, which ldmatrix
// reads, differ only if a row has an odd number of chunks. Otherwise let 2^b be the largest power of two, at most 8, that
// divides this number: banks repeat after 8 / 2^b rows, and the swizzle xors the chunk index with the number of the
// repetition. That permutes aligned groups of 2^b chunks within a row. For rows of 128, 64 and 32 bytes it is the swizzle
// that TMA and wgmma name 128B, 64B and 32B.
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

/// The swizzle xors the chunk indices of a row with this.
constexpr int swizzle_of_row(int row_bytes, int row) {
  const int group = swizzle_group(row_bytes);
  return (row / (kBankedChunks / group)) & (group - 1);
}
/// The same for rows of multiples of 128 bytes of which each lane reads 16 bytes (tf32_chunk_along_rows,
/// tf32_chunk_down_rows). A phase of eight lanes has g = lane / 4 equal to 2 m or 2 m + 1, and t = lane % 4 from 0 to 3.
///   along the rows   lanes read chunk t of row g. The swizzles of rows 2 m and 2 m + 1 differ by 4, so one row covers
///                    the lower four of eight places and the other the upper.
///   down the rows    lanes read chunk g of row 2 t. The swizzle of row 2 t is 2 t, so t sets bits 1 and 2 of the place
///                    and g bit 0. In rows 2 t + 1 each place is the same ^ 4.
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
/// The mode whose rows have `bytes`: 128, 64 or 32.
constexpr SwizzleMode swizzle_of_rows(int bytes) {
  return bytes == 128 ? SwizzleMode::k128 : bytes == 64 ? SwizzleMode::k64 : SwizzleMode::k32;
}
/// Eight such rows are the atom of wgmma's layouts. The pattern repeats after it, so tiles start at multiples of it.
constexpr int swizzle_atom_bytes(SwizzleMode mode) {
  return swizzle_row_bytes(mode) * 8;
}

/// The physical byte address of a logical one: a mode xors bits 4 to 6 (k128), 4 and 5 (k64) or 4 (k32) with the bits
/// from 7 on.
constexpr uint32_t swizzled_address(SwizzleMode mode, uint32_t address) {
  const auto mask = static_cast<uint32_t>(swizzle_row_bytes(mode) - kChunkBytes);
  return address ^ ((address >> 3) & mask);
}

}  // namespace fovea::tile
