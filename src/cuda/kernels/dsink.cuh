// The gradient of the sinks, for every backend.
//
//   dsink = -sum over rows exp(sink - lse) delta
//
// A CTA owns a head. Its threads take rows in a fixed order and add their sums in a fixed tree, so every run
// gives the same bits. Rows that take no part and rows whose lse is -inf add nothing.
//
// Grid     dsink_ctas(args).
// Block    kDSinkThreads threads; static shared memory of one float a warp.
// Reads    p.lse and, from bwd_preprocess, args.delta.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/special.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

inline constexpr int kDSinkThreads = 1024;  ///< all that a CTA can have: reading is bound by latency

constexpr int64_t dsink_ctas(const BackwardArgs& args) {
  return args.p.heads_q;
}

/// kThreads: kDSinkThreads.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) dsink(const __grid_constant__ BackwardArgs args) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float warp_sums[kWarps];
  const tile::AttentionParams& p = args.p;
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const float sink = p.sink[head];

  float sum = 0;
  if (sink != -INFINITY) {  // such a sink has no weight, not even in a row without keys
    for (int batch = 0; batch < p.batch; ++batch) {
      const tile::SequenceSpan span = tile::sequence_span(p, batch);
      const float* delta = args.delta + (static_cast<int64_t>(batch) * p.heads_q + head) * args.rows;
      for (int i = thread; i < span.used_q; i += kThreads) {
        const float lse = p.lse.data[p.lse.offset(batch, head, span.row_q + i)];
        if (lse != -INFINITY) sum -= ptx::ex2((sink - lse) * tile::kLog2e) * delta[i];
      }
    }
  }
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
  if (thread % 32 == 0) warp_sums[thread / 32] = sum;
  __syncthreads();  // the sums of all warps are complete
  if (thread != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += warp_sums[warp];
  p.dsink[head] = sum;
}

}  // namespace fovea::cuda
