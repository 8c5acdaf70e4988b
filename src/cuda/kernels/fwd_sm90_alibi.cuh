// ALiBi in fwd_sm90. Where all keys of a block lie on one side of a warp's rows, a distance is linear in the key, and one more step of
// Q K^T adds it:
//
//   S + factor |distance| = S - (+-factor) column + factor |distance of the block's first key|
//                               |          |        a number of a row and block: `shift`, which the exponents' bases take
//                               |          operand B: 0 to kTileN - 1, the same for all blocks, in shared memory
//                               operand A: a row's factor as three bfloat16 parts, whose sum is exact
//
// It costs a step of head_dim / 16 + 1, and no instruction for each element. In the blocks that rows cross, operand A is 0 and an element
// takes an addition and an FMA.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/warp/alibi.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// In its place in kernels without ALiBi.
struct NoAlibi {
  struct Operand {};
};

/// Of a lane's two rows.
struct FwdSm90Alibi {
  float factor[2];      ///< of Q K^T: the slope over the scale, negative
  int diagonal[2];      ///< the key position of the query
  uint32_t parts[2];    ///< the lane's elements of operand A, for keys that come before the rows
  int lowest, highest;  ///< of the diagonals of the warp's rows

  /// Where a block of `keys` keys lies: before all rows of the warp, behind them, or neither.
  enum class Side { kBefore, kBehind, kAcross };
  /// Operand A of the step that adds distances.
  struct Operand {
    uint32_t a[4];
  };

  __device__ __forceinline__ Side side_of(int first_key, int keys) const {
    if (first_key + keys - 1 <= lowest) return Side::kBefore;
    return first_key >= highest ? Side::kBehind : Side::kAcross;
  }

  /// Reads the slopes of the tile's rows. The largest of the warp's factors: of the two rows, without its sign.
  __device__ __forceinline__ float begin(const ForwardArgs& f, const FwdWorkTile& work) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A row behind the last one has a slope, too, that nobody looks at.
      const int row = min(work.first_row + 16 * warp_index() + lane_index() / 4 + 8 * half, work.end_row - 1);
      const QueryRow query = query_row(f, work, max(row, 0));
      factor[half] = -alibi_slope(f.p, work.batch, query.head) / f.p.scale;
      diagonal[half] = query.query + work.span.used_k - work.span.used_q;
      parts[half] = parts_of_lane(-factor[half]);
    }
    const float largest = fmaxf(fabsf(factor[0]), fabsf(factor[1]));
    lowest = __reduce_min_sync(0xffffffffu, min(diagonal[0], diagonal[1]));
    highest = __reduce_max_sync(0xffffffffu, max(diagonal[0], diagonal[1]));
    // An infinite factor times column 0 would be NaN, so that all distances of such rows are taken one by one.
    if (__any_sync(0xffffffffu, !(largest < INFINITY))) {
      lowest = -1;
      highest = 0x7fffffff;
    }
    return largest;
  }

  /// Operand A for keys on `side`: columns 0 to 2 of each row; the others, which are 0 in operand B, too, are 0.
  __device__ __forceinline__ Operand operand(Side side) const {
    const uint32_t signs = side == Side::kBehind ? 0x80008000u : 0;
    const bool linear = side != Side::kAcross;
    return {{linear ? parts[0] ^ signs : 0, linear ? parts[1] ^ signs : 0, 0, 0}};
  }
  /// What all scores of row `half` in a block lack that its product has added to.
  __device__ __forceinline__ float shift(Side side, int half, int first_key) const {
    if (side == Side::kAcross) return 0;
    const auto distance = static_cast<float>(diagonal[half] - first_key);
    return factor[half] * (side == Side::kBefore ? distance : -distance);
  }
  /// The distances of a block that rows cross, one by one.
  template <int kElements>
  __device__ __forceinline__ void add_each(float (&acc_s)[kElements], int first_key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      add_distances<-1>(acc_s, half, factor[half],
                        static_cast<float>(diagonal[half] - first_key - 2 * (lane_index() % 4)));
  }

 private:
  /// The two elements of a row of operand A that the lane holds (tile::WgmmaOperandA): x = high + middle + low.
  __device__ __forceinline__ static uint32_t parts_of_lane(float x) {
    constexpr uint32_t kPart = 0xffff0000u;  // the upper half is a bfloat16: cut off, nothing overflows
    const uint32_t high = __float_as_uint(x) & kPart;
    const float rest = x - __uint_as_float(high);
    const uint32_t middle = __float_as_uint(rest) & kPart,
                   low = __float_as_uint(rest - __uint_as_float(middle)) & kPart;
    const int columns = lane_index() % 4;
    return columns == 0 ? high >> 16 | middle : columns == 1 ? low >> 16 : 0;
  }
};

/// Operand B of that step: `tile_n` rows of 16 elements, of which the first three are the row's number.
struct AlibiColumns {
  static constexpr tile::SwizzleMode kMode = tile::SwizzleMode::k32;
  static constexpr int kRowBytes = tile::swizzle_row_bytes(kMode);
  static constexpr tile::WgmmaDescriptor at(uint32_t start) { return tile::wgmma_k_major(start, kMode); }

  /// By `threads` threads of the CTA; wgmma sees it after a __syncthreads().
  __device__ __forceinline__ static void fill(uint32_t start, int tile_n, int thread, int threads) {
    for (int row = thread; row < tile_n; row += threads) {
      const uint32_t number = __float_as_uint(static_cast<float>(row)) >> 16;  // exact up to 256
      ptx::st_shared_16(tile::wgmma_k_major_address(at(start), row, 0),
                        uint4{number << 16 | number, number, 0, 0});
      ptx::st_shared_16(tile::wgmma_k_major_address(at(start), row, 1), uint4{});
    }
    ptx::async_proxy_fence();
  }
};

}  // namespace fovea::cuda
