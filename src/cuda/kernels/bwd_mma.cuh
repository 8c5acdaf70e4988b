// The backward on mma.sync: sm_80 class (cp.async, ldmatrix, m16n8k16) and, with m16n8k8, sm_75.
//
//   S^T = K Q^T    P = exp2(scale_log2 S - lse_log2)    dP^T = V dO^T    dS = P o (dP - delta)
//   dV += P^T dO   dK += dS^T Q   (in registers, over all query blocks and heads of the group)
//   dQ += dS K     (float32 sums in global memory)
//
// A CTA owns kTileN keys of one key head and walks over the blocks of kTileM queries that see any of them, head by head of
// the group: dK and dV need no atomics and no buffer per query head. S and dP are computed transposed, keys in rows, so that
// P^T and dS^T have the shape in which dV and dK want their left operands. Three GEMMs, three ways to share them out:
//
//   S^T, dP^T   warp (n, q) has 32 keys (n) and kSliceM queries (q), kChunkM at a time
//   dV, dK      warp (n, q) has the same 32 keys and every kWarpsQ-th 16 columns from 16 q on
//   dQ          kWarpsDqM x kWarpsDqD warps over queries x columns
//
// With kWarpsQ = 1 P^T and dS^T go from accumulator to operand in registers; else through shared memory. 32 keys a warp: each
// B fragment that ldmatrix brings feeds two mma; with 16 shared memory (128 B a clock) would take longer than the mma.
//
// Shared memory  sK, sV (kTileN, D | Dv), later the tiles of dK and dV; sQ, sdO (1 or 2 stages, kTileM, D | Dv); sP^T (only
//                where kWarpsQ > 1) and sdS^T (kTileN, kTileM); lse_log2 and delta of two blocks.
// Registers      acc_dk, acc_dv 32 (D + Dv) / kWarpsQ / 32 a lane; acc_s, acc_dp 32 kChunkM / 32 each.
//
// Barriers of a step
//   A  the block's Q, dO, lse, delta have arrived for everyone (each thread waited for its own copies); nobody reads the last
//      step's P, dS any more, nor its Q, dO: their second stages take the next block
//   B  P and dS of all warps can be read
//   C  nobody reads dO any more (only where Q has two stages and dO one)
//   D  nobody reads Q (and dO) any more (only where Q has one stage)
//
// What is not finite. K is made finite once a CTA: a row that sees a NaN in K has lse NaN, hence P = NaN, whatever K holds; an
// infinity becomes the largest finite number, which gives the weights 0 or NaN that infinity would give. Q and dO of rows whose
// lse is not finite become 0 before they are used (P of the keys that such a row sees is NaN, or 0 where the row takes no part).
// V only enters dP, which is a number of one pair: pairs that take no part get dS = 0 by selection.
//
// Launch
//   grid    (num_splits * heads_kv * batch, 1, 1); CTA x has share x % num_splits of key head x / num_splits % heads_kv. Without
//           `deterministic` num_splits is the number of key blocks, ceil(longest used_k / kTileN), and all add to the one
//           dq_sum; with it num_splits CTAs take blocks s, s + num_splits, ... one after another, each with dq_sum of its own, so
//           that the same thread adds to the same element in program order. Key block 0, first in a head, has most queries
//           under causal: longest first, and CTAs that run together share a head's Q, dO and dq_sum in L2.
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_prepare (lse_log2, delta, zeros in dq_sum); after: bwd_finish (dq)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/red.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/bwd_tiles.cuh"
#include "cuda/warp/score_terms.cuh"

namespace fovea::cuda {

struct BwdConfig {
  int head_dim, head_dim_v;  ///< padded: multiples of 32
  int tile_m, tile_n;
  int warps_q;               ///< slices of queries in S, of columns in dK and dV; slices of keys are tile_n / 32
  int chunk_m;               ///< queries whose S and dP a warp holds at a time
  int warps_dq_m;            ///< warps along the queries in dQ
  int stages_q, stages_do;   ///< 1 or 2
  int min_ctas;              ///< CTAs an SM, for the register allocator
  bool general;              ///< every term of the score; else window, causal and lengths only

