// The backward in float32 on tensor cores, sm_80 and newer: every product is three of tf32
// (warp/tf32_split.cuh).
//
//   S = Q K^T      P = exp2(scale_log2 S - lse_log2)      dP = dO V^T      dS = P o (dP - delta)
//   dV = P^T dO    dK = scale dS^T Q                      dQ = scale dS K
//
// Two kinds of CTAs in one launch, each with rows of its own whose gradients it sums in registers: nothing is
// added across CTAs, so there are no atomics and no buffers, and the bits are the same each time.
//
//   of keys     rows are keys, columns queries: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
//               over all heads of the group
//   of queries  rows are queries, columns keys: S, dP, dQ += dS K
//
// S and dP are computed twice, seven products in place of five. In return the accumulators of S and dP are
// the left operands of the products behind them as they stand (tf32_tile.cuh), and nothing passes between
// warps: with tf32, dS for a shared dQ would take twice the bytes of the 16-bit kernel's, and its transposed
// reads.
//
// Shared memory
//   two row tiles (kTileM, D): K, V or Q, dO
//   two stages of two column tiles (kTileN, D): Q, dO or K, V; and of their lse_log2 and delta
// Registers
//   one or two gradients, kWarpM D / 32 a lane each; acc_s and acc_dp, kWarpM kTileN / 32 each
// Barrier
//   one a step: the column tiles have arrived for everyone (each thread waited for its own copies), and
//   nobody reads those of the step before any more, so that the next ones take their place
//
// NaN and Inf: as in fwd_tf32.cuh, rows of gradients that are not finite are computed once more, pair by
// pair, from the pairs that take part.
//
// Launch
//   grid    bwd_tf32_ctas(args, config)
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_preprocess (lse_log2, delta); dq_columns is 0, and no bwd_postprocess follows
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_tf32_cta.cuh"
#include "cuda/kernels/bwd_tf32_pairs.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/score_row.cuh"
#include "cuda/warp/tf32_product.cuh"
#include "cuda/warp/tf32_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// P (with dropout) from S and dS from dP, in place, of the pairs of a warp and a block of columns.
template <class Instance, bool kByKeys>
struct BwdTf32Weights {
  using Cta = BwdTf32Cta<Instance, kByKeys>;
  static constexpr int kMTiles = Cta::kMTiles, kNTiles = Cta::kNTiles, kTileN = Cta::kTileN;
  using Pairs = float[kMTiles][kNTiles][4];

  const Cta& cta;
  const float scale_log2;
  float row_lse[kMTiles][2], row_delta[kMTiles][2];  ///< where rows are queries

  __device__ __forceinline__ explicit BwdTf32Weights(const Cta& c)
      : cta(c), scale_log2(c.p.scale * tile::kLog2e) {}

