// Merges the splits of a forward whose keys were divided among CTAs (num_splits).
//
//   lse = log(sum_n exp(lse_n) + exp(sink))      o = sum_n exp(lse_n - lse) o_n
//
// A warp merges a row. Reading part_o once bounds the time. Splits without a key (lse_n = -inf) are not read. A
// split with NaN makes the row NaN, and so does lse_n = +inf. This kernel also clears the rows that take no part:
// with splits, the main kernels write nothing but part_o and part_lse.
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
inline constexpr int kCombineRows = kCombineThreads / 32;  ///< rows of a CTA, a warp each

/// A warp for each (sequence, head, row of the longest sequence). At least one row has a warp: it clears the rows
/// beyond the last packed sequence when all sequences are empty.
constexpr int64_t fwd_combine_ctas(const ForwardArgs& args) {
  const int64_t rows =
      static_cast<int64_t>(args.p.batch) * args.p.heads_q * (args.p.seqlen_q > 0 ? args.p.seqlen_q : 1);
  return (rows + kCombineRows - 1) / kCombineRows;
}

/// The row that a warp merges.
struct CombineRow {
  tile::SequenceSpan span;
  int batch, head, row;  ///< of the sequence
  int64_t part;          ///< index of the row in part_lse of the first split
};

/// The sum of the splits' weights, as its largest term and the rest.
struct CombineWeights {
  float reference;  ///< weights are exp(lse_n - reference)
  float inverse;    ///< of the sum of weights; 0 without a key
  float lse;        ///< of the whole row
};

/// T: the type of q, which o has unless it is float32.
template <class T>
struct FwdCombine {
  const ForwardArgs& args;
  const tile::AttentionParams& p;
  const int lane;
  const int rows;  ///< of a sequence and head that have a warp

  __device__ __forceinline__ explicit FwdCombine(const ForwardArgs& arguments)
      : args(arguments),
        p(arguments.p),
        lane(static_cast<int>(threadIdx.x) % 32),
        rows(p.seqlen_q > 0 ? p.seqlen_q : 1) {}

  /// Finds the row of this warp. Returns whether there is one.
  __device__ __forceinline__ bool find_row(CombineRow& r) const {
    const int64_t index =
        static_cast<int64_t>(blockIdx.x) * kCombineRows + static_cast<int>(threadIdx.x) / 32;
    const int64_t sequence_head = index / rows;
    if (sequence_head >= static_cast<int64_t>(p.batch) * p.heads_q) return false;
    r.row = static_cast<int>(index % rows);
    r.head = static_cast<int>(sequence_head % p.heads_q);
    r.batch = static_cast<int>(sequence_head / p.heads_q);
    r.span = tile::sequence_span(p, r.batch);
    r.part = sequence_head * p.seqlen_q + r.row;
    return true;
  }

  /// Writes zeros and -inf to rows that take no part. The last packed sequence holds all rows that follow: this
  /// warp clears every rows-th of them.
  __device__ __forceinline__ void clear_unused(const CombineRow& r) const {
    for (int64_t i = r.row; i < r.span.length_q; i += rows) {
      if (i < r.span.used_q) continue;
      const int64_t offset = p.o.offset(r.batch, r.span.row_q + i, r.head);
      for (int c = lane; c < p.head_dim_v; c += 32) store(offset + c, 0.0f);
      if (lane == 0) write_lse(r, i, -INFINITY);
    }
  }

  /// Weighs the splits of a row, and its sink.
  __device__ __forceinline__ CombineWeights weigh(const CombineRow& r) const {
    const float* const part_lse = args.part_lse + r.part;
    const int64_t apart = splits_apart();
    const float sink = p.sink != nullptr ? p.sink[r.head] : -INFINITY;
    float largest = -INFINITY;
    for (int n = lane; n < args.num_splits; n += 32) largest = fmaxf(largest, part_lse[n * apart]);
    largest = fmaxf(warp_max(largest), sink);
    const float reference = largest == -INFINITY ? 0.0f : largest;
    float sum = 0;
    bool has_key = false;
    for (int n = lane; n < args.num_splits; n += 32) {
      const float lse = part_lse[n * apart];
      has_key = has_key || lse != -INFINITY;
      sum += exp_of(lse - reference);
    }
    has_key = __any_sync(~0u, has_key);
    sum = warp_sum(sum);
    if (p.sink != nullptr) sum += exp_of(sink - reference);
    return {reference, has_key ? 1.0f / sum : 0.0f, has_key ? largest + logf(sum) : sink};
  }

