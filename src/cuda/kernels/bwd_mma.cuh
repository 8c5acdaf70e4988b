// The backward on mma.sync: sm_80 class (cp.async, ldmatrix, m16n8k16) and, with m16n8k8, sm_75.
//
//   S^T = K Q^T    P = exp2(scale_log2 S - lse_log2)    dP^T = V dO^T    dS = P o (dP - delta)
//   dV += P^T dO   dK += dS^T Q   (in registers, over all query blocks and heads of the group)
//   dQ += dS K     (float32 sums in global memory)
//
// A CTA owns kTileN keys of one key head and walks over the blocks of kTileM queries that see any of them,
// head by head of the group: dK and dV need no atomics and no buffer per query head. S and dP are computed
// transposed, keys in rows, so that P^T and dS^T have the shape in which dV and dK want their left operands.
// Three GEMMs, three ways to share them out:
//
//   S^T, dP^T   warp (n, q) has 32 keys (n) and kSliceM queries (q), kChunkM at a time
//   dV, dK      warp (n, q) has the same 32 keys and every kWarpsQ-th 16 columns from 16 q on
//   dQ          kWarpsDqM x kWarpsDqD warps over queries x columns
//
// With kWarpsQ = 1 P^T and dS^T go from accumulator to operand in registers; else through shared memory.
// 32 keys a warp: each B fragment that ldmatrix brings feeds two mma; with 16 shared memory (128 B a clock)
// would take longer than the mma. With `stream` (wide heads) a CTA owns a slice of the columns of dK, dV, dQ,
// and all columns of Q, K, dO, V pass through shared memory for S and dP.
//
// Shared memory
//   sK, sV     (kTileN, D | Dv), later the tiles of dK and dV; sV with `stream`: chunks on their way
//   sQ, sdO    (kTileM, D | Dv), 1 to 3 stages
//   sdS^T      (kTileN, kTileM); sP^T likewise, only where kWarpsQ > 1
//   lse_log2 and delta of two blocks; BwdWork
// Registers
//   acc_dk, acc_dv 32 (D + Dv) / kWarpsQ / 32 a lane; acc_s, acc_dp kChunkM each
//
// Barriers of a step
//   A  the block's Q, dO, lse, delta have arrived for everyone (each thread waited for its own copies), and
//      nobody reads the last step's P, dS, Q, dO any more: their second stages take the next block
//   B  P and dS of all warps can be read
//   C  nobody reads dO any more (only where Q has two stages and dO one)
//   D  nobody reads Q (and dO) any more (only where Q has one stage)
//
// What is not finite. K is made finite once a CTA: a row that sees a NaN in K has lse NaN, hence P = NaN,
// whatever K holds; an infinity becomes the largest finite number, which gives the weights 0 or NaN that
// infinity would give. Q and dO of rows whose lse is not finite become 0 before they are used (P of the keys
// that such a row sees is NaN, or 0 where the row takes no part). V only enters dP, which is a number of one
// pair: pairs that take no part get dS = 0 by selection.
//
// Launch
//   grid    bwd_mma_grid: (num_splits * heads_kv * batch, slices or 1, 1)
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_prepare (lse_log2, delta, zeros in dq_sum)
//   after   bwd_finish (dq; zeros in rows of dk, dv beyond used_k)
//
// CTA x has share x % num_splits of key head x / num_splits % heads_kv. Without `deterministic` num_splits is
// the number of key blocks, ceil(longest used_k / kTileN), and all add to one dq_sum. With it each of
// num_splits CTAs takes one block of every num_splits in turn (every other round in reverse: under causal all
// then have the same work) and has a dq_sum of its own, so that the same thread adds to the same element in
// program order. Key block 0, first in a head, has most queries under causal: longest first, and CTAs that
// run together share a head's Q, dO and dq_sum in L2.
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

/// What a CTA knows of its work and needs now and then: in shared memory, as registers are what limits this
/// kernel.
struct BwdWork {
  tile::SequenceSpan span;
  tile::Dropout dropout;
  int batch, head_kv, share, round;
  int j0;              ///< first key of the block
  int m_first, m_end;  ///< blocks of queries that see the key block
  int not_finite[2];   ///< the last step, of either parity, with rows that are not finite
};

struct BwdConfig {
  int head_dim, head_dim_v;  ///< padded: multiples of 32
  int tile_m, tile_n;
  int warps_q;     ///< slices of queries in S, of columns in dK and dV; slices of keys are tile_n / 32
  int chunk_m;     ///< queries whose S and dP a warp holds at a time
  int warps_dq_m;  ///< warps along the queries in dQ
  int stages_q, stages_do;  ///< of Q and dO
  int min_ctas;             ///< CTAs an SM, for the register allocator
  bool general;             ///< every term of the score; else window, causal and lengths only
  /// 0, or wide heads: a CTA owns `head_dim` columns of dK and dQ and `head_dim_v` of dV (slice blockIdx.y),
  /// and computes S and dP from all columns of Q, K, dO, V, which pass through shared memory `stream` columns
  /// at a time.
  int stream;
  MmaShape mma = MmaShape::kM16N8K16;

