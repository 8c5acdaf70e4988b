// The gradients in one loop: a block owns 32 keys and goes over all queries. dK and dV stay in registers; the
// part of dQ is added to memory atomically, because the blocks of all keys add to the same rows.
#include "ladder/harness/launch.cuh"

namespace ladder::backward_atomics {

using Problem = AttentionGradient<__nv_bfloat16>;
constexpr int kTile = 32, kD = 64;  ///< rows of a tile; its columns, the largest head size
constexpr int kThreads = 256;
constexpr int kOwn =
    kTile * kD / kThreads;  ///< elements of a gradient tile that a thread holds: one column of 8 rows

using Tile = float[kTile][kD + 1];
using Square = float[kTile][kTile + 1];

/// Rows [first, first + kTile) of a matrix of n rows of d values; 0 behind the end.
__device__ __forceinline__ void load_tile(Tile& tile, const __nv_bfloat16* from, int first, int n, int d) {
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kD; at += kThreads) {
    const int r = at / kD, c = at % kD;
    const bool exists = first + r < n && c < d;
    tile[r][c] = exists ? static_cast<float>(from[static_cast<int64_t>(first + r) * d + c]) : 0.0f;
  }
}

/// P and dS of a tile of queries against a tile of keys, recomputed from L, the only result kept from the
/// forward besides O.
__device__ __forceinline__ void recompute(Square& weights, Square& d_scores, const Tile& q, const Tile& k,
                                          const Tile& v, const Tile& d_o, const Problem& p, const float* dots,
                                          int64_t first, int i0, int j0) {
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kTile; at += kThreads) {
    const int i = at / kTile, j = at % kTile;
    float s = 0, dp = 0;
    for (int c = 0; c < kD; ++c) {
      s += q[i][c] * k[j][c];
      dp += d_o[i][c] * v[j][c];
    }
    const bool exists = i0 + i < p.seqlen && j0 + j < p.seqlen;
    weights[i][j] = exists ? expf(s * p.scale - p.lse[first + i0 + i]) : 0.0f;
    d_scores[i][j] = exists ? weights[i][j] * (dp - dots[first + i0 + i]) : 0.0f;
  }
}

/// D_i = dO_i . O_i, a thread a row.
__global__ void __launch_bounds__(kThreads) row_dots(Problem p, float* dots) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= static_cast<int64_t>(p.batch) * p.seqlen) return;
  float sum = 0;
  for (int c = 0; c < p.head_dim; ++c)
    sum += static_cast<float>(p.d_o[row * p.head_dim + c]) * static_cast<float>(p.o[row * p.head_dim + c]);
  dots[row] = sum;
}

/// Shared memory of all kernels below: 45 KiB with the squares.
struct Shared {
  Tile q, k, v, d_o;
  Square weights, d_scores;
};

__global__ void __launch_bounds__(kThreads) gradients(Problem p, const float* dots) {
  Shared& s = *shared_memory<Shared>();
  const int n = p.seqlen, d = p.head_dim, j0 = static_cast<int>(blockIdx.x) * kTile;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * n;
  const int column = static_cast<int>(threadIdx.x) % kD, row = static_cast<int>(threadIdx.x) / kD * kOwn;
  float dk[kOwn] = {}, dv[kOwn] = {};
  load_tile(s.k, p.k + first * d, j0, n, d);
  load_tile(s.v, p.v + first * d, j0, n, d);
  for (int i0 = 0; i0 < n; i0 += kTile) {
    __syncthreads();  // all have read the queries before: they may be overwritten
    load_tile(s.q, p.q + first * d, i0, n, d);
    load_tile(s.d_o, p.d_o + first * d, i0, n, d);
    __syncthreads();  // the tiles are complete and may be read
    recompute(s.weights, s.d_scores, s.q, s.k, s.v, s.d_o, p, dots, first, i0, j0);
    __syncthreads();  // P and dS are complete and may be read
    float dq[kOwn] = {};
    for (int l = 0; l < kTile; ++l) {
      const float value_q = s.q[l][column], value_do = s.d_o[l][column], value_k = s.k[l][column];
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        dk[r] += s.d_scores[l][row + r] * value_q;
        dv[r] += s.weights[l][row + r] * value_do;
        dq[r] += s.d_scores[row + r][l] * value_k;
      }
    }
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      if (i0 + row + r < n && column < d)
        atomicAdd(p.dq + (first + i0 + row + r) * d + column, dq[r] * p.scale);
    }
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    if (j0 + row + r >= n || column >= d) continue;
    p.dk[(first + j0 + row + r) * d + column] = dk[r] * p.scale;
    p.dv[(first + j0 + row + r) * d + column] = dv[r];
  }
}

/// p.workspace: D, batch x seqlen.
void run(const Problem& p) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.seqlen;
  const Grid grid = {blocks_of(p.seqlen, kTile), static_cast<unsigned>(p.batch)};
  launch(row_dots, {blocks_of(rows, kThreads)}, kThreads, 0, p, p.workspace);
  fill_zero(p.dq, static_cast<size_t>(rows * p.head_dim));
  launch(gradients, grid, kThreads, sizeof(Shared), p, p.workspace);
}

}  // namespace ladder::backward_atomics
