// Before the main kernel of the backward: statistics of the rows, and zeros in the sums of dq where all add to them, in their semaphore,
// the counter of tiles and the flag of gradients that are not finite.
//
//   lse_log2 = lse log2(e)              +inf for rows that take no part: their weights are exp2(-inf) = 0
//                                       NaN for lse = +inf
//   delta    = rowsum(dO o O) - dlse    0 for rows that take no part
//
// for all rows up to used_q rounded up to kRowPadding, so that main kernels need not look at used_q.
//
// Launch
//   grid    (any number, heads_q, batch), best bwd_preprocess_grid
//   block   kPreprocessThreads
//   shared  none
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/first_stores.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/warp/elements.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

inline constexpr int kPreprocessThreads = 256;
/// Eight lanes read a row: 128 bytes at a time, a whole line of L2, at the smallest usual head size.
inline constexpr int kPreprocessLanes = 8;
/// Rows of a thread at a time, whose loads are on their way together. More registers would leave fewer warps an SM.
inline constexpr int kPreprocessRowsOfThread = 2;
inline constexpr int kPreprocessRows = kPreprocessThreads / kPreprocessLanes * kPreprocessRowsOfThread;

/// Some blocks of rows for a CTA where there are many and it writes no zeros: its threads find their way once, which takes as long as some
/// of their loads. (H200, 16,384 tokens of 32 heads of 64: 41 us for 54. Beside zeros 74 for 71.)
template <class Grid>
constexpr Grid bwd_preprocess_grid(const BackwardArgs& args) {
  constexpr int64_t kMostOfCta = 4, kCtasOfSm = 8;  // twice what an SM holds
  const int64_t blocks = (args.p.seqlen_q + kPreprocessRows - 1) / kPreprocessRows;
  const int64_t all = blocks * args.p.heads_q * args.p.batch;
  const int64_t share = args.slots > 0 && first_stores(args) ? all / (kCtasOfSm * args.slots) : 1;
  const int64_t of_cta = share < 1 ? 1 : share > kMostOfCta ? kMostOfCta : share;
  const int64_t ctas = (blocks + of_cta - 1) / of_cta;
  return {ctas > 0 ? ctas : 1, args.p.heads_q, args.p.batch};
}

/// This lane's share of the dot product of two vectors of 16 bytes.
template <class T>
__device__ __forceinline__ float dot_of_words(const uint4& x, const uint4& y) {
  const T* const xs = reinterpret_cast<const T*>(&x);
  const T* const ys = reinterpret_cast<const T*>(&y);
  float sum = 0;
#pragma unroll
  for (int e = 0; e < static_cast<int>(16 / sizeof(T)); ++e) sum += to_float(xs[e]) * to_float(ys[e]);
  return sum;
}

/// The rows of a head.
template <class T>
struct Preprocess {
  static constexpr int kBytes = static_cast<int>(sizeof(T)), kRows = kPreprocessRowsOfThread,
                       kApart = kPreprocessThreads / kPreprocessLanes;
  const BackwardArgs& args;
  const tile::SequenceSpan& span;
  const int padded;     ///< rows that take part, and those to be written behind them
  const bool wide;      ///< o and dO can be read 16 bytes at a time
  const char *o, *d_o;  ///< of the first row
  const float *lse, *dlse;
  float *lse_log2, *delta;
  float* sums;     ///< of dq
  int* semaphore;  ///< null: there is no order

  __device__ __forceinline__ Preprocess(const BackwardArgs& a, const tile::SequenceSpan& of, int batch,
                                        int head)
      : args(a),
        span(of),
        padded((of.used_q + BackwardArgs::kRowPadding - 1) / BackwardArgs::kRowPadding *
               BackwardArgs::kRowPadding),
        wide((a.p.aligned16 & tile::kAlignedO) != 0 && (a.p.aligned16 & tile::kAlignedDO) != 0 &&
             a.p.o_is_f32() == (sizeof(T) == 4)),
        o(a.p.o.data + a.p.o.offset(batch, of.row_q, head) * (a.p.o_is_f32() ? 4 : kBytes)),
        d_o(a.p.d_o.data + a.p.d_o.offset(batch, of.row_q, head) * kBytes),
        lse(a.p.lse.data + a.p.lse.offset(batch, head, of.row_q)),
        dlse(a.p.dlse.data != nullptr ? a.p.dlse.data + a.p.dlse.offset(batch, head, of.row_q) : nullptr) {
    const int64_t rows_before = (int64_t{batch} * a.p.heads_q + head) * a.rows;
    lse_log2 = a.lse_log2 + rows_before;
    delta = a.delta + rows_before;
    sums = a.dq_sum + rows_before * a.dq_columns;
    semaphore = a.dq_semaphore != nullptr ? a.dq_semaphore + a.semaphore_at(batch, head, 0, 0) : nullptr;
  }

