// ALiBi on a tile of scores as wgmma's accumulator holds it: score - slope |i + used_k - used_q - j| of query i and key j. A
// lane has elements of two rows, 8 apart: 4 t + 2 half + e is column 8 t + 2 (lane % 4) + e of row lane / 4 + 8 half.
#pragma once

#include <cmath>

#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// The slope of a query head.
__device__ __forceinline__ float alibi_slope(const tile::AttentionParams& p, int batch, int head) {
  return __ldg(p.alibi + (batch * p.alibi_batch + head * p.alibi_head));
}

/// x + factor |distance + step (8 t + e)|: the elements of one row, from that of column 2 (lane % 4), which is `distance` away.
/// `step`: -1 where columns are keys, 1 where they are queries.
template <int kStep, int kElements>
__device__ __forceinline__ void add_distances(float (&x)[kElements], int half, float factor, float distance) {
  static_assert(kStep == 1 || kStep == -1);
#pragma unroll
  for (int t = 0; t < kElements / 4; ++t) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& element = x[4 * t + 2 * half + e];
      element = fmaf(factor, fabsf(distance + static_cast<float>(kStep * (8 * t + e))), element);
    }
  }
}

}  // namespace fovea::cuda