  constexpr int warps_n() const { return tile_n / 32; }
  constexpr int num_warps() const { return warps_n() * warps_q; }
  constexpr int threads() const { return 32 * num_warps(); }
  constexpr bool exchanges_p() const { return warps_q > 1; }

  // Offsets in shared memory.
  constexpr int offset_k() const { return 0; }
  constexpr int offset_v() const { return tile_n * head_dim * 2; }
  constexpr int offset_q() const { return offset_v() + tile_n * head_dim_v * 2; }
  constexpr int offset_do() const { return offset_q() + stages_q * tile_m * head_dim * 2; }
  constexpr int offset_ds() const { return offset_do() + stages_do * tile_m * head_dim_v * 2; }
  constexpr int offset_p() const { return offset_ds() + tile_n * tile_m * 2; }
  constexpr int offset_stats() const { return offset_p() + (exchanges_p() ? tile_n * tile_m * 2 : 0); }
  /// lse_log2 and delta of two blocks, and the steps that found rows that are not finite.
  constexpr int shared_bytes() const { return offset_stats() + 2 * 2 * tile_m * 4 + 16; }

  constexpr bool valid() const {
    return head_dim % 32 == 0 && head_dim_v % 32 == 0 && tile_n % 32 == 0 && tile_m % 32 == 0 &&
           tile_m % (warps_q * chunk_m) == 0 && chunk_m % 16 == 0 && head_dim % (16 * warps_q) == 0 &&
           head_dim_v % (16 * warps_q) == 0 && num_warps() % warps_dq_m == 0 && tile_m % (16 * warps_dq_m) == 0 &&
           head_dim % (16 * (num_warps() / warps_dq_m)) == 0 && BackwardArgs::kRowPadding % tile_m == 0 &&
           (warps_q > 1 || chunk_m % 16 == 0) && 2 * tile_m <= threads() * 2;
  }
};

/// Offset of 16 rows x 8 columns in a head's sums of dq: they lie as an mma leaves them in its lanes, 16 bytes a lane, so that
/// a warp adds 512 consecutive bytes.
__host__ __device__ constexpr int64_t dq_fragment(int row16, int column8, int columns) {
  return (static_cast<int64_t>(row16) * (columns / 8) + column8) * 128;
}

template <class T, const BwdConfig& kC>
struct BwdMma {
  static_assert(kC.valid());
  static constexpr int kD = kC.head_dim, kDv = kC.head_dim_v, kM = kC.tile_m, kN = kC.tile_n;
  static constexpr int kThreads = kC.threads();
  static constexpr int kWarpN16 = 2;  ///< 32 keys a warp
  static constexpr int kChunkN8 = kC.chunk_m / 8;
  static constexpr int kSliceM = kM / kC.warps_q;
  static constexpr int kChunks = kSliceM / kC.chunk_m;
  static constexpr int kOwnD16 = kD / 16 / kC.warps_q, kOwnDv16 = kDv / 16 / kC.warps_q;
  static constexpr int kWarpsDqD = kC.num_warps() / kC.warps_dq_m;
  static constexpr int kDqM16 = kM / 16 / kC.warps_dq_m;
  static constexpr int kDqD16 = kD / 16 / kWarpsDqD;
  /// 16-column groups of dQ at a time: 64 accumulators a lane at most, beside those of dK and dV.
  static constexpr int kDqGroup = kDqD16 * kDqM16 <= 8 ? kDqD16 : kDqD16 % 4 == 0 && kDqM16 <= 2 ? 4 : kDqD16 % 2 == 0 ? 2 : 1;

  using TileK = BwdTile<kN, kD>;
  using TileV = BwdTile<kN, kDv>;
  using TileQ = BwdTile<kM, kD>;
  using TileDO = BwdTile<kM, kDv>;
  using TileP = BwdTile<kN, kM>;

