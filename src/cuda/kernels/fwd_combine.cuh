// Merges the parts of a forward that was split over the keys.
//
//   lse = log(sum_n exp(lse_n) + exp(sink))      o = sum_n exp(lse_n - lse) o_n
//
// A warp merges a row; it is bound by reading part_o once. Parts without a key (lse_n = -inf) are not read. A
// part that is NaN makes the row NaN, and so does one with lse_n = +inf. Rows that take no part are cleared
// here: kernels with splits write nothing but parts.
//
// Grid     fwd_combine_ctas(args).
// Block    kCombineThreads threads. No shared memory.
// Reads    part_o, part_lse; writes o and, where there is one, lse.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/special.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

inline constexpr int kCombineThreads = 128;
inline constexpr int kCombineRows = kCombineThreads / 32;  ///< rows of a CTA

/// A warp for each (sequence, head, row of the longest sequence); where there are none, but rows beyond the
/// last packed sequence, the warps of its first row clear them.
constexpr int64_t fwd_combine_ctas(const ForwardArgs& args) {
  const int64_t rows =
      static_cast<int64_t>(args.p.batch) * args.p.heads_q * (args.p.seqlen_q > 0 ? args.p.seqlen_q : 1);
  return (rows + kCombineRows - 1) / kCombineRows;
}

namespace combine {

template <class T>
__device__ __forceinline__ void store(const tile::AttentionParams& p, int64_t offset, float x) {
  if (p.o_is_f32()) {
    reinterpret_cast<float*>(p.o.data)[offset] = x;
  } else {
    reinterpret_cast<T*>(p.o.data)[offset] = T(x);
  }
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

}  // namespace combine

/// T: the type of q, which o has unless it is float32.
template <class T>
__global__ void __launch_bounds__(kCombineThreads, 8) fwd_combine(const __grid_constant__ ForwardArgs args) {
  using tile::kLog2e;
  const tile::AttentionParams& p = args.p;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int rows = p.seqlen_q > 0 ? p.seqlen_q : 1;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kCombineRows + static_cast<int>(threadIdx.x) / 32;
  const int64_t sequence_head = index / rows;
  if (sequence_head >= static_cast<int64_t>(p.batch) * p.heads_q) return;
  const int row = static_cast<int>(index % rows);
  const int head = static_cast<int>(sequence_head % p.heads_q),
            batch = static_cast<int>(sequence_head / p.heads_q);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);

  // The last packed sequence holds all rows that follow: this warp clears every rows-th of them.
  for (int64_t i = row; i < span.length_q; i += rows) {
    if (i < span.used_q) continue;
    const int64_t offset = p.o.offset(batch, span.row_q + i, head);
    for (int c = lane; c < p.head_dim_v; c += 32) combine::store<T>(p, offset + c, 0.0f);
    if (lane == 0 && p.lse.data != nullptr) p.lse.data[p.lse.offset(batch, head, span.row_q + i)] = -INFINITY;
  }
  if (row >= span.used_q) return;

  const int64_t parts_apart = static_cast<int64_t>(p.batch) * p.heads_q * p.seqlen_q;
  const float* part_lse = args.part_lse + sequence_head * p.seqlen_q + row;
  const float* part_o = args.part_o + (sequence_head * p.seqlen_q + row) * p.head_dim_v;
  const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;

  float largest = -INFINITY;
  for (int n = lane; n < args.num_splits; n += 32) largest = fmaxf(largest, part_lse[n * parts_apart]);
  largest = fmaxf(combine::warp_max(largest), sink);
  const float reference = largest == -INFINITY ? 0.0f : largest;
  float sum = 0;
  bool has_key = false;
  for (int n = lane; n < args.num_splits; n += 32) {
    const float lse = part_lse[n * parts_apart];
    has_key = has_key || lse != -INFINITY;
    sum += ptx::ex2((lse - reference) * kLog2e);
  }
  has_key = __any_sync(~0u, has_key);
  sum = combine::warp_sum(sum);
  if (p.sink != nullptr) sum += ptx::ex2((sink - reference) * kLog2e);
  const float lse = has_key ? largest + logf(sum) : sink;
  const float inverse = has_key ? 1.0f / sum : 0.0f;
  if (lane == 0 && p.lse.data != nullptr) p.lse.data[p.lse.offset(batch, head, span.row_q + row)] = lse;

  // Weights of 32 parts at a time lie in the lanes; columns go over the lanes, four at a time where rows of
  // parts are multiples of 16 bytes.
  const int64_t offset = p.o.offset(batch, span.row_q + row, head);
  const bool vector = p.head_dim_v % 4 == 0;
  const int step = vector ? 128 : 32, width = vector ? 4 : 1;
  for (int column = lane * width; column - lane * width < p.head_dim_v; column += step) {
    const bool inside = column < p.head_dim_v;
    float o[4] = {0, 0, 0, 0};
    for (int first = 0; first < args.num_splits; first += 32) {
      float weight = 0;  // 0: the part is not read
      if (first + lane < args.num_splits) {
        weight = ptx::ex2((part_lse[(first + lane) * parts_apart] - reference) * kLog2e) * inverse;
      }
      const int count = min(args.num_splits - first, 32);
#pragma unroll 4
      for (int n = 0; n < count; ++n) {
        const float w = __shfl_sync(~0u, weight, n);
        if (w == 0 || !inside) continue;
        const float* from = part_o + (first + n) * parts_apart * p.head_dim_v + column;
        if (vector) {
          const float4 x = *reinterpret_cast<const float4*>(from);
          o[0] = fmaf(w, x.x, o[0]), o[1] = fmaf(w, x.y, o[1]), o[2] = fmaf(w, x.z, o[2]),
          o[3] = fmaf(w, x.w, o[3]);
        } else {
          o[0] = fmaf(w, *from, o[0]);
        }
      }
    }
    if (!inside) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < width) combine::store<T>(p, offset + column + c, o[c]);
    }
  }
}

}  // namespace fovea::cuda
