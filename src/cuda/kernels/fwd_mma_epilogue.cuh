// The end of fwd_mma: from the sums of a row to O and lse.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_mma_config.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace fovea::cuda {

/// Writes a warp's rows: O and lse, or parts of them where keys are split. O passes through `sO`, statistics of
/// rows through `sK`: nobody may need what lies there.
template <class Instance>
struct FwdMmaEpilogue {
  using T = typename Instance::Element;
  static constexpr FwdMmaConfig kConfig = Instance::kConfig;
  using WorkTile = FwdMmaWorkTile<kConfig>;
  static constexpr int kDimV = kConfig.value_slice, kWarpM = kConfig.warp_m();
  static constexpr int kMTiles = kWarpM / 16, kOTiles = kDimV / 8;
  using TileO = SharedTile<kConfig.tile_m, kDimV>;
  using AccO = float[kMTiles][kOTiles][4];
  using Factors = float[kMTiles][2];

  const ForwardArgs& args;
  const WorkTile& work;
  const int warp, lane;
  const uint32_t sO, sK;

  /// `acc_o` is not normalised; the sums in `rows` are of this lane's columns. A warp with any output that is not
  /// finite computes its rows again.
  __device__ __forceinline__ void write(const AccO& acc_o, const Factors& row_max, const Factors& row_sum,
                                        float scale_log2, const tile::Dropout& dropout) const {
    if (any_not_finite(acc_o)) {
      write_exact_rows(dropout);
      return;
    }
    Factors factor;
    row_factors(row_max, row_sum, scale_log2, factor_of_values(dropout), factor);
    if (stores_f32(args, work)) {
      store_f32_rows(acc_o, factor);
    } else {
      put_in_shared(acc_o, factor);
      __syncwarp();  // a warp's rows of sO are written by its own lanes
      copy_out();
    }
  }

 private:
  /// What multiplies every output beside the sum of its row.
  __device__ __forceinline__ float factor_of_values(const tile::Dropout& dropout) const {
    if constexpr (kConfig.e4m3) return args.p.v_descale.at(work.batch, head_of_keys(args, work));
    return kConfig.dropout ? dropout.keep_scale : 1.0f;
  }
  __device__ __forceinline__ int columns() const { return min(kDimV, args.p.head_dim_v - work.first_column); }
  /// First row of the warp.
  __device__ __forceinline__ int warp_row() const { return work.first_row + warp * kWarpM; }

