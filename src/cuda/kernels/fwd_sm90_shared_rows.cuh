// Two consumers that have the same rows and different keys: at the end of a tile their sums become one.
//
//   m = max(m_0, m_1)    f_w = exp2(scale log2(e) (m_w - m))    O = f_0 O_0 + f_1 O_1    l = f_0 l_0 + f_1 l_1
//
// Each leaves one half of its columns of O in shared memory, and ends the other half.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"

namespace fovea::cuda {

/// Factor of sums relative to the maximum `from`, to be relative to `to`; 0 for a row that has seen no key.
__device__ __forceinline__ float factor_to(float from, float to, float scale_log2) {
  return from == -INFINITY ? 0.0f : ptx::ex2((from - to) * scale_log2);
}

/// Adds the other consumer's sums: `half` becomes consumer w's half of the columns of O, and `rows` those of both. All threads
/// of both consumers call it.
template <class Memory, class Rows, int kRegs>
__device__ __forceinline__ void add_up_shared_rows(const Memory& memory, int w, const float (&acc_o)[kRegs],
                                                   Rows& rows, float (&half)[kRegs / 2]) {
  constexpr int kBarrier = 1, kThreads = 256, kHalf = kRegs / 2;
  const bool second = uniform(w) != 0;
  const int thread = 32 * warp_index() + lane_index();
  ptx::barrier_wait(kBarrier, kThreads);  // both have read what was left at the end of the tile before
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    uint4 x;
    x.x = __float_as_uint(second ? acc_o[i] : acc_o[kHalf + i]);
    x.y = __float_as_uint(second ? acc_o[i + 1] : acc_o[kHalf + i + 1]);
    x.z = __float_as_uint(second ? acc_o[i + 2] : acc_o[kHalf + i + 2]);
    x.w = __float_as_uint(second ? acc_o[i + 3] : acc_o[kHalf + i + 3]);
    ptx::st_shared_16(memory.left_for_other(w, thread, i / 4), x);
  }
  ptx::st_shared_16(memory.left_for_other(w, thread, kHalf / 4),
                    uint4{__float_as_uint(rows.row_max[0]), __float_as_uint(rows.row_max[1]),
                          __float_as_uint(rows.row_sum[0]), __float_as_uint(rows.row_sum[1])});
  ptx::barrier_wait(kBarrier, kThreads);  // both have left it
  const uint4 theirs = ptx::ld_shared_16(memory.left_for_other(1 - w, thread, kHalf / 4));
  const float their_max[2] = {__uint_as_float(theirs.x), __uint_as_float(theirs.y)};
  const float their_sum[2] = {__uint_as_float(theirs.z), __uint_as_float(theirs.w)};
  float own_factor[2], their_factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float largest = fmaxf(rows.row_max[r], their_max[r]);
    own_factor[r] = factor_to(rows.row_max[r], largest, rows.scale_log2);
    their_factor[r] = factor_to(their_max[r], largest, rows.scale_log2);
    rows.row_max[r] = largest;
    rows.row_sum[r] = rows.row_sum[r] * own_factor[r] + their_sum[r] * their_factor[r];
  }
#pragma unroll
  for (int i = 0; i < kHalf; i += 4) {
    const uint4 x = ptx::ld_shared_16(memory.left_for_other(1 - w, thread, i / 4));
    const float from_other[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                                 __uint_as_float(x.w)};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float own = second ? acc_o[kHalf + i + j] : acc_o[i + j];
      half[i + j] = own * own_factor[j / 2] + from_other[j] * their_factor[j / 2];
    }
  }
}

}  // namespace fovea::cuda
