// Before a forward over a cache that grows: writes the new rows of k and v behind those that the cache has, rotates those of k and
// q by the angles of their positions, and tells the lengths that result.
//
// Grid     append_grid(args): a warp takes one row of one head after the other.
// Block    kAppendThreads threads. No shared memory.
// Bound    by latency: a step of decoding moves some kilobytes a sequence.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/append_args.hpp"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/any_query.cuh"

namespace fovea::cuda {

/// Copies rows of elements of type T, a warp a row, as elements of type To: E4M3 that stand for `scale` times themselves, or T that
/// are `scale` times what is read.
template <class T, class To = T>
struct RowCopy {
  const AppendArgs& args;
  const float scale = 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  static __device__ __forceinline__ To stored(float x, float scale) {
    if constexpr (sizeof(To) == 1) {
      // x / scale, rounded as a division is (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990):
      // the compiler's own calls a function, for which registers are spilled.
      const float about = ptx::rcp(scale), inverse = fmaf(fmaf(-scale, about, 1.0f), about, about);
      const float quotient = x * inverse;
      return {ptx::e4m3_of(fmaf(fmaf(-quotient, scale, x), inverse, quotient))};
    } else {
      return To(x * scale);
    }
  }
  template <class From>
  __device__ __forceinline__ void plain(const From& from, To* to, int begin, int end) const {
    for (int c = begin + lane; c < end; c += 32) {
      if constexpr (std::is_same_v<From, const To*>) {
        to[c] = from[c];
      } else {
        to[c] = stored(static_cast<float>(from[c]), scale);
      }
    }
  }
  __device__ __forceinline__ void zeros(To* to) const {
    for (int c = lane; c < args.p.head_dim; c += 32) to[c] = To(0.0f);
  }
  /// Turns the first pairs, of which there may be none, by the angles of `position`. One that has none makes them NaN.
  template <class From>
  __device__ __forceinline__ void rotated(const From& from, To* to, int position) const {
    const int step = args.interleaved ? 2 : 1, partner = args.interleaved ? 1 : args.half;
    const bool known = position >= 0 && position < args.positions;
    for (int j = lane; j < args.half; j += 32) {
      const float x = static_cast<float>(from[j * step]), y = static_cast<float>(from[j * step + partner]);
      const float cosine = known ? angle(args.cosines, position, j) : NAN,
                  sine = known ? angle(args.sines, position, j) : NAN;
      to[j * step] = stored(x * cosine - y * sine, scale);
      to[j * step + partner] = stored(x * sine + y * cosine, scale);
    }
    plain(from, to, 2 * args.half, args.p.head_dim);
  }

