// The end of fwd_mma: from the sums of a row to O and lse.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/fwd_mma_place.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/warp/exact_row.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/score_terms.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// Writes a warp's rows: O = acc_o / sum and lse, or parts of them where keys are split. row_max is in units
/// of the scores, scale_log2 makes them exponents of 2; row_sum is of this lane's columns. O passes through
/// `sO`, statistics of rows through `sK`: nobody may need what lies there. f32_row(i, head) is where a row
/// goes with as_f32, finish_row(i, head, base, sum) writes its lse and returns the factor of acc_o.
template <class Instance, int kMTiles, int kOTiles, class F32Row, class FinishRow>
__device__ __forceinline__ void store_rows(const ForwardArgs& args,
                                           const FwdMmaPlace<Instance::kConfig>& here, float scale_log2,
                                           const float (&acc_o)[kMTiles][kOTiles][4],
                                           const float (&row_max)[kMTiles][2],
                                           const float (&row_sum)[kMTiles][2], uint32_t sO, uint32_t sK,
                                           int warp, int lane, int columns, bool as_f32,
                                           const F32Row& f32_row, const FinishRow& finish_row) {
  using T = typename Instance::Element;
  constexpr FwdMmaConfig kConfig = Instance::kConfig;
  constexpr int kDimV = kConfig.value_slice;
  using TileO = SharedTile<kConfig.tile_m, kDimV>;
  const tile::AttentionParams& p = args.p;
  const int lane_row = lane / 4, lane_column = 2 * (lane % 4);

  // Statistics of rows, from the four lanes that hold a row to the one lane that finishes it, and back.
  const uint32_t sRows = sK + warp * kConfig.warp_m() * 8;
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[mt][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float base = row_max[mt][half] == -INFINITY ? 0.0f : row_max[mt][half] * scale_log2;
      if (lane % 4 == 0) {
        ptx::st_shared_8(sRows + (mt * 16 + half * 8 + lane_row) * 8,
                         {__float_as_uint(base), __float_as_uint(sum)});
      }
    }
  }
  __syncwarp();  // the statistics are there
  if (lane < kConfig.warp_m()) {
    const int row = here.first_row + warp * kConfig.warp_m() + lane;
    if (row < here.end_row) {
      const uint2 statistics = ptx::ld_shared_8(sRows + lane * 8);
      const float factor = finish_row(here.query_of(args, row), here.head_of(args, row),
                                      __uint_as_float(statistics.x), __uint_as_float(statistics.y));
      ptx::st_shared_4(sRows + lane * 8, __float_as_uint(factor));
    }
  }
  __syncwarp();  // the factors are there
  float factor[kMTiles][2];
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[mt][half] = __uint_as_float(ptx::ld_shared_4(sRows + (mt * 16 + half * 8 + lane_row) * 8));
    }
  }

  if (as_f32) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = here.first_row + warp * kConfig.warp_m() + mt * 16 + half * 8 + lane_row;
        if (row >= here.end_row) continue;
        float* to = f32_row(here.query_of(args, row), here.head_of(args, row)) + lane_column;
        const int left = columns - lane_column;