  constexpr int warps_n() const { return tile_n / 32; }
  constexpr int num_warps() const { return warps_n() * warps_q; }
  constexpr int threads() const { return 32 * num_warps(); }
  constexpr bool exchanges_p() const { return warps_q > 1; }  ///< P through shared memory, as operands

  // Offsets in shared memory.
  constexpr int offset_k() const { return 0; }
  constexpr int offset_v() const { return tile_n * head_dim * 2; }
  constexpr int stream_bytes() const { return (tile_n + tile_m) * stream * 2; }  ///< of one of two stages
  constexpr int offset_q() const {
    return offset_v() + (stream > 0 ? 2 * stream_bytes() : tile_n * head_dim_v * 2);
  }
  constexpr int offset_do() const { return offset_q() + stages_q * tile_m * head_dim * 2; }
  constexpr int offset_ds() const { return offset_do() + stages_do * tile_m * head_dim_v * 2; }
  constexpr int offset_p() const { return offset_ds() + tile_n * tile_m * 2; }
  constexpr int offset_stats() const { return offset_p() + (exchanges_p() ? tile_n * tile_m * 2 : 0); }
  constexpr int offset_work() const { return offset_stats() + 2 * 2 * tile_m * 4; }
  constexpr int shared_bytes() const { return offset_work() + static_cast<int>(sizeof(BwdWork)); }

  constexpr bool valid() const {
    return head_dim % 32 == 0 && head_dim_v % 32 == 0 && tile_n % 32 == 0 && tile_m % 32 == 0 &&
           tile_m % (warps_q * chunk_m) == 0 && chunk_m % 16 == 0 && head_dim % (16 * warps_q) == 0 &&
           head_dim_v % (16 * warps_q) == 0 && num_warps() % warps_dq_m == 0 &&
           tile_m % (16 * warps_dq_m) == 0 && head_dim % (16 * (num_warps() / warps_dq_m)) == 0 &&
           BackwardArgs::kRowPadding % tile_m == 0 && 2 * tile_m <= threads() &&
           (stream == 0 || (stages_q == 1 && stages_do == 1 && exchanges_p() && tile_m == warps_q * chunk_m &&
                            2 * stream_bytes() >= tile_n * head_dim_v * 2 && stream % 32 == 0));
  }
};

/// Grid of a launch: x, y, z. `value_slice` of the kernel table is head_dim_v where heads are streamed, else
/// 0.
template <class Grid>
constexpr Grid bwd_mma_grid(const BackwardArgs& args, const BwdConfig& config) {
  const int64_t ctas = static_cast<int64_t>(args.num_splits) * args.p.heads_kv * args.p.batch;
  if (config.stream == 0) return {ctas, 1, 1};
  const int slices = (args.p.head_dim + config.head_dim - 1) / config.head_dim;
  const int slices_v = (args.p.head_dim_v + config.head_dim_v - 1) / config.head_dim_v;
  return {ctas, slices > slices_v ? slices : slices_v, 1};
}

/// Offset of 16 rows x 8 columns in a head's sums of dq: they lie as an mma leaves them in its lanes, 16
/// bytes a lane, so that a warp adds 512 consecutive bytes.
__host__ __device__ constexpr int64_t dq_fragment(int row16, int column8, int columns) {
  return (static_cast<int64_t>(row16) * (columns / 8) + column8) * 128;
}

template <int kM16, int kN8>
__device__ __forceinline__ void clear(float (&acc)[kM16][kN8][4]) {
#pragma unroll
  for (int m = 0; m < kM16; ++m) {
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0;
    }
  }
}

template <class Instance>
struct BwdMma {
  static constexpr BwdConfig kC = Instance::kConfig;
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
  /// 16-column groups of dQ at a time: beside the accumulators of dK and dV there is room for 64 a lane, with
  /// 16 warps for 32.
  static constexpr int kDqRoom = kThreads * kC.min_ctas > 256 ? 4 : 8;
  static constexpr int kDqGroup = kDqD16 * kDqM16 <= kDqRoom                 ? kDqD16
                                  : kDqD16 % 4 == 0 && 4 * kDqM16 <= kDqRoom ? 4
                                  : kDqD16 % 2 == 0 && 2 * kDqM16 <= kDqRoom ? 2
                                                                             : 1;

