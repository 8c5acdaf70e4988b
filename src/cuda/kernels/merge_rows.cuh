// Four rows of the forward from up to eight parts of their keys each, by a warp: lane 8 r + n weighs part n of row r, and all lanes
// add up the columns of one row after the other. Equations as in merge_parts.cuh, sums in the same order, so with the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/merge_parts.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/special.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

inline constexpr int kPartsOfRow = 8, kRowsOfWarp = 32 / kPartsOfRow;

/// What a lane knows of its row and part.
struct RowOfMerge {
  int batch, head, query;
  bool exists;   ///< the row is one of the launch
  bool merges;   ///< and takes part
  int64_t to;    ///< where its outputs go in o
  float weight;  ///< of the lane's part
  float lse;     ///< of the row
};

/// Largest value, or sum, over the lanes of a row; in the order of warp_sum (MergeParts), whose other lanes hold 0.
__device__ __forceinline__ float parts_maximum(float x) {
#pragma unroll
  for (int apart = kPartsOfRow / 2; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}
__device__ __forceinline__ float parts_total(float x) {
#pragma unroll
  for (int apart = kPartsOfRow / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}

/// Weighs the lane's part, whose lse is `lse`; sets `weight` and `lse` of the row.
__device__ __forceinline__ void weigh_part(const tile::AttentionParams& p, float lse, RowOfMerge& row) {
  const auto exp_of = [](float x) { return ptx::ex2(x * tile::kLog2e); };
  const float sink = p.sink != nullptr && row.merges ? p.sink[row.head] : -INFINITY;
  const float largest = fmaxf(parts_maximum(lse), sink);
  const float reference = largest == -INFINITY ? 0.0f : largest;
  const float share = exp_of(lse - reference);
  float sum = parts_total(share);
  const bool has_key = parts_maximum(lse != -INFINITY ? 1.0f : 0.0f) != 0.0f;
  if (p.sink != nullptr) sum += exp_of(sink - reference);
  row.weight = share * (has_key ? 1.0f / sum : 0.0f);
  row.lse = has_key ? largest + logf(sum) : sink;
}

/// Merges rows [first, first + kRowsOfWarp) of all, of which a sequence and head have `rows`. The whole warp calls it; head_dim_v is a
/// multiple of 4.
template <class T>
__device__ __forceinline__ void merge_rows(const ForwardArgs& args, int64_t first, int rows) {
  const tile::AttentionParams& p = args.p;
  const int lane = static_cast<int>(threadIdx.x) % 32, part = lane % kPartsOfRow;
  const int64_t apart = static_cast<int64_t>(p.batch) * p.heads_q * p.seqlen_q;  // of splits
  const int64_t own = first + lane / kPartsOfRow;
  RowOfMerge row = {};
  row.exists = own < static_cast<int64_t>(p.batch) * p.heads_q * rows;
  const unsigned plane = row.exists ? static_cast<unsigned>(own) / static_cast<unsigned>(rows) : 0;
  row.query = row.exists ? static_cast<int>(static_cast<unsigned>(own) - plane * rows) : 0;
  row.batch = tile::quotient(static_cast<int>(plane), p.heads_q);
  row.head = static_cast<int>(plane) - row.batch * p.heads_q;
  const tile::SequenceSpan span = tile::cached_span(p, row.batch);
  row.merges = row.exists && row.query < span.used_q;
  row.to = p.o.offset(row.batch, span.row_q + row.query, row.head);
  if (__any_sync(~0u, row.exists && span.length_q > min(span.used_q, rows))) {  // some rows take no part
#pragma unroll 1
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int of_row = r * kPartsOfRow;
      const int batch = __shfl_sync(~0u, row.batch, of_row), head = __shfl_sync(~0u, row.head, of_row),
                query = __shfl_sync(~0u, row.query, of_row);
      if (__shfl_sync(~0u, row.exists, of_row))
        clear_unused<T>(p, tile::cached_span(p, batch), batch, head, query, rows);
    }
  }
  ptx::wait_for_launches_before();  // parts are there
  ptx::let_next_launch_begin();
  const int columns = columns_at_once(p.head_dim_v), width = columns / 32;
  const int parts = args.num_splits;
  weigh_part(p, row.merges && part < parts ? args.part_lse[own + part * apart] : -INFINITY, row);
  if (row.merges && part == 0 && p.lse.data != nullptr)
    p.lse.data[p.lse.offset(row.batch, row.head, span.row_q + row.query)] = row.lse;
  const int64_t next_part = apart * p.head_dim_v;
#pragma unroll 1
  for (int before = 0; before < p.head_dim_v; before += columns) {
    const int column = before + lane * width;
    const bool exists = column < p.head_dim_v;
    const float* from = args.part_o + first * p.head_dim_v + column;  // the first row's of part n
    float o[kRowsOfWarp][4] = {};
#pragma unroll 1
    for (int n = 0; n < parts;
         n += 2, from += 2 * next_part) {  // reads of two parts of all rows are on their way at a time
      float4 x[kRowsOfWarp][2];
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const bool reads = __shfl_sync(~0u, row.merges, r * kPartsOfRow) && exists;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[r][i] = make_float4(0, 0, 0, 0);
          if (reads && n + i < parts)
            x[r][i] = *reinterpret_cast<const float4*>(from + r * p.head_dim_v + i * next_part);
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          add_weighted(n + i < parts ? __shfl_sync(~0u, row.weight, r * kPartsOfRow + n + i) : 0.0f, x[r][i],
                       o[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const bool merges = __shfl_sync(~0u, row.merges, r * kPartsOfRow);
      const int64_t to = __shfl_sync(~0u, row.to, r * kPartsOfRow);
      if (merges && exists) store_four<T>(p, to + column, o[r]);
    }
  }
}

}  // namespace fovea::cuda
