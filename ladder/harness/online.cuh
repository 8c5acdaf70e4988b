// The online softmax of rungs 46 and 47, for accumulators of any width: a lane holds columns 8 i + 2 t and
// 8 i + 2 t + 1 (t = lane % 4) of its two rows, acc[i][2 half] and acc[i][2 half + 1]. `rows[half].max` is of
// unscaled scores; `rows[half].sum` is of this lane's keys, summed over the lanes at the end.
#pragma once

#include "ladder/harness/launch.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder {

inline constexpr float kLog2e = 1.4426950408889634f;
/// log2 of the largest weight before a maximum is raised: far below the range of bfloat16 and of the sums.
inline constexpr float kLazy = 8.0f;

/// Masks all but the first `keys` keys of the block.
template <int kTiles>
__device__ __forceinline__ void mask(float (&acc_s)[kTiles][4], int keys, int lane) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    if (i / 4 * 8 + 2 * (lane % 4) + i % 2 >= keys) acc_s[i / 4][i % 4] = -INFINITY;
  }
}

/// Raises the maxima of all rows of the warp to those of the block if any weight would exceed 2^kLazy, and
/// returns whether it did. Earlier sums and outputs must then be multiplied by `factor`.
template <int kTiles>
__device__ __forceinline__ bool raise_max(const float (&acc_s)[kTiles][4], OnlineRow (&rows)[2],
                                          float (&factor)[2], float scale_log2) {
  float largest[2];
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      largest[half] = fmaxf(largest[half], fmaxf(acc_s[i][2 * half], acc_s[i][2 * half + 1]));
    largest[half] = quad_max(largest[half]);
    grows |= (largest[half] - rows[half].max) * scale_log2 > kLazy;
  }
  if (!__any_sync(kWholeWarp, grows)) return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float raised = fmaxf(rows[half].max, largest[half]);
    factor[half] = ptx::ex2((rows[half].max - raised) * scale_log2);
    rows[half].max = raised;
    rows[half].sum *= factor[half];
  }
  return true;
}
template <int kTiles>
__device__ __forceinline__ void rescale(float (&acc_o)[kTiles][4], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) acc_o[i / 4][i % 4] *= factor[i / 2 % 2];
}

/// Turns scores into weights.
template <int kTiles>
__device__ __forceinline__ void weigh(float (&acc_s)[kTiles][4], OnlineRow (&rows)[2], float scale_log2) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) {
    OnlineRow& row = rows[i / 2 % 2];
    float& s = acc_s[i / 4][i % 4];
    s = ptx::ex2(fmaf(s, scale_log2, -row.max * scale_log2));
    row.sum += s;
  }
}
/// Packs weights as operand A of products with 16 keys each.
template <int kTiles>
__device__ __forceinline__ void pack(const float (&acc_s)[kTiles][4], uint32_t (&weights)[kTiles / 2][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i)
    weights[i / 4][i % 4] = pack_bf16(acc_s[i / 2][i % 2 * 2], acc_s[i / 2][i % 2 * 2 + 1]);
}

}  // namespace ladder