  /// Copies of the terms that every pair needs.
  struct Pairs {
    int shift, window_lo, window_hi;  ///< key j and query i see each other when lo <= j - i - shift <= hi
    int used_q, used_k;

    __device__ __forceinline__ Pairs(const tile::AttentionParams& p, const tile::SequenceSpan& span)
        : shift(span.used_k - span.used_q),
          window_lo(p.window_left < 0 ? -(1 << 30) : -p.window_left),
          window_hi(p.window_right < 0 ? 1 << 30 : p.window_right),
          used_q(span.used_q),
          used_k(span.used_k) {}
    __device__ __forceinline__ bool sees(int i, int j) const {
      const int distance = j - i - shift;
      return distance >= window_lo && distance <= window_hi && j < used_k;
    }
    /// Every query of a block sees every key of a block.
    __device__ __forceinline__ bool all_see(int i, int j) const {
      return j + kN - 1 - i - shift <= window_hi && j - (i + kM - 1) - shift >= window_lo && j + kN <= used_k;
    }
  };
};

/// Weights of a chunk from S, in place: acc becomes P, without the dropout factor, times the slope of softcap; `weights` gets
/// P with dropout, rounded. `keep` has a bit for each kept element, in the order of acc.
template <class T, const BwdConfig& kC>
__device__ __forceinline__ void bwd_weights_general(const BackwardArgs& args, const typename BwdMma<T, kC>::Pairs& pairs,
                                                    const tile::SequenceSpan& span, const tile::Dropout& dropout, int batch,
                                                    int head, int i0, int j0, const float* lse_log2, int lane,
                                                    float (&acc)[2][kC.chunk_m / 8][4],
                                                    uint32_t (&weights)[2][kC.chunk_m / 8][2],
                                                    uint32_t (&keep)[(kC.chunk_m + 31) / 32]) {
  const tile::AttentionParams& p = args.p;
  constexpr float kLog2E = 1.4426950408889634f;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (auto& word : keep) word = ~0u;
#pragma unroll
  for (int n = 0; n < kC.chunk_m / 8; ++n) {
    float kept[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[m][e] = 1.0f;
    }
    if (p.dropout_threshold != 0) {
      // The four words of one Philox call decide four consecutive keys, which four lanes hold. Each of them makes the words of
      // one (query, eight keys) and tells the others by vote.
      const int r = g & 3;
      uint32_t keeps = 0;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = i0 + n * 8 + 2 * t + (r & 1);
        const int j = j0 + m * 16 + (r >> 1) * 8 + (g & 4);
        const auto words = dropout.quad(static_cast<int64_t>(batch) * p.heads_q + head, i, j >> 2);
        uint32_t mine = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const uint32_t votes = __ballot_sync(~0u, words[static_cast<size_t>(w)] >= dropout.threshold);
          if (w == r) mine = votes;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool kept_e = (mine >> (((g & 4) | e) * 4 + t)) & 1;
          kept[m][e] = kept_e ? dropout.keep_scale : 0.0f;
          keeps |= static_cast<uint32_t>(kept_e) << (m * 4 + e);
        }
      }
      keep[n / 4] &= ~(0xffu << (8 * (n % 4))) | keeps << (8 * (n % 4));
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = n * 8 + 2 * t + c;
      const int i = i0 + column;
      const float lse = lse_log2[column];
      const RowTerms<T> terms(p, span, batch, head, i < pairs.used_q ? i : 0);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int j = j0 + m * 16 + h * 8 + g, e = 2 * h + c;
          float weight = 0;
          if (i < pairs.used_q && pairs.sees(i, j) && terms.sees(p, j)) {
            const float dot = acc[m][n][e];
            const float score = terms.score(p, dot, j);
            if (score != -INFINITY) weight = ptx::ex2(score * kLog2E - lse);
            kept[m][e] = kept[m][e] == 0 ? 0.0f : kept[m][e] * weight;
            // Not 0 while the weight is not: dS of 0 is taken for a pair that takes no part.
            if (weight != 0) weight *= fmaxf(terms.cap_slope(p, dot), 1e-30f);
          } else {
            kept[m][e] = 0;
          }
          acc[m][n][e] = weight;
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      weights[m][n][0] = pack_pair<T>(kept[m][0], kept[m][1]);
      weights[m][n][1] = pack_pair<T>(kept[m][2], kept[m][3]);
    }
  }
}

