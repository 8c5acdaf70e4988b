// Tiles of 16-bit elements out of rows of float8_e4m3fn: a thread copies chunks of 16 elements to a place of their own, where it finds them
// later and widens them into the tile. It reads no chunk of another's, so that its own copies are all that it waits for.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "tile/shared_tile.hpp"

namespace fovea::cuda {

/// Two float8_e4m3fn as T, exactly; the upper half of `pair` is not read.
template <class T>
__device__ __forceinline__ uint32_t two_of_e4m3(uint32_t pair) {
  const uint32_t halves = ptx::f16x2_of_e4m3x2(pair);
  if constexpr (std::is_same_v<T, __half>) return halves;
  const float2 x = unpack<__half>(halves);
  return pack<T>(x.x, x.y);
}
/// Eight of them.
template <class T>
__device__ __forceinline__ uint4 eight_of_e4m3(uint32_t first, uint32_t second) {
  return make_uint4(two_of_e4m3<T>(first), two_of_e4m3<T>(first >> 16), two_of_e4m3<T>(second),
                    two_of_e4m3<T>(second >> 16));
}

/// The elements of a Tile as they come, by kThreads threads.
template <class Tile, int kThreads>
struct WidenedTile {
  static constexpr int kChunkElements = 16, kChunks = Tile::kColumns / kChunkElements;  ///< of a row
  static constexpr int kBytes = Tile::kRows * Tile::kColumns;
  static_assert(Tile::kElementBytes == 2 && Tile::kColumns % kChunkElements == 0);

  /// Starts copying rows, of which row r lies at `row_at(r)` (null: zeros) on multiples of 16 bytes; columns from `columns` on, a multiple of
  /// 16, become zeros. The caller commits and waits.
  template <class RowAt>
  static __device__ __forceinline__ void copy(uint32_t raw, int columns, int thread, const RowAt& row_at) {
#pragma unroll 1
    for (int index = thread; index < Tile::kRows * kChunks; index += kThreads) {
      const int r = index / kChunks, chunk = index % kChunks;
      const char* row = row_at(r);
      ptx::cp_async_16(raw + index * kChunkElements, row + chunk * kChunkElements,
                       row != nullptr && chunk * kChunkElements < columns);
    }
  }
  /// The chunks that the thread has copied, to the tile. A barrier follows before anyone reads it.
  template <class T>
  static __device__ __forceinline__ void widen(uint32_t raw, uint32_t tile, int thread) {
#pragma unroll 2
    for (int index = thread; index < Tile::kRows * kChunks; index += kThreads) {
      const int r = index / kChunks, chunk = index % kChunks;
      const uint4 x = ptx::ld_shared_16(raw + index * kChunkElements);
      ptx::st_shared_16(tile + Tile::offset(r, 2 * chunk), eight_of_e4m3<T>(x.x, x.y));
      ptx::st_shared_16(tile + Tile::offset(r, 2 * chunk + 1), eight_of_e4m3<T>(x.z, x.w));
    }
  }
};

}  // namespace fovea::cuda