#pragma unroll
        for (int ot = 0; ot < kOTiles; ++ot) {
          if (ot * 8 < left) to[ot * 8] = acc_o[mt][ot][2 * half] * factor[mt][half];
          if (ot * 8 + 1 < left) to[ot * 8 + 1] = acc_o[mt][ot][2 * half + 1] * factor[mt][half];
        }
      }
    }
    return;
  }
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp * kConfig.warp_m() + mt * 16 + half * 8 + lane_row;
#pragma unroll
      for (int ot = 0; ot < kOTiles; ++ot) {
        ptx::st_shared_4(sO + TileO::offset(r, ot) + lane_column * 2,
                         pack<T>(acc_o[mt][ot][2 * half] * factor[mt][half],
                                 acc_o[mt][ot][2 * half + 1] * factor[mt][half]));
      }
    }
  }
  __syncwarp();  // a warp's rows of sO are written by its own lanes
  constexpr int kChunks = TileO::kChunks;
  if ((p.aligned16 & tile::kAlignedO) != 0 && !args.pack_group && 32 % kChunks == 0) {
    // A lane keeps to one column of chunks: one address, and multiples of the distance between rows.
    constexpr int kRowsAtOnce = 32 / kChunks > 0 ? 32 / kChunks : 1;
    const int r0 = warp * kConfig.warp_m() + lane / kChunks, chunk = lane % kChunks;
    T* to = reinterpret_cast<T*>(p.o.data) +
            p.o.offset(here.batch, here.span.row_q + here.first_row + r0, here.head) + here.first_column +
            chunk * 8;
    const int rows = chunk * 8 < columns ? here.end_row - here.first_row - r0 : 0;
#pragma unroll
    for (int r = 0; r < kConfig.warp_m(); r += kRowsAtOnce) {
      const uint4 words = ptx::ld_shared_16(sO + TileO::offset(r0 + r, chunk));
      if (r < rows) *reinterpret_cast<uint4*>(to + r * p.o.row) = words;
    }
    return;
  }
#pragma unroll 1
  for (int at = lane; at < kConfig.warp_m() * kChunks; at += 32) {
    const int r = warp * kConfig.warp_m() + at / kChunks, chunk = at % kChunks;
    const int row = here.first_row + r;
    const int left = columns - chunk * 8;
    if (row >= here.end_row || left <= 0) continue;
    T* to = reinterpret_cast<T*>(p.o.data) +
            p.o.offset(here.batch, here.span.row_q + here.query_of(args, row), here.head_of(args, row)) +
            here.first_column + chunk * 8;
    const uint4 words = ptx::ld_shared_16(sO + TileO::offset(r, chunk));
    if ((p.aligned16 & tile::kAlignedO) != 0) {
      *reinterpret_cast<uint4*>(to) = words;
    } else {
      store_elements(reinterpret_cast<char*>(to), words, left);
    }
  }
}

/// A warp's rows again, one after the other and without matrix products: as store_rows writes them.
template <class Instance, class F32Row, class FinishRow>
__device__ __forceinline__ void store_exact_rows(const ForwardArgs& args,
                                                 const FwdMmaPlace<Instance::kConfig>& here,
                                                 const tile::Dropout& dropout, int warp, int lane,
                                                 int columns, bool as_f32, const F32Row& f32_row,
                                                 const FinishRow& finish_row) {
  using T = typename Instance::Element;
  constexpr FwdMmaConfig kConfig = Instance::kConfig;
  constexpr int kTileN = kConfig.tile_n;
  const tile::AttentionParams& p = args.p;
#pragma unroll 1
  for (int r = 0; r < kConfig.warp_m(); ++r) {
    const int row = here.first_row + warp * kConfig.warp_m() + r;
    if (row >= here.end_row) break;
    const int i = here.query_of(args, row), head = here.head_of(args, row);
    ExactRow<kConfig.value_slice> exact;
    exact.add(p, RowTerms<T>(p, here.span, here.batch, head, i), dropout,
              reinterpret_cast<const T*>(p.q.data) + p.q.offset(here.batch, here.span.row_q + i, head),
              reinterpret_cast<const T*>(here.k), reinterpret_cast<const T*>(here.v), columns,
              tile::keys_of(p, here.span, i), here.n_begin * kTileN, here.n_end * kTileN);
    const float factor =
        finish_row(i, head, exact.maximum == -INFINITY ? 0.0f : exact.maximum * tile::kLog2e, exact.sum);
#pragma unroll
    for (int n32 = 0; n32 < ExactRow<kConfig.value_slice>::kPerLane; ++n32) {
      const int c = lane + 32 * n32;
      if (c >= columns) break;
      if (as_f32) {
        f32_row(i, head)[c] = exact.o[n32] * factor;
      } else {
        reinterpret_cast<T*>(
            p.o.data)[p.o.offset(here.batch, here.span.row_q + i, head) + here.first_column + c] =
            static_cast<T>(exact.o[n32] * factor);
      }
    }
  }
}

}  // namespace fovea::cuda