  /// Writes lse of query i of the row's sequence and head.
  __device__ __forceinline__ void write_lse(const CombineRow& r, int64_t i, float lse) const {
    if (p.lse.data != nullptr) p.lse.data[p.lse.offset(r.batch, r.head, r.span.row_q + i)] = lse;
  }

  /// Writes the weighted sum of the splits' outputs. Columns go over the lanes, four at a time where rows of
  /// part_o are multiples of 16 bytes.
  __device__ __forceinline__ void write_o(const CombineRow& r, const CombineWeights& weights) const {
    const int64_t offset = p.o.offset(r.batch, r.span.row_q + r.row, r.head);
    const bool vector = p.head_dim_v % 4 == 0;
    const int step = vector ? 128 : 32, width = vector ? 4 : 1;
    for (int column = lane * width; column - lane * width < p.head_dim_v; column += step) {
      float o[4] = {0, 0, 0, 0};
      add_splits(r, weights, column, vector, o);
      if (column >= p.head_dim_v) continue;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < width) store(offset + column + c, o[c]);
      }
    }
  }

 private:
  /// o += the weighted outputs of all splits in one column, or four. Lanes hold the weights of 32 splits at a
  /// time, so all take part, also those whose column does not exist.
  __device__ __forceinline__ void add_splits(const CombineRow& r, const CombineWeights& weights, int column,
                                             bool vector, float (&o)[4]) const {
    const float* const part_lse = args.part_lse + r.part;
    const float* const part_o = args.part_o + r.part * p.head_dim_v;
    const int64_t apart = splits_apart();
    const bool inside = column < p.head_dim_v;
    for (int first = 0; first < args.num_splits; first += 32) {
      float weight = 0;  // 0: the split is not read
      if (first + lane < args.num_splits)
        weight = exp_of(part_lse[(first + lane) * apart] - weights.reference) * weights.inverse;
      const int count = min(args.num_splits - first, 32);
#pragma unroll 4
      for (int n = 0; n < count; ++n) {
        const float w = __shfl_sync(~0u, weight, n);
        if (w == 0 || !inside) continue;
        const float* const from = part_o + (first + n) * apart * p.head_dim_v + column;
        if (vector) {
          const float4 x = *reinterpret_cast<const float4*>(from);
          o[0] = fmaf(w, x.x, o[0]), o[1] = fmaf(w, x.y, o[1]), o[2] = fmaf(w, x.z, o[2]),
          o[3] = fmaf(w, x.w, o[3]);
        } else {
          o[0] = fmaf(w, *from, o[0]);
        }
      }
    }
  }

  /// Rows from one split to the next in part_lse and part_o.
  __device__ __forceinline__ int64_t splits_apart() const {
    return static_cast<int64_t>(p.batch) * p.heads_q * p.seqlen_q;
  }
  __device__ __forceinline__ void store(int64_t offset, float x) const {
    if (p.o_is_f32()) {
      reinterpret_cast<float*>(p.o.data)[offset] = x;
    } else {
      reinterpret_cast<T*>(p.o.data)[offset] = T(x);
    }
  }
  static __device__ __forceinline__ float exp_of(float x) {
    return ptx::ex2(x * tile::kLog2e);
  }
  static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
  }
  static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
  }
};

template <class T>
__global__ void __launch_bounds__(kCombineThreads, 8) fwd_combine(const __grid_constant__ ForwardArgs args) {
  const FwdCombine<T> combine(args);
  CombineRow r;
  if (!combine.find_row(r)) return;
  combine.clear_unused(r);
  if (r.row >= r.span.used_q) return;
  const CombineWeights weights = combine.weigh(r);
  if (combine.lane == 0) combine.write_lse(r, r.row, weights.lse);
  combine.write_o(r, weights);
}

}  // namespace fovea::cuda