template <class T, const BwdConfig& kC>
__global__ void __launch_bounds__(kC.threads(), kC.min_ctas) bwd_mma(const __grid_constant__ BackwardArgs args) {
  using B = BwdMma<T, kC>;
  using TileDO = typename B::TileDO;
  using TileK = typename B::TileK;
  using TileP = typename B::TileP;
  using TileQ = typename B::TileQ;
  using TileV = typename B::TileV;
  constexpr int kM = B::kM, kN = B::kN, kThreads = B::kThreads, kChunkN8 = B::kChunkN8;
  constexpr float kLog2E = 1.4426950408889634f;

  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const s_k = shared + kC.offset_k();
  unsigned char* const s_v = shared + kC.offset_v();
  unsigned char* const s_q = shared + kC.offset_q();
  unsigned char* const s_do = shared + kC.offset_do();
  float* const s_stats = reinterpret_cast<float*>(shared + kC.offset_stats());  // [2][lse_log2, delta][kM]
  volatile int* const s_not_finite = reinterpret_cast<int*>(s_stats + 4 * kM);  // [2]
  const uint32_t shared_base = ptx::shared_address(shared);
  const uint32_t a_k = shared_base + kC.offset_k(), a_v = shared_base + kC.offset_v(),
                 a_q = shared_base + kC.offset_q(), a_do = shared_base + kC.offset_do(),
                 a_ds = shared_base + kC.offset_ds(), a_p = shared_base + kC.offset_p();

  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31, warp = thread >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int warp_n = warp % kC.warps_n(), warp_q = warp / kC.warps_n();
  const int warp_dq_m = warp % kC.warps_dq_m, warp_dq_d = warp / kC.warps_dq_m;

  const int share = static_cast<int>(blockIdx.x) % args.num_splits;
  const int head_index = static_cast<int>(blockIdx.x) / args.num_splits;
  const int head_kv = head_index % p.heads_kv, batch = head_index / p.heads_kv;
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  const typename B::Pairs pairs(p, span);
  const float scale_log2 = p.scale * kLog2E;
  const tile::Dropout dropout = kC.general ? tile::dropout_of(p) : tile::Dropout();

  const auto rows_of = [&](const tile::RowsView& view, int64_t row, int head, int used, int columns, uint32_t bit) {
    return BwdRows{view.data + view.offset(batch, row, head) * 2, view.row, used, columns, (p.aligned16 & bit) != 0};
  };
  const BwdRows k_rows = rows_of(p.k, span.row_k, head_kv, span.used_k, p.head_dim, tile::kAlignedK);
  const BwdRows v_rows = rows_of(p.v, span.row_k, head_kv, span.used_k, p.head_dim_v, tile::kAlignedV);
  const BwdRows dk_rows = rows_of(p.dk, span.row_k, head_kv, span.used_k, p.head_dim, tile::kAlignedDK);
  const BwdRows dv_rows = rows_of(p.dv, span.row_k, head_kv, span.used_k, p.head_dim_v, tile::kAlignedDV);

  const int num_blocks = max((span.used_k + kN - 1) / kN, 1);
  for (int n_block = share; n_block < num_blocks; n_block += args.num_splits) {
    const int j0 = n_block * kN;
    const tile::Span32 queries = tile::queries_of_any(p, span, j0, min(j0 + kN, span.used_k));
    const int m_first = queries.begin / kM;
    const int m_count = queries.empty() || j0 >= span.used_k ? 0 : (queries.end + kM - 1) / kM - m_first;
    const int steps = m_count * p.group;

    // Q, dO, and a row's statistics of one step.
    const auto load_q = [&](int head, int block, int stage) {
      load_tile<TileQ, kThreads>(s_q + stage * TileQ::kBytes,
                                 rows_of(p.q, span.row_q, head, span.used_q, p.head_dim, tile::kAlignedQ), block * kM,
                                 thread);
    };
    const auto load_do = [&](int head, int block, int stage) {
      load_tile<TileDO, kThreads>(s_do + stage * TileDO::kBytes,
                                  rows_of(p.d_o, span.row_q, head, span.used_q, p.head_dim_v, tile::kAlignedDO),
                                  block * kM, thread);
    };
    float next_lse = 0, next_delta = 0;
    const auto load_stats = [&](int head, int block) {
      if (thread < kM) {
        const int64_t at = (static_cast<int64_t>(batch) * p.heads_q + head) * args.rows + block * kM + thread;
        next_lse = __ldg(args.lse_log2 + at);
        next_delta = __ldg(args.delta + at);
      }
    };

    int head = head_kv * p.group, m_block = m_first;
    int next_head = head, next_block = m_block;
    const auto advance = [&] {
      if (++next_block == m_first + m_count) {
        next_block = m_first;
        ++next_head;
      }
    };
    if (steps > 0) {
      load_tile<TileK, kThreads>(s_k, k_rows, j0, thread);
      load_q(head, m_block, 0);
      load_tile<TileV, kThreads>(s_v, v_rows, j0, thread);
      load_do(head, m_block, 0);
      ptx::cp_async_commit();
      load_stats(head, m_block);
      if (thread < 2) s_not_finite[thread] = -1;
      advance();
      ptx::cp_async_wait<0>();
      make_finite<T, TileK, kThreads>(s_k, thread);
      __syncthreads();  // s_not_finite is set before the first step marks it
    }

    float acc_dk[2][2 * B::kOwnD16][4], acc_dv[2][2 * B::kOwnDv16][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * B::kOwnD16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_dk[m][n][e] = 0;
      }
#pragma unroll
      for (int n = 0; n < 2 * B::kOwnDv16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_dv[m][n][e] = 0;
      }
    }

#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int parity = step & 1;
      const int stage_q = kC.stages_q == 2 ? parity : 0, stage_do = kC.stages_do == 2 ? parity : 0;
      const int i0 = m_block * kM;
      float* const s_lse = s_stats + parity * 2 * kM;
      float* const s_delta = s_lse + kM;
      if (thread < kM) {
        s_lse[thread] = next_lse;
        s_delta[thread] = next_delta;
        // lse is finite but for rows that are NaN or take no part (those beyond used_q are 0 already).
        if (!(fabsf(next_lse) < INFINITY) && i0 + thread < span.used_q) s_not_finite[parity] = step;
      }
      ptx::cp_async_wait<0>();
      __syncthreads();  // A
      if (s_not_finite[parity] == step) {
        for (int index = thread; index < kM * (B::kD + B::kDv) / 8; index += kThreads) {
          const int row = index % kM, c = index / kM;
          if (fabsf(s_lse[row]) < INFINITY) continue;
          unsigned char* const chunk = c < B::kD / 8
                                           ? s_q + stage_q * TileQ::kBytes + TileQ::chunk(row, c)
                                           : s_do + stage_do * TileDO::kBytes + TileDO::chunk(row, c - B::kD / 8);
          *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();  // rows that are not finite are zeros for everyone
      }
      const bool more = step + 1 < steps;
      if (more) {
        if constexpr (kC.stages_q == 2) load_q(next_head, next_block, parity ^ 1);
        if constexpr (kC.stages_do == 2) load_do(next_head, next_block, parity ^ 1);
        ptx::cp_async_commit();
        load_stats(next_head, next_block);
      }
      const bool all_see = !kC.general && pairs.all_see(i0, j0);

      const uint32_t q_tile = a_q + stage_q * TileQ::kBytes, do_tile = a_do + stage_do * TileDO::kBytes;
#pragma unroll 1
      for (int chunk = 0; chunk < B::kChunks; ++chunk) {
        const int column0 = warp_q * B::kSliceM + chunk * kC.chunk_m;  // first query of the chunk, in the tile
        float acc_s[2][kChunkN8][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < kChunkN8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_s[m][n][e] = 0;
          }
        }
        {
          const auto left = BwdOperand<TileK>::by_16_rows(a_k, warp_n * 32, 0, lane);
          const auto right = BwdOperand<TileQ>::by_8_rows(q_tile, column0, 0, lane);
          multiply<T, 2, kChunkN8 / 2, B::kD / 16>(
              acc_s, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
              [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, right.at(n * 16, 2 * k)); });
        }

        uint32_t weights[2][kChunkN8][2];
        uint32_t keep[(kC.chunk_m + 31) / 32];
        if constexpr (kC.general) {
          bwd_weights_general<T, kC>(args, pairs, span, dropout, batch, head, i0 + column0, j0 + warp_n * 32,
                                     s_lse + column0, lane, acc_s, weights, keep);
        } else {
#pragma unroll
          for (int n = 0; n < kChunkN8; ++n) {
            const float2 lse = *reinterpret_cast<const float2*>(s_lse + column0 + n * 8 + 2 * t);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                acc_s[m][n][e] = ptx::ex2(acc_s[m][n][e] * scale_log2 - (e & 1 ? lse.y : lse.x));
              }
            }
          }
          if (!all_see) {
#pragma unroll
            for (int n = 0; n < kChunkN8; ++n) {
#pragma unroll
              for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  const int i = i0 + column0 + n * 8 + 2 * t + (e & 1);
                  const int j = j0 + warp_n * 32 + m * 16 + g + 8 * (e >> 1);
                  if (!pairs.sees(i, j)) acc_s[m][n][e] = 0;
                }
              }
            }
          }