  using TileK = BwdTile<kN, kD>;
  using TileV = BwdTile<kN, kDv>;
  using TileQ = BwdTile<kM, kD>;
  using TileDO = BwdTile<kM, kDv>;
  using TileP = BwdTile<kN, kM>;
  static constexpr int kStream = kC.stream > 0 ? kC.stream : 32;  // 32: unused
  using StreamN = BwdTile<kN, kStream>;
  using StreamM = BwdTile<kM, kStream>;

  /// Where a thread stands. Made anew in each phase: kept over a step, what is derived from it would cost 30
  /// registers.
  struct Place {
    int lane, g, t;            ///< g, t: row and pair of columns in a fragment
    int warp_n, warp_q;        ///< in S, dP, dV, dK
    int warp_dq_m, warp_dq_d;  ///< in dQ

    __device__ __forceinline__ explicit Place(int thread) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
      constexpr bool kAnew = true;
#else
      // Where P stays in registers there are few addresses: sm_90 has room to keep them (measured: 5 % at D =
      // 64).
      constexpr bool kAnew = kC.warps_q > 1;
#endif
      if constexpr (kAnew) ptx::make_opaque(thread);
      constexpr auto divide = [](int x, int y) {
        return static_cast<int>(static_cast<uint32_t>(x) / static_cast<uint32_t>(y));
      };
      const int warp = divide(thread, 32);
      lane = thread & 31;
      g = lane >> 2, t = lane & 3;
      warp_q = divide(warp, kC.warps_n()), warp_n = warp - warp_q * kC.warps_n();
      warp_dq_d = divide(warp, kC.warps_dq_m), warp_dq_m = warp - warp_dq_d * kC.warps_dq_m;
    }
    /// First query of a chunk, in the tile.
    __device__ __forceinline__ int column0(int chunk) const {
      return warp_q * kSliceM + chunk * kC.chunk_m;
    }
    /// Where this lane's words of a chunk lie in sP^T and sdS^T: fragment (m, n), row g or g + 8.
    __device__ __forceinline__ uint32_t words(int chunk) const {
      return TileP::chunk(warp_n * 32 + g, column0(chunk) / 8) + static_cast<uint32_t>(t) * 4;
    }
    static __device__ __forceinline__ uint32_t word(uint32_t words, int m, int half, int n) {
      return (words ^ static_cast<uint32_t>((n % TileP::kChunks) << 4)) +
             static_cast<uint32_t>((n / TileP::kChunks) * TileP::kPanelBytes +
                                   (m * 16 + half * 8) * TileP::kPitch);
    }
  };

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

