// Tiles of 16-bit elements in shared memory as ldmatrix reads them without bank conflicts, copies into and
// out of them, and products of tiles in a warp's registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// kRows x kColumns elements of 16 bits in panels of 64 columns (32 where the columns are no multiple of 64).
/// A panel's row is one line of the 32 banks (half a line), and the 16-byte chunk c of row r lies at place c
/// ^ (r % 8) (c ^ (r / 2 % 4)): the eight rows of an 8x8 matrix then lie in eight different groups of four
/// banks.
template <int kRowsT, int kColumnsT>
struct BwdTile {
  static constexpr int kRows = kRowsT, kColumns = kColumnsT;
  static constexpr int kPanel = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kPitch = kPanel * 2;   ///< bytes of a panel's row
  static constexpr int kChunks = kPanel / 8;  ///< 16-byte chunks of a panel's row
  static constexpr int kPanelBytes = kRows * kPitch;
  static constexpr int kBytes = kRows * kColumns * 2;
  static_assert(kColumns % kPanel == 0 && kRows % 8 == 0);

  /// Byte offset of 16-byte chunk `c` of a row.
  static constexpr uint32_t chunk(int row, int c) {
    const auto r = static_cast<uint32_t>(row),
               place = static_cast<uint32_t>(c);  // unsigned: powers of 2 divide by shifts
    const uint32_t swizzle = kPanel == 64 ? r & 7 : (r >> 1) & 3;
    return place / kChunks * kPanelBytes + r * kPitch + (((place % kChunks) ^ swizzle) << 4);
  }
};

/// The address that a lane hands to ldmatrix, relative to a first row and chunk. Later rows (multiples of 8)
/// and chunks are constants: the row moves the address, the chunk's low bits enter by exclusive or, so one
/// instruction makes each address.
template <class Tile>
struct BwdOperand {
  uint32_t lane_address;

  /// Rows across lanes 0..15, second chunk from lanes 16..31: A as stored (rows m), or B transposed (rows k).
  static __device__ __forceinline__ BwdOperand by_16_rows(uint32_t tile, int row, int chunk, int lane) {
    return {tile + Tile::chunk(row + (lane & 15), chunk + (lane >> 4))};
  }
  /// Rows across lanes 0..7 and 16..23, second chunk from lanes 8..15: B as stored (rows n), or A transposed
  /// (rows k).
  static __device__ __forceinline__ BwdOperand by_8_rows(uint32_t tile, int row, int chunk, int lane) {
    return {tile + Tile::chunk(row + (lane & 7) + ((lane >> 4) << 3), chunk + ((lane >> 3) & 1))};
  }
  /// `row` a multiple of 8; `chunk` shares no bit with the first chunk, or is a multiple of a panel's.
  __device__ __forceinline__ uint32_t at(int row, int chunk) const {
    return (lane_address ^ static_cast<uint32_t>((chunk % Tile::kChunks) << 4)) +
           static_cast<uint32_t>((chunk / Tile::kChunks) * Tile::kPanelBytes + row * Tile::kPitch);
  }
};

/// Rows of one head as a copy sees them: `data` is the first element of row 0.
struct BwdRows {
  char* data;
  int64_t stride;  ///< elements between rows
  int rows;        ///< rows below this one take part, the others are zeros
  int columns;     ///< head size as asked
  bool aligned16;
};

