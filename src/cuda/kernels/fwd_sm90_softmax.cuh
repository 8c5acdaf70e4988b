// The softmax of fwd_sm90: one block of scores becomes weights, the operand A of P V. warp/online_rows.cuh has
// what it shares with other kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/packed.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/operand_parts.cuh"

namespace fovea::cuda {

/// What a lane's weights of a block may add up to: 2^8 for each of 32. No weight then exceeds 2^13, which
/// float16 holds.
inline constexpr float kMostSum = 8192.0f;

/// Rows of a consumer's thread, over blocks of kTileN keys. With kSums their sums are kept here; otherwise tensor
/// cores add the weights up. With kShifts all scores of a row of a block lack the same number, `shift`.
template <class T, int kTileN, bool kSums, int kParts, bool kShifts = false>
struct FwdSm90Rows : OnlineRows {
  using AccS = float[kTileN / 2];
  using Weights = uint32_t[kParts][kTileN / 16][4];
  const float& scale_log2;  ///< a parameter of the kernel, so it takes no register
  float shift[kShifts ? 2 : 1];

  __device__ __forceinline__ explicit FwdSm90Rows(const float& scale) : scale_log2(scale) {}

  __device__ __forceinline__ float base(int half) const { return OnlineRows::base(half, scale_log2); }

  /// What a lane's exponents of a row are relative to in this block.
  __device__ __forceinline__ float base_in_block(int half) const {
    if constexpr (kShifts) return base_of(row_max[half] - shift[half], scale_log2);
    return base(half);
  }
  /// A row's largest score among the first kTiles * 8 keys of this block.
  template <int kTiles>
  __device__ __forceinline__ float largest_in_block(const AccS& acc_s, int half) const {
    if constexpr (kShifts) return largest_of<kTiles>(acc_s, half) + shift[half];
    return largest_of<kTiles>(acc_s, half);
  }

  /// Raises the maxima to those of the block if any row of the warp needs it; whether it did.
  __device__ __forceinline__ bool raise(const AccS& acc_s) {
    const float largest[2] = {largest_in_block<kTileN / 8>(acc_s, 0), largest_in_block<kTileN / 8>(acc_s, 1)};
    const bool grows = outgrown(0, largest[0], scale_log2) || outgrown(1, largest[1], scale_log2);
    if (!__any_sync(0xffffffffu, grows)) return false;
#pragma unroll
    for (int half = 0; half < 2; ++half) raise_to(half, fmaxf(row_max[half], largest[half]), scale_log2);
    return true;
  }

  /// A maximum for rows that have none: the largest of the block's first 32 keys, mostly close enough. (The
  /// largest of all keys costs as much as the weights.)
  __device__ __forceinline__ void guess(const AccS& acc_s) {
    constexpr int kGuessed = kTileN < 32 ? kTileN : 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) row_max[half] = largest_in_block<kGuessed / 8>(acc_s, half);
  }
  /// Whether every row of the warp has seen a key.
  __device__ __forceinline__ bool all_have_maxima() const {
    return __all_sync(0xffffffffu, have_maxima());
  }

  /// Scores become weights, relative to the maxima.
  __device__ __forceinline__ void weigh(AccS& acc_s) {
    const float bases[2] = {base_in_block(0), base_in_block(1)};
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      acc_s[i] = ptx::ex2(fmaf(acc_s[i], scale_log2, -bases[i / 2 % 2]));
      if constexpr (kSums) sum[i / 2 % 2] += acc_s[i];
    }
    if constexpr (kSums) add(sum);
  }
  /// Weights as operand A of P V.
  __device__ __forceinline__ static void pack_weights(const AccS& acc_s, Weights& to) {
#pragma unroll
    for (int x = 0; x < kTileN / 4; ++x) set_parts<T>(to, x, acc_s[2 * x], acc_s[2 * x + 1]);
  }

  /// Packed weights against the maxima of the blocks before, from S, which stays. False when weights exceed the
  /// bound: then nothing else has changed, and they are to be taken again.
  __device__ __forceinline__ bool weigh_stale(const AccS& acc_s, Weights& to) {
    const float bases[2] = {base_in_block(0), base_in_block(1)};
    float sum[2] = {};
    uint32_t largest = 0;  // of two weights, where nobody adds them up
#pragma unroll
    for (int x = 0; x < kTileN / 4; ++x) {  // register x % 4 of step x / 4: of row x % 2
      const float low = ptx::ex2(fmaf(acc_s[2 * x], scale_log2, -bases[x % 2]));
      const float high = ptx::ex2(fmaf(acc_s[2 * x + 1], scale_log2, -bases[x % 2]));
      set_parts<T>(to, x, low, high);
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

  /// Weights against the maxima of the blocks before, in the registers of S. Where they exceed the bound, they
  /// are scaled down and the maxima raised: then true, and what was summed before is to be multiplied by
  /// `factor`. (Beyond 2^127 outputs become NaN, and the row is computed again.)
  __device__ __forceinline__ bool weigh_in_place(AccS& acc_s) {
    static_assert(kSums);
    const float bases[2] = {base_in_block(0), base_in_block(1)};
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
#pragma unroll
      for (int half = 0; half < 2; ++half) raise_by(half, sum[half], scale_log2);
      sum[0] = sum[1] = 0;  // anew: they may be infinite where their weights are not
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) {
        acc_s[i] *= factor[i / 2 % 2];
        sum[i / 2 % 2] += acc_s[i];
      }
    }
    add(sum);
    return !within;
  }

 private:
  __device__ __forceinline__ void add(const float (&sum)[2]) {
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
  }
};

}  // namespace fovea::cuda