 private:
  __device__ __forceinline__ float angle(const AnglesView& view, int position, int j) const {
    const int64_t at = position * view.row + j;
    return args.angles_are_f32 ? reinterpret_cast<const float*>(view.data)[at]
                               : static_cast<float>(reinterpret_cast<const T*>(view.data)[at]);
  }
};

/// Keys of sequence b before, as far as the cache can hold them.
__device__ __forceinline__ int used_before(const tile::AttentionParams& p, int b) {
  const int used = p.seqused_k[b];
  return used < 0 ? 0 : used > p.seqlen_k ? p.seqlen_k : used;
}
__device__ __forceinline__ int first_position(const AppendArgs& args, int b) {
  return args.rotary_positions != nullptr ? args.rotary_positions[b] : args.p.seqused_k[b];
}

/// Row `row` of k_new and v_new, of key head `head`, to a cache of elements of type To.
template <class T, class To>
__device__ __forceinline__ void append_row(const AppendArgs& args, int row, int head) {
  const tile::AttentionParams& p = args.p;
  const SequenceRow at = sequence_row(args.cu_seqlens_k_new, p.batch, args.new_rows, row);
  if (at.batch < 0) return;
  const int key = used_before(p, at.batch) + at.index;
  const tile::PageRow to = row_to_write(p, at.batch, key);
  if (to.page < 0) return;
  const int b = args.cu_seqlens_k_new != nullptr ? 0 : at.batch;
  const int r = args.cu_seqlens_k_new != nullptr ? row : at.index;
  const RowCopy<T, To> copy_k{args, p.k_descale.at(at.batch, head)},
      copy_v{args, p.v_descale.at(at.batch, head)};
  const T* const k_new = reinterpret_cast<const T*>(args.k_new.data) + args.k_new.offset(b, r, head);
  To* const k = reinterpret_cast<To*>(p.k.data) + p.k.offset(to.page, to.row, head);
  copy_k.rotated(k_new, k, first_position(args, at.batch) + at.index);
  copy_v.plain(reinterpret_cast<const T*>(args.v_new.data) + args.v_new.offset(b, r, head),
               reinterpret_cast<To*>(p.v.data) + p.v.offset(to.page, to.row, head), 0, p.head_dim_v);
}

/// Row `row` of q, of query head `head`. Rows of no sequence become zeros: tiles that reach so far decide by all their rows when to
/// rescale, and the bits of the others are not to depend on what the workspace held. Where the cache has 8 bits q may have them, too.
template <class T, class To>
__device__ __forceinline__ void rotate_query(const AppendArgs& args, int row, int head) {
  const tile::AttentionParams& p = args.p;
  const SequenceRow at = sequence_row(p.cu_seqlens_q, p.batch, p.seqlen_q, row);
  T* const to = reinterpret_cast<T*>(args.q_rotated) + (int64_t{row} * p.heads_q + head) * p.head_dim;
  if (at.batch < 0) return RowCopy<T>{args}.zeros(to);
  const bool packed = p.cu_seqlens_q != nullptr;
  const int64_t from = p.q.offset(packed ? 0 : at.batch, packed ? row : at.index, head);
  const int position = first_position(args, at.batch) + (args.by_row ? at.index : 0);
  if constexpr (sizeof(To) == 1) {
    const RowCopy<T> copy{args, p.q_descale.at(at.batch, head / p.group)};
    return copy.rotated(AnyQuery<T>(p.q.data, from, p.e4m3_queries), to, position);
  }
  RowCopy<T>{args}.rotated(reinterpret_cast<const T*>(p.q.data) + from, to, position);
}

__device__ __forceinline__ void write_length(const AppendArgs& args, int b) {
  const int rows = args.cu_seqlens_k_new != nullptr ? args.cu_seqlens_k_new[b + 1] - args.cu_seqlens_k_new[b]
                                                    : args.new_rows;
  const int used = used_before(args.p, b), room = args.p.seqlen_k - used;
  args.lengths[b] = used + (rows < 0 ? 0 : rows < room ? rows : room);
}

/// Everything, to a cache of elements of type To.
template <class T, class To>
__device__ __forceinline__ void append_all(const AppendArgs& args) {
  ptx::wait_for_launches_before();
  ptx::let_next_launch_begin();  // which waits for this one before it reads a key
  const tile::AttentionParams& p = args.p;
  const int threads = static_cast<int>(gridDim.x) * kAppendThreads,
            thread = static_cast<int>(blockIdx.x) * kAppendThreads + static_cast<int>(threadIdx.x);
  for (int b = thread; blockIdx.y == 0 && b < p.batch; b += threads) write_length(args, b);
  for (int head = static_cast<int>(blockIdx.y); head < heads_to_append(args);
       head += static_cast<int>(gridDim.y)) {
    const bool of_keys = head < p.heads_kv;
    const int rows = of_keys ? args.total_new : static_cast<int>(p.total_q);
    for (uint32_t row = static_cast<uint32_t>(thread) / 32; row < static_cast<uint32_t>(rows);
         row += static_cast<uint32_t>(threads) / 32) {
      if (of_keys) {
        append_row<T, To>(args, static_cast<int>(row), head);
      } else {
        rotate_query<T, To>(args, static_cast<int>(row), head - p.heads_kv);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kAppendThreads) append(const __grid_constant__ AppendArgs args) {
  append_all<T, T>(args);
}
/// To keys and values of 8 bits.
template <class T>
__global__ void __launch_bounds__(kAppendThreads) append_e4m3(const __grid_constant__ AppendArgs args) {
  append_all<T, E4M3>(args);
}

}  // namespace fovea::cuda
