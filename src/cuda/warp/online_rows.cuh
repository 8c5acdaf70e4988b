// Online softmax of the two rows that four lanes share of a 16-row accumulator, over blocks of keys: the state
// and the steps that the mma, tf32 and wgmma forwards have in common, and the end of a row.
//
// An accumulator is float[kTiles][4] (m16n8 tiles side by side) or float[4 * kTiles] (wgmma): in both, elements
// 0 and 1 of tile n belong to the first row (half 0), 2 and 3 to the one eight rows below (half 1), and a lane
// has columns 8 n + 2 (lane % 4) and the next.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/special.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/score_row.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// How far, as a power of 2, weights may exceed 1 before the maximum is raised: float16 holds 2^8 * 2^-24.
inline constexpr float kLazyGrowthLog2 = 8.0f;

/// Element e of tile n of an accumulator.
template <int kTiles>
__device__ __forceinline__ float& element(float (&acc)[kTiles][4], int n, int e) {
  return acc[n][e];
}
template <int kTiles>
__device__ __forceinline__ const float& element(const float (&acc)[kTiles][4], int n, int e) {
  return acc[n][e];
}
template <int kFloats>
__device__ __forceinline__ float& element(float (&acc)[kFloats], int n, int e) {
  return acc[4 * n + e];
}
template <int kFloats>
__device__ __forceinline__ const float& element(const float (&acc)[kFloats], int n, int e) {
  return acc[4 * n + e];
}
/// Tiles of 8 columns of an accumulator.
template <class Acc>
inline constexpr int kTilesOf = sizeof(Acc) / (4 * sizeof(float));

/// Largest value, or sum, over the four lanes of a row.
__device__ __forceinline__ float row_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_total(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x;
}

/// Largest score of this lane's in row `half` among the first kTiles * 8 keys of the block.
template <int kTiles, class Acc>
__device__ __forceinline__ float largest_of_lane(const Acc& acc_s, int half) {
  float largest = fmaxf(element(acc_s, 0, 2 * half), element(acc_s, 0, 2 * half + 1));
#pragma unroll
  for (int n = 1; n < kTiles; ++n)
    largest = fmaxf(largest, fmaxf(element(acc_s, n, 2 * half), element(acc_s, n, 2 * half + 1)));
  return largest;
}
/// The same of all lanes'.
template <int kTiles, class Acc>
__device__ __forceinline__ float largest_of(const Acc& acc_s, int half) {
  return row_maximum(largest_of_lane<kTiles>(acc_s, half));
}

/// Scores of row `half` outside of the keys `seen` become -inf; this lane's first key is `first_key`.
template <class Acc>
__device__ __forceinline__ void mask_row(Acc& acc_s, int half, int first_key, tile::Span32 seen) {
#pragma unroll
  for (int n = 0; n < kTilesOf<Acc>; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = first_key + n * 8 + e;
      if (j < seen.begin || j >= seen.end) element(acc_s, n, 2 * half + e) = -INFINITY;
    }
  }
}

/// From q.k of row `half` to exponents of 2 with every term
/// of the score; -inf for keys that the row does not see.
template <class T, class Acc>
__device__ __forceinline__ void apply_terms(Acc& acc_s, int half, int first_key, tile::Span32 seen,
                                            const ScoreRow<T>& row) {
#pragma unroll
  for (int n = 0; n < kTilesOf<Acc>; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = first_key + n * 8 + e;
      float& s = element(acc_s, n, 2 * half + e);
      s = j >= seen.begin && j < seen.end && row.sees(j) ? row.score(s, j) * tile::kLog2e : -INFINITY;
    }
  }
}

/// Dropout of the weights of row `half`; `first_key` is that of a multiple of 16, plus 2 (lane % 4).
template <class Acc>
__device__ __forceinline__ void drop_weights(Acc& acc_s, int half, int first_key, const DropoutRow& row) {
  static_assert(kTilesOf<Acc> % 2 == 0, "a cell has keys 8 apart");
  const auto key = static_cast<uint32_t>(first_key);
  const tile::Dropout& dropout = row.dropout;
#pragma unroll
  for (uint32_t n = 0; n < kTilesOf<Acc>; n += 2) {
    const tile::Dropout::Cell cell = dropout.cell(row.head, tile::Dropout::row_of_cell(row.row),
                                                  tile::Dropout::column_of_cell(key + n * 8));
#pragma unroll
    for (uint32_t u = 0; u < 2; ++u) {
      const uint32_t kept = (row.row % 16 < 8 ? cell.kept(2 * u) : cell.kept(2 * u + 1)) >> (8 * (key % 4));
      element(acc_s, n + u, 2 * half) *= (kept & 0x80) != 0 ? dropout.keep_scale : 0.0f;
      element(acc_s, n + u, 2 * half + 1) *= (kept & 0x8000) != 0 ? dropout.keep_scale : 0.0f;
    }
  }
}

