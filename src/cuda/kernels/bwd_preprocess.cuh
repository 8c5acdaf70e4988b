// Before the main kernel of the backward: statistics of the rows, and zeros in the sums of dq, their semaphore
// and the counter of tiles.
//
//   lse_log2 = lse log2(e)              +inf for rows that take no part: their weights are exp2(-inf) = 0
//                                       NaN for lse = +inf
//   delta    = rowsum(dO o O) - dlse    0 for rows that take no part
//
// for all rows up to used_q rounded up to kRowPadding, so that main kernels need not look at used_q.
//
// Launch
//   grid    (any number, heads_q, batch), best ceil(seqlen_q / kPreprocessRows)
//   block   kPreprocessThreads
//   shared  none
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/score_terms.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

inline constexpr int kPreprocessThreads = 256;
/// Eight lanes read a row: 128 bytes at a time, a whole line of L2, at the smallest usual head size.
inline constexpr int kPreprocessLanes = 8;
/// Each lane reads its share of two rows at a time: twice the bytes in flight.
inline constexpr int kPreprocessGroups = kPreprocessThreads / kPreprocessLanes,
                     kPreprocessRows = 2 * kPreprocessGroups;

/// This thread's share of the zeros of kPreprocessRows rows: their sums of dq, and whose turn it is at their tiles.
/// A multiple of 16 rows is contiguous in every layout of dq_sum.
__device__ __forceinline__ void clear_dq_sums(const BackwardArgs& args, int batch, int head,
                                              int64_t rows_before, int first, int thread) {
  auto* const sums = reinterpret_cast<float4*>(args.dq_sum + (rows_before + first) * args.dq_columns);
  for (int index = thread; index < kPreprocessRows * args.dq_columns / 4; index += kPreprocessThreads) {
    sums[index] = make_float4(0, 0, 0, 0);
  }
  static_assert(kPreprocessRows % BackwardArgs::kSemaphoreRows == 0 &&
                BackwardArgs::kRowPadding % kPreprocessRows == 0);
  if (args.dq_semaphore != nullptr && thread < args.semaphore_columns()) {
    for (int row = first; row < first + kPreprocessRows; row += BackwardArgs::kSemaphoreRows)
      args.dq_semaphore[args.semaphore_at(batch, head, row, thread)] = 0;
  }
}

/// This lane's share of the dot products of o and dO of two rows, each of which may not exist: then 0. `wide`: they can be
/// read 16 bytes at a time.
template <class T>
__device__ __forceinline__ void dots_of_lane(const tile::AttentionParams& p, const int64_t (&o_offset)[2],
                                             const int64_t (&d_o_offset)[2], const bool (&exists)[2],
                                             bool wide, int lane, float (&sums)[2]) {
  constexpr int kBytes = static_cast<int>(sizeof(T)), kWord = 16 / kBytes;
  if (wide) {
#pragma unroll 2
    for (int c = lane; c < p.head_dim_v / kWord; c += kPreprocessLanes) {
      uint4 x[2] = {}, y[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!exists[r]) continue;
        x[r] = __ldg(reinterpret_cast<const uint4*>(p.o.data + o_offset[r] * kBytes) + c);
        y[r] = __ldg(reinterpret_cast<const uint4*>(p.d_o.data + d_o_offset[r] * kBytes) + c);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const T* const xs = reinterpret_cast<const T*>(&x[r]);
        const T* const ys = reinterpret_cast<const T*>(&y[r]);
#pragma unroll
        for (int e = 0; e < kWord; ++e) sums[r] += to_float(xs[e]) * to_float(ys[e]);
      }
    }
  } else {
    for (int r = 0; r < 2; ++r) {
      if (!exists[r]) continue;
      const T* const d_o = reinterpret_cast<const T*>(p.d_o.data) + d_o_offset[r];
      for (int c = lane; c < p.head_dim_v; c += kPreprocessLanes)
        sums[r] += load_either<T>(p.o.data, o_offset[r] + c, p.o_is_f32()) * to_float(__ldg(d_o + c));
    }
  }
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

template <class T>
__global__ void __launch_bounds__(kPreprocessThreads)
    bwd_preprocess(const __grid_constant__ BackwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  const int padded =
      (span.used_q + BackwardArgs::kRowPadding - 1) / BackwardArgs::kRowPadding * BackwardArgs::kRowPadding;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kPreprocessLanes;
  const int64_t rows_before = (static_cast<int64_t>(batch) * p.heads_q + head) * args.rows;
  const bool wide = sizeof(T) == 2 && (p.aligned16 & tile::kAlignedO) != 0 &&
                    (p.aligned16 & tile::kAlignedDO) != 0 && !p.o_is_f32();

  if (blockIdx.x == 0 && head == 0 && batch == 0) {  // no CTA of the main kernel has begun
    if (args.dq_semaphore != nullptr && thread < args.semaphore_columns()) args.dq_semaphore[thread] = 0;
    if (args.tile_counter != nullptr && thread == 0) *args.tile_counter = 0;
  }
  for (int first = static_cast<int>(blockIdx.x) * kPreprocessRows; first < padded;
       first += static_cast<int>(gridDim.x) * kPreprocessRows) {
    clear_dq_sums(args, batch, head, rows_before, first, thread);
    int64_t o_offset[2] = {}, d_o_offset[2] = {};
    bool exists[2];
    float sums[2] = {};
    const int row = first + thread / kPreprocessLanes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      exists[r] = row + r * kPreprocessGroups < span.used_q;
      if (!exists[r]) continue;
      o_offset[r] = p.o.offset(batch, span.row_q + row + r * kPreprocessGroups, head);
      d_o_offset[r] = p.d_o.offset(batch, span.row_q + row + r * kPreprocessGroups, head);
    }
    dots_of_lane<T>(p, o_offset, d_o_offset, exists, wide, lane, sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int distance = kPreprocessLanes / 2; distance > 0; distance /= 2)
        sums[r] += __shfl_xor_sync(~0u, sums[r], distance);
      if (lane == 0)
        write_statistics(args, span, batch, head, rows_before, row + r * kPreprocessGroups, sums[r]);
    }
  }
}

}  // namespace fovea::cuda