/// Weights of a chunk from S, in place: acc becomes P, without the dropout factor, times the slope of
/// softcap; `weights` gets P with dropout, rounded. `keep` has a bit for each kept element, in the order of
/// acc.
template <class Instance, int kChunkN8, int kKeepWords>
__device__ __forceinline__ void bwd_weights_general(
    const BackwardArgs& args, const typename BwdMma<Instance>::Pairs& pairs, const BwdWork& work, int head,
    int i0, int j0, const float* lse_log2, int lane, float (&acc)[2][kChunkN8][4],
    uint32_t (&weights)[2][kChunkN8][2], uint32_t (&keep)[kKeepWords]) {
  using T = typename Instance::Element;
  const tile::AttentionParams& p = args.p;
  const tile::Dropout dropout = work.dropout;
  constexpr float kLog2E = 1.4426950408889634f;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (auto& word : keep) word = ~0u;
#pragma unroll
  for (int n = 0; n < kChunkN8; ++n) {
    float kept[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[m][e] = 1.0f;
    }
    if (p.dropout_threshold != 0) {
      // The four words of one Philox call decide four consecutive keys, which four lanes hold. Each of them
      // makes the words of one (query, eight keys) and tells the others by vote.
      const int r = g & 3;
      uint32_t keeps = 0;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = i0 + n * 8 + 2 * t + (r & 1);
        const int j = j0 + m * 16 + (r >> 1) * 8 + (g & 4);
        const auto words = dropout.quad(static_cast<int64_t>(work.batch) * p.heads_q + head, i, j >> 2);
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
      const bool q_is_nan = isnan(lse) && lse_log2[Instance::kConfig.tile_m + column] == INFINITY;
      const RowTerms<T> terms(p, work.span, work.batch, head, i < pairs.used_q ? i : 0);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int j = j0 + m * 16 + h * 8 + g, e = 2 * h + c;
          float weight = 0;
          if (i < pairs.used_q && lse != INFINITY && pairs.sees(i, j) && terms.sees(p, j)) {
            const float dot = acc[m][n][e];
            const float score = terms.score(p, dot, j);
            if (score != -INFINITY || q_is_nan) weight = q_is_nan ? lse : ptx::ex2(score * kLog2E - lse);
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
      weights[m][n][0] = pack<T>(kept[m][0], kept[m][1]);
      weights[m][n][1] = pack<T>(kept[m][2], kept[m][3]);
    }
  }
}

/// An instance is a type that names its element type and its configuration:
///   struct Example { using Element = __half; static constexpr BwdConfig kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    bwd_mma(const __grid_constant__ BackwardArgs args) {
  using T = typename Instance::Element;
  using B = BwdMma<Instance>;
  using TileDO = typename B::TileDO;
  using TileK = typename B::TileK;
  using TileP = typename B::TileP;
  using TileQ = typename B::TileQ;
  using TileV = typename B::TileV;
  using Place = typename B::Place;
  constexpr int kM = B::kM, kN = B::kN, kThreads = B::kThreads, kChunkN8 = B::kChunkN8;
  constexpr float kLog2E = 1.4426950408889634f;

  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const s_k = shared + B::kC.offset_k();
  unsigned char* const s_v = shared + B::kC.offset_v();
  unsigned char* const s_q = shared + B::kC.offset_q();
  unsigned char* const s_do = shared + B::kC.offset_do();
  float* const s_stats = reinterpret_cast<float*>(shared + B::kC.offset_stats());  // [2][lse_log2, delta][kM]
  BwdWork& work = *reinterpret_cast<BwdWork*>(shared + B::kC.offset_work());
  const uint32_t shared_base = ptx::shared_address(shared);
  const uint32_t a_k = shared_base + B::kC.offset_k(), a_v = shared_base + B::kC.offset_v(),
                 a_q = shared_base + B::kC.offset_q(), a_do = shared_base + B::kC.offset_do(),
                 a_ds = shared_base + B::kC.offset_ds(), a_p = shared_base + B::kC.offset_p(),
                 a_stats = shared_base + B::kC.offset_stats();

  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    const int head_index = static_cast<int>(blockIdx.x) / args.num_splits;
    work.head_kv = head_index % p.heads_kv;
    work.batch = head_index / p.heads_kv;
    work.share = static_cast<int>(blockIdx.x) % args.num_splits;
    work.round = 0;
    work.j0 = work.share * kN;
    work.span = tile::sequence_span(p, work.batch);
    if constexpr (B::kC.general) work.dropout = tile::dropout_of(p);
  }
  __syncthreads();  // the work is known

  const auto rows_of = [&](const tile::RowsView& view, int64_t row, int head, int used, int columns,
                           uint32_t bit) {
    return BwdRows{view.data + view.offset(work.batch, row, head) * 2, view.row, used, columns,
                   (p.aligned16 & bit) != 0};
  };
  // Columns from `first` on: those of this CTA's slice, or a chunk that is streamed.
  const auto columns_from = [](BwdRows rows, int first) {
    rows.data += first * 2;
    rows.columns -= first;
    return rows;
  };
  const auto slice_at = [](int width) { return B::kC.stream > 0 ? static_cast<int>(blockIdx.y) * width : 0; };
  const auto k_rows = [&](const tile::RowsView& view, int columns, uint32_t bit) {
    return rows_of(view, work.span.row_k, work.head_kv, work.span.used_k, columns, bit);
  };
  const auto q_rows = [&](const tile::RowsView& view, int head, int columns, uint32_t bit) {
    return rows_of(view, work.span.row_q, head, work.span.used_q, columns, bit);
  };

  const float scale_log2 = p.scale * kLog2E;
