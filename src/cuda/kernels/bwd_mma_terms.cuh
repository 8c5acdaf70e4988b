// What kernels of bwd_mma that know one term do with the pairs of a chunk: ALiBi, which weights dropout keeps, the expression.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bwd_mma_config.cuh"
#include "cuda/kernels/bwd_mma_cta.cuh"
#include "cuda/ptx/packed.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/pair_bits.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// To be made before a chunk's products, beside which it looks things up. Element e of tile (m, n) of a warp's chunk is of key
/// 16 m + 8 (e / 2) + lane / 4 of the warp's 32, and query 8 n + 2 (lane % 4) + e % 2 of the chunk's.
template <class Instance>
struct BwdMmaTerms {
  using B = BwdMma<Instance>;
  static constexpr BwdConfig kC = B::kC;
  static constexpr int kChunkN8 = B::kChunkN8;
  static constexpr bool kHasScore = kC.expression && Expression::kHasScore,
                        kHasSees = kC.expression && Expression::kHasSees;
  /// Whether a score's derivative by s may be another than 1.
  static constexpr bool kHasSlope = kHasScore && !Expression::kSlopeIsOne;
  /// Of the pairs of 16 keys; element 4 n + e of a sum is element e of tile n.
  using Seen = PairBits<kHasSees ? kChunkN8 / 2 : 1>;
  static_assert(kChunkN8 <= 4 && sizeof(Seen) == 4, "bits of a chunk's pairs lie in one word");

  /// Where the warp's chunk and a lane stand. Found anew behind the products, whose operands take the registers.
  struct Place {
    int lane;
    int first_key, first_query;

    __device__ __forceinline__ Place(const BwdWork& work, const BwdStep& step, int chunk, int thread) {
      const typename B::Place at(thread);
      lane = at.lane;
      first_key = work.j0 + at.warp_n * 32;
      first_query = step.block * B::kM + at.column0(chunk);
    }
    __device__ __forceinline__ int key(int m, int e) const {
      return first_key + 16 * m + 8 * (e / 2) + lane / 4;
    }
    __device__ __forceinline__ int query(int n, int e) const {
      return first_query + 8 * n + 2 * (lane % 4) + e % 2;
    }
  };

  const BwdMmaCta<Instance>& cta;
  const tile::AttentionParams& p;
  const int head;
  const float scale_log2;
  Seen seen[2] = {{{~0u}},
                  {{~0u}}};  ///< whether the expression lets the pairs of keys 16 m and on see each other

  __device__ __forceinline__ BwdMmaTerms(const BwdMmaCta<Instance>& cta_, const BwdStep& step, int chunk,
                                         float scale_log2_)
      : cta(cta_), p(cta_.p), head(step.head), scale_log2(scale_log2_) {
    if constexpr (kHasSees) {
      if (cta.work.seen.is_partial(step.block))
        find_seen(step, Place(cta.work, step, chunk, cta.index_again()));
    }
  }

  __device__ __forceinline__ Expression::Head expression() const {
    return expression_head(p, cta.work.span, cta.work.batch, head);
  }
  /// Tensors have elements of every query and key that is in use; others answer for none.
  __device__ __forceinline__ Expression::Query query(int q) const {
    return Expression::Query(expression(), Expression::kReadsByQuery ? query_in_use(cta.work.span, q) : q);
  }
  __device__ __forceinline__ Expression::Key key(int k) const {
    return Expression::Key(expression(),
                           Expression::kReadsByKey ? max(min(k, cta.work.span.used_k - 1), 0) : k);
  }

  /// ALiBi of a lane.
  struct Distances {
    float factor;  ///< of exponents of 2: the slope, negative
    float first;   ///< from the lane's first query to its first key
  };
  __device__ __forceinline__ Distances distances(const Place& at) const {
    if constexpr (!kC.alibi) return {};
    const tile::SequenceSpan& span = cta.work.span;
    return {-alibi_slope(p, cta.work.batch, head) * tile::kLog2e,
            static_cast<float>(at.key(0, 0) - at.query(0, 0) - (span.used_k - span.used_q))};
  }
  /// From s = q.k of element e of tile (m, n) to an exponent of 2 relative to `base`, and the score's derivative by scale s.
  __device__ __forceinline__ float exponent(float s, float base, const Place& at, const Distances& distance,
                                            int m, int n, int e, float& slope) const {
    slope = 1.0f;
    if constexpr (kHasScore) {
      const float score =
          Expression::score(expression(), query(at.query(n, e)), key(at.key(m, e)), s * p.scale, slope);
      return fmaf(score, tile::kLog2e, -base);
    }
    const float x = fmaf(s, scale_log2, -base);
    if constexpr (!kC.alibi) return x;
    const auto from_first = static_cast<float>(16 * m + 8 * (e / 2) - 8 * n - e % 2);
    return fmaf(distance.factor, fabsf(distance.first + from_first), x);
  }