#pragma unroll
          for (int n = 0; n < kChunkN8; ++n) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              weights[m][n][0] = pack_pair<T>(acc_s[m][n][0], acc_s[m][n][1]);
              weights[m][n][1] = pack_pair<T>(acc_s[m][n][2], acc_s[m][n][3]);
            }
          }
        }
        // Where this lane's words of the chunk lie in sP^T and sdS^T.
        const uint32_t word = TileP::chunk(warp_n * 32 + g, column0 / 8) + t * 4;
        const auto word_at = [&](int m, int half, int n) {
          return (word ^ static_cast<uint32_t>((n % TileP::kChunks) << 4)) +
                 static_cast<uint32_t>((n / TileP::kChunks) * TileP::kPanelBytes + (m * 16 + half * 8) * TileP::kPitch);
        };
        if constexpr (kC.exchanges_p()) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < kChunkN8; ++n) {
              ptx::st_shared_4(a_p + word_at(m, 0, n), weights[m][n][0]);
              ptx::st_shared_4(a_p + word_at(m, 1, n), weights[m][n][1]);
            }
          }
        } else {
          const auto right = BwdOperand<TileDO>::by_16_rows(do_tile, column0, 0, lane);
          multiply<T, 2, B::kOwnDv16, kChunkN8 / 2>(
              acc_dv,
              [&](uint32_t(&a)[4], int k, int m) {
                a[0] = weights[m][2 * k][0], a[1] = weights[m][2 * k][1];
                a[2] = weights[m][2 * k + 1][0], a[3] = weights[m][2 * k + 1][1];
              },
              [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * n)); });
        }

        float acc_dp[2][kChunkN8][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < kChunkN8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc_dp[m][n][e] = 0;
          }
        }
        {
          const auto left = BwdOperand<TileV>::by_16_rows(a_v, warp_n * 32, 0, lane);
          const auto right = BwdOperand<TileDO>::by_8_rows(do_tile, column0, 0, lane);
          multiply<T, 2, kChunkN8 / 2, B::kDv / 16>(
              acc_dp, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
              [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, right.at(n * 16, 2 * k)); });
        }

