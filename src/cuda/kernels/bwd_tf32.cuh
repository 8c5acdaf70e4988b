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
//   before  bwd_prepare (lse_log2, delta); dq_columns is 0, and no bwd_finish follows
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_tf32_pairs.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/score_terms.cuh"
#include "cuda/warp/tf32_product.cuh"
#include "cuda/warp/tf32_tile.cuh"
#include "tile/kv_blocks.hpp"

namespace fovea::cuda {

/// The CTA `index` of those whose rows are keys, or queries.
template <class Instance, bool kByKeys>
__device__ __forceinline__ void bwd_tf32_rows(const BackwardArgs& args, unsigned index, unsigned blocks,
                                              unsigned char* shared) {
  constexpr BwdTf32Config kConfig = Instance::kConfig;
  constexpr int kTileM = kConfig.tile_m(), kTileN = kConfig.tile_n, kWarpM = kConfig.warp_m;
  constexpr int kThreads = kConfig.threads(), kDim = kConfig.head_dim;
  constexpr int kMTiles = kWarpM / 16, kNTiles = kTileN / 8, kOTiles = kDim / 8;
  constexpr int kVTiles = kByKeys ? kOTiles : 1;  ///< a query has no gradient of v
  constexpr float kLog2e = 1.4426950408889634f;
  using RowTile = SharedTile<kTileM, kDim, 4>;
  using ColumnTile = SharedTile<kTileN, kDim, 4>;
  static_assert(BackwardArgs::kRowPadding % kTileM == 0 && BackwardArgs::kRowPadding % kTileN == 0,
                "statistics are read without a look at their number");
  static_assert(2 * kTileN <= kThreads, "a thread copies one statistic of a block");

  float* const s_rows = reinterpret_cast<float*>(shared);  // K or Q, then V or dO
  float* const s_rows_v = s_rows + RowTile::kBytes / 4;
  float* const s_columns =
      reinterpret_cast<float*>(shared + kConfig.offset_columns());  // a stage: Q or K, then dO or V
  float* const s_statistics =
      reinterpret_cast<float*>(shared + kConfig.offset_statistics());  // a stage: lse_log2, delta
  BwdTf32Place& place = *reinterpret_cast<BwdTf32Place*>(shared + kConfig.offset_place());

  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;  // as in ptx/mma.cuh

  const tile::RowsView& view_qk = kByKeys ? p.dk : p.dq;
  {
    const unsigned heads = kByKeys ? p.heads_kv : p.heads_q;
    const unsigned plane = index / blocks, batch = plane / heads;
    // Longest first under causal: the first keys, the last queries.
    const int block = static_cast<int>(kByKeys ? index % blocks : blocks - 1 - index % blocks);
    const int head = static_cast<int>(plane % heads);
    const tile::SequenceSpan span = tile::sequence_span(p, static_cast<int>(batch));
    const int used = kByKeys ? span.used_k : span.used_q, length = kByKeys ? span.length_k : span.length_q;
    const int64_t row0 = kByKeys ? span.row_k : span.row_q;
    // Rows that take no part: this CTA's share of those from `used` on.
    const int share = tile::ceil_div(max(kByKeys ? p.seqlen_k : p.seqlen_q, 1), static_cast<int>(blocks));
    const int stop = block + 1 == static_cast<int>(blocks) ? length : min(length, (block + 1) * share);
    for (int row = max(used, block * share); row < stop; ++row) {
      float* const to = reinterpret_cast<float*>(view_qk.data) + view_qk.offset(batch, row0 + row, head);
      for (int c = thread; c < p.head_dim; c += kThreads) to[c] = 0.0f;
      if (kByKeys) {
        float* const to_v = reinterpret_cast<float*>(p.dv.data) + p.dv.offset(batch, row0 + row, head);
        for (int c = thread; c < p.head_dim_v; c += kThreads) to_v[c] = 0.0f;
      }
    }
    const int first = block * kTileM, end = min(first + kTileM, used);
    if (first >= end) return;
    if (thread == 0) {
      const tile::Span32 columns =
          kByKeys ? tile::queries_of_any(p, span, first, end)
                  : tile::Span32{tile::keys_of(p, span, first).begin, tile::keys_of(p, span, end - 1).end};
      const bool any = !columns.empty();
      place = {span,
               static_cast<int>(batch),
               head,
               first,
               end,
               any ? columns.begin / kTileN : 0,
               any ? tile::ceil_div(columns.end, kTileN) : 0,
               span.used_k - span.used_q};
    }
  }
  __syncthreads();  // place can be read

  // One head's rows of a tensor, of keys or of queries.
  const auto source = [&](const tile::RowsView& view, bool keys, int head, int columns, uint32_t bit) {
    const int64_t row = keys ? place.span.row_k : place.span.row_q;
    return RowSource{view.data + view.offset(place.batch, row, head) * 4, view.row * 4,
                     keys ? place.span.used_k : place.span.used_q, columns, opaque((p.aligned16 & bit) != 0)};
  };
  const auto key_head = [&](int head_q) { return static_cast<int>(static_cast<unsigned>(head_q) / p.group); };
  const auto copy_columns = [&](int head, int n, int stage) {
    float* const to = s_columns + stage * 2 * ColumnTile::kBytes / 4;
    const uint32_t to_qk = ptx::shared_address(to), to_v = ptx::shared_address(to + ColumnTile::kBytes / 4);
    const int first = n * kTileN;
    if constexpr (kByKeys) {
      copy_tile_either<ColumnTile, kThreads>(to_qk, source(p.q, false, head, p.head_dim, tile::kAlignedQ),
                                             first, opaque(thread));
      copy_tile_either<ColumnTile, kThreads>(to_v, source(p.d_o, false, head, p.head_dim_v, tile::kAlignedDO),
                                             first, opaque(thread));
      if (thread < 2 * kTileN) {
        const float* const from = thread < kTileN ? args.lse_log2 : args.delta;
        ptx::cp_async_4(ptx::shared_address(s_statistics + stage * 2 * kTileN + thread),
                        from + (static_cast<int64_t>(place.batch) * p.heads_q + head) * args.rows + first +
                            thread % kTileN,
                        true);
      }
    } else {
      copy_tile_either<ColumnTile, kThreads>(
          to_qk, source(p.k, true, key_head(head), p.head_dim, tile::kAlignedK), first, opaque(thread));
      copy_tile_either<ColumnTile, kThreads>(
          to_v, source(p.v, true, key_head(head), p.head_dim_v, tile::kAlignedV), first, opaque(thread));
    }
    ptx::cp_async_commit();
  };

  // --- prologue ---
  const int first_head = kByKeys ? place.head * p.group : place.head;
  {
    const RowSource rows = source(kByKeys ? p.k : p.q, kByKeys, place.head, p.head_dim,
                                  kByKeys ? tile::kAlignedK : tile::kAlignedQ);
    const RowSource rows_v = source(kByKeys ? p.v : p.d_o, kByKeys, place.head, p.head_dim_v,
                                    kByKeys ? tile::kAlignedV : tile::kAlignedDO);
    copy_tile_either<RowTile, kThreads>(ptx::shared_address(s_rows), rows, place.first, opaque(thread));
    copy_tile_either<RowTile, kThreads>(ptx::shared_address(s_rows_v), rows_v, place.first, opaque(thread));
  }
  int head = first_head, n = place.begin;
  if (n < place.until) copy_columns(head, n, 0);

  const auto row_at = [&](int mt, int half) { return place.first + warp * kWarpM + mt * 16 + half * 8 + g; };
  [[maybe_unused]] float row_lse[kMTiles][2], row_delta[kMTiles][2];  // where rows are queries
  if constexpr (!kByKeys) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at =
            (static_cast<int64_t>(place.batch) * p.heads_q + head) * args.rows + row_at(mt, half);
        row_lse[mt][half] = args.lse_log2[at];
        row_delta[mt][half] = args.delta[at];
      }
    }
  }
  float acc_qk[kMTiles][kOTiles][4];  // dK or dQ, without scale
  float acc_v[kMTiles][kVTiles][4];   // dV
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int ot = 0; ot < kOTiles; ++ot) acc_qk[mt][ot][e] = 0.0f;
#pragma unroll
      for (int ot = 0; ot < kVTiles; ++ot) acc_v[mt][ot][e] = 0.0f;
    }
  }

  const Tf32AlongRows<kDim> rows(s_rows, warp * kWarpM, lane), rows_v(s_rows_v, warp * kWarpM, lane);
  const Tf32AlongRows<kDim> columns(s_columns, 0, lane);
  const Tf32DownRows<kDim> down(s_columns, lane);
  const float scale_log2 = p.scale * kLog2e;
  const auto add = [](float sum, float x, int, int) { return sum + x; };
  using Pairs = float[kMTiles][kNTiles][4];

  /// P (with dropout) from S and dS from dP, in place.
  const auto weigh = [&](Pairs& acc_s, Pairs& acc_dp, int n, const float* statistics, auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    const int lo = p.window_left < 0 ? -(1 << 30) : -p.window_left,
              hi = p.window_right < 0 ? 1 << 30 : p.window_right;
    // Distance of key and diagonal, of element 0.
    const int across = place.first + warp * kWarpM + g, along = n * kTileN + 2 * t;
    const int distance = kByKeys ? across - along - place.shift : along - across - place.shift;
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float lse = kByKeys ? statistics[nt * 8 + 2 * t + e % 2] : row_lse[mt][e / 2];
          const float delta = kByKeys ? statistics[kTileN + nt * 8 + 2 * t + e % 2] : row_delta[mt][e / 2];
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
  };
  /// The same with every term of the score.
  [[maybe_unused]] const auto weigh_general = [&](Pairs& acc_s, Pairs& acc_dp, int head, int n,
                                                  const float* statistics) {
    const tile::Dropout dropout = tile::dropout_of(p);
    const auto weigh_pair = [&](const RowTerms<float>& terms, const tile::Span32& seen, int j, float lse,
                                float delta, float& s, float& dp) {
      BwdTf32Pair pair;
      if (j >= seen.begin && j < seen.end && terms.sees(p, j)) {
        pair = gradient_of_pair(p, terms, dropout, j, s, dp, lse, delta);
      }
      s = pair.weight;
      dp = pair.ds;
    };
    if constexpr (kByKeys) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = opaque(nt * 8 + 2 * t + c), i = n * kTileN + column;
          const RowTerms<float> terms(p, place.span, place.batch, head, i < place.span.used_q ? i : 0);
          const tile::Span32 seen = i < place.span.used_q ? tile::keys_of(p, place.span, i) : tile::Span32{};
#pragma unroll
          for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              weigh_pair(terms, seen, row_at(mt, half), statistics[column], statistics[kTileN + column],
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
          const int i = opaque(row_at(mt, half));
          const RowTerms<float> terms(p, place.span, place.batch, head, i < place.span.used_q ? i : 0);
          const tile::Span32 seen = i < place.span.used_q ? tile::keys_of(p, place.span, i) : tile::Span32{};
#pragma unroll
          for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              weigh_pair(terms, seen, n * kTileN + nt * 8 + 2 * t + c, row_lse[mt][half], row_delta[mt][half],
                         acc_s[mt][nt][2 * half + c], acc_dp[mt][nt][2 * half + c]);
            }
          }
        }
      }
    }
  };

  // --- mainloop ---
