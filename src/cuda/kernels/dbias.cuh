// The gradient of the bias, for every backend: an element of dbias is the sum of dS over all pairs to which that
// element of the bias was added.
//
//   dS = P * (dP - delta)      P = exp(score(Q K^T) - lse)      dP = keep * dO V^T
//
// A CTA owns 64 x 64 elements of dbias (fewer where queries or keys broadcast). It computes dS of every tile of
// pairs that contributes to them, on CUDA cores in float32, and adds in registers in a fixed order (sequences,
// heads, queries, keys), so every run gives the same bits. Elements without a pair become 0.
//
// Grid     dbias_ctas(args). A bias with few elements gives few CTAs, each with much to sum.
// Block    kDBiasThreads threads. Shared: static, 28 KB.
// Reads    p.lse and, from bwd_preprocess, args.delta.
#pragma once

#include "cuda/kernels/bwd_simt.cuh"
#include "cuda/kernels/dbias_shape.hpp"

namespace fovea::cuda {

inline constexpr int kDBiasThreads = kBwdSimtThreads;

/// Queries and keys of a tile.
inline constexpr int kDBiasTile = 64;

constexpr int64_t dbias_ctas(const BackwardArgs& args) {
  return DBiasShape(args.p, kDBiasTile).tiles();
}

template <class T>
struct DBias {
  using Tile = SimtTile<kDBiasThreads, kDBiasTile>;
  using Shared = typename Tile::Shared;
  using Pairs = typename Tile::Pairs;
  static constexpr int kRows = Tile::kRows;

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  Shared& s;

  __device__ __forceinline__ void run() {
    const DBiasShape shape(p, kDBiasTile);
    find_tile(shape);
    Pairs sum;
    Tile::clear(sum);
    add_all(sum);
    __syncthreads();  // X, Y, W are no longer read
    Tile::write_pairs(s, sum);
    __syncthreads();  // the sums are complete
    reduce_broadcast();
    write(shape);
  }

  // Dimensions over which the bias broadcasts.
  __device__ __forceinline__ bool over_batch() const { return p.dbias.batch == 0; }
  __device__ __forceinline__ bool over_heads() const { return p.dbias.head == 0; }
  __device__ __forceinline__ bool over_q() const { return p.dbias.row == 0; }
  __device__ __forceinline__ bool over_k() const { return p.dbias.column == 0; }

  /// Finds the CTA's tile of dbias; all threads know it afterwards.
  __device__ __forceinline__ void find_tile(const DBiasShape& shape) {
    int64_t index = blockIdx.x;
    if (threadIdx.x == 0) {
      s.tile_k = static_cast<int>(index % shape.tiles_k);
      index /= shape.tiles_k;
      s.tile_q = static_cast<int>(index % shape.tiles_q);
      index /= shape.tiles_q;
      s.head = static_cast<int>(index % shape.heads);
      s.out_batch = static_cast<int>(index / shape.heads);
    }
    __syncthreads();  // the tile is known
  }

  /// sum += dS of every tile of pairs that reaches the CTA's tile, in a fixed order.
  __device__ __forceinline__ void add_all(Pairs& sum) {
    const int &tile_k = s.tile_k, &tile_q = s.tile_q, &head = s.head, &batch = s.out_batch;
    SimtGradient<T, Tile> gradient(args, s, false);
#pragma unroll 1
    for (int b = over_batch() ? 0 : batch; b < (over_batch() ? p.batch : batch + 1); ++b) {
#pragma unroll 1
      for (int h = over_heads() ? 0 : head; h < (over_heads() ? p.heads_q : head + 1); ++h) {
        __syncthreads();  // the last sequence and head are no longer in work
        if (threadIdx.x == 0) {
          s.batch = b;
          s.query_head = h;
          s.span = tile::sequence_span(p, b);
        }
        __syncthreads();  // they are known
        const int end_q = over_q() ? s.span.used_q : min(tile_q * kRows + kRows, s.span.used_q);
#pragma unroll 1
        for (int query0 = over_q() ? 0 : tile_q * kRows; query0 < end_q; query0 += kRows) {
          // Keys that any of the queries sees.
          const int begin = tile::keys_of(p, s.span, query0).begin / kRows * kRows;
          const int end = tile::keys_of(p, s.span, min(query0 + kRows, s.span.used_q) - 1).end;
          const int key_end = over_k() ? end : min(tile_k * kRows + kRows, end);
#pragma unroll 1
          for (int key0 = over_k() ? begin : max(tile_k * kRows, begin); key0 < key_end; key0 += kRows) {
            add(gradient, query0, key0, sum);
          }
        }
      }
    }
  }

  /// Sums the 64 x 64 elements of W over keys and queries where the bias broadcasts over them.
  __device__ __forceinline__ void reduce_broadcast() {
    if (over_k()) {
      if (threadIdx.x < kRows) add_up(s.w + threadIdx.x * Tile::kStrideW, 1);
      __syncthreads();  // column 0 has the sums over keys
    }
    if (over_q()) {
      if (threadIdx.x < (over_k() ? 1 : kRows)) add_up(s.w + threadIdx.x, Tile::kStrideW);
      __syncthreads();  // row 0 has the sums over queries
    }
  }

  /// Writes the elements of W that dbias has.
  __device__ __forceinline__ void write(const DBiasShape& shape) const {
    const int &tile_k = s.tile_k, &tile_q = s.tile_q;
    const int rows = over_q() ? 1 : min(shape.seqlen_q - tile_q * kRows, kRows);
    const int columns = over_k() ? 1 : min(shape.seqlen_k - tile_k * kRows, kRows);
    const int64_t to = p.dbias.offset(s.out_batch, s.head, tile_q * kRows, tile_k * kRows);
    for (int at = static_cast<int>(threadIdx.x); at < kRows * kRows; at += kDBiasThreads) {
      const int row = at / kRows, column = at % kRows;
      if (row >= rows || column >= columns) continue;
      const int64_t offset = to + row * p.dbias.row + column * p.dbias.column;
      const float value = s.w[row * Tile::kStrideW + column];
      if (p.dbias_is_f32()) {
        reinterpret_cast<float*>(p.dbias.data)[offset] = value;
      } else {
        reinterpret_cast<T*>(p.dbias.data)[offset] = T(value);
      }
    }
  }

  /// sum += dS of one tile of pairs.
  __device__ __forceinline__ void add(SimtGradient<T, Tile>& gradient, int query0, int key0, Pairs& sum) {
    Pairs weights, d_weights;
    gradient.product(gradient.q(), query0, gradient.k(), key0, weights,
                     [&] { gradient.set_queries(query0); });
    gradient.weigh(query0, key0, SimtSlope::kOfBias, weights);
    gradient.product(gradient.d_o(), query0, gradient.v(), key0, d_weights, [] {});
    gradient.differentiate(d_weights, weights);
#pragma unroll
    for (int r = 0; r < Tile::kRowsOf; ++r) {
#pragma unroll
      for (int c = 0; c < Tile::kColsOf; ++c) sum[r][c] += weights[r][c];
    }
  }

  /// x[0] = the sum of 64 elements.
  static __device__ __forceinline__ void add_up(float* x, int stride) {
    float sum = 0;
    for (int i = 0; i < kRows; ++i) sum += x[i * stride];
    x[0] = sum;
  }
};

/// T: float, __half or __nv_bfloat16.
template <class T>
__global__ void __launch_bounds__(kDBiasThreads, 3) dbias(const __grid_constant__ BackwardArgs args) {
  __shared__ typename DBias<T>::Shared shared;
  DBias<T>{args, args.p, shared}.run();
}

}  // namespace fovea::cuda
