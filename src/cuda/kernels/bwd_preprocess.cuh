// Before the main kernel of the backward: statistics of the rows, and zeros in the sums of dq where all add to them, in their semaphore,
// the counter of tiles and the flag of gradients that are not finite.
//
//   lse_log2 = lse log2(e)              +inf for rows that take no part: their weights are exp2(-inf) = 0
//                                       NaN for lse = +inf
//   delta    = rowsum(dO o O) - dlse    0 for rows that take no part
//
// for all rows up to used_q rounded up to kRowPadding, so that main kernels need not look at used_q.
//
// Launch
//   grid    (any number, heads_q, batch), best bwd_preprocess_grid
//   block   kPreprocessThreads
//   shared  none
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/first_stores.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/warp/elements.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

inline constexpr int kPreprocessThreads = 256;
/// Eight lanes read a row: 128 bytes at a time, a whole line of L2, at the smallest usual head size.
inline constexpr int kPreprocessLanes = 8;
inline constexpr int kPreprocessRows = kPreprocessThreads / kPreprocessLanes;

/// Whether a thread has two rows at a time, kPreprocessRows apart: where it writes no zeros and a row takes it a single load, what a CTA costs
/// counts (H200, 16,384 tokens of 32 heads of 64: 53 us for 69). Beside zeros it gains nothing.
constexpr bool preprocess_takes_two(const BackwardArgs& args, int element_bytes) {
  return first_stores(args) && args.p.head_dim_v * element_bytes <= kPreprocessLanes * 16;
}
template <class Grid, class T>
constexpr Grid bwd_preprocess_grid(const BackwardArgs& args) {
  const int rows = (preprocess_takes_two(args, sizeof(T)) ? 2 : 1) * kPreprocessRows;
  const int blocks = (args.p.seqlen_q + rows - 1) / rows;
  return {blocks > 0 ? blocks : 1, args.p.heads_q, args.p.batch};
}

/// This thread's share of the zeros of kRows times kPreprocessRows rows: their sums of dq, unless the first to add stores, and whose turn it
/// is at their tiles. A multiple of 16 rows is contiguous in every layout of dq_sum.
template <int kRows>
__device__ __forceinline__ void clear_dq_sums(const BackwardArgs& args, int batch, int head,
                                              int64_t rows_before, int first, int thread) {
  if constexpr (kRows == 1) {  // two rows a thread are for those who store
    auto* const sums = reinterpret_cast<float4*>(args.dq_sum + (rows_before + first) * args.dq_columns);
    const int pieces = first_stores(args) ? 0 : kPreprocessRows * args.dq_columns / 4;
    for (int index = thread; index < pieces; index += kPreprocessThreads) {
      sums[index] = make_float4(0, 0, 0, 0);
    }
  }
  static_assert(kPreprocessRows == BackwardArgs::kSemaphoreRows);
  if (args.dq_semaphore != nullptr && thread < kRows * args.semaphore_columns())
    args.dq_semaphore[args.semaphore_at(batch, head, first, 0) + thread] = 0;
}

/// This lane's share of the dot product of o and dO of a row. `wide`: both can be read 16 bytes at a time.
template <class T>
__device__ __forceinline__ float dot_of_lane(const tile::AttentionParams& p, int64_t o_offset,
                                             const char* d_o, bool wide, int lane) {
  constexpr int kVector = static_cast<int>(16 / sizeof(T));
  float sum = 0;
  if (wide) {
    const auto* const o_words =
        reinterpret_cast<const uint4*>(p.o.data + o_offset * static_cast<int>(sizeof(T)));
    const auto* const d_o_words = reinterpret_cast<const uint4*>(d_o);
#pragma unroll 2
    for (int c = lane; c < p.head_dim_v / kVector; c += kPreprocessLanes) {
      const uint4 x = __ldg(o_words + c), y = __ldg(d_o_words + c);
      const T* const xs = reinterpret_cast<const T*>(&x);
      const T* const ys = reinterpret_cast<const T*>(&y);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum += to_float(xs[e]) * to_float(ys[e]);
    }
  } else {
    for (int c = lane; c < p.head_dim_v; c += kPreprocessLanes) {
      sum += load_either<T>(p.o.data, o_offset + c, p.o_is_f32()) *
             to_float(__ldg(reinterpret_cast<const T*>(d_o) + c));
    }
  }
  return sum;
}

