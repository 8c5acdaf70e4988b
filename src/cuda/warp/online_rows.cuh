// Softmax of the two rows that four lanes hold of an accumulator of wgmma (or of m16n8 tiles side by side),
// over blocks of keys, with the maximum raised lazily.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/packed.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

using tile::kLn2, tile::kLog2e;

/// Growth of the maximum, as a power of 2, that weights are let to exceed 1 by: float16 holds 2^8 * 2^-24
/// still.
inline constexpr float kLazyGrowthLog2 = 8.0f;
/// What a lane's weights of a block may add up to: 2^8 for each of 32. No weight then exceeds 2^13, which
/// float16 holds.
inline constexpr float kMostSum = 8192.0f;
/// Two weights as operand A in kParts of T, each the rest of those before.
template <class T, int kParts, int kSteps>
__device__ __forceinline__ void set_weights(uint32_t (&to)[kParts][kSteps][4], int x, float low, float high) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const uint32_t pair = to[part][x / 4][x % 4] = pack<T>(low, high);
    if (part + 1 < kParts) {
      const float2 taken = unpack<T>(pair);
      low -= taken.x;
      high -= taken.y;
    }
  }
}

/// Row i of the two is half i of each pair of accumulators; `kTileN` keys a block.
template <class T, int kTileN, bool kSums, int kParts = 1>
struct OnlineRows {
  const float&
      scale_log2;         ///< from scores to exponents of 2; positive. A parameter of the kernel: no register
  float row_max[2] = {};  ///< of scores
  float row_sum[2] = {};  ///< of this lane's columns; with kSums
  float factor[2] = {};   ///< of the last raise: what was summed up before is to be multiplied by it

