// Merges the splits of a forward whose keys were divided among CTAs (num_splits), a warp a row (merge_parts.cuh). It also
// clears the rows that take no part: with splits, the main kernels write nothing but part_o and part_lse.
//
// Grid     fwd_combine_ctas(args).
// Block    kCombineThreads threads. No shared memory.
// Reads    part_o, part_lse; writes o and, where there is one, lse.
#pragma once

#include "cuda/kernels/merge_parts.cuh"

namespace fovea::cuda {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineRows = kCombineThreads / 32;  ///< rows of a CTA, a warp each

/// A warp for each (sequence, head, row of the longest sequence). At least one row has a warp: it clears the rows
/// beyond the last packed sequence when all sequences are empty.
constexpr int64_t fwd_combine_ctas(const ForwardArgs& args) {
  const int64_t rows =
      static_cast<int64_t>(args.p.batch) * args.p.heads_q * (args.p.seqlen_q > 0 ? args.p.seqlen_q : 1);
  return (rows + kCombineRows - 1) / kCombineRows;
}

/// Writes zeros and -inf to the rows of a sequence that take no part. The last packed sequence holds all rows that follow: the
/// warp of row `row` clears every rows-th of them.
template <class T>
__device__ __forceinline__ void clear_unused(const tile::AttentionParams& p, const tile::SequenceSpan& span,
                                             int batch, int head, int row, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t i = row; i < span.length_q; i += rows) {
    if (i < span.used_q) continue;
    const int64_t offset = p.o.offset(batch, span.row_q + i, head);
    for (int c = lane; c < p.head_dim_v; c += 32) store_o<T>(p, offset + c, 0.0f);
    if (lane == 0 && p.lse.data != nullptr) p.lse.data[p.lse.offset(batch, head, span.row_q + i)] = -INFINITY;
  }
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads, 8) fwd_combine(const __grid_constant__ ForwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const int rows = p.seqlen_q > 0 ? p.seqlen_q : 1;  // of a sequence and head that have a warp
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kCombineRows + static_cast<int>(threadIdx.x) / 32;
  const int64_t plane = index / rows;
  if (plane >= static_cast<int64_t>(p.batch) * p.heads_q) return;
  const int row = static_cast<int>(index % rows), head = static_cast<int>(plane % p.heads_q),
            batch = static_cast<int>(plane / p.heads_q);
  const tile::SequenceSpan span = tile::cached_span(p, batch);
  clear_unused<T>(p, span, batch, head, row, rows);
  if (row >= span.used_q) return;
  const int64_t first = plane * p.seqlen_q + row;
  const int64_t apart = static_cast<int64_t>(p.batch) * p.heads_q * p.seqlen_q;  // of splits
  const auto part_at = [&](int n) { return first + n * apart; };
  constexpr int kInFlight = 4;
  MergeParts<T, kInFlight, decltype(part_at)>(args, args.num_splits, part_at)
      .write(batch, head, span.row_q, row);
}

}  // namespace fovea::cuda
