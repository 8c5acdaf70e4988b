// After the main kernel of the backward on mma.sync: dq from its float32 sums, which lie as mma fragments
// (dq_fragment). Rows of dq beyond used_q, and of dk and dv beyond used_k, become zeros.
//
// Launch
//   grid    (any number but 0, heads_q, batch), best ceil(seqlen_q / kPostprocessRows)
//   block   kPostprocessThreads
//   shared  none
// dq_columns is a multiple of 32.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/first_stores.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/warp/gradient.cuh"
#include "cuda/warp/mma_tile.cuh"

namespace fovea::cuda {

inline constexpr int kPostprocessThreads = 256;
/// Four rows of fragments, which the warps share in pieces of 16 rows x 32 columns: one or more for each at every head size.
inline constexpr int kPostprocessRows = 64;

/// Writes zeros to this CTA's share of the rows of dk or dv from used_k on.
template <class T>
__device__ __forceinline__ void clear_unused_keys(const tile::AttentionParams& p, const tile::RowsView& view,
                                                  const tile::SequenceSpan& span, int batch, int head,
                                                  int size) {
  for (int row = span.used_k + static_cast<int>(blockIdx.x); row < span.length_k;
       row += static_cast<int>(gridDim.x)) {
    const int64_t offset = view.offset(batch, span.row_k + row, head);
    for (int c = static_cast<int>(threadIdx.x); c < size; c += kPostprocessThreads)
      store_gradient<T>(view.data, offset + c, p.dk_is_f32, 0.0f);
  }
}

/// Transposes 4 x 4 words among the four lanes that hold a row: lane t gets fragment t, eight columns.
__device__ __forceinline__ void transpose_words(uint32_t (&words)[4], int t) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (t & distance) != 0;
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      if (f & distance) continue;
      const uint32_t give = upper ? words[f] : words[f | distance];
      const uint32_t got = __shfl_xor_sync(~0u, give, distance);
      if (upper) {
        words[f] = got;
      } else {
        words[f | distance] = got;
      }
    }
  }
}

/// Writes eight columns of a row of dq, of which those below head_dim exist.
__device__ __forceinline__ void write_dq(const tile::AttentionParams& p, unsigned short* to,
                                         const uint32_t (&words)[4], int column, bool aligned) {
  if (aligned) {
    if (column < p.head_dim)
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (column + e < p.head_dim) to[e] = static_cast<unsigned short>(words[e / 2] >> (16 * (e & 1)));
    }
  }
}

/// Writes the columns of a lane in a fragment, of a row of dq of float32.
__device__ __forceinline__ void write_dq_f32(const tile::AttentionParams& p, int64_t offset, int column,
                                             float x, float y) {
  float* const to = reinterpret_cast<float*>(p.dq.data) + offset;
  if (column < p.head_dim) to[column] = x;
  if (column + 1 < p.head_dim) to[column + 1] = y;
}

/// Whether 16 rows of a head have sums: unless the first to add stores, all have, zeros at least. Semaphores are there for rows that take part.
__device__ __forceinline__ bool have_sums(const BackwardArgs& args, const tile::SequenceSpan& span, int batch,
                                          int head, int row16) {
  if (!first_stores(args)) return true;
  if (row16 * 16 >= span.used_q) return false;
  const int first = row16 * 16 / args.turn_rows * args.turn_rows;
  return __ldg(args.dq_semaphore + args.semaphore_at(batch, head, first, 0)) != 0;
}

