// Gradients of the tensors that a score reads, for every backend.
//
//   dx = sum over pairs of dS * d score / dx      dS = P * (dP - delta)
//
// A CTA takes 64 queries of one head and walks over the keys that they see, 64 at a time. It computes dS of each pair on CUDA
// cores in float32, and adds to the gradients in global memory:
//
//   named_gradients   to the gradients themselves, which named_zeros has cleared: in any order, so that the last bits differ
//                     from run to run
//   named_sums        to integer sums (warp/gradient_sums.cuh), the same bits each time. Launched twice: for the peaks, and for
//                     the sums. named_results makes gradients of them.
//
// Grid     named_gradients_ctas(args).
// Block    kNamedGradientsThreads threads. Shared: static, 28 KB.
// Reads    p.lse and, from bwd_preprocess, args.delta.
#pragma once

#include "cuda/kernels/bwd_simt.cuh"
#include "cuda/kernels/named_sums_args.hpp"
#include "cuda/warp/gradient_sums.cuh"

namespace fovea::cuda {

inline constexpr int kNamedGradientsThreads = kBwdSimtThreads;

constexpr int64_t named_gradients_ctas(const BackwardArgs& args) {
  return static_cast<int64_t>(args.p.batch) * args.p.heads_q * ((args.p.seqlen_q + 63) / 64);
}

template <class T, class Add>
struct NamedGradients {
  using Tile = SimtTile<kNamedGradientsThreads, 64>;
  using Shared = typename Tile::Shared;
  using Pairs = typename Tile::Pairs;
  static constexpr int kRows = Tile::kRows;

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  Shared& s;
  const Add& add_to;

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      int index = static_cast<int>(blockIdx.x);
      const int tiles = (p.seqlen_q + kRows - 1) / kRows;
      s.row0 = index % tiles * kRows;
      index /= tiles;
      s.query_head = index % p.heads_q;
      s.batch = index / p.heads_q;
      s.span = tile::sequence_span(p, s.batch);
    }
    __syncthreads();  // the tile and its sequence are known
    if (s.row0 >= s.span.used_q) return;
    SimtGradient<T, Tile> gradient(args, s, false);
    // Keys that any of the queries sees.
    const int begin = tile::keys_of(p, s.span, s.row0).begin / kRows * kRows;
    const int end = tile::keys_of(p, s.span, min(s.row0 + kRows, s.span.used_q) - 1).end;
#pragma unroll 1
    for (int key0 = begin; key0 < end; key0 += kRows) add(gradient, s.row0, key0);
  }

  /// Adds what the pairs of one tile give.
  __device__ __forceinline__ void add(SimtGradient<T, Tile>& gradient, int query0, int key0) const {
    Pairs dots, ds, d_weights;
    gradient.product(gradient.q(), query0, gradient.k(), key0, dots, [&] { gradient.set_queries(query0); });
#pragma unroll
    for (int r = 0; r < Tile::kRowsOf; ++r) {
#pragma unroll
      for (int c = 0; c < Tile::kColsOf; ++c) ds[r][c] = dots[r][c];
    }
    gradient.weigh(query0, key0, SimtSlope::kNone, ds);
    gradient.product(gradient.d_o(), query0, gradient.v(), key0, d_weights, [] {});
    gradient.differentiate(d_weights, ds);
#pragma unroll
    for (int r = 0; r < Tile::kRowsOf; ++r) {
      const ScoreRow<T> scores(p, s.span, s.batch, s.query_head, query0 + Tile::row_of(r));
#pragma unroll
      for (int c = 0; c < Tile::kColsOf; ++c) {
        if (ds[r][c] != 0) scores.add_gradients(dots[r][c], key0 + Tile::col_of(c), ds[r][c], add_to);
      }
    }
  }
};

/// T: float, __half or __nv_bfloat16.
template <class T>
__global__ void __launch_bounds__(kNamedGradientsThreads, 2)
    named_gradients(const __grid_constant__ BackwardArgs args) {
  using Gradients = NamedGradients<T, AddInAnyOrder>;
  __shared__ typename Gradients::Shared shared;
  Gradients{args, args.p, shared, AddInAnyOrder{}}.run();
}

template <class T>
__global__ void __launch_bounds__(kNamedGradientsThreads, 2)
    named_sums(const __grid_constant__ NamedSumsArgs args) {
  using Gradients = NamedGradients<T, AddFixed>;
  __shared__ typename Gradients::Shared shared;
  Gradients{args.b, args.b.p, shared, AddFixed{args.peaks, args.sums, args.format, args.adds}}.run();
}

}  // namespace fovea::cuda
