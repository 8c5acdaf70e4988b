// What a consumer of bwd_sm90 does with scores, element by element: P from S, with the terms of the score, what is not seen and
// what is dropped; dS from dP; and their way through shared memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_keys.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/packed.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/pair_bits.cuh"
#include "cuda/warp/pair_elements.cuh"
#include "tile/log2.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Which gradients a consumer sums.
enum class BwdSm90Part { kBoth, kDv, kDk };

/// A warpgroup's scores: 64 keys of the tile, against the queries of a step.
template <class Instance, BwdSm90Part kPart>
struct BwdSm90Scores : BwdSm90Keys<Instance> {
  using T = typename Instance::Element;
  using Base = BwdSm90Keys<Instance>;
  using Base::args, Base::memory, Base::descriptor, Base::lane, Base::release, Base::uniform, Base::warp;
  using Base::kConfig, Base::kM, Base::kN, Base::kD, Base::kDv;
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
  /// How a consumer that sums both gradients computes its share of dQ: behind a step's other products, or beside them.
  static constexpr bool kDqBehind = kBoth && kConfig.dq_behind(), kDqLate = kBoth && !kDqBehind;
  /// Whether dP is computed while P is: with 128 queries terms have no registers for both.
  static constexpr bool kDpBesideP =
      kSumsDk && !kConfig.dp_behind_p && !kDqBehind && !(kHasTerm && kM == 128);
  /// Whether dS is the product of two numbers of 16 bits, P as dV has it and dP - delta: two elements an instruction, and nobody unpacks P. Its
  /// error grows by a seventh (three roundings for two). float16 does not reach far enough: dP - delta may overflow where P is 0. With one
  /// gradient a consumer it gains nothing, and with a score of the user's registers run out earlier.
  static constexpr bool kMultipliesPairs =
      std::is_same_v<T, __nv_bfloat16> && kDqLate && !kConfig.dropout && !Expression::kHasScore;
  int consumer;  ///< 0 or 1; uniform

  /// Which 64 of the tile's keys are its own.
  __device__ __forceinline__ int keys() const { return kPart == BwdSm90Part::kBoth ? consumer : 0; }

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
      const float2 t = {tanh_of_log2(acc_s[i] * args.cap_scale_log2),
                        tanh_of_log2(acc_s[i + 1] * args.cap_scale_log2)};
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
      if (kCopiesPairs && t % 2 == 0) ptx::ldmatrix_x4_trans(pairs, pairs_at + t * 8 * kConfig.kDsRowBytes);
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
    const uint32_t head_q =
        tile::dropout_head(args.b.p, work[Work::kBatch], work[Work::kHeadKv] * args.b.p.group + head);
    const int key = work[Work::kFirstKey] + keys() * 64 + warp() * 16;
    const tile::Dropout dropout = work.dropout(args.b.p);
    kept.template of_keys<2>(dropout, head_q, lane(), [&](int i) { return FirstPair{n * kM + i * 16, key}; });
  }
  /// Makes P negative where dropout drops it, so that one operand says both what dS and what dV needs.
  __device__ __forceinline__ static void mark_dropped(Operand& p, const Kept& kept) {
#pragma unroll
    for (int x = 0; x < kM / 4; ++x)
      p[x / 4][x % 4] = with_dropped_negative(p[x / 4][x % 4], kept.signs(x / 4, x % 4));
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
  /// Waits for dP, with kBehind groups of products behind it: dS = factor (dP - delta), the factor being P times the slope of the score.
  template <int kBehind>
  __device__ __forceinline__ void score_gradients(const Operand& factor, Scores& dp, Operand& ds,
                                                  int s) const {
    Statistics delta;
    constexpr bool kEarly = kDqLate && kM == 64 && !kHasTerm;  // others have no registers for it
    if constexpr (kEarly) delta.read(memory.delta(s));
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(dp);
    if constexpr (!kEarly) delta.read(memory.delta(s));
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      const uint32_t weights = factor[i / 8][i % 8 / 2];
      const float2 base = delta.at(i, memory.delta(s));
      if constexpr (kMultipliesPairs) {
        uint32_t& d_scores = ds[i / 8][i % 8 / 2];
        d_scores = ptx::multiply_bf16_pairs(weights, pack<T>(dp[i] - base.x, dp[i + 1] - base.y));
        if constexpr (Expression::kHasSees)  // the pair may be excluded, and its dP anything
          d_scores &= ptx::bf16_pairs_not_zero(weights);
      } else {
        ds[i / 8][i % 8 / 2] = score_gradients_of_pair(weights, {dp[i], dp[i + 1]}, base);
      }
    }
  }
  /// The same of two elements, in float32.
  __device__ __forceinline__ uint32_t score_gradients_of_pair(uint32_t weights, float2 dp,
                                                              float2 delta) const {
    const float2 weight = unpack<T>(weights);
    float2 d_score;
    if constexpr (kConfig.dropout) {
      const float keep = args.b.p.dropout_keep_scale;
      d_score = {fabsf(weight.x) * fmaf(zero_where_negative(weight.x, dp.x), keep, -delta.x),
                 fabsf(weight.y) * fmaf(zero_where_negative(weight.y, dp.y), keep, -delta.y)};
    } else {
      d_score = {weight.x * (dp.x - delta.x), weight.y * (dp.y - delta.y)};
    }
    if constexpr (kConfig.expression) {  // as above, also by its score
      if (weight.x == 0) d_score.x = 0;
      if (weight.y == 0) d_score.y = 0;
    }
    return pack<T>(d_score.x, d_score.y);
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
    for (int i = 0; i < kM / 16; ++i) ptx::stmatrix_x4_trans(at + i * 16 * kConfig.kDsRowBytes, ds[i]);
  }
  /// Eight keys of a query in a buffer of dS.
  __device__ __forceinline__ static uint32_t ds_chunk(int query, int chunk) {
    return query * kConfig.kDsRowBytes + (chunk ^ query % 8) * 16;
  }
  /// Where the lane reads or writes a row of the warp's first 16 queries.
  __device__ __forceinline__ uint32_t ds_of_lane(int buffer) const {
    return memory.ds(buffer, keys()) + ds_chunk(lane() % 8 + lane() / 16 * 8, 2 * warp() + lane() / 8 % 2);
  }
};

}  // namespace fovea::cuda
