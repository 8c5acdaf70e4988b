// The forward in float32 on tensor cores, sm_80 and newer: every product is three of tf32
// (warp/tf32_split.cuh).
//
//   S = Q K^T        O = softmax(scale S + terms) V        lse = log sum exp
//
// A CTA owns kTileM rows of queries of one head and walks over the blocks of kTileN keys that they see. Each
// warp owns kWarpM of the rows: scores, weights and outputs of a row never leave the four lanes that hold it.
//
// Operands lie in shared memory as float32 and are split in registers by every warp that reads them: split
// tiles would take twice the room and twice the bandwidth, and three instructions an element are hidden
// behind six mma (kWarpM = 32).
//
// Shared memory
//   sQ (kTileM, D), sK (kTileN, D), sV (kTileN, D), one stage each: two or three CTAs share an SM
// Registers
//   acc_o kWarpM D / 32, acc_s and its corrections kWarpM kTileN / 32 each; the weights lie in acc_s, and a
//   quarter of P V (kWarpM x 32 of kTileN keys) in registers of its own, since the tensor core truncates what
//   it adds: acc_o = alpha acc_o + (P V) is rounded to nearest, and costs no more than the rescaling.
// Barriers
//   A  before Q K^T of block n: K (and Q) of block n have arrived for everyone (each thread waited for its
//      own copies), and nobody reads the V of block n - 1 any more, so that V of block n is fetched
//   B  before P V of block n: V has arrived for everyone, and nobody reads the K of block n any more, so that
//      K of block n + 1 is fetched
//
// NaN and Inf: a split Inf gives NaN, and the weight 0 of a key that a row does not see times NaN is NaN. So
// rows whose outputs are not all finite are computed once more without tensor cores (warp/exact_row.cuh).
//
// Launch
//   grid    (tiles of queries * heads * batch, num_splits), see FwdTf32Work
//   block   threads()
//   shared  shared_bytes(), dynamic
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/fwd_tf32_rows.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/score_terms.cuh"
#include "cuda/warp/tf32_product.cuh"
#include "cuda/warp/tf32_tile.cuh"
#include "tile/kv_blocks.hpp"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// An instance is a type that names its configuration:
///   struct Example { static constexpr FwdTf32Config kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    fwd_tf32(const __grid_constant__ ForwardArgs args) {
  constexpr FwdTf32Config kConfig = Instance::kConfig;
  constexpr int kTileM = kConfig.tile_m(), kTileN = kConfig.tile_n, kWarpM = kConfig.warp_m;
  constexpr int kThreads = kConfig.threads(), kDim = kConfig.head_dim;
  constexpr int kMTiles = kWarpM / 16;                     ///< m16 tiles of a warp
  constexpr int kSTiles = kTileN / 8, kOTiles = kDim / 8;  ///< n8 tiles of S and of O
  using tile::kLn2, tile::kLog2e;
  using TileQ = SharedTile<kTileM, kDim, 4>;
  using TileK = SharedTile<kTileN, kDim, 4>;
  using TileV = SharedTile<kTileN, kDim, 4>;

  extern __shared__ __align__(128) unsigned char shared[];
  float* const sQ = reinterpret_cast<float*>(shared);
  float* const sK = reinterpret_cast<float*>(shared + kConfig.offset_k());
  float* const sV = reinterpret_cast<float*>(shared + kConfig.offset_v());
  FwdTf32Place& place = *reinterpret_cast<FwdTf32Place*>(shared + kConfig.offset_place());
  auto* const blocks_of_warp = reinterpret_cast<tile::KvBlocks*>(shared + kConfig.offset_warps());

  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;  // as in ptx/mma.cuh

  // --- which rows, which keys ---
  const int rows_per_query = args.pack_group ? p.group : 1;
  const int heads = args.pack_group ? p.heads_kv : p.heads_q;
  const int m_blocks = max(1, tile::ceil_div(p.seqlen_q * rows_per_query, kTileM));
  const FwdTf32Work work = FwdTf32Work::of(args, blockIdx.x, heads, m_blocks);
  const int head_kv = args.pack_group ? work.head : work.head / p.group;
  const tile::SequenceSpan span = tile::sequence_span(p, work.batch);

  const auto query_of = [&](int row) {
    return args.pack_group ? static_cast<int>(__umulhi(static_cast<uint32_t>(row), args.query_magic)) : row;
  };

  if (args.num_splits == 1) {
    // Rows that take no part: this CTA's share of the queries from used_q on.
    const int share = tile::ceil_div(max(p.seqlen_q, 1), m_blocks);
    const int begin = max(span.used_q, work.m_block * share);
    const int end =
        work.m_block + 1 == m_blocks ? span.length_q : min(span.length_q, (work.m_block + 1) * share);
    for (int i = begin; i < end; ++i) {
      for (int h = 0; h < rows_per_query; ++h) {
        const int head = args.pack_group ? work.head * p.group + h : work.head;
        float* const o = reinterpret_cast<float*>(p.o.data) + p.o.offset(work.batch, span.row_q + i, head);
        for (int c = thread; c < p.head_dim_v; c += kThreads) o[c] = 0.0f;
        if (p.lse.data != nullptr && thread == 0) {
          p.lse.data[p.lse.offset(work.batch, head, span.row_q + i)] = -INFINITY;
        }
      }
    }
  }
  if (p.rng_state != nullptr && !p.rng_state_is_input && thread == 0 && blockIdx.x + blockIdx.y == 0) {
    p.rng_state[0] = static_cast<int64_t>(p.seed);
    p.rng_state[1] = static_cast<int64_t>(p.offset);
  }
  const int first_row = work.m_block * kTileM;
  const int end_row = min(first_row + kTileM, span.used_q * rows_per_query);
  if (first_row >= end_row) return;

  const auto blocks_of_rows = [&](int begin, int end) {
    return begin < end ? tile::kv_blocks(p, span, query_of(begin), query_of(end - 1) + 1, kTileN)
                       : tile::KvBlocks{};
  };
  const tile::KvBlocks all_blocks = blocks_of_rows(first_row, end_row);
  const int warp_row = first_row + warp * kWarpM;
  const int share = tile::ceil_div(all_blocks.count(), args.num_splits);
  const int n_begin = all_blocks.begin + static_cast<int>(blockIdx.y) * share;
  const int n_end = min(n_begin + share, all_blocks.end);
  const float* const gK =
      reinterpret_cast<const float*>(p.k.data) + p.k.offset(work.batch, span.row_k, head_kv);
  const float* const gV =
      reinterpret_cast<const float*>(p.v.data) + p.v.offset(work.batch, span.row_k, head_kv);

  // What only the prologue and the epilogue, masked blocks and the terms of the score ask for waits in shared
  // memory: the main loop needs the registers.
  if (thread == 0) place = {work, span, end_row, n_begin, n_end, gK, gV};
  if (lane == 0) blocks_of_warp[warp] = blocks_of_rows(warp_row, min(warp_row + kWarpM, end_row));
  __syncthreads();  // both can be read
  const auto head_of = [&](int row) {
    return args.pack_group ? place.work.head * p.group + row - query_of(row) * p.group : place.work.head;
  };
  const auto row_at = [&](int mt, int half) {
    return place.work.m_block * kTileM + warp * kWarpM + mt * 16 + half * 8 + g;
  };

  const auto copy_q = [&] {
    gather_tile<TileQ, kThreads>(
        ptx::shared_address(sQ), p.head_dim, (p.aligned16 & tile::kAlignedQ) != 0, thread,
        [&](int r) -> const char* {
          const int row = place.work.m_block * kTileM + r;
          if (row >= place.end_row) return nullptr;
          return p.q.data + p.q.offset(place.work.batch, place.span.row_q + query_of(row), head_of(row)) * 4;
        });
  };
  const auto copy_k = [&](int n) {
    const RowSource rows = {reinterpret_cast<const char*>(place.k), p.k.row * 4, place.span.used_k,
                            p.head_dim, opaque((p.aligned16 & tile::kAlignedK) != 0)};
    copy_tile_either<TileK, kThreads>(ptx::shared_address(sK), rows, n * kTileN, opaque(thread));
    ptx::cp_async_commit();
  };
  const auto copy_v = [&](int n) {
    const RowSource rows = {reinterpret_cast<const char*>(place.v), p.v.row * 4, place.span.used_k,
                            p.head_dim_v, opaque((p.aligned16 & tile::kAlignedV) != 0)};
    copy_tile_either<TileV, kThreads>(ptx::shared_address(sV), rows, n * kTileN, opaque(thread));
    ptx::cp_async_commit();
  };

  // Scores enter the softmax as exponents of 2: the plain kernel folds scale * log2(e) into the exponent's
  // fma, the general one has multiplied already.
  const float scale_log2 = kConfig.general ? 1.0f : p.scale * kLog2e;
  const tile::Dropout dropout = kConfig.general ? tile::dropout_of(p) : tile::Dropout();

  float acc_o[kMTiles][kOTiles][4];
  // The largest score so far as an exponent of 2, rounded, so that the weights of all blocks refer to the
  // same number; and the sum of this lane's weights.
  float row_base[kMTiles][2], row_sum[kMTiles][2];
  using Scores = float[kMTiles][kSTiles][4];

  const Tf32AlongRows<kDim> q_rows(sQ, warp * kWarpM, lane), k_rows(sK, 0, lane);
  const Tf32DownRows<kDim> v_rows(sV, lane);

  const auto mask = [&](Scores& acc_s, int n) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const tile::Span32 seen = tile::keys_of(p, place.span, query_of(row_at(mt, half)));
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = n * kTileN + nt * 8 + 2 * t + e;
            if (j < seen.begin || j >= seen.end) acc_s[mt][nt][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  };

  const auto apply_terms = [&](Scores& acc_s, int n) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_at(mt, half);
        const int i = query_of(row);
        const tile::Span32 seen = row < place.end_row ? tile::keys_of(p, place.span, i) : tile::Span32{};
        const RowTerms<float> terms(p, place.span, place.work.batch, head_of(row), i);
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int j = n * kTileN + nt * 8 + 2 * t + e;
            float& s = acc_s[mt][nt][2 * half + e];
            s = j >= seen.begin && j < seen.end && terms.sees(p, j) ? terms.score(p, s, j) * kLog2e
                                                                    : -INFINITY;
          }
        }
      }
    }
  };

  const auto drop = [&](Scores& acc_s, int n) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_at(mt, half);
        const RowTerms<float> terms(p, place.span, place.work.batch, head_of(row), query_of(row));
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
          const float2 keep = terms.keep_pair(dropout, n * kTileN + nt * 8 + 2 * t);
          acc_s[mt][nt][2 * half] *= keep.x;
          acc_s[mt][nt][2 * half + 1] *= keep.y;
        }
      }
    }
  };

  /// From scores to weights; alpha is what the sums so far are to be multiplied by.
  const auto softmax = [&](Scores& acc_s, float(&alpha)[kMTiles][2]) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = -INFINITY;
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
          largest = fmaxf(largest, fmaxf(acc_s[mt][nt][2 * half], acc_s[mt][nt][2 * half + 1]));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const float raised = fmaxf(row_base[mt][half], __fmul_rn(largest, scale_log2));
        const float base = raised == -INFINITY ? 0.0f : raised;
        alpha[mt][half] = ptx::ex2(row_base[mt][half] - base);
        row_base[mt][half] = raised;
        float sum = 0;
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = acc_s[mt][nt][2 * half + e];
            s = ptx::ex2(fmaf(s, scale_log2, -base));
            sum += s;
          }
        }
        row_sum[mt][half] = fmaf(row_sum[mt][half], alpha[mt][half], sum);
      }
    }
  };

  copy_q();
  if (place.n_begin < place.n_end) copy_k(place.n_begin);
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_base[mt][half] = -INFINITY;
      row_sum[mt][half] = 0.0f;
    }
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_o[mt][ot][e] = 0.0f;
    }
  }