  /// Reads the statistics of rows that are queries of `head`.
  __device__ __forceinline__ void load_rows(int head) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = (static_cast<int64_t>(cta.place.batch) * cta.p.heads_q + head) * cta.args.rows +
                           cta.row_at(mt, half);
        row_lse[mt][half] = cta.args.lse_log2[at];
        row_delta[mt][half] = cta.args.delta[at];
      }
    }
  }

  /// Scale, causal and window only. With kMasked some pairs may not see each other.
  template <bool kMasked>
  __device__ __forceinline__ void weigh(Pairs& acc_s, Pairs& acc_dp, int n, const float* statistics) const {
    const tile::AttentionParams& p = cta.p;
    const BwdTf32Place& place = cta.place;
    const int lo = p.window_left < 0 ? -(1 << 30) : -p.window_left,
              hi = p.window_right < 0 ? 1 << 30 : p.window_right;
    // Distance of key and diagonal, of element 0.
    const int across = place.first + cta.warp * Cta::kWarpM + cta.g, along = n * kTileN + 2 * cta.t;
    const int distance = kByKeys ? across - along - place.shift : along - across - place.shift;
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float lse = kByKeys ? statistics[nt * 8 + 2 * cta.t + e % 2] : row_lse[mt][e / 2];
          const float delta =
              kByKeys ? statistics[kTileN + nt * 8 + 2 * cta.t + e % 2] : row_delta[mt][e / 2];
          float weight = ptx::ex2(fmaf(acc_s[mt][nt][e], scale_log2, -lse));
          float ds = weight * (acc_dp[mt][nt][e] - delta);
          if constexpr (kMasked) {
            const int row = mt * 16 + e / 2 * 8, column = nt * 8 + e % 2;
            const int d = distance + (kByKeys ? row - column : column - row);
            const int j = kByKeys ? across + row : along + column;
            if (d < lo || d > hi || j >= place.span.used_k) weight = ds = 0.0f;
          }
          acc_s[mt][nt][e] = weight;
          acc_dp[mt][nt][e] = ds;
        }
      }
    }
  }

  /// Every term of the score.
  __device__ __forceinline__ void weigh_general(Pairs& acc_s, Pairs& acc_dp, int head, int n,
                                                const float* statistics) const {
    const tile::Dropout dropout = tile::dropout_of(cta.p);
    if constexpr (kByKeys) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = opaque(nt * 8 + 2 * cta.t + c), i = n * kTileN + column;
          const BwdTf32Query query = query_of(dropout, head, i);
          const tile::Span32 seen = keys_of(i);
#pragma unroll
          for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              weigh_pair(query, seen, cta.row_at(mt, half), statistics[column], statistics[kTileN + column],
                         acc_s[mt][nt][2 * half + c], acc_dp[mt][nt][2 * half + c]);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = opaque(cta.row_at(mt, half));
          const BwdTf32Query query = query_of(dropout, head, i);
          const tile::Span32 seen = keys_of(i);
#pragma unroll
          for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              weigh_pair(query, seen, n * kTileN + nt * 8 + 2 * cta.t + c, row_lse[mt][half],
                         row_delta[mt][half], acc_s[mt][nt][2 * half + c], acc_dp[mt][nt][2 * half + c]);
            }
          }
        }
      }
    }
  }

 private:
  // Of query i; queries that take no part see nothing.
  __device__ __forceinline__ BwdTf32Query query_of(const tile::Dropout& dropout, int head, int i) const {
    const BwdTf32Place& place = cta.place;
    return {cta.p, place, dropout, head, i < place.span.used_q ? i : 0};
  }
  __device__ __forceinline__ tile::Span32 keys_of(int i) const {
    return i < cta.place.span.used_q ? tile::keys_of(cta.p, cta.place.span, i) : tile::Span32{};
  }
  __device__ __forceinline__ void weigh_pair(const BwdTf32Query& query, const tile::Span32& seen, int j,
                                             float lse, float delta, float& s, float& dp) const {
    BwdTf32Pair pair;
    if (j >= seen.begin && j < seen.end && query.scores.sees(j)) {
      pair = query.gradient_of_pair(j, s, dp, lse, delta);
    }
    s = pair.weight;
    dp = pair.ds;
  }
};

