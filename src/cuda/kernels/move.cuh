// Copies boxes of elements, or adds them to others: to = from, to = to + from, computed in float32 and rounded once.
//
// Grid     any number of CTAs: threads take one unit of kColumns elements after the other.
// Block    kMoveThreads threads. No shared memory.
// Bound    by memory: each element is read once (twice where it is added to), and written once.
#pragma once

#include "cuda/kernels/columns.cuh"
#include "cuda/kernels/move_args.hpp"

namespace fovea::cuda {

/// Where a unit lies in its box.
struct MoveUnit {
  int64_t from, to;  ///< bytes to the start of the run
  uint32_t first;    ///< element of the run
};
__device__ __forceinline__ MoveUnit unit_of(const MoveBox& box, uint32_t unit) {
  const uint32_t units = (box.elements + kColumns - 1) / kColumns;
  uint32_t run = unit / units;
  MoveUnit at{0, 0, (unit - run * units) * kColumns};
  for (int axis = 2; axis >= 0; --axis) {
    const uint32_t outer = run / box.size[axis], index = run - outer * box.size[axis];
    at.from += index * box.from_stride[axis];
    at.to += index * box.to_stride[axis];
    run = outer;
  }
  return at;
}

__device__ __forceinline__ void move_unit(const MoveArgs& args, const MoveBox& box, uint32_t unit) {
  const MoveUnit at = unit_of(box, unit);
  const int64_t count = static_cast<int64_t>(box.elements) - at.first;
  Columns x;
  with_type(args.from, const_cast<char*>(box.from) + at.from, at.first,
            [&](const auto* from) { load_columns(x, from, box.vectors, count); });
  with_type(args.to, box.to + at.to, at.first, [&](auto* to) {
    if (args.add) {
      Columns sum;
      load_columns(sum, to, box.vectors, count);
      for (int i = 0; i < kColumns; ++i) x.x[i] += sum.x[i];
    }
    store_columns(x, to, box.vectors, count);
  });
}

/// Units of 16 bytes as they are. A thread has several on their way at a time, as each waits for memory.
template <int kThreads>
__device__ __forceinline__ void copy_vectors(const MoveArgs& args, uint32_t all, uint32_t step) {
  constexpr int kAhead = 4;
  int box = 0;
  uint32_t first = 0;  // unit of the box
  for (uint32_t unit = blockIdx.x * kThreads + threadIdx.x; unit < all; unit += kAhead * step) {
    uint4 x[kAhead];
    uint4* to[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t own = unit + i * step;
      to[i] = nullptr;
      if (own >= all) continue;
      while (own >= args.boxes[box].end) first = args.boxes[box++].end;
      const MoveBox& b = args.boxes[box];
      const MoveUnit at = unit_of(b, own - first);
      constexpr int64_t kBytes = sizeof(uint4) / kColumns;
      x[i] = *reinterpret_cast<const uint4*>(b.from + at.from + at.first * kBytes);
      to[i] = reinterpret_cast<uint4*>(b.to + at.to + at.first * kBytes);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (to[i] != nullptr) *to[i] = x[i];
    }
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) move(const __grid_constant__ MoveArgs args) {
  const uint32_t all = args.boxes[args.count - 1].end, step = gridDim.x * kThreads;
  if (args.copies_vectors) return copy_vectors<kThreads>(args, all, step);
  int box = 0;
  uint32_t first = 0;  // unit of the box
  for (uint32_t unit = blockIdx.x * kThreads + threadIdx.x; unit < all; unit += step) {
    while (unit >= args.boxes[box].end) first = args.boxes[box++].end;
    move_unit(args, args.boxes[box], unit - first);
  }
}

}  // namespace fovea::cuda