#pragma unroll 1
  for (int stage = 0; n < place.until; stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // column tiles of this step have arrived, those of the last are free
    const int this_head = head, this_n = n;
    if (++n == place.until && ++head < first_head + (kByKeys ? p.group : 1)) n = place.begin;
    if (n < place.until) copy_columns(head, n, stage ^ 1);

    // The nearest and farthest pairs of this warp and block.
    const int row0 = place.first + warp * kWarpM, column0 = this_n * kTileN;
    const int nearest =
        kByKeys ? row0 - (column0 + kTileN - 1) - place.shift : column0 - (row0 + kWarpM - 1) - place.shift;
    const int farthest = nearest + kWarpM - 1 + kTileN - 1;
    const int lo = p.window_left < 0 ? -(1 << 30) : -p.window_left,
              hi = p.window_right < 0 ? 1 << 30 : p.window_right;
    if (farthest < lo || nearest > hi) continue;

    const int at = stage * 2 * ColumnTile::kBytes / 4;
    Pairs acc_s, acc_dp;
    multiply_rows(acc_s, rows, columns.moved(at), p.head_dim);
    multiply_rows(acc_dp, rows_v, columns.moved(at + ColumnTile::kBytes / 4), p.head_dim_v);
    const float* const statistics = s_statistics + stage * 2 * kTileN;
    if constexpr (kConfig.general) {
      weigh_general(acc_s, acc_dp, this_head, this_n, statistics);
    } else if (nearest >= lo && farthest <= hi &&
               (kByKeys ? row0 + kWarpM : column0 + kTileN) <= place.span.used_k) {
      weigh(acc_s, acc_dp, this_n, statistics, std::false_type());
    } else {
      weigh(acc_s, acc_dp, this_n, statistics, std::true_type());
    }
    if constexpr (kByKeys) {
      multiply_weights(acc_v, acc_s, down.moved(at + ColumnTile::kBytes / 4), p.head_dim_v, add);
    }
    multiply_weights(acc_qk, acc_dp, down.moved(at), p.head_dim, add);
  }

  // --- epilogue ---
  const auto output = [&](const tile::RowsView& view, int row) {
    return reinterpret_cast<float*>(view.data) +
           view.offset(place.batch, (kByKeys ? place.span.row_k : place.span.row_q) + row, place.head);
  };
  const auto write = [&](const auto& acc, int mt, int half, float* to, int size, bool vectors, float scale) {
#pragma unroll
    for (int block = 0; block < kDim / 32; ++block) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 x = make_float4(
            acc[mt][block * 4][2 * half + e] * scale, acc[mt][block * 4 + 1][2 * half + e] * scale,
            acc[mt][block * 4 + 2][2 * half + e] * scale, acc[mt][block * 4 + 3][2 * half + e] * scale);
        const int column = block * 32 + 8 * t + 4 * e;
        if (vectors) {
          if (column < size) *reinterpret_cast<float4*>(to + column) = x;
        } else {
          if (column < size) to[column] = x.x;
          if (column + 1 < size) to[column + 1] = x.y;
          if (column + 2 < size) to[column + 2] = x.z;
          if (column + 3 < size) to[column + 3] = x.w;
        }
      }
    }
  };
  uint32_t broken[kMTiles][2];  // bit 4 g + t: lane t of row g has something that is not finite
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_at(mt, half);
      bool finite = true;