/// The CTA `index` of those whose rows are keys, or queries: gradients of its rows.
template <class Instance, bool kByKeys>
__device__ __forceinline__ void bwd_tf32_rows(const BackwardArgs& args, unsigned index, unsigned blocks,
                                              unsigned char* shared) {
  using Cta = BwdTf32Cta<Instance, kByKeys>;
  using Weights = BwdTf32Weights<Instance, kByKeys>;
  constexpr int kDim = Cta::kDim, kTileN = Cta::kTileN, kWarpM = Cta::kWarpM;
  const Cta cta(args, shared);
  if (!cta.find_place(index, blocks)) return;
  const tile::AttentionParams& p = args.p;
  const BwdTf32Place& place = cta.place;

  cta.copy_rows();
  const int first_head = kByKeys ? place.head * p.group : place.head;
  int head = first_head, n = place.begin;
  if (n < place.until) cta.copy_columns(head, n, 0);
  Weights weights(cta);
  if constexpr (!kByKeys) weights.load_rows(head);
  float acc_qk[Cta::kMTiles][Cta::kOTiles][4];  // dK or dQ, without scale
  float acc_v[Cta::kMTiles][Cta::kVTiles][4];   // dV
  clear(acc_qk);
  clear(acc_v);

  const Tf32AlongRows<kDim> rows(cta.s_rows, cta.warp * kWarpM, cta.lane),
      rows_v(cta.s_rows + Cta::kRowFloats, cta.warp * kWarpM, cta.lane);
  const Tf32AlongRows<kDim> columns(cta.s_columns, 0, cta.lane);
  const Tf32DownRows<kDim> down(cta.s_columns, cta.lane);
  const auto add = [](float sum, float x, int, int) { return sum + x; };
#pragma unroll 1
  for (int stage = 0; n < place.until; stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // column tiles of this step have arrived, those of the last are free
    const int this_head = head, this_n = n;
    if (++n == place.until && ++head < first_head + (kByKeys ? p.group : 1)) n = place.begin;
    if (n < place.until) cta.copy_columns(head, n, stage ^ 1);

    // The nearest and farthest pairs of this warp and block.
    const int row0 = place.first + cta.warp * kWarpM, column0 = this_n * kTileN;
    const int nearest =
        kByKeys ? row0 - (column0 + kTileN - 1) - place.shift : column0 - (row0 + kWarpM - 1) - place.shift;
    const int farthest = nearest + kWarpM - 1 + kTileN - 1;
    const int lo = p.window_left < 0 ? -(1 << 30) : -p.window_left,
              hi = p.window_right < 0 ? 1 << 30 : p.window_right;
    if (farthest < lo || nearest > hi) continue;

    const int at = stage * 2 * Cta::kColumnFloats;
    typename Weights::Pairs acc_s, acc_dp;
    multiply_rows(acc_s, rows, columns.moved(at), p.head_dim);
    multiply_rows(acc_dp, rows_v, columns.moved(at + Cta::kColumnFloats), p.head_dim_v);
    const float* const statistics = cta.s_statistics + stage * 2 * kTileN;
    if constexpr (Instance::kConfig.general) {
      weights.weigh_general(acc_s, acc_dp, this_head, this_n, statistics);
    } else if (nearest >= lo && farthest <= hi &&
               (kByKeys ? row0 + kWarpM : column0 + kTileN) <= place.span.used_k) {
      weights.template weigh<false>(acc_s, acc_dp, this_n, statistics);
    } else {
      weights.template weigh<true>(acc_s, acc_dp, this_n, statistics);
    }
    if constexpr (kByKeys) {
      multiply_weights(acc_v, acc_s, down.moved(at + Cta::kColumnFloats), p.head_dim_v, add);
    }
    multiply_weights(acc_qk, acc_dp, down.moved(at), p.head_dim, add);
  }

  uint32_t broken[Cta::kMTiles][2];
  cta.write_finite_rows(acc_qk, acc_v, broken);
  cta.write_exact_rows(broken);
}

/// An instance is a type that names its configuration:
///   struct Example { static constexpr BwdTf32Config kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    bwd_tf32(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const BwdTf32Ctas ctas(args.p, Instance::kConfig.tile_m());
  const auto of_keys = static_cast<unsigned>(ctas.of_keys);
  if (blockIdx.x < of_keys) {
    bwd_tf32_rows<Instance, true>(args, blockIdx.x, ctas.blocks_k, shared);
  } else {
    bwd_tf32_rows<Instance, false>(args, blockIdx.x - of_keys, ctas.blocks_q, shared);
  }
}

}  // namespace fovea::cuda