#pragma unroll 1
  for (int n = place.n_begin; n < place.n_end; ++n) {
    const bool visible = blocks_of_warp[warp].begin <= n && n < blocks_of_warp[warp].end;
    Scores acc_s;
    ptx::cp_async_wait<0>();
    __syncthreads();  // A: K has arrived, V of the block before is free
    copy_v(n);
    if (visible) multiply_rows(acc_s, q_rows, k_rows, p.head_dim);
    ptx::cp_async_wait<0>();
    __syncthreads();  // B: V has arrived, K is free
    if (n + 1 < place.n_end) copy_k(n + 1);
    if (!visible) continue;
    if constexpr (kConfig.general) {
      apply_terms(acc_s, n);
    } else if (!blocks_of_warp[warp].is_full(n)) {
      mask(acc_s, n);
    }
    float alpha[kMTiles][2];
    softmax(acc_s, alpha);
    if (kConfig.general && p.dropout_threshold != 0) drop(acc_s, n);
    multiply_weights(acc_o, acc_s, v_rows, p.head_dim_v,
                     [&](float o, float pv, int mt, int half) { return fmaf(o, alpha[mt][half], pv); });
  }

  // --- epilogue ---
  uint32_t broken[kMTiles][2];  // bit 4 g + t: lane t of row g has something that is not finite
  const bool vectors = p.head_dim_v % 4 == 0 && (args.num_splits > 1 || (p.aligned16 & tile::kAlignedO) != 0);
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[mt][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = row_at(mt, half);
      bool finite = true;
#pragma unroll
      for (int ot = 0; ot < kOTiles; ++ot) {
        finite &= isfinite(acc_o[mt][ot][2 * half]) && isfinite(acc_o[mt][ot][2 * half + 1]);
      }
      broken[mt][half] = __ballot_sync(0xffffffffu, row < place.end_row && !finite);
      if (row >= place.end_row || (broken[mt][half] >> (4 * g) & 15u) != 0) continue;
      const int i = query_of(row), head = head_of(row);
      const RowResult result = row_result(sum, row_base[mt][half] * kLn2, sink_of(p, args.num_splits, head));
      float* const o = row_output(args, place, head, i);
      if (t == 0) write_lse(args, place, head, i, result.lse);
#pragma unroll
      for (int block = 0; block < kDim / 32; ++block) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float4 x;
          x.x = acc_o[mt][block * 4][2 * half + e] * result.factor;
          x.y = acc_o[mt][block * 4 + 1][2 * half + e] * result.factor;
          x.z = acc_o[mt][block * 4 + 2][2 * half + e] * result.factor;
          x.w = acc_o[mt][block * 4 + 3][2 * half + e] * result.factor;
          const int column = block * 32 + 8 * t + 4 * e;
          if (vectors) {
            if (column < p.head_dim_v) *reinterpret_cast<float4*>(o + column) = x;
          } else {
            if (column < p.head_dim_v) o[column] = x.x;
            if (column + 1 < p.head_dim_v) o[column + 1] = x.y;
            if (column + 2 < p.head_dim_v) o[column + 2] = x.z;
            if (column + 3 < p.head_dim_v) o[column + 3] = x.w;
          }
        }
      }
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
        const int row = place.work.m_block * kTileM + warp * kWarpM + mt * 16 + half * 8 + r;
        write_exact_row<kDim>(args, place, head_of(row), query_of(row), place.n_begin * kTileN,
                              place.n_end * kTileN);
      }
    }
  }
}

}  // namespace fovea::cuda