  /// Of two rounded numbers, of keys of one `half`: all bits of those whose pairs see each other.
  __device__ __forceinline__ uint32_t seen_halves(int m, int n, int half) const {
    return ptx::halves_by_signs(seen[m].signs(n / 2, n % 2 * 2 + half));
  }
  /// Which weights of a chunk dropout keeps: step m kChunkN8 / 2 + n / 2 is of tiles n and n + 1, n even.
  struct Kept : KeptWeights<kC.dropout || kC.general ? kChunkN8 : 1> {
    static_assert(sizeof(KeptWeights<kChunkN8>) == 4);
    /// Whether the weights of queries 2 (lane % 4) and the next of tile (m, n) are kept: bits 15 and 31.
    __device__ __forceinline__ uint32_t signs_of(int m, int n, int half) const {
      return this->signs(m * (kChunkN8 / 2) + n / 2, n % 2 * 2 + half);
    }
    __device__ __forceinline__ bool holds(int m, int n, int e) const {
      return (signs_of(m, n, e / 2) >> (15 + 16 * (e % 2)) & 1) != 0;
    }
    /// Two rounded weights of keys of one `half`; those that are dropped become 0.
    __device__ __forceinline__ uint32_t drop(uint32_t weights, int m, int n, int half) const {
      return weights & ptx::halves_by_signs(signs_of(m, n, half));
    }
    /// The derivative by a weight that is kept, but for the factor 1 / (1 - p); 0, whatever that is, where it is not.
    __device__ __forceinline__ float drop_gradient(float dp, int m, int n, int e) const {
      return __uint_as_float(__float_as_uint(dp) & ptx::word_by_sign(signs_of(m, n, e / 2), e % 2));
    }
  };
  /// The whole warp calls it.
  template <int kAtOnce>
  __device__ __forceinline__ static Kept find_kept(const BwdMmaCta<Instance>& cta, const BwdStep& step,
                                                   int chunk) {
    const Place at(cta.work, step, chunk, cta.index_again());
    Kept kept;
    kept.template of_keys<kAtOnce>(
        cta.work.dropout, tile::dropout_head(cta.p, cta.work.batch, step.head), at.lane, [&](int i) {
          return FirstPair{at.first_query + i % (kChunkN8 / 2) * 16, at.first_key + i / (kChunkN8 / 2) * 16};
        });
    return kept;
  }
  /// Finds them for all chunks of a step, and leaves them to its own thread in shared memory: to be called beside products that leave
  /// registers and places for other instructions.
  __device__ __forceinline__ static void find_kept(const BwdMmaCta<Instance>& cta, const BwdStep& step) {
    if constexpr (kC.dropout) {
      if (!step.exists) return;
#pragma unroll
      for (int chunk = 0; chunk < B::kChunks; ++chunk)
        ptx::st_shared_4(cta.kept(chunk), find_kept<2>(cta, step, chunk).of[0]);
    }
  }
  /// Those of a chunk; kernels that know every term find them when they are asked for.
  __device__ __forceinline__ Kept kept_of(const BwdStep& step, int chunk) const {
    Kept kept = {};
    if constexpr (kC.dropout) kept.of[0] = ptx::ld_shared_4(cta.kept(chunk));
    if constexpr (kC.general) {
      kept.of[0] = ~0u;
      if (p.dropout_threshold != 0) kept = find_kept<1>(cta, step, chunk);
    }
    return kept;
  }
  /// 1 - p.
  __device__ __forceinline__ float share_kept() const {
    constexpr float kUnit = 1.0f / static_cast<float>(tile::Dropout::kOne);
    return 1.0f - static_cast<float>(p.dropout_threshold) * kUnit;
  }

 private:
  /// Finds which pairs the expression lets see each other.
  __device__ __forceinline__ void find_seen(const BwdStep& step, const Place& at) {
    const tile::SeenBlocksView& view = cta.args.seen;
    if (view.pairs == nullptr) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        seen[m].template ask<8>([&](int i) {
          return Expression::sees(expression(), query(at.query(i / 4, i % 4)), key(at.key(m, i % 4)));
        });
      }
      return;
    }
    const BwdWork& work = cta.work;
    const int column8 = (at.first_query - step.block * B::kM) / 8, row16 = (at.first_key - work.j0) / 16;
    const uint32_t* const words = view.pairs + view.pairs_offset(work.batch, head, work.j0 / view.tile_rows) +
                                  int64_t{step.block} * view.words_of_block() + column8 / 8 * 32 + at.lane;
#pragma unroll
    for (int m = 0; m < 2; ++m)
      seen[m].of[0] = __ldg(words + (row16 + m) * view.words_of_rows()) >> (2 * (column8 % 8));
  }
};

}  // namespace fovea::cuda
