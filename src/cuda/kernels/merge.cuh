// Merges results over disjoint keys: lse = log sum_i exp(lse_i), o = sum_i exp(lse_i - lse) o_i.
//
// Grid     x: warps take kMergeRows rows of a head, those of a CTA of neighbouring heads, or of one head; y: the other of rows and
//          heads; z: sequences; any numbers of each.
// Block    kMergeThreads threads. No shared memory.
// Bound    by memory: each part is read once, the result is written once. What a warp has to find out about its rows it finds
//          out for all of them at once, else that bounds the time.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/columns.cuh"
#include "cuda/kernels/merge_args.hpp"

namespace fovea::cuda {

/// Rows of one head, at most kMergeRows.
struct MergeRows {
  int64_t batch, first, head;
  int count;
};

/// What a lane knows of the weights: those of part lane % kLanes, and of every kLanes-th behind it, in row lane / kLanes.
class MergeWeights {
 public:
  static constexpr int kLanes = 32 / kMergeRows;  ///< of a row

  __device__ __forceinline__ MergeWeights(const MergeArgs& args, const MergeRows& rows, int lane)
      : args_(args), rows_(rows), row_(lane / kLanes), own_(lane % kLanes), first_lse_(lse(own_)) {
    float largest = first_lse_;
    for (int first = kLanes; first < args.count; first += kLanes) largest = fmaxf(largest, lse(first + own_));
    largest = over_lanes(largest, [](float a, float b) { return fmaxf(a, b); });
    base_ = largest == -INFINITY ? 0.0f : largest;
    sum_ = expf(first_lse_ - base_);
    for (int first = kLanes; first < args.count; first += kLanes) sum_ += expf(lse(first + own_) - base_);
    sum_ = over_lanes(sum_, [](float a, float b) { return a + b; });
    inverse_ = sum_ == 0 ? 0.0f : 1.0f / sum_;
  }
  /// Of the lane's part among those from `first` on.
  __device__ __forceinline__ float weight(int first) const {
    return expf((first == 0 ? first_lse_ : lse(first + own_)) - base_) * inverse_;
  }
  __device__ __forceinline__ void write_lse() const {
    const tile::StatsView& to = args_.result.lse;
    if (own_ != 0 || row_ >= rows_.count || to.data == nullptr) return;
    to.data[to.offset(rows_.batch, rows_.head, rows_.first + row_)] =
        sum_ == 0 ? -INFINITY : base_ + logf(sum_);
  }

 private:
  __device__ __forceinline__ float lse(int part) const {
    if (row_ >= rows_.count || part >= args_.count) return -INFINITY;
    const tile::StatsView& of = args_.parts[part].lse;
    return of.data[of.offset(rows_.batch, rows_.head, rows_.first + row_)];
  }
  template <class Combine>
  static __device__ __forceinline__ float over_lanes(float x, Combine&& combine) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2)
      x = combine(x, __shfl_xor_sync(0xffffffffu, x, distance));
    return x;
  }

  const MergeArgs& args_;
  const MergeRows& rows_;
  const int row_, own_;  ///< of the lane: its row, and its first part
  const float first_lse_;
  float base_;     ///< the largest lse, or 0 where no part has a key
  float sum_;      ///< of exp(lse_i - base)
  float inverse_;  ///< 0 where no part has a key
};

/// Neighbouring columns of each row.
using MergeColumns = float[kMergeRows][kMergeColumns];

/// Calls use(row, pointer) with a pointer to column `c` of each row.
template <class Use>
__device__ __forceinline__ void for_each_row(const MergePart& part, const MergeRows& rows, int64_t c,
                                             Use&& use) {
  with_type(part.type, part.o.data, part.o.offset(rows.batch, rows.first, rows.head) + c, [&](auto* o) {
#pragma unroll
    for (int r = 0; r < kMergeRows; ++r, o += part.o.row) {
      if (r < rows.count) use(r, o);
    }
  });
}

/// Adds a part times the weights that lanes `at`, `at` + kLanes and so on have in `own`. Its rows are read before they are weighed.
template <bool kVectors>
__device__ __forceinline__ void add_part(MergeColumns& sum, const MergeArgs& args, const MergeRows& rows,
                                         int part, float own, int at, int64_t c) {
  MergeColumns columns = {};
  if (c < args.columns) {
    for_each_row(args.parts[part], rows, c,
                 [&](int r, const auto* o) { load_four<kVectors>(columns[r], o, args.columns - c); });
  }
#pragma unroll
  for (int r = 0; r < kMergeRows; ++r) {
    const float weight = __shfl_sync(0xffffffffu, own, r * MergeWeights::kLanes + at);
    // A part without keys has weight 0, and its o may hold NaN.
#pragma unroll
    for (int j = 0; j < kMergeColumns; ++j)
      sum[r][j] = fmaf(weight, weight == 0 ? 0.0f : columns[r][j], sum[r][j]);
  }
}

/// The result may be a part: of its columns a lane has read all parts before it writes them. All lanes of the warp call it.
template <bool kVectors>
__device__ __forceinline__ void merge_rows(const MergeArgs& args, const MergeRows& rows, int lane) {
  const MergeWeights weights(args, rows, lane);
  for (int64_t turn = 0; turn < args.columns; turn += 32 * kMergeColumns) {
    const int64_t c = turn + lane * kMergeColumns;
    MergeColumns sum = {};
    for (int first = 0; first < args.count; first += MergeWeights::kLanes) {
      const float own = weights.weight(first);
      const int count = min(MergeWeights::kLanes, args.count - first);
      for (int i = 0; i < count; ++i) add_part<kVectors>(sum, args, rows, first + i, own, i, c);
    }
    if (c >= args.columns) continue;
    for_each_row(args.result, rows, c,
                 [&](int r, auto* o) { store_four<kVectors>(sum[r], o, args.columns - c); });
  }
  __syncwarp();  // the lse of a part may be that of the result: every lane has read it
  weights.write_lse();
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kMergeCtasOfSm) merge(const __grid_constant__ MergeArgs args) {
  constexpr int kWarps = kThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t groups = merge_groups(args.rows), inner = args.heads_inside ? args.heads : groups,
                outer = args.heads_inside ? groups : args.heads;
  const int64_t begin = int64_t{blockIdx.x} * kWarps + warp, step = int64_t{gridDim.x} * kWarps;
  for (int64_t batch = blockIdx.z; batch < args.batch; batch += gridDim.z) {
    for (int64_t o = blockIdx.y; o < outer; o += gridDim.y) {
      for (int64_t i = begin; i < inner; i += step) {
        // From the last rows to the first: of parts that were just written these are still in L2.
        const int64_t first = (groups - 1 - (args.heads_inside ? o : i)) * kMergeRows,
                      left = args.rows - first;
        const MergeRows rows{batch, first, args.heads_inside ? i : o,
                             left < kMergeRows ? static_cast<int>(left) : kMergeRows};
        args.vectors ? merge_rows<true>(args, rows, lane) : merge_rows<false>(args, rows, lane);
      }
    }
  }
}

}  // namespace fovea::cuda