/// Writes lse_log2 and delta of a row from its dot product.
__device__ __forceinline__ void write_statistics(const BackwardArgs& args, const tile::SequenceSpan& span,
                                                 int batch, int head, int64_t rows_before, int row,
                                                 float dot) {
  const tile::AttentionParams& p = args.p;
  float lse = -INFINITY;
  if (row < span.used_q) lse = p.lse.data[p.lse.offset(batch, head, span.row_q + row)];
  const bool takes_part = lse != -INFINITY;
  if (takes_part && p.dlse.data != nullptr) dot -= p.dlse.data[p.dlse.offset(batch, head, span.row_q + row)];
  args.lse_log2[rows_before + row] = !takes_part ? INFINITY : (lse == INFINITY ? NAN : lse * tile::kLog2e);
  args.delta[rows_before + row] = takes_part ? dot : 0.0f;
}

/// kRows times kPreprocessRows rows from `first` on.
template <class T, int kRows>
__device__ __forceinline__ void preprocess_rows(const BackwardArgs& args, const tile::SequenceSpan& span,
                                                int batch, int head, int64_t rows_before, int first,
                                                int padded, bool wide) {
  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kPreprocessLanes;
  clear_dq_sums<kRows>(args, batch, head, rows_before, first, thread);
  float sums[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = first + i * kPreprocessRows + thread / kPreprocessLanes;
    if (row >= span.used_q) continue;
    const char* const d_o =
        p.d_o.data + p.d_o.offset(batch, span.row_q + row, head) * static_cast<int>(sizeof(T));
    sums[i] = dot_of_lane<T>(p, p.o.offset(batch, span.row_q + row, head), d_o, wide, lane);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int distance = kPreprocessLanes / 2; distance > 0; distance /= 2)
      sums[i] += __shfl_xor_sync(~0u, sums[i], distance);
    const int row = first + i * kPreprocessRows + thread / kPreprocessLanes;
    if (lane == 0 && row < padded) write_statistics(args, span, batch, head, rows_before, row, sums[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kPreprocessThreads)
    bwd_preprocess(const __grid_constant__ BackwardArgs args) {
  ptx::let_next_launch_begin();
  const tile::AttentionParams& p = args.p;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  const int padded =
      (span.used_q + BackwardArgs::kRowPadding - 1) / BackwardArgs::kRowPadding * BackwardArgs::kRowPadding;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t rows_before = (static_cast<int64_t>(batch) * p.heads_q + head) * args.rows;
  const bool wide = (p.aligned16 & tile::kAlignedO) != 0 && (p.aligned16 & tile::kAlignedDO) != 0 &&
                    p.o_is_f32() == (sizeof(T) == 4);

  if (blockIdx.x == 0 && head == 0 && batch == 0) {  // no CTA of the main kernel has begun
    if (args.dq_semaphore != nullptr && thread < args.semaphore_columns()) args.dq_semaphore[thread] = 0;
    if (args.tile_counter != nullptr && thread == 0) *args.tile_counter = 0;
    if (args.not_finite != nullptr && thread == 0) *args.not_finite = 0;
  }
  const auto run = [&]<int kRows>() {
    constexpr int kOfCta = kRows * kPreprocessRows;
    for (int first = static_cast<int>(blockIdx.x) * kOfCta; first < padded;
         first += static_cast<int>(gridDim.x) * kOfCta)
      preprocess_rows<T, kRows>(args, span, batch, head, rows_before, first, padded, wide);
  };
  if (preprocess_takes_two(args, sizeof(T))) {
    run.template operator()<2>();
  } else {
    run.template operator()<1>();
  }
}

}  // namespace fovea::cuda