#pragma unroll
        for (int n = 0; n < kChunkN8; ++n) {
          const float2 delta = *reinterpret_cast<const float2*>(s_delta + column0 + n * 8 + 2 * t);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            float ds[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float dp = acc_dp[m][n][e];
              if constexpr (kC.general) {
                if (p.dropout_threshold != 0) {
                  dp = keep[n / 4] >> (8 * (n % 4) + m * 4 + e) & 1 ? dp * dropout.keep_scale : 0.0f;
                }
              }
              ds[e] = acc_s[m][n][e] * (dp - (e & 1 ? delta.y : delta.x));
            }
            // A pair that takes no part: V or delta may be NaN.
            if (!all_see) {
#pragma unroll
              for (int e = 0; e < 4; ++e) ds[e] = acc_s[m][n][e] == 0 ? 0.0f : ds[e];
            }
            weights[m][n][0] = pack_pair<T>(ds[0], ds[1]);
            weights[m][n][1] = pack_pair<T>(ds[2], ds[3]);
            ptx::st_shared_4(a_ds + word_at(m, 0, n), weights[m][n][0]);
            ptx::st_shared_4(a_ds + word_at(m, 1, n), weights[m][n][1]);
          }
        }
        if constexpr (!kC.exchanges_p()) {
          const auto right = BwdOperand<TileQ>::by_16_rows(q_tile, column0, 0, lane);
          multiply<T, 2, B::kOwnD16, kChunkN8 / 2>(
              acc_dk,
              [&](uint32_t(&a)[4], int k, int m) {
                a[0] = weights[m][2 * k][0], a[1] = weights[m][2 * k][1];
                a[2] = weights[m][2 * k + 1][0], a[3] = weights[m][2 * k + 1][1];
              },
              [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * n)); });
        }
      }
      __syncthreads();  // B

      if constexpr (kC.exchanges_p()) {
        {
          const auto left = BwdOperand<TileP>::by_16_rows(a_p, warp_n * 32, 0, lane);
          const auto right = BwdOperand<TileDO>::by_16_rows(do_tile, 0, 2 * warp_q, lane);
          multiply<T, 2, B::kOwnDv16, kM / 16>(
              acc_dv, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
              [&](uint32_t(&b)[4], int k, int n) {
                ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * kC.warps_q * n));
              });
        }
        if constexpr (kC.stages_do == 1 && kC.stages_q == 2) {
          __syncthreads();  // C
          if (more) load_do(next_head, next_block, 0);
          ptx::cp_async_commit();
        }
        {
          const auto left = BwdOperand<TileP>::by_16_rows(a_ds, warp_n * 32, 0, lane);
          const auto right = BwdOperand<TileQ>::by_16_rows(q_tile, 0, 2 * warp_q, lane);
          multiply<T, 2, B::kOwnD16, kM / 16>(
              acc_dk, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
              [&](uint32_t(&b)[4], int k, int n) {
                ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * kC.warps_q * n));
              });
        }
      }
      if constexpr (kC.stages_q == 1) {
        if constexpr (kC.exchanges_p()) __syncthreads();  // D; in registers dK and dV were done before B
        if (more) {
          load_q(next_head, next_block, 0);
          if constexpr (kC.stages_do == 1) load_do(next_head, next_block, 0);
        }
        ptx::cp_async_commit();
      } else if constexpr (kC.stages_do == 1 && !kC.exchanges_p()) {
        if (more) load_do(next_head, next_block, 0);
        ptx::cp_async_commit();
      }

      // dQ, added to the sums of this head.
      const int64_t copy = args.deterministic ? share : 0;
      float* const dq = args.dq_sum + ((copy * p.batch + batch) * p.heads_q + head) * args.rows * B::kD;
      const auto left = BwdOperand<TileP>::by_8_rows(a_ds, 0, warp_dq_m * (2 * B::kDqM16), lane);