  /// This lane's shares of the dot products of o and dO of its rows.
  __device__ __forceinline__ void dot_vectors(const int (&rows)[kRows], int lane,
                                              float (&dots)[kRows]) const {
    const uint4 *x[kRows], *y[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = reinterpret_cast<const uint4*>(o + rows[i] * args.p.o.row * kBytes);
      y[i] = reinterpret_cast<const uint4*>(d_o + rows[i] * args.p.d_o.row * kBytes);
    }
#pragma unroll 2
    for (int c = lane; c < args.p.head_dim_v * kBytes / 16; c += kPreprocessLanes) {
      uint4 xs[kRows], ys[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) xs[i] = __ldg(x[i] + c), ys[i] = __ldg(y[i] + c);
#pragma unroll
      for (int i = 0; i < kRows; ++i) dots[i] += dot_of_words<T>(xs[i], ys[i]);
    }
  }
  /// The same, element by element.
  __device__ __forceinline__ void dot_elements(const int (&rows)[kRows], int lane,
                                               float (&dots)[kRows]) const {
#pragma unroll 1
    for (int c = lane; c < args.p.head_dim_v; c += kPreprocessLanes) {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        dots[i] += load_either<T>(o, rows[i] * args.p.o.row + c, args.p.o_is_f32()) *
                   to_float(__ldg(reinterpret_cast<const T*>(d_o) + rows[i] * args.p.d_o.row + c));
    }
  }

  /// This thread's share of the zeros of the rows from `first` on: their sums of dq, unless the first to add stores, and whose turn it is at
  /// their tiles. A multiple of 16 rows is contiguous in every layout of dq_sum.
  __device__ __forceinline__ void clear(int first, int thread) const {
    if (!first_stores(args)) {
      auto* const to = reinterpret_cast<float4*>(sums + int64_t{first} * args.dq_columns);
      const int pieces = min(kPreprocessRows, padded - first) * args.dq_columns / 4;
      for (int index = thread; index < pieces; index += kPreprocessThreads)
        to[index] = make_float4(0, 0, 0, 0);
    }
    static_assert(kPreprocessRows % BackwardArgs::kSemaphoreRows == 0);
    if (semaphore == nullptr) return;
    const int words = args.semaphore_columns(), before = first / BackwardArgs::kSemaphoreRows * words;
    if (thread < kPreprocessRows / BackwardArgs::kSemaphoreRows * words) semaphore[before + thread] = 0;
  }

  /// kPreprocessRows rows from `first` on. All loads of a thread are on their way together, of rows that do not exist those of the last that
  /// does: a CTA lives as long as its loads take, so one behind the other halve the rate.
  __device__ __forceinline__ void block(int first) const {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kPreprocessLanes;
    int rows[kRows];
    float row_lse[kRows], row_dlse[kRows], dots[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = min(first + i * kApart + thread / kPreprocessLanes, span.used_q - 1);
      row_lse[i] = __ldg(lse + rows[i] * args.p.lse.row);
      row_dlse[i] = dlse != nullptr ? __ldg(dlse + rows[i] * args.p.dlse.row) : 0.0f;
    }
    if (wide) {
      dot_vectors(rows, lane, dots);
    } else {
      dot_elements(rows, lane, dots);
    }
    clear(first, thread);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int distance = kPreprocessLanes / 2; distance > 0; distance /= 2)
        dots[i] += __shfl_xor_sync(~0u, dots[i], distance);
      const int row = first + i * kApart + thread / kPreprocessLanes;
      if (lane != 0 || row >= padded) continue;
      const bool takes_part = row < span.used_q && row_lse[i] != -INFINITY;
      lse_log2[row] = !takes_part ? INFINITY : (row_lse[i] == INFINITY ? NAN : row_lse[i] * tile::kLog2e);
      delta[row] = takes_part ? dots[i] - row_dlse[i] : 0.0f;
    }
  }
};

template <class T>
__global__ void __launch_bounds__(kPreprocessThreads)
    bwd_preprocess(const __grid_constant__ BackwardArgs args) {
  ptx::wait_for_launches_before();
  ptx::let_next_launch_begin();  // not before the wait: the main kernel loads q, k, v and d_o without one
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && head == 0 && batch == 0) {  // no CTA of the main kernel has begun
    if (args.dq_semaphore != nullptr && thread < args.semaphore_columns()) args.dq_semaphore[thread] = 0;
    if (args.tile_counter != nullptr && thread == 0) *args.tile_counter = 0;
    if (args.not_finite != nullptr && thread == 0) *args.not_finite = 0;
  }
  const tile::SequenceSpan span = tile::sequence_span(args.p, batch);
  const Preprocess<T> rows(args, span, batch, head);
  for (int first = static_cast<int>(blockIdx.x) * kPreprocessRows; first < rows.padded;
       first += static_cast<int>(gridDim.x) * kPreprocessRows)
    rows.block(first);
}

}  // namespace fovea::cuda
