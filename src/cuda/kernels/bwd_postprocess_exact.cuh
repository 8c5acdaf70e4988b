// After bwd_sm90_bf16x3: dq in float32 from its sums, zeros in rows that take no part, and rows of gradients that are not
// finite once more.
//
//   dq    scale times its sum, which lies as bwd_postprocess reads it; 0 in rows beyond used_q
//   dk    0 in rows beyond used_k
//   dv    likewise
//
// bf16x3 turns an infinity into NaN, and a product of a tile multiplies pairs that do not see each other by 0, which
// leaves a NaN a NaN. So rows that are not finite are computed again, pair by pair, from the pairs that take part: those of
// dq where they are found, those of dk and dv where the main kernel has said that there are any (not_finite).
//
// Launch
//   grid    (any number but 0, heads_q, batch), best ceil(seqlen_q / kPostprocessExactRows)
//   block   kPostprocessExactThreads
//   shared  none
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_tf32_pairs.cuh"

namespace fovea::cuda {

inline constexpr int kPostprocessExactThreads = 128;
/// 16 a warp: those of a fragment.
inline constexpr int kPostprocessExactRows = kPostprocessExactThreads / 32 * 16;

/// A warp's share of the work on one (batch, head).
template <int kColumns>
struct BwdPostprocessExact {
  const BackwardArgs& args;
  BwdTf32Place place;

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static constexpr int kWarps = kPostprocessExactThreads / 32;

  __device__ __forceinline__ float* row_of(const tile::RowsView& view, int64_t first, int row) const {
    return reinterpret_cast<float*>(view.data) + view.offset(place.batch, first + row, place.head);
  }
  __device__ __forceinline__ static void clear(float* row, int columns) {
    for (int c = lane(); c < columns; c += 32) row[c] = 0.0f;
  }

  /// dq of 16 rows.
  __device__ __forceinline__ void queries(int first) const {
    const tile::AttentionParams& p = args.p;
    const tile::SequenceSpan& span = place.span;
    const bool aligned = (p.aligned16 & tile::kAlignedDQ) != 0;
    const float* const sums =
        args.dq_sum +
        ((int64_t{place.batch} * p.heads_q + place.head) * args.rows + first) * args.dq_columns + lane() * 4;
    float4 x[kColumns / 8];
#pragma unroll
    for (int f = 0; f < kColumns / 8; ++f) x[f] = __ldcs(reinterpret_cast<const float4*>(sums + f * 128));
    uint32_t broken[2];  // bit 4 g + t: lane t of row g has something that is not finite
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + half * 8 + lane() / 4;
      float* const to = row_of(p.dq, span.row_q, row) + lane() % 4 * 2;
      float zero = 0.0f;
#pragma unroll
      for (int f = 0; f < kColumns / 8; ++f) {
        const float a = half == 0 ? x[f].x : x[f].z, b = half == 0 ? x[f].y : x[f].w;
        zero = fmaf(0.0f, a, fmaf(0.0f, b, zero));
        const int column = f * 8 + lane() % 4 * 2;
        if (row >= span.used_q) continue;
        if (aligned) {
          if (column < p.head_dim)
            *reinterpret_cast<float2*>(to + f * 8) = make_float2(a * p.scale, b * p.scale);
        } else {
          if (column < p.head_dim) to[f * 8] = a * p.scale;
          if (column + 1 < p.head_dim) to[f * 8 + 1] = b * p.scale;
        }
      }
      broken[half] = __ballot_sync(~0u, row < span.used_q && !(zero == 0.0f));
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (uint32_t rest = half == 0 ? broken[0] : broken[1]; rest != 0;) {
        const int g = (__ffs(static_cast<int>(rest)) - 1) / 4, row = first + half * 8 + g;
        rest &= ~(15u << (4 * g));
        __syncwarp();  // the other lanes have written their columns of the row
        ExactGradient<false, kColumns> exact;
        exact.sum(args, place, row);
        exact.write(exact.of_qk, row_of(p.dq, span.row_q, row), p.head_dim, p.scale);
      }
    }
  }

  /// Whether a row holds something that is not finite.
  __device__ __forceinline__ static bool is_broken(const float* row, int columns) {
    bool broken = false;
    for (int c = lane(); c < columns; c += 32) broken |= !(fabsf(row[c]) < INFINITY);
    return __any_sync(~0u, broken);
  }
  /// Row `row` of dk and dv, where either is not finite.
  __device__ __forceinline__ void exact_key(int row) const {
    const tile::AttentionParams& p = args.p;
    float* const dk = row_of(p.dk, place.span.row_k, row);
    float* const dv = row_of(p.dv, place.span.row_k, row);
    if (!is_broken(dk, p.head_dim) && !is_broken(dv, p.head_dim_v)) return;
    ExactGradient<true, kColumns> exact;
    exact.sum(args, place, row);
    exact.write(exact.of_qk, dk, p.head_dim, p.scale);
    exact.write(exact.of_v, dv, p.head_dim_v, 1.0f);
  }
};

template <int kColumns>
__global__ void __launch_bounds__(kPostprocessExactThreads)
    bwd_postprocess_exact(const __grid_constant__ BackwardArgs args) {
  using Share = BwdPostprocessExact<kColumns>;
  const tile::AttentionParams& p = args.p;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  Share share{args, {}};
  share.place.span = tile::sequence_span(p, batch);
  share.place.batch = batch;
  share.place.head = head;
  const tile::SequenceSpan& span = share.place.span;
  const int warp = static_cast<int>(blockIdx.x) * Share::kWarps + Share::warp();
  const int warps = static_cast<int>(gridDim.x) * Share::kWarps;

  for (int first = warp * 16; first < span.used_q; first += warps * 16) share.queries(first);
  for (int row = span.used_q + warp; row < span.length_q; row += warps)
    Share::clear(share.row_of(p.dq, span.row_q, row), p.head_dim);
  if (head >= p.heads_kv) return;
  for (int row = span.used_k + warp; row < span.length_k; row += warps) {
    Share::clear(share.row_of(p.dk, span.row_k, row), p.head_dim);
    Share::clear(share.row_of(p.dv, span.row_k, row), p.head_dim_v);
  }
  if (*args.not_finite == 0) return;
  for (int row = warp; row < span.used_k; row += warps) share.exact_key(row);
}

}  // namespace fovea::cuda