/// What the exponents of a row are relative to; 0 for a row that has seen no key.
__device__ __forceinline__ float base_of(float row_max, float scale_log2) {
  return row_max == -INFINITY ? 0.0f : row_max * scale_log2;
}

/// By how much, as a power of 2, a row's maximum is to rise: log2 of a lane's `sum` of weights, over all four lanes. By 124 at most:
/// below 2^-126 the factor of what was summed would be 0, and with it the row. Weights that float32 holds are 2^4 then; infinite ones
/// stay, and the row is computed again.
__device__ __forceinline__ float growth_of_sum(float sum) {
  constexpr float kMostGrowth = 124.0f;
  return fminf(fmaxf(ptx::lg2(row_total(sum)), 0.0f), kMostGrowth);
}

/// The two rows. `scale_log2` takes scores to exponents of 2; it is positive, and the same in every call.
struct OnlineRows {
  float row_max[2];      ///< of scores; -inf before the row's first key
  float row_sum[2];      ///< of weights relative to row_max, of this lane's columns
  float factor[2] = {};  ///< of the last raise: multiplies what was summed before

  __device__ __forceinline__ void start() {
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.0f;
  }
  __device__ __forceinline__ float base(int half, float scale_log2) const {
    return base_of(row_max[half], scale_log2);
  }
  /// Whether both rows have seen a key.
  __device__ __forceinline__ bool have_maxima() const {
    return row_max[0] != -INFINITY && row_max[1] != -INFINITY;
  }
  /// Whether a score of `largest` would have a weight above 2^kLazyGrowthLog2.
  __device__ __forceinline__ bool outgrown(int half, float largest, float scale_log2) const {
    return largest * scale_log2 > fmaf(row_max[half], scale_log2, kLazyGrowthLog2);
  }
  /// Raises row_max to `now`, and sets `factor`.
  __device__ __forceinline__ void raise_to(int half, float now, float scale_log2) {
    factor[half] = now == -INFINITY ? 1.0f : ptx::ex2((row_max[half] - now) * scale_log2);
    row_max[half] = now;
    row_sum[half] *= factor[half];
  }
  /// Raises row_max by growth_of_sum, so that the weights sum to 1. A weight that is all of its row becomes exactly 1, as against the
  /// block's own maximum.
  __device__ __forceinline__ void raise_by(int half, float sum, float scale_log2) {
    raise_to(half, row_max[half] + __fdividef(growth_of_sum(sum), scale_log2), scale_log2);
  }
};

/// tanh(x) of `x_log2` = 2 log2(e) x, with an absolute error below 2^-21. (A small x loses its relative precision: scores may
/// be off by 2^-21 of the softcap, which kMostSigmoidSoftcap bounds.)
__device__ __forceinline__ float tanh_of_log2(float x_log2) {
  return fmaf(-2.0f, ptx::rcp(1.0f + ptx::ex2(x_log2)), 1.0f);
}

/// log2 of a row's sum of weights, with an absolute error of 2^-22: that of its mantissa, so that the exponent costs no digits.
__device__ __forceinline__ float log2_of_sum(float sum) {
  constexpr int kMantissaBits = 23, kBias = 127;
  const int bits = __float_as_int(sum), mantissa = bits & ((1 << kMantissaBits) - 1);
  return static_cast<float>((bits >> kMantissaBits) - kBias) +
         ptx::lg2(__int_as_float(mantissa | kBias << kMantissaBits));
}

/// The end of a row.
struct RowEnd {
  float factor = 0;            ///< normalises the weighted sum of values
  float lse_log2 = -INFINITY;  ///< log-sum-exp to base 2
};
/// `sum` of weights relative to 2^base; `sink`, times log2(e), is one more key without a value, -inf for none.
__device__ __forceinline__ RowEnd end_of_row(float base, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, sink};
  if (sink == -INFINITY) return {1.0f / sum, base + log2f(sum)};
  const float top = fmaxf(base, sink);  // so that neither exponential overflows
  const float part = exp2f(base - top), whole = sum * part + exp2f(sink - top);
  return {part / whole, top + log2f(whole)};
}

}  // namespace fovea::cuda
