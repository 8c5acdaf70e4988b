// The element by element part of bwd_mma: P and dS from S and dP, and rounded gradients.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_mma_config.cuh"
#include "cuda/kernels/bwd_mma_terms.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/score_row.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// dS of 0 is taken for a pair that takes no part: a slope is not 0 while the weight is not.
template <bool kHasSign>
__device__ __forceinline__ float not_zero(float slope) {
  if constexpr (!kHasSign) return fmaxf(slope, 1e-30f);
  return fabsf(slope) < 1e-30f ? copysignf(1e-30f, slope) : slope;
}

/// Weights of a chunk from S, in place: acc becomes P, without the dropout factor, times the slope of
/// softcap; `weights` gets P with dropout, rounded.
template <class Instance, int kChunkN8>
__device__ __forceinline__ void bwd_weights_general(
    const BackwardArgs& args, const typename BwdMma<Instance>::Pairs& pairs, const BwdWork& work, int head,
    int i0, int j0, const float* lse_log2, int lane, const typename BwdMmaTerms<Instance>::Kept& keeps,
    float (&acc)[2][kChunkN8][4], uint32_t (&weights)[2][kChunkN8][2]) {
  using T = typename Instance::Element;
  const tile::AttentionParams& p = args.p;
  const float keep_scale = work.dropout.keep_scale;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < kChunkN8; ++n) {
    float kept[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) kept[m][e] = keeps.holds(m, n, e) ? keep_scale : 0.0f;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = n * 8 + 2 * t + c;
      const int i = i0 + column;
      const float lse = lse_log2[column];
      const bool q_is_nan = isnan(lse) && lse_log2[Instance::kConfig.tile_m + column] == INFINITY;
      const ScoreRow<T> row(p, work.span, work.batch, head, i < pairs.used_q ? i : 0);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int j = j0 + m * 16 + h * 8 + g, e = 2 * h + c;
          float weight = 0;
          if (i < pairs.used_q && lse != INFINITY && pairs.sees(i, j) && row.sees(j)) {
            const float dot = acc[m][n][e];
            const float score = row.score(dot, j);
            if (score != -INFINITY || q_is_nan)
              weight = q_is_nan ? lse : ptx::ex2(score * tile::kLog2e - lse);
            kept[m][e] = kept[m][e] == 0 ? 0.0f : kept[m][e] * weight;
            if (weight != 0) weight *= not_zero<ScoreOf<T>::kSlopeHasSign>(row.slope(dot, j));
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

/// Where a warp's chunk of P or dS goes in a tile that other warps read.
template <class Instance>
struct BwdChunkStore {
  using B = BwdMma<Instance>;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kHasStmatrix = false;
#else
  static constexpr bool kHasStmatrix = true;
#endif
  uint32_t words;                                                         ///< of a lane
  FragmentAddresses<typename B::TileP, LdmatrixOrder::kDownFirst> strip;  ///< for stmatrix

  __device__ __forceinline__ BwdChunkStore(const typename B::Place& at, int chunk)
      : words(at.words(chunk)), strip(at.lane, at.warp_n * 32, at.column0(chunk) / 8) {}

  /// Tile (m, n) of x; with stmatrix that and the one before, n - 1, where n is odd.
  template <int kChunkN8>
  __device__ __forceinline__ void store(uint32_t tile, const uint32_t (&x)[2][kChunkN8][2], int m,
                                        int n) const {
    if constexpr (!kHasStmatrix) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::st_shared_4(tile + B::Place::word(words, m, half, n), x[m][n][half]);
    } else if (n % 2 != 0) {
      ptx::stmatrix_x4(strip.at(tile, m * 16, n / 2),
                       {x[m][n - 1][0], x[m][n - 1][1], x[m][n][0], x[m][n][1]});
    }
  }
};

/// Makes P and dS of a chunk, rounded, and stores them in the tiles of shared memory that other warps read. acc_s
/// holds S, or with `general` what bwd_weights_general made of it. `s_lse`: lse_log2 of the block's queries, then delta.
/// kSelect: some pairs may take no part.
template <class Instance, bool kSelect, int kChunkN8>
__device__ __forceinline__ void bwd_weights(const BwdStep& step, const BwdMmaTerms<Instance>& terms,
                                            int chunk, const float* s_lse, uint32_t a_p, uint32_t a_ds,
                                            int thread, float (&acc_s)[2][kChunkN8][4],
                                            const float (&acc_dp)[2][kChunkN8][4],
                                            const typename BwdMmaTerms<Instance>::Kept& kept,
                                            uint32_t (&rounded_p)[2][kChunkN8][2],
                                            uint32_t (&rounded_ds)[2][kChunkN8][2]) {
  using B = BwdMma<Instance>;
  using T = typename Instance::Element;
  using Terms = BwdMmaTerms<Instance>;
  const tile::AttentionParams& p = terms.p;
  const BwdWork& work = terms.cta.work;
  const int i0 = step.block * B::kM;
  const typename B::Place at(thread);
  const float* const statistics = s_lse + at.column0(chunk) + 2 * at.t;
  const typename B::Pairs pairs(p, work.span);
  [[maybe_unused]] const int distance =
      work.j0 + at.warp_n * 32 + at.g - (i0 + at.column0(chunk) + 2 * at.t) - pairs.shift;
  [[maybe_unused]] const int keys_left = pairs.used_k - (work.j0 + at.warp_n * 32 + at.g);
  [[maybe_unused]] const typename Terms::Place place(work, step, chunk, thread);
  [[maybe_unused]] const typename Terms::Distances distances = terms.distances(place);
  [[maybe_unused]] const float share_kept = terms.share_kept(), log2_of_kept = ptx::lg2(share_kept);
  const BwdChunkStore<Instance> to(at, chunk);
#pragma unroll
  for (int n = 0; n < kChunkN8; ++n) {
    [[maybe_unused]] float2 lse = *reinterpret_cast<const float2*>(statistics + n * 8);
    float2 delta = *reinterpret_cast<const float2*>(statistics + B::kM + n * 8);
    if constexpr (B::kC.dropout) {
      // P times 1 / (1 - p), which dV and dS have as a factor.
      lse.x += log2_of_kept, lse.y += log2_of_kept;
      delta.x *= share_kept, delta.y *= share_kept;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float ds[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float weight = acc_s[m][n][e], dp = acc_dp[m][n][e];
        if constexpr (B::kC.general) {
          dp = kept.holds(m, n, e) ? dp * p.dropout_keep_scale : 0.0f;
        } else {
          float slope;
          weight = ptx::ex2(terms.exponent(weight, e & 1 ? lse.y : lse.x, place, distances, m, n, e, slope));
          if constexpr (kSelect) {
            const int key = m * 16 + 8 * (e >> 1), d = distance + key - (n * 8 + (e & 1));
            if (d < pairs.window_lo || d > pairs.window_hi || key >= keys_left) weight = 0;
          }
          acc_s[m][n][e] = weight;
          if constexpr (Terms::kHasSlope) weight = weight == 0 ? 0.0f : weight * slope;
          if constexpr (B::kC.dropout) dp = kept.drop_gradient(dp, m, n, e);
        }
        ds[e] = weight * (dp - (e & 1 ? delta.y : delta.x));
        // A pair that takes no part: V or delta may be NaN.
        if constexpr (kSelect || Terms::kHasScore) ds[e] = weight == 0 ? 0.0f : ds[e];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (!B::kC.general) {
          rounded_p[m][n][half] = pack<T>(acc_s[m][n][2 * half], acc_s[m][n][2 * half + 1]);
          if constexpr (B::kC.dropout) rounded_p[m][n][half] = kept.drop(rounded_p[m][n][half], m, n, half);
        }
        rounded_ds[m][n][half] = pack<T>(ds[2 * half], ds[2 * half + 1]);
        if constexpr (Terms::kHasSees) {
          rounded_p[m][n][half] &= terms.seen_halves(m, n, half);
          rounded_ds[m][n][half] &= terms.seen_halves(m, n, half);
        }
      }
      if constexpr (B::kC.exchanges_p()) to.store(a_p, rounded_p, m, n);
      to.store(a_ds, rounded_ds, m, n);
    }
  }
}

/// A warp's share of dK or dV, times `scale` and rounded, into a tile.
template <class Instance, class Tile, int kN8>
__device__ __forceinline__ void stage_gradient(const float (&acc)[2][kN8][4], uint32_t tile, float scale,
                                               int thread) {
  using B = BwdMma<Instance>;
  using T = typename Instance::Element;
  const typename B::Place at(thread);
  const uint32_t word = tile + Tile::offset(at.warp_n * 32 + at.g, 2 * at.warp_q) + at.t * 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
      const int c = 2 * B::kC.warps_q * (n / 2) + n % 2;
      ptx::st_shared_4(Tile::moved(word, m * 16, c), pack<T>(acc[m][n][0] * scale, acc[m][n][1] * scale));
      ptx::st_shared_4(Tile::moved(word, m * 16 + 8, c), pack<T>(acc[m][n][2] * scale, acc[m][n][3] * scale));
    }
  }
}

/// The same in float32 to the rows of `to`, from key `first_row` on, which hold the columns of the tile.
template <class Instance, int kN8>
__device__ __forceinline__ void store_gradient_f32(const float (&acc)[2][kN8][4], const RowTarget& to,
                                                   int first_row, float scale, int thread) {
  using B = BwdMma<Instance>;
  const typename B::Place at(thread);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + at.warp_n * 32 + at.g + m * 16 + half * 8;
      if (row >= to.rows) continue;
      float* const values = reinterpret_cast<float*>(to.data + row * to.row_bytes);
#pragma unroll
      for (int n = 0; n < kN8; ++n) {
        const int column = (2 * (at.warp_q + B::kC.warps_q * (n / 2)) + n % 2) * 8 + at.t * 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (column + e < to.columns) values[column + e] = acc[m][n][2 * half + e] * scale;
        }
      }
    }
  }
}

}  // namespace fovea::cuda
