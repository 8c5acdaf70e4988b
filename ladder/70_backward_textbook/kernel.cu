// The gradients as in the textbook, with the matrices P and dS in memory:
//   D_i = dO_i . O_i    P = exp(scale Q K^T - L)    dS = P (dO V^T - D)
//   dQ = scale dS K     dK = scale dS^T Q           dV = P^T dO
#include "ladder/harness/launch.cuh"

namespace ladder::backward_textbook {

using Problem = AttentionGradient<__nv_bfloat16>;
constexpr int kTile = 16;  ///< a block computes kTile x kTile elements of a product
constexpr int kThreads = kTile * kTile;

/// This thread's sum_l a(row, l) b(l, column) over tiles in shared memory; `a` and `b` give a value or 0.
template <class A, class B>
__device__ __forceinline__ float multiply(int depth, const A& a, const B& b) {
  __shared__ float tile_a[kTile][kTile + 1], tile_b[kTile][kTile + 1];
  const int row = static_cast<int>(threadIdx.x) / kTile, column = static_cast<int>(threadIdx.x) % kTile;
  float sum = 0;
  for (int l0 = 0; l0 < depth; l0 += kTile) {
    tile_a[row][column] = a(row, l0 + column);
    tile_b[row][column] = b(l0 + row, column);
    __syncthreads();  // the tiles are complete and may be read
    for (int l = 0; l < kTile; ++l) sum += tile_a[row][l] * tile_b[l][column];
    __syncthreads();  // all have read the tiles: they may be overwritten
  }
  return sum;
}

/// A matrix of the problem: element (row, column) of a batch entry, or 0.
template <class T>
struct Matrix {
  const T* data;
  int rows, columns;
  __device__ __forceinline__ float operator()(int row, int column) const {
    return row < rows && column < columns
               ? static_cast<float>(data[static_cast<int64_t>(row) * columns + column])
               : 0.0f;
  }
};

/// D, a thread a row.
__global__ void __launch_bounds__(kThreads) row_dots(Problem p, float* dots) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= static_cast<int64_t>(p.batch) * p.seqlen) return;
  float sum = 0;
  for (int c = 0; c < p.head_dim; ++c)
    sum += static_cast<float>(p.d_o[row * p.head_dim + c]) * static_cast<float>(p.o[row * p.head_dim + c]);
  dots[row] = sum;
}

/// P and dS, a block for each 16 x 16 of them.
__global__ void __launch_bounds__(kThreads)
    scores(Problem p, const float* dots, float* weights, float* d_scores) {
  const int n = p.seqlen, d = p.head_dim;
  const int i0 = static_cast<int>(blockIdx.y) * kTile, j0 = static_cast<int>(blockIdx.x) * kTile;
  const int64_t first = static_cast<int64_t>(blockIdx.z) * n;
  const Matrix<__nv_bfloat16> q{p.q + first * d, n, d}, k{p.k + first * d, n, d}, v{p.v + first * d, n, d},
      d_o{p.d_o + first * d, n, d};
  const float s = multiply(
      d, [&](int i, int c) { return q(i0 + i, c); }, [&](int c, int j) { return k(j0 + j, c); });
  const float dp = multiply(
      d, [&](int i, int c) { return d_o(i0 + i, c); }, [&](int c, int j) { return v(j0 + j, c); });
  const int i = i0 + static_cast<int>(threadIdx.x) / kTile, j = j0 + static_cast<int>(threadIdx.x) % kTile;
  if (i >= n || j >= n) return;
  const float weight = expf(s * p.scale - p.lse[first + i]);
  weights[(first + i) * n + j] = weight;
  d_scores[(first + i) * n + j] = weight * (dp - dots[first + i]);
}

/// dQ, dK and dV: this block's 16 x 16 of each.
__global__ void __launch_bounds__(kThreads)
    gradients(Problem p, const float* weights, const float* d_scores) {
  const int n = p.seqlen, d = p.head_dim;
  const int i0 = static_cast<int>(blockIdx.y) * kTile, c0 = static_cast<int>(blockIdx.x) * kTile;
  const int64_t first = static_cast<int64_t>(blockIdx.z) * n;
  const Matrix<float> ps{weights + first * n, n, n}, ds{d_scores + first * n, n, n};
  const Matrix<__nv_bfloat16> q{p.q + first * d, n, d}, k{p.k + first * d, n, d},
      d_o{p.d_o + first * d, n, d};
  const float dq = multiply(
      n, [&](int i, int j) { return ds(i0 + i, j); }, [&](int j, int c) { return k(j, c0 + c); });
  const float dk = multiply(
      n, [&](int j, int i) { return ds(i, i0 + j); }, [&](int i, int c) { return q(i, c0 + c); });
  const float dv = multiply(
      n, [&](int j, int i) { return ps(i, i0 + j); }, [&](int i, int c) { return d_o(i, c0 + c); });
  const int row = i0 + static_cast<int>(threadIdx.x) / kTile, c = c0 + static_cast<int>(threadIdx.x) % kTile;
  if (row >= n || c >= d) return;
  p.dq[(first + row) * d + c] = dq * p.scale;
  p.dk[(first + row) * d + c] = dk * p.scale;
  p.dv[(first + row) * d + c] = dv;
}

/// p.workspace: D (batch x seqlen), P and dS (batch x seqlen x seqlen each).
void run(const Problem& p) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.seqlen;
  float *dots = p.workspace, *weights = dots + rows, *d_scores = weights + rows * p.seqlen;
  const unsigned tiles = blocks_of(p.seqlen, kTile), batch = static_cast<unsigned>(p.batch);
  launch(row_dots, {blocks_of(rows, kThreads)}, kThreads, 0, p, dots);
  launch(scores, {tiles, tiles, batch}, kThreads, 0, p, dots, weights, d_scores);
  launch(gradients, {blocks_of(p.head_dim, kTile), tiles, batch}, kThreads, 0, p, weights, d_scores);
}

}  // namespace ladder::backward_textbook
