// Copies of tiles (tile/shared_tile.hpp) between global and shared memory, of 16-bit elements and of float32.
#pragma once

#include <cstdint>

#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/shared.cuh"
#include "tile/shared_tile.hpp"

namespace fovea::cuda {

using tile::FragmentAddresses;
using tile::LdmatrixOrder;
using tile::SharedTile;

/// Rows of one head in global memory: row r at data + r * row_bytes.
template <class Byte>
struct HeadRows {
  Byte* data = nullptr;
  int64_t row_bytes = 0;
  int rows = 0;           ///< rows that exist, from `data` on; those before and behind read as 0
  int columns = 0;        ///< columns that exist; those behind read as 0
  bool aligned16 = true;  ///< 16-byte accesses are safe
};
using RowSource = HeadRows<const char>;
using RowTarget = HeadRows<char>;

/// Reads eight elements of 16 bits from memory that allows no 16-byte access; `count` of them exist.
__device__ __forceinline__ uint4 load_elements(const char* from, int count) {
  uint32_t words[4] = {0, 0, 0, 0};
  const auto* elements = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) words[e / 2] |= static_cast<uint32_t>(__ldg(elements + e)) << (16 * (e % 2));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// Writes eight elements of 16 bits to memory that allows no 16-byte access; `count` of them exist.
__device__ __forceinline__ void store_elements(char* to, const uint4& x, int count) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  auto* elements = reinterpret_cast<uint16_t*>(to);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) elements[e] = static_cast<uint16_t>(words[e / 2] >> (16 * (e % 2)));
  }
}

/// Starts copying a tile whose row r lies at `row_at(r)` (null: zeros), with kThreads threads; columns from `columns` on
/// become zeros. The caller commits, waits, and passes a barrier before anyone reads. The loop is not unrolled, which
/// keeps the code small; it copies the elements of unaligned rows one by one.
template <class Tile, int kThreads, class RowAt>
__device__ __forceinline__ void gather_tile(uint32_t tile, int columns, bool aligned16, int thread,
                                            const RowAt& row_at) {
  if (Tile::kElementBytes == 2 || aligned16) {
#pragma unroll 1
    for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
      const int r = index / Tile::kChunks, chunk = index % Tile::kChunks;
      const char* row = row_at(r);
      if (Tile::kElementBytes == 4 || aligned16) {
        ptx::cp_async_16(tile + Tile::offset(r, chunk), row + chunk * 16,
                         row != nullptr && chunk * Tile::kChunkElements < columns);
      } else {
        ptx::st_shared_16(tile + Tile::offset(r, chunk),
                          load_elements(row + chunk * 16, row != nullptr ? columns - chunk * 8 : 0));
      }
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < Tile::kRows * Tile::kColumns; index += kThreads) {
      const int r = index / Tile::kColumns, column = index % Tile::kColumns;
      const char* row = row_at(r);
      ptx::cp_async_4(tile + Tile::element(r, column), row + column * 4, row != nullptr && column < columns);
    }
  }
}

/// gather_tile for rows first_row, first_row + 1, ... of the source; those that do not exist become zeros. kAligned
/// promises an aligned16 source, whose copies are unrolled: one instruction and one address each. Without kMayEnd all
/// rows exist. Pass an unsigned `thread` where the compiler cannot see that it is not negative.
template <class Tile, int kThreads, bool kMayEnd, bool kAligned, class Byte, class Index>
__device__ __forceinline__ void copy_tile(uint32_t tile, const HeadRows<Byte>& source, int first_row,
                                          Index thread) {
  if constexpr (kAligned) {
    using Share = tile::CopyShare<Tile, kThreads>;
    const Share share(thread);
    if (!share.exists()) return;
    const bool column_exists = share.chunk * Tile::kChunkElements < source.columns;
    // Aligned rows are less than 2^30 elements apart (launch/params.cpp), so offsets are products of 32 bits added to 64:
    // one instruction each, with nothing that the compiler would keep in registers across a mainloop.
    const int row = static_cast<int>(source.row_bytes / Tile::kElementBytes);
    const char* from = source.data + static_cast<int64_t>(first_row + share.row) * row * Tile::kElementBytes +
                       share.chunk * 16;
    const int rows = source.rows - first_row - share.row;  // that exist from the thread's first row on
#pragma unroll
    for (int step = 0; step < Share::kSteps; ++step) {
      if (!share.has(step)) break;
      ptx::cp_async_16(tile + Tile::offset(share.row + step * Share::kRowsAtOnce, share.chunk),
                       from + static_cast<int64_t>(row) * (step * Share::kRowsAtOnce * Tile::kElementBytes),
                       column_exists && (!kMayEnd || step * Share::kRowsAtOnce < rows));
    }
  } else {
    gather_tile<Tile, kThreads>(
        tile, source.columns, source.aligned16, static_cast<int>(thread), [&](int r) -> const char* {
          return first_row + r < source.rows ? source.data + (first_row + r) * source.row_bytes : nullptr;
        });
  }
}

/// copy_tile for either kind of source, by a branch on source.aligned16 around both copies: fast, for kernels with
/// registers to spare.
template <class Tile, int kThreads, class Byte>
__device__ __forceinline__ void copy_tile_either(uint32_t tile, HeadRows<Byte> source, int first_row,
                                                 int thread) {
  if (source.aligned16) {
    copy_tile<Tile, kThreads, true, true>(tile, source, first_row, static_cast<unsigned>(thread));
  } else {
    source.aligned16 = false;
    copy_tile<Tile, kThreads, true, false>(tile, source, first_row, thread);
  }
}

/// Writes rows [first_row, first_row + kRows) of a tile of 16-bit elements that exist in `to`.
template <class Tile, int kThreads>
__device__ __forceinline__ void store_tile(uint32_t tile, const RowTarget& to, int first_row, int thread) {
  static_assert(Tile::kElementBytes == 2);
#pragma unroll 2
  for (int index = thread; index < Tile::kRows * Tile::kChunks; index += kThreads) {
    const int r = index / Tile::kChunks, chunk = index % Tile::kChunks;
    if (first_row + r >= to.rows || chunk * 8 >= to.columns) continue;
    const uint4 words = ptx::ld_shared_16(tile + Tile::offset(r, chunk));
    char* const target = to.data + (first_row + r) * to.row_bytes + chunk * 16;
    if (to.aligned16) {
      *reinterpret_cast<uint4*>(target) = words;
    } else {
      store_elements(target, words, to.columns - chunk * 8);
    }
  }
}

}  // namespace fovea::cuda