#pragma unroll
      for (int ot = 0; ot < kOTiles; ++ot) {
        finite &= isfinite(acc_qk[mt][ot][2 * half]) && isfinite(acc_qk[mt][ot][2 * half + 1]);
      }
#pragma unroll
      for (int ot = 0; ot < kVTiles; ++ot) {
        finite &= isfinite(acc_v[mt][ot][2 * half]) && isfinite(acc_v[mt][ot][2 * half + 1]);
      }
      broken[mt][half] = __ballot_sync(0xffffffffu, row < place.end && !finite);
      if (row >= place.end || (broken[mt][half] >> (4 * g) & 15u) != 0) continue;
      const auto aligned = [&](uint32_t bit) { return (p.aligned16 & bit) != 0; };
      write(acc_qk, mt, half, output(view_qk, row), p.head_dim,
            aligned(kByKeys ? tile::kAlignedDK : tile::kAlignedDQ), p.scale);
      if constexpr (kByKeys)
        write(acc_v, mt, half, output(p.dv, row), p.head_dim_v, aligned(tile::kAlignedDV), 1.0f);
    }
  }

  // --- rows that are not finite, once more ---
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      while (broken[mt][half] != 0) {
        const int r = (__ffs(static_cast<int>(broken[mt][half])) - 1) / 4;
        broken[mt][half] &= ~(15u << (4 * r));
        const int row = place.first + warp * kWarpM + mt * 16 + half * 8 + r;
        ExactGradient<kByKeys, kDim> exact;
        exact.sum(args, place, row);
        exact.write(exact.of_qk, output(view_qk, row), p.head_dim, p.scale);
        if constexpr (kByKeys) exact.write(exact.of_v, output(p.dv, row), p.head_dim_v, 1.0f);
      }
    }
  }
}

/// An instance is a type that names its configuration:
///   struct Example { static constexpr BwdTf32Config kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    bwd_tf32(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(128) unsigned char shared[];
  const BwdTf32Ctas ctas(args.p, Instance::kConfig.tile_m());
  const auto of_keys = static_cast<unsigned>(ctas.of_keys);
  if (blockIdx.x < of_keys) {
    bwd_tf32_rows<Instance, true>(args, blockIdx.x, ctas.blocks_k, shared);
  } else {
    bwd_tf32_rows<Instance, false>(args, blockIdx.x - of_keys, ctas.blocks_q, shared);
  }
}

}  // namespace fovea::cuda
