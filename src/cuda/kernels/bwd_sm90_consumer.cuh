// A consumer of bwd_sm90: 64 keys of the tile, against all queries that see any of the tile's.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_dq.cuh"
#include "cuda/kernels/bwd_sm90_keys.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/packed.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/finite_tile.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/pair_elements.cuh"
#include "cuda/warp/row_vectors.cuh"
#include "cuda/warp/score_terms.cuh"
#include "tile/log2.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Which gradients a consumer sums.
enum class BwdSm90Part { kBoth, kDv, kDk };

template <class Instance, BwdSm90Part kPart>
struct BwdSm90Consumer : BwdSm90Keys<Instance> {
  using T = typename Instance::Element;
  using Base = BwdSm90Keys<Instance>;
  using Base::args, Base::memory, Base::descriptor, Base::lane, Base::release, Base::uniform, Base::warp;
  using Base::kConfig, Base::kM, Base::kN, Base::kD, Base::kDv, Base::kRowBytes, Base::kSwizzle;
  using Base::mask, Base::read_tile, Base::seen;
  using Work = BwdSm90Work;
  using Scores = typename Base::Scores;
  using Tile = typename Base::Tile;
  using Statistics = typename Base::Statistics;
  using Operand = uint32_t[kM / 16][4];  ///< scores as operand A

  static constexpr bool kSumsDv = kPart != BwdSm90Part::kDk, kSumsDk = kPart != BwdSm90Part::kDv,
                        kBoth = kSumsDv && kSumsDk;
  static_assert(kConfig.expression == (Expression::kHasScore || Expression::kHasSees));
  static constexpr bool kHasTerm = kConfig.softcap || kConfig.alibi || kConfig.dropout || kConfig.expression;
  /// Whether the factor of dS is another than P.
  static constexpr bool kHasSlope = kConfig.softcap || (kConfig.expression && !Expression::kSlopeIsOne);
  /// Whether elements of a tensor of pairs are copied a step ahead, to where the step's dS will be.
  static constexpr bool kCopiesPairs = Expression::kReadsPairs && kBoth;
  /// Whether dP is computed while P is: with 128 queries terms have no registers for both.
  static constexpr bool kDpBesideP = kSumsDk && !kConfig.dp_behind_p && !(kHasTerm && kM == 128);
  struct Sums {
    float dk[kSumsDk ? kD / 2 : 1], dv[kSumsDv ? kDv / 2 : 1];
  };
  using Dq = BwdSm90Dq<Instance>;
  int consumer;  ///< 0 or 1; uniform

  /// Which 64 of the tile's keys are its own.
  __device__ __forceinline__ int keys() const { return kPart == BwdSm90Part::kBoth ? consumer : 0; }

  // --- products, each queued as a group of its own ---

  /// acc = (own 64 rows of the tile of keys, kColumns wide) (kM x kColumns tile of queries)^T.
  template <int kColumns>
  __device__ __forceinline__ void issue_keys_by_queries(Scores& acc, int keys_at, int queries_at) const {
    const uint64_t a = descriptor(tile::wgmma_k_major(0, kSwizzle), keys_at + keys() * 64 * kRowBytes);
    const uint64_t b = descriptor(tile::wgmma_k_major(0, kSwizzle), queries_at);
    using Product = ptx::Wgmma<kM>;
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const uint64_t a_step = a + tile::wgmma_start_step(i / 4 * kN * kRowBytes + i % 4 * 32);
      const uint64_t b_step = b + tile::wgmma_start_step(i / 4 * kM * kRowBytes + i % 4 * 32);
      if (i == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(acc, a_step, b_step);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(acc, a_step, b_step);
      }
    }
    ptx::wgmma_commit();
  }
  /// acc (64 keys, kColumns) += operand (64 keys, kM queries) (kM x kColumns tile of queries).
  template <int kColumns>
  __device__ __forceinline__ void issue_gradient(float (&acc)[kColumns / 2], const Operand& operand,
                                                 int queries_at) const {
    // ptxas wants 158 registers at launch for a product of 256 columns; 512 threads leave 128.
    constexpr int kPartColumns = kColumns == 256 ? 128 : kColumns;
#pragma unroll
    for (int c = 0; c < kColumns; c += kPartColumns) {
      const uint64_t b =
          descriptor(tile::wgmma_mn_major(0, kSwizzle, kM), queries_at + c / kConfig.kStrip * kM * kRowBytes);
      auto& part = reinterpret_cast<float(&)[kPartColumns / 2]>(acc[c / 2]);
#pragma unroll
      for (int i = 0; i < kM / 16; ++i)
        ptx::Wgmma<kPartColumns>::template rs<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kMN>(
            part, operand[i], b + tile::wgmma_start_step(i * 16 * kRowBytes));
    }
    ptx::wgmma_commit();
  }

  // --- element by element ---

  /// Zero for pairs that are not seen, whatever they hold.
  __device__ __forceinline__ void mask_rounded(Operand& x, const Work& work, int n) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t kept = seen(work, keys(), n, half);
