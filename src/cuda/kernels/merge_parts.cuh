// One row of the forward from parts of its keys:
//
//   lse = log(sum_n exp(lse_n) + exp(sink))      o = sum_n exp(lse_n - lse) o_n
//
// A warp merges a row, or some of its columns from some of the parts. Reading part_o once bounds the time.
// Parts without a key (lse_n = -inf) do not count. A part with NaN makes the row NaN, and so does lse_n = +inf.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/special.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// The sum of the parts' weights, as its largest term and the rest.
struct PartWeights {
  float reference;  ///< weights are exp(lse_n - reference)
  float inverse;    ///< of the sum of weights; 0 without a key
  float lse;        ///< of the whole row
};

/// Columns that a warp merges at a time: four a lane where rows of part_o are multiples of 16 bytes.
constexpr int columns_at_once(int head_dim_v) {
  return head_dim_v % 4 == 0 ? 128 : 32;
}

/// Writes element `offset` of o, which has type T unless it is float32.
template <class T>
__device__ __forceinline__ void store_o(const tile::AttentionParams& p, int64_t offset, float x) {
  if (p.o_is_f32()) {
    reinterpret_cast<float*>(p.o.data)[offset] = x;
  } else {
    reinterpret_cast<T*>(p.o.data)[offset] = T(x);
  }
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

/// Writes elements [offset, offset + 4) of o, at once where all its rows are aligned.
template <class T>
__device__ __forceinline__ void store_four(const tile::AttentionParams& p, int64_t offset,
                                           const float (&o)[4]) {
  if ((p.aligned16 & tile::kAlignedO) == 0) {
#pragma unroll
    for (int c = 0; c < 4; ++c) store_o<T>(p, offset + c, o[c]);
  } else if (sizeof(T) == 4 || p.o_is_f32()) {
    *reinterpret_cast<float4*>(reinterpret_cast<float*>(p.o.data) + offset) =
        make_float4(o[0], o[1], o[2], o[3]);
  } else {
    alignas(8) T packed[4] = {T(o[0]), T(o[1]), T(o[2]), T(o[3])};
    *reinterpret_cast<uint2*>(reinterpret_cast<T*>(p.o.data) + offset) =
        *reinterpret_cast<const uint2*>(packed);
  }
}

/// o += weight x.
__device__ __forceinline__ void add_weighted(float weight, const float4& x, float (&o)[4]) {
  if (weight == 0) return;  // without a key: what is read there has no meaning
  o[0] = fmaf(weight, x.x, o[0]), o[1] = fmaf(weight, x.y, o[1]), o[2] = fmaf(weight, x.z, o[2]),
  o[3] = fmaf(weight, x.w, o[3]);
}

/// `PartAt`: the index in part_lse (and in part_o, times head_dim_v) of the row in part n. kInFlight: reads of part_o that a
/// lane starts before it needs the first.
template <class T, int kInFlight, class PartAt>
struct MergeParts {
  const ForwardArgs& args;
  const tile::AttentionParams& p;
  const int lane, count;  ///< of parts
  const PartAt part_at;

  __device__ __forceinline__ MergeParts(const ForwardArgs& arguments, int count_, const PartAt& part_at_)
      : args(arguments),
        p(arguments.p),
        lane(static_cast<int>(threadIdx.x) % 32),
        count(count_),
        part_at(part_at_) {}

  /// Writes o and lse of query `query` of head `head`; `row_q` is the first row of the sequence.
  __device__ __forceinline__ void write(int batch, int head, int64_t row_q, int query) const {
    const PartWeights weights = weigh(head);
    write_lse(batch, head, row_q + query, weights);
    for (int first = 0; first < p.head_dim_v; first += columns_at_once(p.head_dim_v)) {
      float o[4] = {0, 0, 0, 0};
      add_parts(weights, first, 0, 1, o);
      write_o(batch, head, row_q + query, first, o);
    }
  }

  __device__ __forceinline__ void write_lse(int batch, int head, int64_t row,
                                            const PartWeights& weights) const {
    if (lane == 0 && p.lse.data != nullptr) p.lse.data[p.lse.offset(batch, head, row)] = weights.lse;
  }
  /// Writes the lane's of the columns from `first` on.
  __device__ __forceinline__ void write_o(int batch, int head, int64_t row, int first,
                                          const float (&o)[4]) const {
    if (column_of_lane(first) >= p.head_dim_v) return;
    const int64_t offset = p.o.offset(batch, row, head) + column_of_lane(first);
    if (width() == 4) {
      store_four<T>(p, offset, o);
    } else {
      store_o<T>(p, offset, o[0]);
    }
  }

  /// Weighs the parts, and the sink.
  __device__ __forceinline__ PartWeights weigh(int head) const {
    const float sink = p.sink != nullptr ? p.sink[head] : -INFINITY;
    float largest = -INFINITY;
    for (int n = lane; n < count; n += 32) largest = fmaxf(largest, args.part_lse[part_at(n)]);
    largest = fmaxf(warp_max(largest), sink);
    const float reference = largest == -INFINITY ? 0.0f : largest;
    float sum = 0;
    bool has_key = false;
    for (int n = lane; n < count; n += 32) {
      const float lse = args.part_lse[part_at(n)];
      has_key = has_key || lse != -INFINITY;
      sum += exp_of(lse - reference);
    }
    has_key = __any_sync(~0u, has_key);
    sum = warp_sum(sum);
    if (p.sink != nullptr) sum += exp_of(sink - reference);
    return {reference, has_key ? 1.0f / sum : 0.0f, has_key ? largest + logf(sum) : sink};
  }

  /// What a lane has asked for: its columns of kInFlight parts. Nothing of it depends on weights, so that it may be on its way meanwhile.
  struct Reads {
    float4 x[kInFlight];
  };
  /// Of parts begin, begin + step and so on, the lane's of the columns from `first` on.
  __device__ __forceinline__ Reads read_parts(int first, int begin, int step) const {
    Reads reads;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) reads.x[i] = read_part(begin + i * step, column_of_lane(first));
    return reads;
  }

  /// o += the weighted outputs of the parts of which `reads` are.
  __device__ __forceinline__ void add_reads(const PartWeights& weights, const Reads& reads, int begin,
                                            int step, float (&o)[4]) const {
    static_assert(kInFlight <= 32);
    const int own = begin + lane * step;
    const float weight = lane < kInFlight && own < count ? weight_of(weights, own) : 0.0f;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) add_weighted(__shfl_sync(~0u, weight, i), reads.x[i], o);
  }
  /// o += the weighted outputs of parts begin, begin + step and so on, in the lane's of the columns from `first` on. Lanes hold the
  /// weights of 32 parts at a time, so all take part, also those whose column does not exist.
  __device__ __forceinline__ void add_parts(const PartWeights& weights, int first, int begin, int step,
                                            float (&o)[4]) const {
    static_assert(32 % kInFlight == 0);
    const int own = (count - begin + step - 1) / step;
    for (int before = 0; before < own; before += 32) {
      float weight = 0;
      if (before + lane < own) weight = weight_of(weights, begin + (before + lane) * step);
#pragma unroll 1
      for (int next = 0; next < min(own - before, 32); next += kInFlight) {
        const Reads reads = read_parts(first, begin + (before + next) * step, step);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) add_weighted(__shfl_sync(~0u, weight, next + i), reads.x[i], o);
      }
    }
  }

 private:
  __device__ __forceinline__ int width() const {
    return columns_at_once(p.head_dim_v) / 32;
  }
  __device__ __forceinline__ int column_of_lane(int first) const {
    return first + lane * width();
  }
  __device__ __forceinline__ float weight_of(const PartWeights& weights, int n) const {
    return exp_of(args.part_lse[part_at(n)] - weights.reference) * weights.inverse;
  }
  __device__ __forceinline__ float4 read_part(int n, int column) const {
    float4 x = make_float4(0, 0, 0, 0);
    if (n >= count || column >= p.head_dim_v) return x;
    const float* const from = args.part_o + part_at(n) * p.head_dim_v + column;
    if (width() == 4) {
      x = *reinterpret_cast<const float4*>(from);
    } else {
      x.x = *from;
    }
    return x;
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

}  // namespace fovea::cuda