#pragma unroll 1
      for (int first = 0; first < B::kDqD16; first += B::kDqGroup) {
        float acc[B::kDqM16][2 * B::kDqGroup][4];
#pragma unroll
        for (int m = 0; m < B::kDqM16; ++m) {
#pragma unroll
          for (int n = 0; n < 2 * B::kDqGroup; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0;
          }
        }
        const auto right =
            BwdOperand<TileK>::by_16_rows(a_k, 0, 2 * (warp_dq_d + first * B::kWarpsDqD), lane);
        multiply<T, B::kDqM16, B::kDqGroup, kN / 16>(
            acc, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4_trans(a, left.at(k * 16, 2 * m)); },
            [&](uint32_t(&b)[4], int k, int n) {
              ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * B::kWarpsDqD * n));
            });
#pragma unroll
        for (int m = 0; m < B::kDqM16; ++m) {
          const int row16 = i0 / 16 + warp_dq_m * B::kDqM16 + m;
#pragma unroll
          for (int n = 0; n < 2 * B::kDqGroup; ++n) {
            const int column8 = 2 * (warp_dq_d + (first + n / 2) * B::kWarpsDqD) + n % 2;
            ptx::red_add_v4(dq + dq_fragment(row16, column8, B::kD) + lane * 4, acc[m][n][0], acc[m][n][1], acc[m][n][2],
                            acc[m][n][3]);
          }
        }
      }

      head = next_head, m_block = next_block;
      advance();
    }

    if (steps > 0) {
      __syncthreads();  // nobody reads K, V, Q, dO any more: sK and sV become tiles of dK and dV
      const auto stage = [&](auto& acc, auto tile, uint32_t base, int groups, float scale) {
        using Tile = decltype(tile);
        const uint32_t word = base + Tile::chunk(warp_n * 32 + g, 2 * warp_q) + t * 4;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < static_cast<int>(sizeof(acc[0]) / sizeof(acc[0][0])); ++n) {
            const int c = 2 * kC.warps_q * (n / 2) + n % 2;
            const uint32_t to = (word ^ static_cast<uint32_t>((c % Tile::kChunks) << 4)) +
                                static_cast<uint32_t>((c / Tile::kChunks) * Tile::kPanelBytes + m * 16 * Tile::kPitch);
            ptx::st_shared_4(to, pack_pair<T>(acc[m][n][0] * scale, acc[m][n][1] * scale));
            ptx::st_shared_4(to + 8 * Tile::kPitch, pack_pair<T>(acc[m][n][2] * scale, acc[m][n][3] * scale));
          }
        }
        (void)groups;
      };
      stage(acc_dk, TileK{}, a_k, B::kOwnD16, p.scale);
      stage(acc_dv, TileV{}, a_v, B::kOwnDv16, 1.0f);
      __syncthreads();  // the tiles of dK and dV are complete
      store_tile<TileK, kThreads>(s_k, dk_rows, j0, span.length_k, thread);
      store_tile<TileV, kThreads>(s_v, dv_rows, j0, span.length_k, thread);
      __syncthreads();  // and read: the next key block may be loaded
    } else {
      store_zero_rows<kThreads>(dk_rows, j0, min(j0 + kN, span.length_k), thread);
      store_zero_rows<kThreads>(dv_rows, j0, min(j0 + kN, span.length_k), thread);
    }
    if (n_block == num_blocks - 1) {
      store_zero_rows<kThreads>(dk_rows, j0 + kN, span.length_k, thread);
      store_zero_rows<kThreads>(dv_rows, j0 + kN, span.length_k, thread);
    }
  }
}

}  // namespace fovea::cuda
