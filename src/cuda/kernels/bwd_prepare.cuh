// Before the main kernel of the backward: statistics of the rows, and zeros where dq is summed and turns are
// counted.
//
//   lse_log2 = lse log2(e)             +inf for rows that take no part: their weights become exp2(-inf) = 0;
//   NaN for +inf delta    = rowsum(dO o O) - dlse   0 for rows that take no part
//
// for all rows up to used_q rounded up to kRowPadding, so that main kernels need not look at used_q.
//
// Launch: grid (any number, heads_q, batch), best ceil(seqlen_q / kPrepareRows); block kPrepareThreads; no
// shared memory.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/score_terms.cuh"

namespace fovea::cuda {

inline constexpr int kPrepareThreads = 256;
/// Eight lanes read a row: 128 bytes at a time, a whole line of L2, at the smallest usual head size.
inline constexpr int kPrepareLanes = 8;
inline constexpr int kPrepareRows = kPrepareThreads / kPrepareLanes;

template <class T>
__global__ void __launch_bounds__(kPrepareThreads) bwd_prepare(const __grid_constant__ BackwardArgs args) {
  const tile::AttentionParams& p = args.p;
  const int columns = args.dq_columns;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  const int padded =
      (span.used_q + BackwardArgs::kRowPadding - 1) / BackwardArgs::kRowPadding * BackwardArgs::kRowPadding;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kPrepareLanes;
  const int64_t statistics = (static_cast<int64_t>(batch) * p.heads_q + head) * args.rows;
  const bool wide = sizeof(T) == 2 && (p.aligned16 & tile::kAlignedO) != 0 &&
                    (p.aligned16 & tile::kAlignedDO) != 0 && !p.o_is_f32();

  if (args.turns != nullptr && blockIdx.x == 0 && head == 0 && batch == 0 && thread < args.turn_columns())
    args.turns[thread] = 0;  // no CTA has begun
  for (int first = static_cast<int>(blockIdx.x) * kPrepareRows; first < padded;
       first += static_cast<int>(gridDim.x) * kPrepareRows) {
    // A multiple of 16 rows is contiguous in every layout of dq_sum.
    auto* const sums = reinterpret_cast<float4*>(args.dq_sum + (statistics + first) * columns);
    for (int index = thread; index < kPrepareRows * columns / 4; index += kPrepareThreads) {
      sums[index] = make_float4(0, 0, 0, 0);
    }
    static_assert(kPrepareRows == BackwardArgs::kTurnRows);
    if (args.turns != nullptr && thread < args.turn_columns())
      args.turns[args.turn_at(batch, head, first, thread)] = 0;

    const int row = first + thread / kPrepareLanes;
    float sum = 0;
    if (row < span.used_q) {
      const char* const d_o =
          p.d_o.data + p.d_o.offset(batch, span.row_q + row, head) * static_cast<int>(sizeof(T));
      const int64_t o_offset = p.o.offset(batch, span.row_q + row, head);
      if (wide) {
        const auto* const o_words =
            reinterpret_cast<const uint4*>(p.o.data + o_offset * static_cast<int>(sizeof(T)));
        const auto* const d_o_words = reinterpret_cast<const uint4*>(d_o);
#pragma unroll 2
        for (int c = lane; c < p.head_dim_v / 8; c += kPrepareLanes) {
          const uint4 x = __ldg(o_words + c), y = __ldg(d_o_words + c);
          const T* const xs = reinterpret_cast<const T*>(&x);
          const T* const ys = reinterpret_cast<const T*>(&y);
#pragma unroll
          for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) sum += to_float(xs[e]) * to_float(ys[e]);
        }
      } else {
        for (int c = lane; c < p.head_dim_v; c += kPrepareLanes) {
          sum += load_either<T>(p.o.data, o_offset + c, p.o_is_f32()) *
                 to_float(__ldg(reinterpret_cast<const T*>(d_o) + c));
        }
      }
    }
#pragma unroll
    for (int distance = kPrepareLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(~0u, sum, distance);
    }
    if (lane == 0 && row < padded) {
      constexpr float kLog2E = 1.4426950408889634f;
      float lse = -INFINITY;
      if (row < span.used_q) lse = p.lse.data[p.lse.offset(batch, head, span.row_q + row)];
      const bool takes_part = lse != -INFINITY;
      if (takes_part && p.dlse.data != nullptr)
        sum -= p.dlse.data[p.dlse.offset(batch, head, span.row_q + row)];
      args.lse_log2[statistics + row] = !takes_part ? INFINITY : (lse == INFINITY ? NAN : lse * kLog2E);
      args.delta[statistics + row] = takes_part ? sum : 0.0f;
    }
  }
}

}  // namespace fovea::cuda
