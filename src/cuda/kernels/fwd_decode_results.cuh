// Of the kernels that decode: the end of a tile. What warps or warpgroups have found over different keys lies in shared memory,
// where rows are merged, and goes to o or to a part in global memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_decode_config.cuh"
#include "cuda/ptx/special.cuh"

namespace fovea::cuda {

/// A warp that merges rows and writes them.
template <class Instance>
struct FwdDecodeResults {
  using T = typename Instance::Element;
  using Memory = FwdDecodeMemory<Instance>;
  static constexpr auto kConfig = Instance::kConfig;
  using Key = std::conditional_t<kConfig.e4m3, E4M3, T>;
  static constexpr int kWarps = kConfig.warps;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;

  const ForwardArgs& f;
  const Memory& memory;
  const int warp, lane;

  /// A row merged from its results over different keys, of which a lane has columns 128 i + 4 lane and the next three.
  struct MergedRow {
    static constexpr int kColumnsAtOnce = 4 * 32,
                         kVectors = (kConfig.head_dim_v + kColumnsAtOnce - 1) / kColumnsAtOnce;
    float base, sum;  ///< weights are relative to 2^base
    float o[kVectors][4] = {};

    __device__ __forceinline__ bool is_finite() const {
      bool finite = isfinite(sum);
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        finite = finite && (o[i][0] + o[i][1] + o[i][2] + o[i][3]) * 0.0f == 0.0f;
      return finite;
    }
    static __device__ __forceinline__ int column(int i, int lane) {
      return i * kColumnsAtOnce + 4 * lane;
    }
  };
  /// Merges a row of `kCount` results, at most 32: their states lie `state_step` behind each other, their rows of O `o_step` floats.
  template <int kCount>
  __device__ __forceinline__ MergedRow merge(const RowState* states, int state_step, const float* o,
                                             int o_step, int count = kCount) const {
    const RowState own = lane < count ? states[lane * state_step] : RowState{-INFINITY, 0.0f};
    MergedRow row;
    row.base = own.base;
#pragma unroll
    for (int distance = 1; distance < kCount; distance *= 2)
      row.base = fmaxf(row.base, __shfl_xor_sync(kWholeWarp, row.base, distance));
    row.base = __shfl_sync(kWholeWarp, row.base, 0);
    const float weight = own.base == -INFINITY ? 0.0f : ptx::ex2(own.base - row.base);
    row.sum = lane < count ? own.sum * weight : 0.0f;
#pragma unroll
    for (int distance = 1; distance < kCount; distance *= 2)
      row.sum += __shfl_xor_sync(kWholeWarp, row.sum, distance);
    row.sum = __shfl_sync(kWholeWarp, row.sum, 0);
#pragma unroll
    for (int i = 0; i < MergedRow::kVectors; ++i) {
      const int column = MergedRow::column(i, lane);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const float factor = __shfl_sync(kWholeWarp, weight, n);
        const bool there = n < count && column < kConfig.head_dim_v;
        const float4 x = there ? *reinterpret_cast<const float4*>(o + n * o_step + column) : float4{};
        row.o[i][0] = fmaf(factor, x.x, row.o[i][0]), row.o[i][1] = fmaf(factor, x.y, row.o[i][1]);
        row.o[i][2] = fmaf(factor, x.z, row.o[i][2]), row.o[i][3] = fmaf(factor, x.w, row.o[i][3]);
      }
    }
    return row;
  }
  /// Row `row` of all results of the CTA.
  __device__ __forceinline__ MergedRow merge_results(int row) const {
    return merge<kConfig.results()>(memory.states(0) + row, kConfig.tile_m,
                                    memory.o(0) + row * kConfig.head_dim_v, kConfig.result_step() / 4);
  }
  /// Ends a row of a tile of these pieces, and writes it.
  __device__ __forceinline__ void write_row(const FwdWorkTile& work, const tile::KvBlocks& pieces, int row,
                                            const MergedRow& merged) const {
    if (__any_sync(kWholeWarp, !merged.is_finite())) {
      write_exact_row<T, kConfig.head_dim_v, Key>(f, work, NoDropout{}, row, 0, f.p.head_dim_v,
                                                  pieces.begin * kConfig.unit_keys(),
                                                  pieces.end * kConfig.unit_keys());
      return;
    }
    const QueryRow r = query_row(f, work, row);
    float factor = finish_row(f, work, r, merged.sum == 0.0f ? 0.0f : merged.base, merged.sum, lane == 0);
    if constexpr (kConfig.e4m3) factor *= f.p.v_descale.at(work.batch, head_of_keys(f, work));
#pragma unroll
    for (int i = 0; i < MergedRow::kVectors; ++i) {
      const int column = MergedRow::column(i, lane);
      if (column >= f.p.head_dim_v) continue;  // a multiple of 4
      if (stores_f32(f, work)) {
        float* const to = f32_row(f, work, r) + column;
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = merged.o[i][e] * factor;
      } else {
        T* const to = o_row<T>(f, work, r) + column;
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = static_cast<T>(merged.o[i][e] * factor);
      }
    }
  }

  /// Merges what the CTA has found of rows below `end_row`, and writes it.
  __device__ __forceinline__ void write_rows(const tile::KvBlocks& pieces, int end_row) const {
#pragma unroll 1
    for (int row = warp; row < end_row; row += kWarps)
      write_row(*memory.work_tile(warp), pieces, row, merge_results(row));
  }
};

}  // namespace fovea::cuda