#pragma unroll 1
  while (work.j0 < work.span.used_k) {
    if (thread == 0) {
      const tile::Span32 queries =
          tile::queries_of_any(p, work.span, work.j0, min(work.j0 + kN, work.span.used_k));
      const bool any = !queries.empty() && work.j0 < work.span.used_k;
      work.m_first = any ? queries.begin / kM : 0;
      work.m_end = any ? (queries.end + kM - 1) / kM : 0;
      work.not_finite[0] = work.not_finite[1] = -1;
    }
    __syncthreads();  // the blocks of queries are known
    int head = work.head_kv * p.group, m_block = work.m_first;
    const bool any_step = m_block < work.m_end;

    // Q, dO, and a row's statistics of one step.
    const auto load_q = [&](int head, int block, int stage) {
      load_tile<TileQ, kThreads>(
          s_q + stage * TileQ::kBytes,
          columns_from(q_rows(p.q, head, p.head_dim, tile::kAlignedQ), slice_at(B::kD)), block * kM, thread);
    };
    const auto load_do = [&](int head, int block, int stage) {
      load_tile<TileDO, kThreads>(
          s_do + stage * TileDO::kBytes,
          columns_from(q_rows(p.d_o, head, p.head_dim_v, tile::kAlignedDO), slice_at(B::kDv)), block * kM,
          thread);
    };
    // lse_log2 of row `thread`, or delta of row `thread - kM`.
    const auto load_statistics = [&](int head, int block, int parity) {
      if (thread < 2 * kM) {
        const float* const from = thread < kM ? args.lse_log2 : args.delta;
        ptx::cp_async_4(a_stats + static_cast<uint32_t>(parity * 2 * kM + thread) * 4,
                        from + (static_cast<int64_t>(work.batch) * p.heads_q + head) * args.rows +
                            block * kM + thread % kM,
                        true);
      }
    };

    if (any_step) {
      load_tile<TileK, kThreads>(s_k, columns_from(k_rows(p.k, p.head_dim, tile::kAlignedK), slice_at(B::kD)),
                                 work.j0, thread);
      load_q(head, m_block, 0);
      if constexpr (B::kC.stream == 0) {
        load_tile<TileV, kThreads>(s_v, k_rows(p.v, p.head_dim_v, tile::kAlignedV), work.j0, thread);
      }
      load_do(head, m_block, 0);
      load_statistics(head, m_block, 0);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      make_finite<T, TileK, kThreads>(s_k, thread);
    }

    float acc_dk[2][2 * B::kOwnD16][4], acc_dv[2][2 * B::kOwnDv16][4];
    clear(acc_dk);
    clear(acc_dv);

#pragma unroll 1
    for (int step = 0; any_step; ++step) {
      const int parity = step & 1;
      const int stage_q = step % B::kC.stages_q, stage_do = step % B::kC.stages_do;
      const int i0 = m_block * kM;
      float* const s_lse = s_stats + parity * 2 * kM;
      ptx::cp_async_wait<0>();
      // lse is finite but for rows that are NaN or take no part (those beyond used_q are 0 already).
      if (thread < kM && !(fabsf(s_lse[thread]) < INFINITY) && i0 + thread < work.span.used_q) {
        work.not_finite[parity] = step;
      }
      __syncthreads();  // A
      if (work.not_finite[parity] == step) {
        int first = thread;
        ptx::make_opaque(first);
        for (int index = first; index < kM * (B::kD + B::kDv) / 8; index += kThreads) {
          const int row = index % kM, c = index / kM;
          if (fabsf(s_lse[row]) < INFINITY) continue;
          unsigned char* const chunk =
              c < B::kD / 8 ? s_q + stage_q * TileQ::kBytes + TileQ::chunk(row, c)
                            : s_do + stage_do * TileDO::kBytes + TileDO::chunk(row, c - B::kD / 8);
          if constexpr (B::kC.general) {
            // A bias of -inf does not take a key out of a row whose q is NaN: the scores are NaN, not -inf.
            const uint4 words = *reinterpret_cast<const uint4*>(chunk);
            NonFinite<T> bad;
            bad.look(words.x), bad.look(words.y), bad.look(words.z), bad.look(words.w);
            if (c < B::kD / 8 && bad.any()) s_lse[kM + row] = INFINITY;
          }
          *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
        }
        __syncthreads();  // rows that are not finite are zeros for everyone
      }
      // Where the step to come is; read anew from `work` behind each barrier, which keeps it out of the
      // registers.
      struct Step {
        int head, block;
        bool exists;
      };
      const auto next_step = [&] {
        const bool wraps = m_block + 1 == work.m_end;
        return Step{head + wraps, wraps ? work.m_first : m_block + 1,
                    head + wraps < (work.head_kv + 1) * p.group};
      };
      if (const Step next = next_step(); next.exists) {
        if constexpr (B::kC.stages_q > 1) load_q(next.head, next.block, (step + 1) % B::kC.stages_q);
        if constexpr (B::kC.stages_do > 1) load_do(next.head, next.block, (step + 1) % B::kC.stages_do);
        load_statistics(next.head, next.block, parity ^ 1);
        ptx::cp_async_commit();
      }

      // acc += rows of `left` times rows of `right` over all columns, in chunks that pass through sV.
      [[maybe_unused]] const auto stream = [&](auto& acc, const BwdRows& left, const BwdRows& right) {
        using StreamN = typename B::StreamN;
        using StreamM = typename B::StreamM;
        const auto load = [&](int c) {
          unsigned char* const to = s_v + (c & 1) * B::kC.stream_bytes();
          load_tile<StreamN, kThreads>(to, columns_from(left, c * B::kStream), work.j0, thread);
          load_tile<StreamM, kThreads>(to + StreamN::kBytes, columns_from(right, c * B::kStream), i0, thread);
          ptx::cp_async_commit();
        };
        __syncthreads();  // nobody reads the chunks of the last product any more
        load(0);
        const int chunks = (left.columns + B::kStream - 1) / B::kStream;
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
          ptx::cp_async_wait<0>();
          __syncthreads();  // chunk c is here for everyone, chunk c - 1 has been read
          if (c + 1 < chunks) load(c + 1);
          const Place at(thread);
          const uint32_t from = a_v + static_cast<uint32_t>((c & 1) * B::kC.stream_bytes());
          const auto a_operand = BwdOperand<StreamN>::by_16_rows(from, at.warp_n * 32, 0, at.lane);
          const auto b_operand =
              BwdOperand<StreamM>::by_8_rows(from + StreamN::kBytes, at.column0(0), 0, at.lane);
          multiply<T, B::kC.mma, 2, kChunkN8 / 2, B::kStream / 16>(
              acc, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, a_operand.at(m * 16, 2 * k)); },
              [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, b_operand.at(n * 16, 2 * k)); });
        }
      };
      // S, dP, P, dS of this step; dV and dK where they need no others' P and dS.
      const auto front = [&] {
        const uint32_t q_tile = a_q + stage_q * TileQ::kBytes, do_tile = a_do + stage_do * TileDO::kBytes;
#pragma unroll 1
        for (int chunk = 0; chunk < B::kChunks; ++chunk) {
          float acc_s[2][kChunkN8][4];
          clear(acc_s);
          if constexpr (B::kC.stream > 0) {
            stream(acc_s, k_rows(p.k, p.head_dim, tile::kAlignedK),
                   q_rows(p.q, head, p.head_dim, tile::kAlignedQ));
          } else {
            const Place at(thread);
            const auto left = BwdOperand<TileK>::by_16_rows(a_k, at.warp_n * 32, 0, at.lane);
            const auto right = BwdOperand<TileQ>::by_8_rows(q_tile, at.column0(chunk), 0, at.lane);
            multiply<T, B::kC.mma, 2, kChunkN8 / 2, B::kD / 16>(
                acc_s, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
                [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, right.at(n * 16, 2 * k)); });
          }

          // dP right behind S: its mma cover the exponentials.
          float acc_dp[2][kChunkN8][4];
          clear(acc_dp);
          if constexpr (B::kC.stream > 0) {
            stream(acc_dp, k_rows(p.v, p.head_dim_v, tile::kAlignedV),
                   q_rows(p.d_o, head, p.head_dim_v, tile::kAlignedDO));
          } else {
            const Place at(thread);
            const auto left = BwdOperand<TileV>::by_16_rows(a_v, at.warp_n * 32, 0, at.lane);
            const auto right = BwdOperand<TileDO>::by_8_rows(do_tile, at.column0(chunk), 0, at.lane);
            multiply<T, B::kC.mma, 2, kChunkN8 / 2, B::kDv / 16>(
                acc_dp, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
                [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, right.at(n * 16, 2 * k)); });
          }

          uint32_t rounded_p[2][kChunkN8][2], rounded_ds[2][kChunkN8][2];
          uint32_t keep[(B::kC.chunk_m + 31) / 32];
          if constexpr (B::kC.general) {
            const Place at(thread);
            bwd_weights_general<Instance>(args, typename B::Pairs(p, work.span), work, head,
                                          i0 + at.column0(chunk), work.j0 + at.warp_n * 32,
                                          s_lse + at.column0(chunk), at.lane, acc_s, rounded_p, keep);
          }
          const auto weigh = [&](auto select) {
            constexpr bool kSelect = decltype(select)::value;
            const Place at(thread);
            const float* const statistics = s_lse + at.column0(chunk) + 2 * at.t;
            const typename B::Pairs pairs(p, work.span);
            [[maybe_unused]] const int distance =
                work.j0 + at.warp_n * 32 + at.g - (i0 + at.column0(chunk) + 2 * at.t) - pairs.shift;
            [[maybe_unused]] const int keys_left = pairs.used_k - (work.j0 + at.warp_n * 32 + at.g);
            const uint32_t words = at.words(chunk);
#pragma unroll
            for (int n = 0; n < kChunkN8; ++n) {
              [[maybe_unused]] const float2 lse = *reinterpret_cast<const float2*>(statistics + n * 8);
              const float2 delta = *reinterpret_cast<const float2*>(statistics + kM + n * 8);
#pragma unroll
              for (int m = 0; m < 2; ++m) {
                float ds[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  float weight = acc_s[m][n][e], dp = acc_dp[m][n][e];
                  if constexpr (B::kC.general) {
                    if (p.dropout_threshold != 0) {
                      dp = keep[n / 4] >> (8 * (n % 4) + m * 4 + e) & 1 ? dp * p.dropout_keep_scale : 0.0f;
                    }
                  } else {
                    weight = ptx::ex2(weight * scale_log2 - (e & 1 ? lse.y : lse.x));
                    if constexpr (kSelect) {
                      const int key = m * 16 + 8 * (e >> 1), d = distance + key - (n * 8 + (e & 1));
                      if (d < pairs.window_lo || d > pairs.window_hi || key >= keys_left) weight = 0;
                    }
                    acc_s[m][n][e] = weight;
                  }
                  ds[e] = weight * (dp - (e & 1 ? delta.y : delta.x));
                  // A pair that takes no part: V or delta may be NaN.
                  if constexpr (kSelect) ds[e] = weight == 0 ? 0.0f : ds[e];
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  if constexpr (!B::kC.general) {
                    rounded_p[m][n][half] = pack<T>(acc_s[m][n][2 * half], acc_s[m][n][2 * half + 1]);
                  }
                  rounded_ds[m][n][half] = pack<T>(ds[2 * half], ds[2 * half + 1]);
                  const uint32_t word = Place::word(words, m, half, n);
                  if constexpr (B::kC.exchanges_p()) ptx::st_shared_4(a_p + word, rounded_p[m][n][half]);
                  ptx::st_shared_4(a_ds + word, rounded_ds[m][n][half]);
                }
              }
            }
          };
          if (B::kC.general || !typename B::Pairs(p, work.span).all_see(i0, work.j0)) {
            weigh(std::true_type());
          } else {
            weigh(std::false_type());
          }

          if constexpr (!B::kC.exchanges_p()) {
            const auto from_registers = [](const uint32_t(&source)[2][kChunkN8][2]) {
              return [&source](uint32_t(&a)[4], int k, int m) {
                a[0] = source[m][2 * k][0], a[1] = source[m][2 * k][1];
                a[2] = source[m][2 * k + 1][0], a[3] = source[m][2 * k + 1][1];
              };
            };
            const Place at(thread);
            const auto right_do = BwdOperand<TileDO>::by_16_rows(do_tile, at.column0(chunk), 0, at.lane);
            multiply<T, B::kC.mma, 2, B::kOwnDv16, kChunkN8 / 2>(
                acc_dv, from_registers(rounded_p), [&](uint32_t(&b)[4], int k, int n) {
                  ptx::ldmatrix_x4_trans(b, right_do.at(k * 16, 2 * n));
                });
            const auto right_q = BwdOperand<TileQ>::by_16_rows(q_tile, at.column0(chunk), 0, at.lane);
            multiply<T, B::kC.mma, 2, B::kOwnD16, kChunkN8 / 2>(
                acc_dk, from_registers(rounded_ds),
                [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4_trans(b, right_q.at(k * 16, 2 * n)); });
          }
        }
      };
      // What needs the P and dS of all warps.
      const auto back = [&] {
        if constexpr (B::kC.exchanges_p()) {
          const uint32_t q_tile = a_q + stage_q * TileQ::kBytes;
          const uint32_t do_tile = a_do + stage_do * TileDO::kBytes;
          {
            const Place at(thread);
            const auto left = BwdOperand<TileP>::by_16_rows(a_p, at.warp_n * 32, 0, at.lane);
            const auto right = BwdOperand<TileDO>::by_16_rows(do_tile, 0, 2 * at.warp_q, at.lane);
            multiply<T, B::kC.mma, 2, B::kOwnDv16, kM / 16>(
                acc_dv, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
                [&](uint32_t(&b)[4], int k, int n) {
                  ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * B::kC.warps_q * n));
                });
          }
          if constexpr (B::kC.stages_do == 1 && B::kC.stages_q == 2) {
            __syncthreads();  // C
            if (const Step next = next_step(); next.exists) load_do(next.head, next.block, 0);
            ptx::cp_async_commit();
          }
          {
            const Place at(thread);
            const auto left = BwdOperand<TileP>::by_16_rows(a_ds, at.warp_n * 32, 0, at.lane);
            const auto right = BwdOperand<TileQ>::by_16_rows(q_tile, 0, 2 * at.warp_q, at.lane);
            multiply<T, B::kC.mma, 2, B::kOwnD16, kM / 16>(
                acc_dk, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, left.at(m * 16, 2 * k)); },
                [&](uint32_t(&b)[4], int k, int n) {
                  ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * B::kC.warps_q * n));
                });
          }
        }
        if constexpr (B::kC.stages_q == 1) {
          if constexpr (B::kC.exchanges_p()) __syncthreads();  // D; in registers dK and dV were done before B
          if (const Step next = next_step(); next.exists) {
            load_q(next.head, next.block, 0);
            if constexpr (B::kC.stages_do == 1) load_do(next.head, next.block, 0);
          }
          ptx::cp_async_commit();
        } else if constexpr (B::kC.stages_do == 1 && !B::kC.exchanges_p()) {
          if (const Step next = next_step(); next.exists) load_do(next.head, next.block, 0);
          ptx::cp_async_commit();
        }

        // dQ, added to the sums of this head.
        const int64_t copy = args.deterministic ? work.share : 0;
        float* const dq =
            args.dq_sum + ((copy * p.batch + work.batch) * p.heads_q + head) * args.rows * args.dq_columns;