  /// Whether any output of the warp is NaN or infinite: 0 times these is NaN.
  __device__ __forceinline__ static bool any_not_finite(const AccO& acc_o) {
    float probe[4] = {};
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int ot = 0; ot < kOTiles; ++ot) {
#pragma unroll
        for (int e = 0; e < 4; ++e) probe[e] = fmaf(acc_o[mt][ot][e], 0.0f, probe[e]);
      }
    }
    return __any_sync(0xffffffffu, (probe[0] + probe[1]) + (probe[2] + probe[3]) != 0.0f);
  }

  /// Computes all rows of the warp again, key by key.
  __device__ __forceinline__ void write_exact_rows(const tile::Dropout& dropout) const {
    constexpr int kTileN = kConfig.tile_n;
#pragma unroll 1
    for (int r = 0; r < kWarpM; ++r) {
      const int row = warp_row() + r;
      if (row >= work.end_row) break;
      const auto write = [&](const auto& kept) {
        using Key = std::conditional_t<kConfig.e4m3, E4M3, T>;
        write_exact_row<T, kDimV, Key>(args, work, kept, row, work.first_column, columns(),
                                       work.n_begin * kTileN, work.n_end * kTileN);
      };
      if constexpr (kConfig.general || kConfig.dropout) {
        write(dropout);
      } else {
        write(NoDropout{});
      }
    }
  }

  /// The factors of this lane's rows, times `of_values`; writes lse. Statistics go through shared memory from the four lanes that
  /// hold a row to the one lane that finishes it, and back.
  __device__ __forceinline__ void row_factors(const Factors& row_max, const Factors& row_sum,
                                              float scale_log2, float of_values, Factors& factor) const {
    const uint32_t sRows = sK + warp * kWarpM * 8;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = row_total(row_sum[mt][half]), base = base_of(row_max[mt][half], scale_log2);
        if (lane % 4 == 0) {
          ptx::st_shared_8(sRows + (mt * 16 + half * 8 + lane / 4) * 8,
                           {__float_as_uint(base), __float_as_uint(sum)});
        }
      }
    }
    __syncwarp();  // the statistics are there
    const int row = warp_row() + lane;
    if (lane < kWarpM && row < work.end_row) {
      const uint2 statistics = ptx::ld_shared_8(sRows + lane * 8);
      const float of_row = finish_row(args, work, query_row(args, work, row), __uint_as_float(statistics.x),
                                      __uint_as_float(statistics.y), work.first_column == 0);
      ptx::st_shared_4(sRows + lane * 8, __float_as_uint(of_row * of_values));
    }
    __syncwarp();  // the factors are there
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        factor[mt][half] = __uint_as_float(ptx::ld_shared_4(sRows + (mt * 16 + half * 8 + lane / 4) * 8));
    }
  }

  /// O in float32, or this split's part of it, straight from registers.
  __device__ __forceinline__ void store_f32_rows(const AccO& acc_o, const Factors& factor) const {
    const int lane_column = 2 * (lane % 4), left = columns() - lane_column;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row() + mt * 16 + half * 8 + lane / 4;
        if (row >= work.end_row) continue;
        float* to = f32_row(args, work, query_row(args, work, row)) + work.first_column + lane_column;
#pragma unroll
        for (int ot = 0; ot < kOTiles; ++ot) {
          if (ot * 8 < left) to[ot * 8] = acc_o[mt][ot][2 * half] * factor[mt][half];
          if (ot * 8 + 1 < left) to[ot * 8 + 1] = acc_o[mt][ot][2 * half + 1] * factor[mt][half];
        }
      }
    }
  }

  /// The warp's rows of O, normalised and rounded, to sO.
  __device__ __forceinline__ void put_in_shared(const AccO& acc_o, const Factors& factor) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = warp * kWarpM + mt * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int ot = 0; ot < kOTiles; ++ot) {
          ptx::st_shared_4(sO + TileO::offset(r, ot) + 2 * (lane % 4) * 2,
                           pack<T>(acc_o[mt][ot][2 * half] * factor[mt][half],
                                   acc_o[mt][ot][2 * half + 1] * factor[mt][half]));
        }
      }
    }
  }

  /// The warp's rows from sO to O, 16 bytes a lane where that is allowed.
  __device__ __forceinline__ void copy_out() const {
    constexpr int kChunks = TileO::kChunks;
    const tile::AttentionParams& p = args.p;
    const bool aligned = (p.aligned16 & tile::kAlignedO) != 0;
    if (aligned && !args.pack_group && 32 % kChunks == 0) {
      // A lane keeps to one column of chunks: one address, and multiples of the distance between rows.
      constexpr int kRowsAtOnce = 32 / kChunks > 0 ? 32 / kChunks : 1;
      const int r0 = warp * kWarpM + lane / kChunks, chunk = lane % kChunks;
      T* to = reinterpret_cast<T*>(p.o.data) +
              p.o.offset(work.batch, work.span.row_q + work.first_row + r0, work.head) + work.first_column +
              chunk * 8;
      const int rows = chunk * 8 < columns() ? work.end_row - work.first_row - r0 : 0;
#pragma unroll
      for (int r = 0; r < kWarpM; r += kRowsAtOnce) {
        const uint4 words = ptx::ld_shared_16(sO + TileO::offset(r0 + r, chunk));
        if (r < rows) *reinterpret_cast<uint4*>(to + r * p.o.row) = words;
      }
      return;
    }
#pragma unroll 1
    for (int at = lane; at < kWarpM * kChunks; at += 32) {
      const int r = warp * kWarpM + at / kChunks, chunk = at % kChunks;
      const int row = work.first_row + r;
      const int left = columns() - chunk * 8;
      if (row >= work.end_row || left <= 0) continue;
      T* to = o_row<T>(args, work, query_row(args, work, row)) + work.first_column + chunk * 8;
      const uint4 words = ptx::ld_shared_16(sO + TileO::offset(r, chunk));
      if (aligned) {
        *reinterpret_cast<uint4*>(to) = words;
      } else {
        store_elements(reinterpret_cast<char*>(to), words, left);
      }
    }
  }
};

}  // namespace fovea::cuda
