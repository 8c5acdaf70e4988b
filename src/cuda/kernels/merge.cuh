// Merges results over disjoint keys: lse = log sum_i exp(lse_i), o = sum_i exp(lse_i - lse) o_i.
//
// Grid     any number of CTAs: groups of args.lanes lanes take one row after the other.
// Block    kMergeThreads threads. No shared memory.
// Bound    by memory: each part is read once, the result is written once.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/columns.cuh"
#include "cuda/kernels/merge_args.hpp"

namespace fovea::cuda {

/// Of the lanes of one row.
template <class Combine>
__device__ __forceinline__ float over_lanes(float x, int lanes, Combine&& combine) {
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

/// A row of the result.
struct MergeRow {
  int64_t batch, row, head;

  __device__ __forceinline__ float lse(const MergePart& part) const {
    return part.lse.data[part.lse.offset(batch, head, row)];
  }
  __device__ __forceinline__ int64_t o(const MergePart& part) const {
    return part.o.offset(batch, row, head);
  }
};

/// exp(lse_i - base) summed, and the base: the largest lse, or 0 where no part has a key.
struct MergeWeights {
  float base, sum;
};
__device__ __forceinline__ MergeWeights weights_of(const MergeArgs& args, const MergeRow& row, int lane) {
  float largest = -INFINITY;
  for (int i = lane; i < args.count; i += args.lanes) largest = fmaxf(largest, row.lse(args.parts[i]));
  largest = over_lanes(largest, args.lanes, [](float a, float b) { return fmaxf(a, b); });
  const float base = largest == -INFINITY ? 0.0f : largest;
  float sum = 0;
  for (int i = lane; i < args.count; i += args.lanes) sum += expf(row.lse(args.parts[i]) - base);
  return {base, over_lanes(sum, args.lanes, [](float a, float b) { return a + b; })};
}

/// Columns [c, c + kColumns) of the row. The result may be a part: a lane reads its columns of all before it writes them.
__device__ __forceinline__ void merge_columns(const MergeArgs& args, const MergeRow& row,
                                              MergeWeights weights, int64_t c) {
  const int64_t count = args.columns - c;
  Columns sum;
  for (int i = 0; i < args.count; ++i) {
    const MergePart& part = args.parts[i];
    const float weight = expf(row.lse(part) - weights.base);
    if (weight == 0) continue;  // a part without keys, whose o may hold NaN
    Columns columns;
    with_type(part.type, part.o.data, row.o(part) + c,
              [&](const auto* o) { load_columns(columns, o, args.vectors, count); });
    for (int j = 0; j < kColumns; ++j) sum.x[j] += weight * columns.x[j];
  }
  for (int j = 0; j < kColumns; ++j) sum.x[j] = weights.sum == 0 ? 0.0f : sum.x[j] / weights.sum;
  with_type(args.result.type, args.result.o.data, row.o(args.result) + c,
            [&](auto* o) { store_columns(sum, o, args.vectors, count); });
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) merge(const __grid_constant__ MergeArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % args.lanes, groups = kThreads / args.lanes;
  const int64_t rows = args.batch * args.rows * args.heads, step = int64_t{gridDim.x} * groups;
  const int64_t first = int64_t{blockIdx.x} * groups;
  for (int64_t of_cta = first; of_cta < rows; of_cta += step) {
    // Every lane stays to the end, as warps exchange numbers: groups beyond the last row repeat it, and write nothing.
    const int64_t index = of_cta + static_cast<int>(threadIdx.x) / args.lanes;
    const int64_t known = index < rows ? index : rows - 1;
    const MergeRow row = {known / args.heads / args.rows, known / args.heads % args.rows, known % args.heads};
    const MergeWeights weights = weights_of(args, row, lane);
    const bool writes = index < rows;
    for (int64_t c = lane * kColumns; writes && c < args.columns; c += args.lanes * kColumns)
      merge_columns(args, row, weights, c);
    __syncwarp();  // the lse of a part may be that of the result: every lane has read it
    if (writes && lane == 0 && args.result.lse.data != nullptr) {
      args.result.lse.data[args.result.lse.offset(row.batch, row.head, row.row)] =
          weights.sum == 0 ? -INFINITY : weights.base + logf(weights.sum);
    }
  }
}

}  // namespace fovea::cuda
