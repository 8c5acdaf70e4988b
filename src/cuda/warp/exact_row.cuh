// One row of attention by one warp, key by key, without a matrix product. Kernels fall back to it for rows
// of a tile whose result is not finite: in a matrix product a weight of 0 times NaN would reach rows that do
// not see the key, while this code skips keys that take no part. It is slow, and runs only for inputs with
// NaN or Inf, or sums that overflow.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/warp/dropout.cuh"
#include "cuda/warp/score_row.cuh"
#include "tile/key_rows.hpp"

namespace fovea::cuda {

/// What a lane adds to its part of the product of a key, beside q k: nothing.
struct NoMoreProducts {
  __device__ __forceinline__ float operator()(int, float product) const { return product; }
};
/// QV V: where the problem has qv. `query` points to its row.
template <class T>
struct ProductsWithValues {
  const T* query;  ///< null: none
  tile::KeyRows values;
  int columns;

  __device__ __forceinline__ float operator()(int key, float product) const {
    if (query == nullptr) return product;
    const T* const value = reinterpret_cast<const T*>(values.row(key));
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x) % 32; c < columns; c += 32)
      product = fmaf(to_float(query[c]), to_float(value[c]), product);
    return product;
  }
};

/// In the place of a DropoutRow, in kernels without dropout.
struct KeepsAll {};

/// The sum of x over the warp. Its loop stays one, as those below: unrolled, such rows were up to 41 % of a kernel's instructions.
__device__ __forceinline__ float rolled_sum_over_warp(float x) {
#pragma unroll 1
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

/// The state of a row, spread over the lanes: lane l holds columns l, l + 32, ... of a slice of o.
template <int kColumns>
struct ExactRow {
  static constexpr int kPerLane = (kColumns + 31) / 32;
  float o[kPerLane] = {};
  float maximum = -INFINITY, sum = 0;  ///< of scores in natural units, and of weights; the same in all lanes

  /// Adds keys [begin, end) of the sequence, of which the row sees those in `seen`. `q` points to the row's first
  /// element, or is an AnyQuery. The whole warp takes part. Keys and values are T, or E4M3 with factors. `kept`: a DropoutRow, or KeepsAll.
  /// `more`: see NoMoreProducts.
  template <class T, class Key = T, class Kept, class More = NoMoreProducts, class Query = const T*>
  __device__ __forceinline__ void add(const tile::AttentionParams& p, const ScoreRow<T>& scores,
                                      const Kept& kept, const Query& q, const tile::KeyRows& k,
                                      const tile::KeyRows& v, int columns, tile::Span32 seen, int begin,
                                      int end, float product_scale = 1, float value_scale = 1,
                                      const More& more = {}) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int j = max(begin, seen.begin); j < min(end, seen.end); ++j) {
      if (!scores.sees(j)) continue;
      float dot = 0;
      const Key* const key = reinterpret_cast<const Key*>(k.row(j));
#pragma unroll 1
      for (int c = lane; c < p.head_dim; c += 32) dot = fmaf(to_float(q[c]), to_float(key[c]), dot);
      dot = rolled_sum_over_warp(more(j, dot));
      if constexpr (sizeof(Key) == 1) dot *= product_scale;
      const float score = scores.score(dot, j);
      if (score == -INFINITY) continue;
      const float now = fmaxf(maximum, score);
      const float rescale = maximum == -INFINITY ? 0.0f : expf(maximum - now);
      float weight = expf(score - now);
      maximum = now;
      sum = sum * rescale + weight;
      if constexpr (std::is_same_v<Kept, DropoutRow>) {
        if (p.dropout_threshold != 0) weight *= kept.factor(j);
      }
      const Key* const value = reinterpret_cast<const Key*>(v.row(j));
#pragma unroll
      for (int n = 0; n < kPerLane; ++n) {
        const int c = lane + 32 * n;
        o[n] *= rescale;
        if (weight != 0 && c < columns)
          o[n] = fmaf(weight, sizeof(Key) == 1 ? to_float(value[c]) * value_scale : to_float(value[c]), o[n]);
      }
    }
  }
};

}  // namespace fovea::cuda