/// Starts the copy of rows [first, first + kRows) into a tile; rows and columns beyond the limits become
/// zeros. Asynchronous where rows are aligned: complete after this thread's cp_async_wait, visible to others
/// after a barrier.
template <class Tile, int kThreads>
__device__ __forceinline__ void load_tile(unsigned char* tile, const BwdRows& from, int first, int thread) {
  constexpr int kRowChunks = Tile::kColumns / 8;
  constexpr int kTotal = Tile::kRows * kRowChunks;
  ptx::make_opaque(
      thread);  // offsets are made anew for each tile: kept over a loop, they would cost a register each
  if (from.aligned16) {
    const uint32_t to = ptx::shared_address(tile);
    if constexpr (kThreads % (8 * kRowChunks) == 0 && kTotal % kThreads == 0) {
      // A thread copies one column of chunks, in steps of a multiple of eight rows: the swizzle stays the
      // same.
      constexpr int kStep = kThreads / kRowChunks;
      const auto row = static_cast<int>(static_cast<uint32_t>(thread) / kRowChunks);
      const auto c = static_cast<int>(static_cast<uint32_t>(thread) % kRowChunks);
      const int left = c * 8 < from.columns ? from.rows - first - row : 0;
      const char* source = from.data + (static_cast<int64_t>(first + row) * from.stride + c * 8) * 2;
      const uint32_t target = to + Tile::chunk(row, c);
#pragma unroll
      for (int n = 0; n < Tile::kRows / kStep; ++n) {
        ptx::cp_async_16(target + static_cast<uint32_t>(n * kStep * Tile::kPitch), source, n * kStep < left);
        source += kStep * from.stride * 2;
      }
    } else {
#pragma unroll
      for (int n = 0; n < (kTotal + kThreads - 1) / kThreads; ++n) {
        const int index = thread + n * kThreads;
        if (kTotal % kThreads != 0 && index >= kTotal) break;
        const auto row = static_cast<int>(static_cast<uint32_t>(index) / kRowChunks);
        const auto c = static_cast<int>(static_cast<uint32_t>(index) % kRowChunks);
        const bool valid = first + row < from.rows && c * 8 < from.columns;
        const char* const source = from.data + (static_cast<int64_t>(first + row) * from.stride + c * 8) * 2;
        ptx::cp_async_16(to + Tile::chunk(row, c), source, valid);
      }
    }
  } else {
#pragma unroll 1
    for (int index = thread; index < kTotal; index += kThreads) {
      const int row = index / kRowChunks, c = index % kRowChunks;
      uint32_t words[4] = {0, 0, 0, 0};
      if (first + row < from.rows) {
        const auto* source = reinterpret_cast<const unsigned short*>(from.data) +
                             static_cast<int64_t>(first + row) * from.stride + c * 8;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (c * 8 + e < from.columns)
            words[e / 2] |= static_cast<uint32_t>(__ldg(source + e)) << (16 * (e & 1));
        }
      }
      *reinterpret_cast<uint4*>(tile + Tile::chunk(row, c)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

/// Writes rows [first, min(first + kRows, to.rows)) from a tile.
template <class Tile, int kThreads>
__device__ __forceinline__ void store_tile(const unsigned char* tile, const BwdRows& to, int first,
                                           int thread) {
  constexpr int kRowChunks = Tile::kColumns / 8;
  ptx::make_opaque(thread);
#pragma unroll 2
  for (int index = thread; index < Tile::kRows * kRowChunks; index += kThreads) {
    const int row = index / kRowChunks, c = index % kRowChunks;
    if (first + row >= to.rows || c * 8 >= to.columns) continue;
    const uint4 words = *reinterpret_cast<const uint4*>(tile + Tile::chunk(row, c));
    auto* target =
        reinterpret_cast<unsigned short*>(to.data) + static_cast<int64_t>(first + row) * to.stride + c * 8;
    if (to.aligned16) {
      *reinterpret_cast<uint4*>(target) = words;
    } else {
      const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (c * 8 + e < to.columns) target[e] = static_cast<unsigned short>(w[e / 2] >> (16 * (e & 1)));
      }
    }
  }
}

/// Whether a pair of T holds NaN or an infinity, gathered: 0 * x is NaN exactly then.
template <class T>
struct NonFinite {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t sum = 0;
  __device__ __forceinline__ void look(uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    constexpr bool kMultiply = std::is_same_v<T, __half>;
#else
    constexpr bool kMultiply = true;
#endif
    if constexpr (kMultiply) {
      const uint32_t zero = 0;
      const Pair pair = __hfma2(reinterpret_cast<const Pair&>(word), reinterpret_cast<const Pair&>(zero),
                                reinterpret_cast<const Pair&>(sum));
      sum = reinterpret_cast<const uint32_t&>(pair);
    }
  }
  __device__ __forceinline__ bool any() const {
    return (sum & 0x7fff7fffu) != 0;
  }
};

/// 16 bits of T without NaN and infinity: NaN becomes 0, infinities the largest finite number.
template <class T>
__device__ __forceinline__ uint32_t finite_half(uint32_t bits) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  if ((bits & kExponent) != kExponent) return bits;
  return (bits & ~kExponent & 0x7fffu) != 0 ? 0u : (bits & 0x8000u) | (kExponent - 1u);
}

/// Makes the 16-byte chunks that this thread copied by load_tile finite. Call after its copies are complete.
template <class T, class Tile, int kThreads>
__device__ __forceinline__ void make_finite(unsigned char* tile, int thread) {
  constexpr int kRowChunks = Tile::kColumns / 8;
  constexpr int kTotal = Tile::kRows * kRowChunks;
  ptx::make_opaque(thread);
  NonFinite<T> bad;
#pragma unroll 4
  for (int index = thread; index < kTotal; index += kThreads) {
    const uint4 words =
        *reinterpret_cast<const uint4*>(tile + Tile::chunk(index / kRowChunks, index % kRowChunks));
    bad.look(words.x);
    bad.look(words.y);
    bad.look(words.z);
    bad.look(words.w);
  }
  if (!bad.any()) return;
#pragma unroll 1
  for (int index = thread; index < kTotal; index += kThreads) {
    auto* words = reinterpret_cast<uint32_t*>(tile + Tile::chunk(index / kRowChunks, index % kRowChunks));
#pragma unroll 1
    for (int w = 0; w < 4; ++w) {
      words[w] = finite_half<T>(words[w] & 0xffffu) | finite_half<T>(words[w] >> 16) << 16;
    }
  }
}

template <int kM16, int kN8>
__device__ __forceinline__ void clear(float (&acc)[kM16][kN8][4]) {
#pragma unroll
  for (int m = 0; m < kM16; ++m) {
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0;
    }
  }
}

/// acc += A B over kK16 * 16 of the inner dimension; A and B from shared memory. `load_a`, `load_b` get (k, m
/// or pair of n) and fill a fragment: all of a step before its products, which then follow each other.
template <class T, MmaShape kShape, int kM16, int kN16, int kK16, class LoadA, class LoadB>
__device__ __forceinline__ void multiply(float (&acc)[kM16][2 * kN16][4], LoadA&& load_a, LoadB&& load_b) {
#pragma unroll
  for (int k = 0; k < kK16; ++k) {
    uint32_t a[kM16][4], b[kN16][4];
#pragma unroll
    for (int m = 0; m < kM16; ++m) load_a(a[m], k, m);
#pragma unroll
    for (int n = 0; n < kN16; ++n) load_b(b[n], k, n);
#pragma unroll
    for (int n = 0; n < kN16; ++n) {
#pragma unroll
      for (int m = 0; m < kM16; ++m) {
        mma<T, kShape>(acc[m][2 * n], a[m], b[n][0], b[n][1]);
        mma<T, kShape>(acc[m][2 * n + 1], a[m], b[n][2], b[n][3]);
      }
    }
  }
}

}  // namespace fovea::cuda
