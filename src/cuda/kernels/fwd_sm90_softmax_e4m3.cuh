// The softmax of fwd_sm90 where weights become operands of 8 bits.
//
// float8_e4m3fn ends at 448 and loses bits below 2^-6, so weights are taken times 2^kHeadroomLog2: a weight of 1 may still
// grow, and weights down to 2^-11 keep all bits. Maxima are those of the blocks before while no weight can exceed 448.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/transposed_values.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/online_rows.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Rows of a consumer's thread, over blocks of kTileN keys.
template <int kTileN>
struct FwdSm90RowsE4M3 : OnlineRows {
  static constexpr int kSteps = kTileN / kKeysOfStep;
  static constexpr int kOfStep = 8;  ///< weights of a lane in a step, of each row
  static constexpr float kHeadroomLog2 = 5.0f;
  static constexpr float kMost = 448.0f;  ///< float8_e4m3fn; eight weights of 2^kHeadroomLog2 add up to less
  using AccS = float[kTileN / 2];
  using Weights = uint32_t[1][kSteps][4];
  float scale_log2 = 0;  ///< of the tile's sequence and head

  __device__ __forceinline__ explicit FwdSm90RowsE4M3(float) {}

  __device__ __forceinline__ float base(int half) const {
    return OnlineRows::base(half, scale_log2) - kHeadroomLog2;
  }

  /// Raises the maxima to those of the block.
  __device__ __forceinline__ void raise(const AccS& acc_s) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      raise_to(half, fmaxf(row_max[half], largest_of<kTileN / 8>(acc_s, half)), scale_log2);
  }
  /// Whether every row of the warp has seen a key.
  __device__ __forceinline__ bool all_have_maxima() const {
    return __all_sync(0xffffffffu, have_maxima());
  }

  /// Scores become weights against the maxima, and these operand A of P V. Where a weight could exceed kMost, all are scaled
  /// down and the maxima raised: then false, and what was summed before is to be multiplied by `factor`. (Beyond 2^127 outputs
  /// become NaN, and the row is computed again.)
  __device__ __forceinline__ bool weigh_within(AccS& acc_s, Weights& to) {
    const float bases[2] = {base(0), base(1)};
    float sum[2] = {}, largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float of_step[2] = {};
#pragma unroll
      for (int i = 0; i < 2 * kOfStep; ++i) {
        float& s = acc_s[step * 2 * kOfStep + i];
        s = ptx::ex2(fmaf(s, scale_log2, -bases[i / 2 % 2]));
        of_step[i / 2 % 2] += s;
      }
      pack(acc_s, to, step);
      sum[0] += of_step[0];
      sum[1] += of_step[1];
      // No weight exceeds a sum of weights; NaN shows in O.
      largest = fmaxf(largest, fmaxf(of_step[0], of_step[1]));
    }
    const bool within = __all_sync(0xffffffffu, largest <= kMost) != 0;
    if (__builtin_expect(!within, 0)) scale_down(acc_s, to, sum);
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
    return within;
  }

 private:
  __device__ __forceinline__ static void pack(const AccS& acc_s, Weights& to, int step) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const auto weight = [&](int byte) { return acc_s[tile::wgmma_accumulator_of_a8(step, r, byte)]; };
      to[0][step][r] = ptx::e4m3x4_of(weight(0), weight(1), weight(2), weight(3));
    }
  }
  __device__ __forceinline__ void scale_down(AccS& acc_s, Weights& to, float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float growth = ptx::lg2(largest_of<kTileN / 8>(acc_s, half)) - kHeadroomLog2;
      raise_to(half, row_max[half] + __fdividef(fmaxf(growth, 0.0f), scale_log2), scale_log2);
      sum[half] = 0;  // anew: it may be infinite where its weights are not
    }
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) {
      acc_s[i] *= factor[i / 2 % 2];
      sum[i / 2 % 2] += acc_s[i];
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pack(acc_s, to, step);
  }
};

}  // namespace fovea::cuda
