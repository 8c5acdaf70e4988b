// A tile of 16-bit elements in shared memory: rows of kColumns elements, its 16-byte chunks swizzled so that
// neither the copies that fill it nor the ldmatrix that read it meet a bank twice (tile/swizzle.hpp has the
// proof). And the copies from global memory.
#pragma once

#include <cstdint>

#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/shared.cuh"
#include "tile/swizzle.hpp"

namespace fovea::cuda {

template <int kRows_, int kColumns_>
struct SharedTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kRowBytes = kColumns * 2;
  static constexpr int kChunks = kRowBytes / 16;  ///< of a row
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kColumns % 32 == 0, "the swizzle permutes groups of four chunks");

  /// Byte offset of a chunk (8 elements) of a row.
  __device__ static __forceinline__ uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + tile::swizzled_chunk<kRowBytes>(row, chunk) * 16);
  }
};

/// Rows of one head in global memory: row r at data + r * row_bytes.
struct RowSource {
  const char* data = nullptr;
  int64_t row_bytes = 0;
  int rows = 0;           ///< rows that exist, from `data` on; those behind (and negative ones) read as 0
  int columns = 0;        ///< columns that exist; those behind read as 0
  bool aligned16 = true;  ///< 16-byte copies are safe
};

/// Eight elements from memory that allows no 16-byte access; `count` of them exist.
__device__ __forceinline__ uint4 load_elements(const char* from, int count) {
  uint32_t words[4] = {0, 0, 0, 0};
  const auto* elements = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) words[e / 2] |= static_cast<uint32_t>(__ldg(elements + e)) << (16 * (e % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// The same the other way round.
__device__ __forceinline__ void store_elements(char* to, const uint4& x, int count) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  auto* elements = reinterpret_cast<uint16_t*>(to);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) elements[e] = static_cast<uint16_t>(words[e / 2] >> (16 * (e % 2)));
  }
}

/// Starts copying rows first_row, first_row + 1, ... of the source into a tile, with kThreads threads. The
/// caller commits, waits, and passes a barrier before anyone reads. Without kMayEnd all of the rows exist.
/// With kAligned 16-byte copies are safe: then a thread keeps to one column of chunks, and its addresses
/// differ by multiples of one stride. (A branch to the other way at run time costs a mainloop its registers.)
template <class Tile, int kThreads, bool kMayEnd, bool kAligned>
__device__ __forceinline__ void copy_tile(uint32_t tile, const RowSource& source, int first_row, int thread) {
  constexpr int kChunks = Tile::kChunks;
  if constexpr (kAligned && kChunks <= kThreads) {
    constexpr int kRowsAtOnce = kThreads / kChunks;
    const int r0 = thread / kChunks, chunk = thread % kChunks;
    if (kThreads % kChunks != 0 && r0 >= kRowsAtOnce) return;  // threads that are left over
    const bool column_exists = chunk * 8 < source.columns;
    // Aligned rows are less than 2^30 elements apart (launch/params.cpp): products of 32 bits, added to 64,
    // are one instruction each and leave nothing that the compiler would keep in registers across a mainloop.
    const int row = static_cast<int>(source.row_bytes / 2);
    const char* from = source.data + static_cast<int64_t>(first_row + r0) * row * 2 + chunk * 16;
    const int rows = source.rows - first_row - r0;  // that exist from this thread's first on
#pragma unroll
    for (int it = 0; it < (Tile::kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++it) {
      if (Tile::kRows % kRowsAtOnce != 0 && it * kRowsAtOnce + r0 >= Tile::kRows) break;
      ptx::cp_async_16(tile + Tile::offset(r0 + it * kRowsAtOnce, chunk),
                       from + static_cast<int64_t>(row) * (it * kRowsAtOnce * 2),
                       column_exists && (!kMayEnd || it * kRowsAtOnce < rows));
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < Tile::kRows * kChunks; index += kThreads) {
      const int r = index / kChunks, chunk = index % kChunks;
      const char* from = source.data + (first_row + r) * source.row_bytes + chunk * 16;
      const int columns = first_row + r < source.rows ? source.columns - chunk * 8 : 0;
      if (kAligned || source.aligned16) {
        ptx::cp_async_16(tile + Tile::offset(r, chunk), from, columns > 0);
      } else {
        ptx::st_shared_16(tile + Tile::offset(r, chunk), load_elements(from, columns));
      }
    }
  }
}

/// The same for rows that lie anywhere: row r at `address_of(r)`, or zeros where that is null.
template <class Tile, int kThreads, class AddressOf>
__device__ __forceinline__ void gather_tile(uint32_t tile, int columns, bool aligned16, int thread,
                                            const AddressOf& address_of) {
#pragma unroll 1
  for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
    const int r = index / Tile::kChunks, chunk = index % Tile::kChunks;
    const char* row = address_of(r);
    if (aligned16) {
      ptx::cp_async_16(tile + Tile::offset(r, chunk), row + chunk * 16,
                       row != nullptr && chunk * 8 < columns);
    } else {
      ptx::st_shared_16(tile + Tile::offset(r, chunk),
                        load_elements(row + chunk * 16, row != nullptr ? columns - chunk * 8 : 0));
    }
  }
}

/// Which lane gives the address of which row of four 8x8 matrices, and so which matrix comes out in which
/// register (tile/fragment_map.hpp). A product takes B from two registers in a row, so the order decides
/// whether they need moving.
enum class LdmatrixOrder : uint8_t {
  /// (rows 0-7, columns 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15): operand A whose m are rows; with .trans
  /// operand B
  /// whose k are rows, registers 0, 1 for the first n8 and 2, 3 for the second.
  kDownFirst,
  /// (rows 0-7, columns 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15): operand B whose n are rows, likewise.
  kAcrossFirst,
};

/// Addresses of fragments of 16 x 16 elements in a tile. The swizzle is an exclusive or of low bits of the
/// chunk, so the address of step 4 j + i (16 columns each) is that of step 0 with i in two bits of it, plus a
/// constant: a lane keeps one offset. Tiles start at multiples of 128 bytes.
template <class Tile, LdmatrixOrder kOrder>
struct FragmentAddresses {
  /// Steps of 16 columns after which the swizzle repeats: 8 chunks in rows of 128 bytes, else 4.
  static constexpr int kPeriod = Tile::kRowBytes % 128 == 0 ? 4 : 2;
  static constexpr int kStepBytes = 32;
  uint32_t offset;

  __device__ __forceinline__ explicit FragmentAddresses(int lane) {
    const bool down = kOrder == LdmatrixOrder::kDownFirst;
    const int row = down ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    offset = Tile::offset(row, down ? lane >> 4 : (lane >> 3) & 1);
  }
  /// The fragment `rows` (a multiple of 16) rows down and `step` steps to the right in the tile at `base`.
  __device__ __forceinline__ uint32_t at(uint32_t base, int rows, int step) const {
    return ((base + offset) ^ static_cast<uint32_t>(step % kPeriod * kStepBytes)) +
           static_cast<uint32_t>(rows * Tile::kRowBytes + step / kPeriod * kPeriod * kStepBytes);
  }
};

}  // namespace fovea::cuda
