// The largest norms of rows of q and k, before a main kernel that passes over what lies beyond the reach of ALiBi's slopes
// (tile/alibi_reach.hpp). Reads q and k once, but for heads whose slope has no reach whatever the norms are.
//
// Grid   (AlibiNorms::kParts, heads_q, batch): a part of the rows of q and k of a head a CTA
// Block  kAlibiNormsThreads
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/elements.cuh"
#include "tile/alibi_reach.hpp"

namespace fovea::cuda {

inline constexpr int kAlibiNormsThreads = 256;
inline constexpr int kAlibiNormsLanes = 8;  ///< that read a row: 128 bytes at a time

/// A CTA's part of the rows of a tensor: [begin, end).
struct RowsOfPart {
  int begin, end;
};
__device__ __forceinline__ RowsOfPart rows_of_part(int rows, int part) {
  const int each = tile::ceil_div(rows, tile::AlibiNorms::kParts);
  return {part * each, min((part + 1) * each, rows)};
}

/// This lane's share of |row|^2. `wide`: it begins at a multiple of 16 bytes. Lanes stay together.
template <class T>
__device__ __forceinline__ float square_of_lane(const T* row, int columns, bool wide, int lane) {
  constexpr int kVector = static_cast<int>(16 / sizeof(T));
  const int vectors = wide ? columns / kVector : 0;
  float sum = 0;
#pragma unroll 4
  for (int first = 0; first < vectors; first += kAlibiNormsLanes) {
    const int v = first + lane;
    const uint4 words = v < vectors ? __ldg(reinterpret_cast<const uint4*>(row) + v) : uint4{};
    const T* const x = reinterpret_cast<const T*>(&words);
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum = fmaf(to_float(x[e]), to_float(x[e]), sum);
  }
#pragma unroll 1
  for (int first = vectors * kVector; first < columns; first += kAlibiNormsLanes) {
    const float x = first + lane < columns ? to_float(row[first + lane]) : 0.0f;
    sum = fmaf(x, x, sum);
  }
  return sum;
}

/// The largest |row|^2 that this thread's lanes find; infinite where one is not finite. `data`: row 0, `step`: elements from row to row.
template <class T>
__device__ __forceinline__ float largest_square(const T* data, int64_t step, const RowsOfPart& rows,
                                                int columns, bool wide) {
  constexpr int kRowsAtOnce = kAlibiNormsThreads / kAlibiNormsLanes;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kAlibiNormsLanes;
  float largest = 0;
#pragma unroll 2
  for (int first = rows.begin; first < rows.end; first += kRowsAtOnce) {
    const int row = min(first + thread / kAlibiNormsLanes, rows.end - 1);
    float sum = square_of_lane(data + row * step, columns, wide, lane);
#pragma unroll
    for (int distance = 1; distance < kAlibiNormsLanes; distance *= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    largest = fmaxf(largest, sum < INFINITY ? sum : INFINITY);  // NaN is infinite
  }
  return largest;
}

/// The largest of all threads, in the first one.
__device__ __forceinline__ float largest_of_cta(float x, float* of_warps) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int distance = kAlibiNormsLanes; distance < 32; distance *= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  if (thread % 32 == 0) of_warps[thread / 32] = x;
  __syncthreads();  // all warps have written
  if (thread == 0) {
    for (int w = 1; w < kAlibiNormsThreads / 32; ++w) x = fmaxf(x, of_warps[w]);
  }
  return x;
}

/// The square root as bfloat16.
__device__ __forceinline__ uint32_t norm_rounded_up(float square) {
  constexpr uint32_t kInfinity = 0x7f80;
  return min((__float_as_uint(sqrtf(square)) >> 16) + 1, kInfinity);
}

template <class T>
__device__ __forceinline__ void find_alibi_norms(const tile::AttentionParams& p,
                                                 const tile::AlibiNorms& norms) {
  __shared__ float of_warps[2][kAlibiNormsThreads / 32];
  const int part = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
            batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  float q = INFINITY, k = INFINITY;
  // Else every key is in reach, whatever the norms.
  if (tile::alibi_reach(alibi_slope(p, batch, head), 0.0f) < span.used_k) {
    const auto rows = [&](const tile::RowsView& view, int64_t row, int of_head) {
      return reinterpret_cast<const T*>(view.data) + view.offset(batch, row, of_head);
    };
    q = largest_of_cta(largest_square(rows(p.q, span.row_q, head), p.q.row, rows_of_part(span.used_q, part),
                                      p.head_dim, (p.aligned16 & tile::kAlignedQ) != 0),
                       of_warps[0]);
    k = largest_of_cta(
        largest_square(rows(p.k, span.row_k, head / p.group), p.k.row, rows_of_part(span.used_k, part),
                       p.head_dim, (p.aligned16 & tile::kAlignedK) != 0),
        of_warps[1]);
  }
  if (threadIdx.x == 0) norms.of_head(p, batch, head)[part] = norm_rounded_up(q) << 16 | norm_rounded_up(k);
}

/// Before a forward.
template <class T>
__global__ void __launch_bounds__(kAlibiNormsThreads) alibi_norms(const __grid_constant__ ForwardArgs args) {
  find_alibi_norms<T>(args.p, args.alibi_norms);
}
/// Before the main kernel of a backward.
template <class T>
__global__ void __launch_bounds__(kAlibiNormsThreads)
    backward_alibi_norms(const __grid_constant__ BackwardArgs args) {
  find_alibi_norms<T>(args.p, args.alibi_norms);
}

template <class Grid, class Args>
constexpr Grid alibi_norms_grid(const Args& args) {
  return {tile::AlibiNorms::kParts, args.p.heads_q, args.p.batch};
}

}  // namespace fovea::cuda
