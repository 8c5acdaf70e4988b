// What a CTA of fwd_tf32 works on, its configuration, and how a row ends: normalised, or computed once more.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/exact_row.cuh"
#include "cuda/warp/score_terms.cuh"
#include "tile/kv_blocks.hpp"

namespace fovea::cuda {

/// The tile of a CTA, from the index of the CTA: tiles of `heads_at_once` heads, whose K and V fit the L2
/// cache together, run at the same time, the longest rows first (under causal the last tile sees most keys).
struct FwdTf32Work {
  int m_block, head, batch;

  __device__ static __forceinline__ FwdTf32Work of(const ForwardArgs& args, unsigned index, int heads,
                                                   int m_blocks) {
    const unsigned at_once = args.heads_at_once, planes = heads * args.p.batch, blocks = m_blocks;
    const unsigned first = index / (at_once * blocks) * at_once, rest = index - first * blocks;
    const unsigned width = min(at_once, planes - first);  // the last section may be smaller
    const unsigned block = rest / width, plane = first + rest % width;
    return {static_cast<int>(blocks - 1 - block), static_cast<int>(plane % heads),
            static_cast<int>(plane / heads)};
  }
};

/// What a CTA of fwd_tf32 works on.
struct FwdTf32Place {
  FwdTf32Work work;
  tile::SequenceSpan span;
  int end_row;
  int n_begin, n_end;  ///< blocks of keys
  const float *k, *v;  ///< key 0 of the sequence
};

struct FwdTf32Config {
  int head_dim;  ///< of Q, K and of V, O, padded to 32, 64, 128 or 256
  int tile_n;    ///< keys of a block
  int warp_m;    ///< rows of a warp, 16 or 32
  int num_warps;
  int min_ctas;          ///< CTAs an SM, for the register allocator
  bool general = false;  ///< every term of the score; else window, causal and lengths only, and scale > 0

  constexpr int threads() const { return 32 * num_warps; }
  constexpr int tile_m() const { return warp_m * num_warps; }
  // Offsets in shared memory.
  constexpr int offset_k() const { return tile_m() * head_dim * 4; }
  constexpr int offset_v() const { return offset_k() + tile_n * head_dim * 4; }
  constexpr int offset_place() const { return offset_v() + tile_n * head_dim * 4; }
  constexpr int offset_warps() const { return offset_place() + static_cast<int>(sizeof(FwdTf32Place)); }
  constexpr int shared_bytes() const {
    return offset_warps() + num_warps * static_cast<int>(sizeof(tile::KvBlocks));
  }
};

/// 1 / x within an ulp, for x of [1, 2^64) (or NaN, Inf); without the branches of an exact division.
__device__ __forceinline__ float reciprocal(float x) {
  const float r = __fdividef(1.0f, x);
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}

/// What normalises a row.
struct RowResult {
  float factor;  ///< of the weighted sum of values
  float lse;
};

/// `sum` of exp(score - base); the sink is one more key of that score without a value.
__device__ __forceinline__ RowResult row_result(float sum, float base, float sink) {
  if (sink == -INFINITY) {
    if (sum == 0.0f) return {0.0f, -INFINITY};
    return {reciprocal(sum), base + logf(sum)};
  }
  if (sum == 0.0f) return {0.0f, sink};
  const float top = fmaxf(base, sink);  // so that neither exponential overflows
  const float weight = expf(base - top), with_sink = sum * weight + expf(sink - top);
  return {weight * reciprocal(with_sink), top + logf(with_sink)};
}

__device__ __forceinline__ float sink_of(const tile::AttentionParams& p, int num_splits, int head) {
  return p.sink != nullptr && num_splits == 1 ? p.sink[head] : -INFINITY;  // parts: fwd_combine adds it
}

/// Where query i of a head goes: o, or this split's part of it.
__device__ __forceinline__ int64_t part_row(const ForwardArgs& args, const FwdTf32Place& place, int head,
                                            int i) {
  const int64_t plane =
      (static_cast<int64_t>(blockIdx.y) * args.p.batch + place.work.batch) * args.p.heads_q + head;
  return plane * args.p.seqlen_q + i;
}
__device__ __forceinline__ float* row_output(const ForwardArgs& args, const FwdTf32Place& place, int head,
                                             int i) {
  const tile::AttentionParams& p = args.p;
  if (args.num_splits > 1) return args.part_o + part_row(args, place, head, i) * p.head_dim_v;
  return reinterpret_cast<float*>(p.o.data) + p.o.offset(place.work.batch, place.span.row_q + i, head);
}
__device__ __forceinline__ void write_lse(const ForwardArgs& args, const FwdTf32Place& place, int head, int i,
                                          float lse) {
  const tile::AttentionParams& p = args.p;
  if (args.num_splits > 1) {
    args.part_lse[part_row(args, place, head, i)] = lse;
  } else if (p.lse.data != nullptr) {
    p.lse.data[p.lse.offset(place.work.batch, head, place.span.row_q + i)] = lse;
  }
}

/// A row once more, without tensor cores, and its output. The whole warp takes part.
template <int kDim>
__device__ __forceinline__ void write_exact_row(const ForwardArgs& args, const FwdTf32Place& place, int head,
                                                int i, int key_begin, int key_end) {
  const tile::AttentionParams& p = args.p;
  const tile::SequenceSpan& span = place.span;
  const int batch = place.work.batch, head_kv = head / p.group, lane = static_cast<int>(threadIdx.x) % 32;
  const RowTerms<float> terms(p, span, batch, head, i);
  ExactRow<kDim> row;
  row.add(p, terms, tile::dropout_of(p),
          reinterpret_cast<const float*>(p.q.data) + p.q.offset(batch, span.row_q + i, head),
          reinterpret_cast<const float*>(p.k.data) + p.k.offset(batch, span.row_k, head_kv),
          reinterpret_cast<const float*>(p.v.data) + p.v.offset(batch, span.row_k, head_kv), p.head_dim_v,
          tile::keys_of(p, span, i), key_begin, key_end);
  const RowResult result = row_result(row.sum, row.maximum, sink_of(p, args.num_splits, head));
  float* const to = row_output(args, place, head, i);
#pragma unroll
  for (int n = 0; n < ExactRow<kDim>::kPerLane; ++n) {
    if (n * 32 + lane < p.head_dim_v) to[n * 32 + lane] = row.o[n] * result.factor;
  }
  if (lane == 0) write_lse(args, place, head, i, result.lse);
}

}  // namespace fovea::cuda
