// Merges the splits of a forward whose keys were divided among CTAs (num_splits): a warp has some columns of a row (merge_parts.cuh), or
// where these are few and parts are many, the four warps of a CTA share the parts; where rows are many and parts few, a warp has four rows
// (merge_rows.cuh). It also clears the rows that take no part: with splits, the main kernels write nothing but part_o and part_lse.
//
// What bounds it where rows are few is latency: a read of parts follows the other. So it begins while the main kernel ends, and asks for the
// first parts before it knows what they weigh.
//
// Grid     fwd_combine_ctas(args).
// Block    kCombineThreads threads.
// Shared   sums of the warps that share parts.
// Reads    part_o, part_lse; writes o and, where there is one, lse.
#pragma once

#include "cuda/kernels/merge_parts.cuh"
#include "cuda/kernels/merge_rows.cuh"
#include "cuda/ptx/grid.cuh"

namespace fovea::cuda {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineWarps = kCombineThreads / 32;

/// How a launch is shared out. Of each sequence and head there is at least one row: it clears the rows beyond the last packed sequence when
/// all sequences are empty.
struct CombineShape {
  int rows;     ///< of a sequence and head
  int columns;  ///< that a warp has: all, or where that leaves SMs idle as many as it merges at a time
  int chunks;   ///< of so many columns
  int64_t items;
  bool shares_parts;     ///< the warps of a CTA, of an item
  int rows_of_warp = 1;  ///< or kRowsOfWarp: an item is so many rows

  constexpr explicit CombineShape(const ForwardArgs& args)
      : rows(args.p.seqlen_q > 0 ? args.p.seqlen_q : 1), columns(columns_at_once(args.p.head_dim_v)) {
    const int64_t all_rows = static_cast<int64_t>(args.p.batch) * args.p.heads_q * rows;
    if (all_rows > kManyRows) columns = args.p.head_dim_v;
    chunks = (args.p.head_dim_v + columns - 1) / columns;
    if (all_rows > kManyRows && args.num_splits <= kPartsOfRow && args.p.head_dim_v % 4 == 0)
      rows_of_warp = kRowsOfWarp;
    items = (all_rows * chunks + rows_of_warp - 1) / rows_of_warp;
    shares_parts = !args.parts_in_turn && args.num_splits >= kManyParts && items <= kFewItems;
  }

  /// Warps of half of an SM each. Two reads of each of four warps in place of eight of one; CTAs of one wave, a few an SM.
  static constexpr int kManyRows = 1024, kManyParts = 8, kFewItems = 512;
};

constexpr int64_t fwd_combine_ctas(const ForwardArgs& args) {
  const CombineShape shape(args);
  return shape.shares_parts ? shape.items : (shape.items + kCombineWarps - 1) / kCombineWarps;
}

/// Adds up what the warps of a CTA have found. True in warp 0, which has the sum.
__device__ __forceinline__ bool add_over_warps(float (&o)[4], float4 (&sums)[kCombineWarps][32]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  sums[warp][lane] = make_float4(o[0], o[1], o[2], o[3]);
  __syncthreads();  // the sums of all are there
  if (warp != 0) return false;
#pragma unroll
  for (int other = 1; other < kCombineWarps; ++other) {
    const float4 x = sums[other][lane];
    o[0] += x.x, o[1] += x.y, o[2] += x.z, o[3] += x.w;
  }
  return true;
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads, 6) fwd_combine(const __grid_constant__ ForwardArgs args) {
  __shared__ float4 sums[kCombineWarps][32];
  const tile::AttentionParams& p = args.p;
  const CombineShape shape(args);
  const int warp = static_cast<int>(threadIdx.x) / 32, step = shape.shares_parts ? kCombineWarps : 1,
            begin = shape.shares_parts ? warp : 0;  // parts of this warp: begin, begin + step and so on
  const unsigned item =
      shape.shares_parts ? blockIdx.x : blockIdx.x * kCombineWarps + static_cast<unsigned>(warp);
  if (item >= shape.items) return;
  if (shape.rows_of_warp > 1) {
    merge_rows<T>(args, static_cast<int64_t>(item) * kRowsOfWarp, shape.rows);
    return;
  }
  const unsigned row_of_all = item / shape.chunks, plane = row_of_all / shape.rows;
  const int chunk = static_cast<int>(item - row_of_all * shape.chunks),
            row = static_cast<int>(row_of_all - plane * shape.rows),
            batch = static_cast<int>(plane / p.heads_q), head = static_cast<int>(plane - batch * p.heads_q);
  const tile::SequenceSpan span = tile::cached_span(p, batch);
  const bool first_of_row = chunk == 0 && (warp == 0 || step == 1);
  if (first_of_row) clear_unused<T>(p, span, batch, head, row, shape.rows);
  // Parts are there. All wait, so that this launch does not end before that which writes them.
  ptx::wait_for_launches_before();
  ptx::let_next_launch_begin();
  if (row >= span.used_q) return;
  const int64_t first = static_cast<int64_t>(plane) * p.seqlen_q + row;
  const int64_t apart = static_cast<int64_t>(p.batch) * p.heads_q * p.seqlen_q;  // of splits
  const auto part_at = [&](int n) { return first + n * apart; };
  constexpr int kInFlight = 8;
  const MergeParts<T, kInFlight, decltype(part_at)> merge(args, args.num_splits, part_at);
  const int first_column = chunk * shape.columns, end = min(first_column + shape.columns, p.head_dim_v);
  auto reads = merge.read_parts(first_column, begin, step);
  const PartWeights weights = merge.weigh(head);  // while these are on their way
  if (first_of_row) merge.write_lse(batch, head, span.row_q + row, weights);
  float o[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int column = first_column, part = begin;;) {
    merge.add_reads(weights, reads, part, step, o);
    part += kInFlight * step;
    if (part >= args.num_splits) {
      if (step > 1 && !add_over_warps(o, sums)) return;  // an item has no further columns
      merge.write_o(batch, head, span.row_q + row, column, o);
      column += columns_at_once(p.head_dim_v), part = begin;
      if (column >= end) return;
      for (float& x : o) x = 0;
    }
    reads = merge.read_parts(column, part, step);
  }
}

}  // namespace fovea::cuda