/// dq of 16 rows x 32 columns in float32 from its sums; zeros in rows from used_q on.
__device__ __forceinline__ void postprocess_piece_f32(const BackwardArgs& args,
                                                      const tile::SequenceSpan& span, const float* sums,
                                                      int batch, int head, int row16, int column32,
                                                      int lane) {
  const tile::AttentionParams& p = args.p;
  const int row = row16 * 16 + (lane >> 2);
  const bool any = have_sums(args, span, batch, head, row16);
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    float4 sum = make_float4(0, 0, 0, 0);
    if (row16 * 16 < span.used_q) {
      const int64_t at =
          (static_cast<int64_t>(row16) * (args.dq_columns / 8) + column32 * 4 + f) * 128 + lane * 4;
      sum = __ldcs(reinterpret_cast<const float4*>(sums + at));
    }
    const int column = column32 * 32 + f * 8 + (lane & 3) * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = row + 8 * h;
      if (at >= span.length_q) continue;
      const bool used = at < span.used_q && any;
      write_dq_f32(p, p.dq.offset(batch, span.row_q + at, head), column,
                   used ? (h ? sum.z : sum.x) * p.scale : 0.0f, used ? (h ? sum.w : sum.y) * p.scale : 0.0f);
    }
  }
}

/// dq of 16 rows x 32 columns from its sums; zeros in rows from used_q on.
template <class T>
__device__ __forceinline__ void postprocess_piece(const BackwardArgs& args, const tile::SequenceSpan& span,
                                                  const float* sums, int batch, int head, int row16,
                                                  int column32, int lane) {
  const tile::AttentionParams& p = args.p;
  const int g = lane >> 2, t = lane & 3;
  uint32_t words[2][4] = {};  // rows g and g + 8; fragment f
  const bool any = have_sums(args, span, batch, head, row16);
  if (row16 * 16 < span.used_q) {
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const int64_t at =
          (static_cast<int64_t>(row16) * (args.dq_columns / 8) + column32 * 4 + f) * 128 + lane * 4;
      const float4 sum = __ldcs(reinterpret_cast<const float4*>(sums + at));
      words[0][f] = pack<T>(sum.x * p.scale, sum.y * p.scale);
      words[1][f] = pack<T>(sum.z * p.scale, sum.w * p.scale);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    transpose_words(words[h], t);
    const int row = row16 * 16 + h * 8 + g;
    if (row >= span.length_q) continue;
    if (row >= span.used_q || !any) words[h][0] = words[h][1] = words[h][2] = words[h][3] = 0;
    const int column = column32 * 32 + t * 8;
    write_dq(
        p, reinterpret_cast<unsigned short*>(p.dq.data) + p.dq.offset(batch, span.row_q + row, head) + column,
        words[h], column, (p.aligned16 & tile::kAlignedDQ) != 0);
  }
}

template <class T>
__global__ void __launch_bounds__(kPostprocessThreads)
    bwd_postprocess(const __grid_constant__ BackwardArgs args) {
  ptx::wait_for_launches_before();
  const tile::AttentionParams& p = args.p;
  const int head = static_cast<int>(blockIdx.y), batch = static_cast<int>(blockIdx.z);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
  const float* const sums =
      args.dq_sum + (static_cast<int64_t>(batch) * p.heads_q + head) * args.rows * args.dq_columns;

  if (head < p.heads_kv) {
    clear_unused_keys<T>(p, p.dk, span, batch, head, p.head_dim);
    clear_unused_keys<T>(p, p.dv, span, batch, head, p.head_dim_v);
  }
  const int across = args.dq_columns / 32;
  for (int first = static_cast<int>(blockIdx.x) * kPostprocessRows; first < span.length_q;
       first += static_cast<int>(gridDim.x) * kPostprocessRows) {
#pragma unroll 2
    for (int piece = warp; piece < kPostprocessRows / 16 * across; piece += kPostprocessThreads / 32) {
      const int row16 = first / 16 + piece / across;
      if (row16 * 16 >= span.length_q) continue;
      if (p.dq_is_f32) {
        postprocess_piece_f32(args, span, sums, batch, head, row16, piece % across, lane);
      } else {
        postprocess_piece<T>(args, span, sums, batch, head, row16, piece % across, lane);
      }
    }
  }
}

}  // namespace fovea::cuda