#pragma unroll 1
        for (int first = 0; first < B::kDqD16; first += B::kDqGroup) {
          float acc[B::kDqM16][2 * B::kDqGroup][4];
          clear(acc);
          const Place at(thread);
          const auto left = BwdOperand<TileP>::by_8_rows(a_ds, 0, at.warp_dq_m * (2 * B::kDqM16), at.lane);
          const auto right =
              BwdOperand<TileK>::by_16_rows(a_k, 0, 2 * (at.warp_dq_d + first * B::kWarpsDqD), at.lane);
          multiply<T, B::kC.mma, B::kDqM16, B::kDqGroup, kN / 16>(
              acc, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4_trans(a, left.at(k * 16, 2 * m)); },
              [&](uint32_t(&b)[4], int k, int n) {
                ptx::ldmatrix_x4_trans(b, right.at(k * 16, 2 * B::kWarpsDqD * n));
              });
#pragma unroll
          for (int m = 0; m < B::kDqM16; ++m) {
            const int row16 = m_block * (kM / 16) + at.warp_dq_m * B::kDqM16 + m;
#pragma unroll
            for (int n = 0; n < 2 * B::kDqGroup; ++n) {
              const int column8 =
                  2 * (at.warp_dq_d + (first + n / 2) * B::kWarpsDqD) + n % 2 + slice_at(B::kD) / 8;
              if (B::kC.stream > 0 && column8 * 8 >= args.dq_columns)
                continue;  // the last slice may be wider than the heads
              ptx::red_add_v4(dq + dq_fragment(row16, column8, args.dq_columns) + at.lane * 4, acc[m][n][0],
                              acc[m][n][1], acc[m][n][2], acc[m][n][3]);
            }
          }
        }
      };
      front();
      __syncthreads();  // B
      back();
      const Step next = next_step();
      if (!next.exists) break;
      head = next.head, m_block = next.block;
    }

    __syncthreads();  // nobody reads K, V, Q, dO any more: sK and sV become tiles of dK and dV
    {
      const auto stage = [&](auto& acc, auto tile, uint32_t base, float scale) {
        using Tile = decltype(tile);
        const Place at(thread);
        const uint32_t word = base + Tile::chunk(at.warp_n * 32 + at.g, 2 * at.warp_q) + at.t * 4;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < static_cast<int>(sizeof(acc[0]) / sizeof(acc[0][0])); ++n) {
            const int c = 2 * B::kC.warps_q * (n / 2) + n % 2;
            const uint32_t to =
                (word ^ static_cast<uint32_t>((c % Tile::kChunks) << 4)) +
                static_cast<uint32_t>((c / Tile::kChunks) * Tile::kPanelBytes + m * 16 * Tile::kPitch);
            ptx::st_shared_4(to, pack<T>(acc[m][n][0] * scale, acc[m][n][1] * scale));
            ptx::st_shared_4(to + 8 * Tile::kPitch, pack<T>(acc[m][n][2] * scale, acc[m][n][3] * scale));
          }
        }
      };
      stage(acc_dk, TileK{}, a_k, p.scale);
      stage(acc_dv, TileV{}, a_v, 1.0f);
      __syncthreads();  // the tiles of dK and dV are complete
    }
    store_tile<TileK, kThreads>(
        s_k, columns_from(k_rows(p.dk, p.head_dim, tile::kAlignedDK), slice_at(B::kD)), work.j0, thread);
    store_tile<TileV, kThreads>(
        s_v, columns_from(k_rows(p.dv, p.head_dim_v, tile::kAlignedDV), slice_at(B::kDv)), work.j0, thread);
    __syncthreads();  // sK, sV and the work have been read: the next key block may come
    if (thread == 0) {
      ++work.round;
      work.j0 =
          (work.round * args.num_splits + (work.round & 1 ? args.num_splits - 1 - work.share : work.share)) *
          kN;
    }
    __syncthreads();  // the next key block is known
  }
}

}  // namespace fovea::cuda