#pragma unroll
      for (int t = 0; t < kM / 8; ++t) {
        x[t / 2][t % 2 * 2 + half] &= ptx::halves_by_signs(kept << (15 - t));  // the bits of the pair
      }
    }
  }
  /// The next tile, with K where it has steps: `keys` tiles of this CTA had any.
  __device__ __forceinline__ Tile open(uint32_t number, uint32_t keys) const {
    const Tile tile = read_tile(number);
    if (kSumsDv && tile.steps > 0) {
      const RingSlot<kConfig.k_stages> k(keys);
      ptx::mbarrier_wait(memory.full_k(k.index), k.phase);
      make_keys_finite(k.index);
    }
    return tile;
  }
  /// What a step begins with, looked up while the last products of the step before run.
  struct Ahead {
    bool odd;        ///< rows have to be cleared
    Statistics lse;  ///< of its first queries
  };
  __device__ __forceinline__ void look_ahead(Ahead& ahead, uint32_t count) const {
    const RingSlot<kConfig.q_stages> slot(count);
    ptx::mbarrier_wait(memory.full_q(slot.index), slot.phase);
    ahead.odd = any_odd_row(slot.index);
    if constexpr (kBoth) ahead.lse.read(memory.lse(slot.index));
  }
  /// Waits for S, with kBehind groups of products behind it: S -> P = exp2(scale_log2 S - lse_log2).
  template <int kBehind>
  __device__ __forceinline__ void weigh(Scores& acc_s, Statistics& lse, int s) const {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc_s);
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      const float2 base = lse.at(i, memory.lse(s));
      acc_s[i] = ptx::ex2(fmaf(acc_s[i], args.scale_log2, -base.x));
      acc_s[i + 1] = ptx::ex2(fmaf(acc_s[i + 1], args.scale_log2, -base.y));
    }
  }
  /// Waits for S, with kBehind groups of products behind it: S -> P = exp2(scale_log2 S - slope_log2 |distance| - lse_log2).
  template <int kBehind>
  __device__ __forceinline__ void weigh_alibi(Scores& acc_s, Statistics& lse, int s, const Work& work, int n,
                                              float slope) const {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc_s);
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      const float2 base = lse.at(i, memory.lse(s));
      acc_s[i] = fmaf(acc_s[i], args.scale_log2, -base.x);
      acc_s[i + 1] = fmaf(acc_s[i + 1], args.scale_log2, -base.y);
    }
    const int first_key = work[Work::kFirstKey] + keys() * 64 + warp() * 16 + lane() / 4;
    const int distance = n * kM + 2 * (lane() % 4) + work[Work::kUsedK] - work[Work::kUsedQ] - first_key;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      add_distances<1>(acc_s, half, -slope * tile::kLog2e, static_cast<float>(distance - 8 * half));