  __device__ __forceinline__ void start() {
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0.0f;
  }
  /// What exponents are relative to; 0 for a row that has seen no key.
  __device__ __forceinline__ float base(int half) const {
    return row_max[half] == -INFINITY ? 0.0f : row_max[half] * scale_log2;
  }
  /// The sum over all four lanes.
  __device__ __forceinline__ float sum_of_row(int half) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
  }

  /// Keys outside of [begin, end) take no part; this lane's first one is `first_key`.
  __device__ __forceinline__ static void mask(float (&acc_s)[kTileN / 2], int half, int first_key, int begin,
                                              int end) {
#pragma unroll
    for (int x = 0; x < kTileN / 4; ++x) {
      const int j = first_key + x / 2 * 8 + x % 2;
      if (j < begin || j >= end) acc_s[x / 2 * 4 + 2 * half + x % 2] = -INFINITY;
    }
  }

  /// Raises the maxima to those of the block if any row of the warp needs it; whether it did.
  __device__ __forceinline__ bool raise(const float (&acc_s)[kTileN / 2]) {
    float largest[2] = {fmaxf(acc_s[0], acc_s[1]), fmaxf(acc_s[2], acc_s[3])};
#pragma unroll
    for (int x = 4; x < kTileN / 2; x += 2)
      largest[x / 2 % 2] = fmaxf(largest[x / 2 % 2], fmaxf(acc_s[x], acc_s[x + 1]));
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
      grows |= largest[half] * scale_log2 > fmaf(row_max[half], scale_log2, kLazyGrowthLog2);
    }
    if (!__any_sync(0xffffffffu, grows)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float now = fmaxf(row_max[half], largest[half]);
      factor[half] = now == -INFINITY ? 1.0f : ptx::ex2((row_max[half] - now) * scale_log2);
      row_max[half] = now;
      row_sum[half] *= factor[half];
    }
    return true;
  }

  /// A maximum for rows that have none: the largest of the block's first 32 keys, mostly close enough. (Of
  /// all keys it costs as much as the weights.)
  __device__ __forceinline__ void guess(const float (&acc_s)[kTileN / 2]) {
    constexpr int kGuessed = kTileN < 32 ? kTileN : 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(acc_s[2 * half], acc_s[2 * half + 1]);
#pragma unroll
      for (int n8 = 1; n8 < kGuessed / 8; ++n8)
        largest = fmaxf(largest, fmaxf(acc_s[4 * n8 + 2 * half], acc_s[4 * n8 + 2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      row_max[half] = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    }
  }
  /// Of the warp.
  __device__ __forceinline__ bool all_have_a_maximum() const {
    return __all_sync(0xffffffffu, row_max[0] != -INFINITY && row_max[1] != -INFINITY);
  }

  /// Scores become weights, relative to the maxima.
  __device__ __forceinline__ void weigh(float (&acc_s)[kTileN / 2]) {
    const float bases[2] = {base(0), base(1)};
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      acc_s[i] = ptx::ex2(fmaf(acc_s[i], scale_log2, -bases[i / 2 % 2]));
      if constexpr (kSums) sum[i / 2 % 2] += acc_s[i];
    }
    if constexpr (kSums) add(sum);
  }
  /// Weights as operand A of the next product.
  __device__ __forceinline__ static void pack_weights(const float (&acc_s)[kTileN / 2],
                                                      uint32_t (&to)[kParts][kTileN / 16][4]) {
#pragma unroll
    for (int x = 0; x < kTileN / 4; ++x) set_weights<T>(to, x, acc_s[2 * x], acc_s[2 * x + 1]);
  }

  /// Both at once, against the maxima of the blocks before, and from other registers than `acc_s`; false
  /// where weights exceed the bound: then nothing has happened yet.
  __device__ __forceinline__ bool weigh_stale(const float (&acc_s)[kTileN / 2],
                                              uint32_t (&to)[kParts][kTileN / 16][4]) {
    const float bases[2] = {base(0), base(1)};
    float sum[2] = {};
    uint32_t largest = 0;  // of two weights, where nobody adds them up
#pragma unroll
    for (int x = 0; x < kTileN / 4; ++x) {  // register x % 4 of step x / 4: of row x % 2
      const float low = ptx::ex2(fmaf(acc_s[2 * x], scale_log2, -bases[x % 2]));
      const float high = ptx::ex2(fmaf(acc_s[2 * x + 1], scale_log2, -bases[x % 2]));
      set_weights<T>(to, x, low, high);
      if constexpr (kSums) {
        sum[x % 2] += low + high;
      } else {
        largest = ptx::max_pair<T>(largest, to[0][x / 4][x % 4]);
      }
    }
    bool within;
    if constexpr (kSums) {  // no weight exceeds a sum of weights, and NaN is within no bound
      within = sum[0] <= kMostSum && sum[1] <= kMostSum;
    } else {
      constexpr uint32_t kBound = std::is_same_v<T, __half> ? (15 + 8) << 10 : (127 + 8) << 7;  // 2^8 in T
      static_assert(kLazyGrowthLog2 == 8.0f);
      within = (largest & 0xffffu) <= kBound && (largest >> 16) <= kBound;
    }
    if (!__all_sync(0xffffffffu, within)) return false;
    if constexpr (kSums) add(sum);
    return true;
  }

  /// Scores become weights against the maxima of the blocks before. Where these exceed the bound, they are
  /// made smaller, and the maxima larger: then true, and what was summed up before is to be multiplied by
  /// `factor`. (Beyond 2^127 outputs come to be NaN, and the row is computed again.)
  __device__ __forceinline__ bool weigh_in_place(float (&acc_s)[kTileN / 2]) {
    static_assert(kSums);
    const float bases[2] = {base(0), base(1)};
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += 2) {
      const int half = i / 2 % 2;
      acc_s[i] = ptx::ex2(fmaf(acc_s[i], scale_log2, -bases[half]));
      acc_s[i + 1] = ptx::ex2(fmaf(acc_s[i + 1], scale_log2, -bases[half]));
      sum[half] += acc_s[i] + acc_s[i + 1];
    }
    const bool within = __all_sync(0xffffffffu, sum[0] <= kMostSum && sum[1] <= kMostSum) != 0;
    if (!within) {
      raise_by(sum);
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) acc_s[i] *= factor[i / 2 % 2];
      sum[0] *= factor[0];
      sum[1] *= factor[1];
    }
    add(sum);
    return !within;
  }

  /// Maxima larger by as much as lanes' sums of weights are above 1, so that those become 1. Of a weight that
  /// is all of its row it leaves 1, exactly, as the block's own maximum would.
  __device__ __forceinline__ void raise_by(const float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float whole = sum[half];
      whole += __shfl_xor_sync(0xffffffffu, whole, 1);
      whole += __shfl_xor_sync(0xffffffffu, whole, 2);
      const float now = row_max[half] + __fdividef(fmaxf(ptx::lg2(whole), 0.0f), scale_log2);
      factor[half] = ptx::ex2((row_max[half] - now) * scale_log2);
      row_max[half] = now;
      row_sum[half] *= factor[half];
    }
  }

 private:
  __device__ __forceinline__ void add(const float (&sum)[2]) {
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
  }
};

/// tanh, absolute error below 2^-22, and relative where it is small.
__device__ __forceinline__ float tanh_of(float x) {
  const float square = x * x;
  const float series =
      x * fmaf(square, fmaf(square, fmaf(square, -0.05396825397f, 0.13333333333f), -0.33333333333f), 1.0f);
  const float whole = 1.0f - __fdividef(2.0f, 1.0f + ptx::ex2(x * (2 * kLog2e)));
  return square < 0.04f ? series : whole;
}

/// How a row ends: weights relative to 2^base add up to `sum`; a sink (times log2(e), -inf without) is one
/// more key, without a value.
struct RowEnd {
  float factor = 0;            ///< of the summed values
  float lse_log2 = -INFINITY;  ///< to base 2
};
__device__ __forceinline__ RowEnd end_of_row(float base, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, sink};
  if (sink == -INFINITY) return {1.0f / sum, base + log2f(sum)};
  const float top = fmaxf(base, sink);
  const float part = exp2f(base - top), whole = sum * part + exp2f(sink - top);
  return {part / whole, top + log2f(whole)};
}

}  // namespace fovea::cuda
