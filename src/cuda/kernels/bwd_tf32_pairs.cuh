// What a CTA of bwd_tf32 works on, its configuration and grid, and what a single pair of query and key adds
// to gradients.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/exact_row.cuh"
#include "cuda/warp/score_row.cuh"
#include "tile/kv_blocks.hpp"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// What a CTA of bwd_tf32 works on.
struct BwdTf32Place {
  tile::SequenceSpan span;
  int batch, head;   ///< `head` of k, or of q where rows are queries
  int first, end;    ///< rows
  int begin, until;  ///< blocks of columns
  int shift;         ///< used_k - used_q
};

struct BwdTf32Config {
  int head_dim;     ///< of Q, K and of V, O, padded to 32, 64, 128 or 256
  int tile_n;       ///< columns of a block
  int warp_m = 16;  ///< rows of a warp, 16 or 32
  int num_warps = 4;
  int min_ctas;          ///< CTAs an SM, for the register allocator
  bool general = false;  ///< every term of the score; else window, causal and lengths only

  constexpr int threads() const { return 32 * num_warps; }
  constexpr int tile_m() const { return warp_m * num_warps; }
  constexpr int row_bytes() const { return tile_m() * head_dim * 4; }
  constexpr int column_bytes() const { return tile_n * head_dim * 4; }
  // Offsets in shared memory.
  constexpr int offset_columns() const { return 2 * row_bytes(); }
  constexpr int offset_statistics() const { return offset_columns() + 4 * column_bytes(); }
  constexpr int offset_place() const { return offset_statistics() + 4 * tile_n * 4; }
  constexpr int shared_bytes() const { return offset_place() + static_cast<int>(sizeof(BwdTf32Place)); }
};

/// CTAs of one launch: of keys first, since they take longer. At least one a head, which also writes the rows
/// that take no part.
struct BwdTf32Ctas {
  int blocks_k, blocks_q;
  int64_t of_keys, of_queries;

  constexpr BwdTf32Ctas(const tile::AttentionParams& p, int tile_m)
      : blocks_k(p.seqlen_k > tile_m ? (p.seqlen_k - 1) / tile_m + 1 : 1),
        blocks_q(p.seqlen_q > tile_m ? (p.seqlen_q - 1) / tile_m + 1 : 1),
        of_keys(int64_t{blocks_k} * p.heads_kv * p.batch),
        of_queries(int64_t{blocks_q} * p.heads_q * p.batch) {}
};
constexpr int64_t bwd_tf32_ctas(const BackwardArgs& args, const BwdTf32Config& config) {
  const BwdTf32Ctas ctas(args.p, config.tile_m());
  return ctas.of_keys + ctas.of_queries;
}

/// What a pair of query and key adds to gradients.
struct BwdTf32Pair {
  float weight = 0;         ///< P with dropout: factor of dO in dv
  float ds = 0;             ///< factor of q in dk and of k in dq, without scale
  bool takes_part = false;  ///< in dq and dk
  bool kept = false;        ///< takes part in dv, too
};

/// A query with every term of its scores.
struct BwdTf32Query {
  ScoreRow<float> scores;
  DropoutRow dropout;

  __device__ __forceinline__ BwdTf32Query(const tile::AttentionParams& p, const BwdTf32Place& place,
                                          const tile::Dropout& d, int head, int i)
      : scores(p, place.span, place.batch, head, i), dropout(d, p, place.batch, head, i) {}

  /// Of a key that the query sees; `dot` = q.k, `dp` = dO.v.
  __device__ __forceinline__ BwdTf32Pair gradient_of_pair(int j, float dot, float dp, float lse_log2,
                                                          float delta) const {
    const float score = scores.score(dot, j);
    if (score == -INFINITY) return {};
    // Rounded like lse_log2: a row of one huge score has the weight 1.
    const float weight = ptx::ex2(__fmul_rn(score, tile::kLog2e) - lse_log2);
    const float keep = dropout.dropout.threshold != 0 ? dropout.factor(j) : 1.0f;
    // The V of a dropped key does not reach the row.
    const bool kept = keep != 0;
    return {kept ? weight * keep : 0.0f, weight * ((kept ? keep * dp : 0.0f) - delta) * scores.slope(dot, j),
            true, kept};
  }
};

/// Gradients of one row, pair by pair, by one warp: lane l holds columns l, l + 32, ...
template <bool kByKeys, int kDim>
struct ExactGradient {
  static constexpr int kPerLane = kDim / 32;
  float of_qk[kPerLane] = {};  ///< dk or dq, without scale
  float of_v[kPerLane] = {};   ///< dv; stays 0 for a query

  __device__ __forceinline__ void sum(const BackwardArgs& args, const BwdTf32Place& place, int row) {
    const tile::AttentionParams& p = args.p;
    const tile::SequenceSpan& span = place.span;
    const int lane = static_cast<int>(threadIdx.x) % 32, batch = place.batch;
    const tile::Dropout dropout = tile::dropout_of(p);
    const int head_begin = kByKeys ? place.head * p.group : place.head;
    const int head_end = kByKeys ? head_begin + p.group : head_begin + 1;
    const tile::Span32 others =
        kByKeys ? tile::queries_of_any(p, span, row, row + 1) : tile::keys_of(p, span, row);
#pragma unroll 1
    for (int head = head_begin; head < head_end; ++head) {
      const int64_t statistics = (static_cast<int64_t>(batch) * p.heads_q + head) * args.rows;
#pragma unroll 1
      for (int other = others.begin; other < others.end; ++other) {
        const int i = kByKeys ? other : row, j = kByKeys ? row : other;
        const BwdTf32Query query(p, place, dropout, head, i);
        const float lse_log2 = args.lse_log2[statistics + i];
        if (lse_log2 == INFINITY || !query.scores.sees(j)) continue;  // no part in anything
        const auto row_of = [&](const tile::RowsView& view, int64_t first, int h) {
          return reinterpret_cast<const float*>(view.data) + view.offset(batch, first, h);
        };
        const float* const q = row_of(p.q, span.row_q + i, head);
        const float* const k = row_of(p.k, span.row_k + j, head / p.group);
        const float* const v = row_of(p.v, span.row_k + j, head / p.group);
        const float* const d_o = row_of(p.d_o, span.row_q + i, head);
        float dot = 0, dp = 0;
        for (int c = lane; c < p.head_dim; c += 32) dot = fmaf(q[c], k[c], dot);
        for (int c = lane; c < p.head_dim_v; c += 32) dp = fmaf(d_o[c], v[c], dp);
        dot = rolled_sum_over_warp(dot), dp = rolled_sum_over_warp(dp);
        const BwdTf32Pair pair = query.gradient_of_pair(j, dot, dp, lse_log2, args.delta[statistics + i]);
#pragma unroll
        for (int n = 0; n < kPerLane; ++n) {
          const int c = lane + 32 * n;
          if (pair.takes_part && c < p.head_dim) of_qk[n] = fmaf(pair.ds, kByKeys ? q[c] : k[c], of_qk[n]);
          if (kByKeys && pair.kept && c < p.head_dim_v) of_v[n] = fmaf(pair.weight, d_o[c], of_v[n]);
        }
      }
    }
  }
  __device__ __forceinline__ static void write(const float (&x)[kPerLane], float* to, int columns,
                                               float scale) {
#pragma unroll
    for (int n = 0; n < kPerLane; ++n) {
      const int c = static_cast<int>(threadIdx.x) % 32 + 32 * n;
      if (c < columns) to[c] = x[n] * scale;
    }
  }
};

}  // namespace fovea::cuda