#pragma unroll
    for (float& x : acc_s) x = ptx::ex2(x);
  }
  /// As weigh, with a softcap, and the factor of dS, P times the slope of the score. Both rounded at once: no registers are
  /// left for more.
  template <int kBehind>
  __device__ __forceinline__ void weigh_capped(Scores& acc_s, Operand& p, Operand& factor, Statistics& lse,
                                               int s) const {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc_s);
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      const float2 base = lse.at(i, memory.lse(s));
      const float2 t = {tanh_of(acc_s[i] * args.cap_scale), tanh_of(acc_s[i + 1] * args.cap_scale)};
      const float2 weight = {ptx::ex2(fmaf(t.x, args.scale_log2, -base.x)),
                             ptx::ex2(fmaf(t.y, args.scale_log2, -base.y))};
      p[i / 8][i % 8 / 2] = pack<T>(weight.x, weight.y);
      factor[i / 8][i % 8 / 2] = pack<T>(weight.x * fmaf(-t.x, t.x, 1.0f), weight.y * fmaf(-t.y, t.y, 1.0f));
    }
  }
  /// What the expression knows of this lane's pairs in a step.
  struct PairTerms {
    Expression::Head head;
    Expression::Key key[2];  ///< of the lane's two rows
    tile::SequenceSpan span;
    int first_query;
    /// Of column 8 t + e from the lane's first. Rows behind the last one have no weights, whatever is computed for them.
    __device__ __forceinline__ Expression::Query query(int t, int e) const {
      const int q = first_query + 8 * t + e;
      return Expression::Query(head, Expression::kReadsByQuery ? query_in_use(span, q) : q);
    }
  };
  __device__ __forceinline__ PairTerms pair_terms(const Work& work, int n, int head) const {
    const tile::AttentionParams& p = args.b.p;
    tile::SequenceSpan span;
    span.used_q = work[Work::kUsedQ], span.used_k = work[Work::kUsedK];
    const Expression::Head of_head =
        expression_head(p, span, work[Work::kBatch], work[Work::kHeadKv] * p.group + head);
    const int key = work[Work::kFirstKey] + keys() * 64 + warp() * 16 + lane() / 4;
    const auto in_use = [&](int k) { return max(min(k, span.used_k - 1), 0); };
    return {of_head,
            {Expression::Key(of_head, in_use(key)), Expression::Key(of_head, in_use(key + 8))},
            span,
            n * kM + 2 * (lane() % 4)};
  }
  /// Begins to copy the elements of a tensor of pairs of step number `count`, which is block n of a head, to where its dS
  /// will be: each warp to its own keys' place.
  __device__ __forceinline__ void copy_pairs(uint32_t count, const Work& work, int n, int head) const {
    const RingSlot<kConfig.kBuffers> buffer(count);
    ptx::mbarrier_wait(memory.empty_ds(buffer.index), buffer.phase ^ 1);  // its last dS has been read
    const PairTerms terms = pair_terms(work, n, head);
    const uint32_t to = memory.ds(buffer.index, keys());
    copy_pair_elements<kM, 2>(terms.head, terms.span, n * kM,
                              work[Work::kFirstKey] + keys() * 64 + warp() * 16, lane(),
                              [&](int row, int chunk) { return to + ds_chunk(row, 2 * warp() + chunk); });
    ptx::cp_async_commit();
  }
  /// As weigh, of a score of the user's; and, where its slope is not 1, the factor of dS. `pairs_at`: where the lane reads
  /// elements of pairs.
  template <int kBehind>
  __device__ __forceinline__ void weigh_score(Scores& acc_s, Operand& factor, Statistics& lse, int s,
                                              const PairTerms& terms, uint32_t pairs_at) const {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc_s);
    if constexpr (kCopiesPairs) {
      ptx::cp_async_wait<0>();
      __syncwarp();  // every lane's part of the step's pairs is there
    }
    uint32_t pairs[4];
#pragma unroll
    for (int t = 0; t < kM / 8; ++t) {
      if (kCopiesPairs && t % 2 == 0) ptx::ldmatrix_x4_trans(pairs, pairs_at + t * 8 * kRowBytes);
      const float2 base[2] = {lse.at(4 * t, memory.lse(s)), lse.at(4 * t + 2, memory.lse(s))};
      float slope[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Expression::Query query = terms.query(t, e);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = acc_s[4 * t + 2 * half + e];
          const float scaled = x * args.b.p.scale;
          float score;
          if constexpr (kCopiesPairs) {
            const float2 pair = unpack<Expression::PairElement>(pairs[t % 2 * 2 + half]);
            score = Expression::score_with(terms.head, query, terms.key[half], scaled,
                                           e == 0 ? pair.x : pair.y, slope[half][e]);
          } else {
            score = Expression::score(terms.head, query, terms.key[half], scaled, slope[half][e]);
          }
          x = ptx::ex2(fmaf(score, tile::kLog2e, -(e == 0 ? base[half].x : base[half].y)));
          slope[half][e] = x == 0 ? 0.0f : x * slope[half][e];
        }
      }
      if constexpr (kHasSlope) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          factor[t / 2][t % 2 * 2 + half] = pack<T>(slope[half][0], slope[half][1]);
      }
    }
  }
  using Seen = PairBits<Expression::kHasSees ? kM / 16 : 1>;
  /// Which pairs of a step the expression lets see each other, where it does not let all: to be found beside products.
  __device__ __forceinline__ bool find_seen(Seen& seen, const Work& work, int n, int head) const {
    if (!BwdSm90Walk::of(args.b, work).is_partial(n)) return false;
    const tile::SeenBlocksView& view = args.b.seen;
    if (view.pairs != nullptr) {
      const int head_q = work[Work::kHeadKv] * args.b.p.group + head;
      const int tile = work[Work::kFirstKey] / view.tile_rows;
      const int rows = keys() * 64 / view.kPairRows + warp();
      seen.load(view.pairs + view.pairs_offset(work[Work::kBatch], head_q, tile) +
                int64_t{n} * view.words_of_block() + rows * view.words_of_rows() + lane());
    } else {
      const PairTerms terms = pair_terms(work, n, head);
      seen.template ask<8>([&](int i) {
        return Expression::sees(terms.head, terms.query(i / 4, i % 2), terms.key[i / 2 % 2]);
      });
    }
    return true;
  }
  /// As weigh, of what the expression says.
  template <int kBehind>
  __device__ __forceinline__ void weigh_expression(Scores& acc_s, Operand& factor, Statistics& lse, int s,
                                                   const Work& work, int n, int head, int buffer) const {
    if constexpr (Expression::kHasScore) {
      weigh_score<kBehind>(acc_s, factor, lse, s, pair_terms(work, n, head), ds_of_lane(buffer));
    } else {
      weigh<kBehind>(acc_s, lse, s);
    }
  }
  using Kept = KeptWeights<kConfig.dropout ? kM / 16 : 1>;
  /// Which weights of a step dropout keeps: to be found beside products.
  __device__ __forceinline__ void find_kept(Kept& kept, const Work& work, int n, int head) const {
    const auto head_q = static_cast<uint32_t>(work[Work::kBatch] * args.b.p.heads_q +
                                              work[Work::kHeadKv] * args.b.p.group + head);
    const auto key = static_cast<uint32_t>(work[Work::kFirstKey] + keys() * 64 + warp() * 16);
    const tile::Dropout dropout = work.dropout(args.b.p);
    kept.template set<2>([&](int i, uint32_t(&of_step)[4]) {
      kept_of_keys(dropout, head_q, static_cast<uint32_t>(n * kM + i * 16), key, lane(), of_step);
    });
  }
  /// Makes P negative where dropout drops it, so that one operand says both what dS and what dV needs.
  __device__ __forceinline__ static void mark_dropped(Operand& p, const Kept& kept) {
#pragma unroll
    for (int x = 0; x < kM / 4; ++x) p[x / 4][x % 4] |= ~kept.signs(x / 4, x % 4) & 0x80008000u;
  }
  /// dP of a dropped pair, whatever it is, becomes 0.
  __device__ __forceinline__ static float zero_where_negative(float sign, float x) {
    return __int_as_float(__float_as_int(x) & ~(__float_as_int(sign) >> 31));
  }
  /// P as dV needs it, but for the factor 1 / (1 - p).
  __device__ __forceinline__ static void clear_dropped(Operand& p) {
#pragma unroll
    for (int x = 0; x < kM / 4; ++x) p[x / 4][x % 4] &= ptx::halves_by_signs(~p[x / 4][x % 4]);
  }
  __device__ __forceinline__ static void to_operand(const Scores& x, Operand& operand) {
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) operand[i / 4][i % 4] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
  /// Waits for dP: dS = factor (dP - delta), the factor being P times the slope of the score.
  __device__ __forceinline__ void score_gradients(const Operand& factor, Scores& dp, Operand& ds,
                                                  int s) const {
    Statistics delta;
    constexpr bool kEarly = kBoth && kM == 64 && !kHasTerm;  // others have no registers for it
    if constexpr (kEarly) delta.read(memory.delta(s));
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(dp);
    if constexpr (!kEarly) delta.read(memory.delta(s));
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      const float2 weight = unpack<T>(factor[i / 8][i % 8 / 2]), base = delta.at(i, memory.delta(s));
      float2 d_score;
      if constexpr (kConfig.dropout) {
        const float keep = args.b.p.dropout_keep_scale;
        d_score = {fabsf(weight.x) * fmaf(zero_where_negative(weight.x, dp[i]), keep, -base.x),
                   fabsf(weight.y) * fmaf(zero_where_negative(weight.y, dp[i + 1]), keep, -base.y)};
      } else {
        d_score = {weight.x * (dp[i] - base.x), weight.y * (dp[i + 1] - base.y)};
      }
      if constexpr (kConfig.expression) {  // it may have excluded the pair, whose dP may be anything
        if (weight.x == 0) d_score.x = 0;
        if (weight.y == 0) d_score.y = 0;
      }
      ds[i / 8][i % 8 / 2] = pack<T>(d_score.x, d_score.y);
    }
  }
  /// The factor of dS from the consumer that sums dV to the one that sums dK, whose threads hold the same keys and queries:
  /// through the buffer that dS of the step will take.
  __device__ __forceinline__ void hand_over(const Operand& factor, int buffer) const {
    const uint32_t at = memory.ds(buffer, 0) + static_cast<int>(ptx::thread_index()) % 128 * 16;
#pragma unroll
    for (int i = 0; i < kM / 16; ++i)
      ptx::st_shared_16(at + i * 2048, uint4{factor[i][0], factor[i][1], factor[i][2], factor[i][3]});
    release(memory.full_factor(buffer));
  }
  __device__ __forceinline__ void take_over(Operand& factor, int buffer) const {
    const uint32_t at = memory.ds(buffer, 0) + static_cast<int>(ptx::thread_index()) % 128 * 16;
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) {
      const uint4 x = ptx::ld_shared_16(at + i * 2048);
      factor[i][0] = x.x, factor[i][1] = x.y, factor[i][2] = x.z, factor[i][3] = x.w;
    }
    ptx::barrier_wait(kFactorTaken, 128);  // all warps have read the factors: dS may take their place
  }
  /// Transposed into the strip of dS of this consumer's keys.
  __device__ __forceinline__ void store_ds(const Operand& ds, int buffer) const {
    const uint32_t at = ds_of_lane(buffer);
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) ptx::stmatrix_x4_trans(at + i * 16 * kRowBytes, ds[i]);
  }
  /// Eight keys of a query in a buffer of dS.
  __device__ __forceinline__ static uint32_t ds_chunk(int query, int chunk) {
    return query * kRowBytes + (chunk ^ query % 8) * 16;
  }
  /// Where the lane reads or writes a row of the warp's first 16 queries.
  __device__ __forceinline__ uint32_t ds_of_lane(int buffer) const {
    return memory.ds(buffer, keys()) + ds_chunk(lane() % 8 + lane() / 16 * 8, 2 * warp() + lane() / 8 % 2);
  }

  // --- what is not finite (bwd_sm90.cuh) ---

  /// Makes this consumer's rows of K finite.
  __device__ __forceinline__ void make_keys_finite(int stage) const {
    const int thread = static_cast<int>(ptx::thread_index()) % 128;
    const uint32_t own = memory.k(stage) + keys() * 64 * kRowBytes;
    constexpr int kChunks = 64 * kRowBytes / 16;  // of a strip's 64 rows
    NonFinite<T> bad;
#pragma unroll
    for (int c = 0; c < kConfig.strips(kD) * kChunks / 128; ++c) {
      const uint4 x =
          ptx::ld_shared_16(own + c * 128 / kChunks * kN * kRowBytes + (c * 128 % kChunks + thread) * 16);
      bad.look(x.x), bad.look(x.y), bad.look(x.z), bad.look(x.w);
    }
    if (bad.any()) {
#pragma unroll 1
      for (int word = 0; word < kConfig.strips(kD) * kChunks / 128 * 4; ++word) {
        const int c = word / 4;
        const uint32_t at =
            own + c * 128 / kChunks * kN * kRowBytes + (c * 128 % kChunks + thread) * 16 + word % 4 * 4;
        const uint32_t pair = ptx::ld_shared_4(at);
        ptx::st_shared_4(at, finite_half<T>(pair & 0xffffu) | finite_half<T>(pair >> 16) << 16);
      }
      ptx::async_proxy_fence();
    }
    ptx::barrier_wait(kOwnKeys + keys(),
                      128);  // all four warps' rows are finite: the products of this consumer may begin
  }
  /// Whether lse of any row of the step is not finite. The same for all warps, as each looks at all rows.
  __device__ __forceinline__ bool any_odd_row(int s) const {
    bool odd = false;
#pragma unroll
    for (int i = 0; i < kM / 32; ++i)
      odd |= !(fabsf(__uint_as_float(ptx::ld_shared_4(memory.lse(s) + (lane() + 32 * i) * 4))) < INFINITY);
    return __any_sync(0xffffffffu, odd);
  }
  /// Rows of Q and dO whose lse is not finite become zeros, before any product reads them. All consumers.
  __device__ __forceinline__ void clear_odd_rows(int s, uint32_t phase) const {
    ptx::mbarrier_wait(memory.full_do(s), phase);
    clear_odd_chunks<kConfig.q_bytes()>(memory.q(s), s);
    clear_odd_chunks<kConfig.do_bytes()>(memory.d_o(s), s);
    ptx::async_proxy_fence();
    // All rows are zeros for the products of both. The second answers, so that no barrier is used again too early.
    if (consumer == 0) {
      ptx::barrier_arrive(kOddRows, kBothConsumers);
      ptx::barrier_wait(kOddRows + 1, kBothConsumers);
    } else {
      ptx::barrier_wait(kOddRows, kBothConsumers);
      ptx::barrier_arrive(kOddRows + 1, kBothConsumers);
    }
  }
  /// The threads of both consumers share the 16-byte chunks of a tile.
  template <int kBytes>
  __device__ __forceinline__ void clear_odd_chunks(uint32_t tile, int s) const {
    const int thread = consumer * 128 + static_cast<int>(ptx::thread_index()) % 128;
#pragma unroll 1
    for (int i = thread; i < kBytes / 16; i += kBothConsumers) {
      const int row = i / 8 % kM;
      if (fabsf(__uint_as_float(ptx::ld_shared_4(memory.lse(s) + row * 4))) < INFINITY) continue;
      ptx::st_shared_16(tile + i * 16, uint4{0, 0, 0, 0});
    }
  }

  // --- the mainloop ---

  /// What this consumer keeps from step to step.
  struct State {
    Tile tile, next;  ///< `next` is known from the last step of `tile` on
    Ahead ahead;
    uint32_t steps = 0, tiles = 0;  ///< that this CTA has done; of the tiles those with steps
    bool looked = false;            ///< `ahead` is that of the next step
    Sums sums;
  };

  /// A step: block n of the queries of one head of the tile's group, the `first` of its tile, or with `more` behind it. A consumer that sums
  /// both gradients computes in it its slice of dQ of the step before, whose dS both consumers have written long ago, and
  /// looks at what comes next while its last products run.
  __device__ __forceinline__ void step(State& state, int n, bool first, bool more, int head) const {
    const uint32_t count = state.steps;
    const Tile& tile = state.tile;
    const bool masked = n < tile.full_begin || n >= tile.full_end;
    const RingSlot<kConfig.k_stages> k(state.tiles);
    const RingSlot<kConfig.kBuffers> buffer(count);
    const RingSlot<kConfig.q_stages> slot(count);
    const int s = slot.index, q_at = kConfig.q_at() + s * kConfig.q_bytes(),
              do_at = kConfig.do_at() + s * kConfig.do_bytes();
    Operand p, ds, slopes;
    Operand& factor = kHasSlope || !kSumsDv ? slopes : p;  // of dS
    typename Dq::Slice acc_dq;
    Scores acc_s, acc_dp;
    if constexpr (!kBoth)
      look_ahead(state.ahead, count);  // in the step before it gains nothing at D = 192 and 256
    if (state.ahead.odd) clear_odd_rows(s, slot.phase);
    [[maybe_unused]] Kept kept;
    [[maybe_unused]] Seen pairs;
    [[maybe_unused]] bool expression_cuts = false;
    if constexpr (kSumsDv) {
      ptx::wgmma_fence();
      issue_keys_by_queries<kD>(acc_s, k.index * kConfig.k_bytes(), q_at);
      if constexpr (kConfig.dropout) find_kept(kept, tile.work, n, head);  // beside S
      if constexpr (Expression::kHasSees) expression_cuts = find_seen(pairs, tile.work, n, head);
      if constexpr (!kBoth) state.ahead.lse.read(memory.lse(s));  // while S is computed
    }
    if constexpr (kDpBesideP) issue_dp(acc_dp, state.tiles, first, slot, do_at);
    constexpr int kBesideP = kBoth && kDpBesideP ? 1 : 0;
    if constexpr (kSumsDv && kConfig.softcap) {
      weigh_capped<kBesideP>(acc_s, p, factor, state.ahead.lse, s);
      if (masked) mask_rounded(p, tile.work, n);
    } else if constexpr (kSumsDv) {
      if constexpr (kConfig.alibi) {
        weigh_alibi<kBesideP>(acc_s, state.ahead.lse, s, tile.work, n, slope_of(tile.work, head));
      } else if constexpr (kConfig.expression) {
        weigh_expression<kBesideP>(acc_s, factor, state.ahead.lse, s, tile.work, n, head, buffer.index);
      } else {
        weigh<kBesideP>(acc_s, state.ahead.lse, s);
      }
      if (masked) mask(acc_s, tile.work, keys(), n);
      to_operand(acc_s, p);  // behind the branch: in front of it a step at d64 takes 2 % longer
      if constexpr (Expression::kHasSees) {
        if (expression_cuts) pairs.keep(p);
        if (kHasSlope && expression_cuts) pairs.keep(factor);
      }
      if constexpr (kConfig.dropout) mark_dropped(p, kept);
    }
    if constexpr (kSumsDk && !kDpBesideP) issue_dp(acc_dp, state.tiles, first, slot, do_at);
    if constexpr (!kSumsDk) {
      release(memory.empty_q(s));
      ptx::mbarrier_wait(memory.empty_ds(buffer.index), buffer.phase ^ 1);
      hand_over(factor, buffer.index);
      ptx::mbarrier_wait(memory.full_do(s), slot.phase);
    }
    if constexpr (kSumsDk) {
      if constexpr (!kSumsDv) {
        ptx::mbarrier_wait(memory.full_factor(buffer.index), buffer.phase);
        take_over(factor, buffer.index);
      }
      score_gradients(factor, acc_dp, ds, s);
      if (!more) release(memory.empty_v());
      if (masked) mask_rounded(ds, tile.work, n);
      if constexpr (kSumsDv) ptx::mbarrier_wait(memory.empty_ds(buffer.index), buffer.phase ^ 1);
      store_ds(ds, buffer.index);
      release(memory.full_ds(buffer.index));
    }
    if constexpr (kSumsDv && kConfig.dropout) clear_dropped(p);
    if constexpr (kBoth) issue_dq(acc_dq, count - 1, (first ? k.index ^ 1 : k.index) * kConfig.k_bytes());
    ptx::wgmma_fence();
    if constexpr (kSumsDv) issue_gradient<kDv>(state.sums.dv, p, do_at);
    if constexpr (kSumsDk) issue_gradient<kD>(state.sums.dk, ds, q_at);
    if constexpr (kBoth) {
      finish_dq<2>(acc_dq, count - 1);
      if (first && state.tiles > 0)
        release(memory.empty_k(k.index ^ 1));  // dQ of the tile before is computed
      if (!more) state.next = open(tile.number + 1, state.tiles + 1);
      state.looked = more || state.next.steps > 0;
      if (state.looked) look_ahead(state.ahead, count + 1);
      if constexpr (kCopiesPairs) {
        const Place behind = more ? place_behind(tile, {n, head}) : Place{state.next.m_begin, 0};
        const Work work = memory.work(more ? tile.number : tile.number + 1);
        if (state.looked) copy_pairs(count + 1, work, behind.n, behind.head);
      }
    }
    if constexpr (kSumsDv) {
      ptx::wgmma_wait<kSumsDk ? 1 : 0>();
      ptx::wgmma_done(state.sums.dv);
    }
    release(memory.empty_do(s));
    if constexpr (kSumsDk) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(state.sums.dk);
      release(memory.empty_q(s));
    }
    ++state.steps;
  }
  /// Of a head of the tile's group.
  __device__ __forceinline__ float slope_of(const Work& work, int head) const {
    if constexpr (!kConfig.alibi || !kSumsDv) return 0.0f;
    return alibi_slope(args.b.p, work[Work::kBatch], work[Work::kHeadKv] * args.b.p.group + head);
  }
  /// Queues dP, behind the first of a tile's steps V.
  __device__ __forceinline__ void issue_dp(Scores& acc, uint32_t tiles, bool first,
                                           const RingSlot<kConfig.q_stages>& slot, int do_at) const {
    if (first) ptx::mbarrier_wait(memory.full_v(), tiles & 1);
    ptx::mbarrier_wait(memory.full_do(slot.index), slot.phase);
    ptx::wgmma_fence();
    issue_keys_by_queries<kDv>(acc, kConfig.v_at(), do_at);
  }
  /// Queues this consumer's slice of dQ of step number `count`; for -1, before the first, of what shared memory happens
  /// to hold: products under a condition would wait for each other.
  __device__ __forceinline__ void issue_dq(typename Dq::Slice& acc, uint32_t count, int k_at) const {
    const RingSlot<kConfig.kBuffers> ds(count);
    ptx::mbarrier_wait(memory.full_ds(ds.index), ds.phase);
    ptx::async_proxy_fence();  // dS, which both consumers have written, for the product
    ptx::wgmma_fence();
    Dq{{args, memory, this->base16}}.issue(acc, ds.index, k_at, consumer);
  }
  /// Waits for it, with kBehind groups of products behind it, and stages it for the writer.
  template <int kBehind>
  __device__ __forceinline__ void finish_dq(typename Dq::Slice& acc, uint32_t count) const {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc);
    if (count != ~0u) release(memory.empty_ds(RingSlot<kConfig.kBuffers>(count).index));
    const int w = warpgroup() - 1;  // looked up again: `consumer` would take a register of the loop
    ptx::mbarrier_wait(memory.empty_dq(w),
                       count & 1);  // the last step's has been read: staging number count + 1
    Dq::stage(acc, memory.dq(w));
    ptx::barrier_arrive(kDqStaged + w, kConsumerAndWriter);
  }
  __device__ __forceinline__ static int warpgroup() {
    return static_cast<int>(ptx::thread_index() / 128);
  }

  /// Rows of dK or dV of this consumer's keys, times `factor`.
  template <int kColumns>
  __device__ __forceinline__ void write(const tile::RowsView& view, uint32_t aligned_bit, int columns,
                                        const Work& work, const float (&acc)[kColumns / 2],
                                        float factor) const {
    const int row = work[BwdSm90Work::kFirstKey] + keys() * 64 + warp() * 16 + lane() / 4,
              used_k = work[BwdSm90Work::kUsedK];
    T* const rows =
        reinterpret_cast<T*>(view.data) +
        view.offset(work[BwdSm90Work::kBatch], work[BwdSm90Work::kRowK], work[BwdSm90Work::kHeadKv]);
    const bool aligned = (args.b.p.aligned16 & aligned_bit) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const to = rows + (row + 8 * half) * view.row;
      const int exist = row + 8 * half < used_k ? columns : 0;
      if (aligned) {
        store_row_vectors<kColumns>(to, exist, acc, half, factor, lane());
      } else {
        store_row_elements<kColumns>(to, exist, acc, half, factor, lane());
      }
    }
  }

  __device__ __forceinline__ void write_sums(const Tile& tile, const Sums& sums) const {
    if constexpr (kSumsDk)
      write<kD>(args.b.p.dk, tile::kAlignedDK, args.b.p.head_dim, tile.work, sums.dk, args.b.p.scale);
    if constexpr (kSumsDv)
      write<kDv>(args.b.p.dv, tile::kAlignedDV, args.b.p.head_dim_v, tile.work, sums.dv,
                 kConfig.dropout ? args.b.p.dropout_keep_scale : 1.0f);
    release(memory.empty_work(tile.number));
  }

  /// Of a step in its tile: a block of queries, and a head of the group.
  struct Place {
    int n, head;
  };
  /// Block by block, head by head.
  __device__ __forceinline__ Place place_behind(const Tile& tile, Place at) const {
    int n = at.n + 1;
    if constexpr (Expression::kHasSees)
      n = uniform(BwdSm90Walk::of(args.b, tile.work).behind(at.n, tile.m_end));
    return n == tile.m_end ? Place{tile.m_begin, at.head + 1} : Place{n, at.head};
  }

  /// All tiles of this CTA.
  __device__ __forceinline__ void run() const {
    static_assert(!kBoth || kConfig.k_stages == 2);
    State state;
    state.tile = open(0, 0);
    while (state.tile.steps >= 0) {
      const Tile& tile = state.tile;
#pragma unroll
      for (float& x : state.sums.dk) x = 0.0f;
#pragma unroll
      for (float& x : state.sums.dv) x = 0.0f;
      if (tile.steps > 0) {
        if (kBoth && !state.looked) look_ahead(state.ahead, state.steps);
        Place at = {tile.m_begin, 0};
        if (kCopiesPairs && !state.looked) copy_pairs(state.steps, tile.work, at.n, at.head);
        ptx::wgmma_fence();
#pragma unroll 1
        for (int left = tile.steps; left > 0; --left) {
          step(state, at.n, left == tile.steps, left > 1, at.head);
          at = place_behind(tile, at);
        }
        if constexpr (!kSumsDk) release(memory.empty_k(RingSlot<kConfig.k_stages>(state.tiles).index));
        ++state.tiles;
      }
      write_sums(tile, state.sums);
      if (!kBoth || tile.steps == 0) {
        state.next = open(tile.number + 1, state.tiles);
        state.looked = false;
      }
      state.tile = state.next;
    }
    if (kBoth && state.steps > 0) {
      typename Dq::Slice acc_dq;
      issue_dq(acc_dq, state.steps - 1,
               RingSlot<kConfig.k_stages>(state.tiles - 1).index * kConfig.k_bytes());
      finish_dq<0>(acc_dq, state.steps - 1);
    }
  }
};

}  // namespace fovea::cuda
