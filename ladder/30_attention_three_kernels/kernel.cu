// Attention as three kernels, with the matrix of scores in memory between them: S = scale Q K^T, P =
// softmax(S), O = P V. Grids have a plane for each entry of the batch.
#include "ladder/harness/launch.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::attention_three_kernels {

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

__global__ void __launch_bounds__(kThreads) scores(Attention<float> p) {
  const int n = p.seqlen, d = p.head_dim;
  const int row = static_cast<int>(threadIdx.x) / kTile, column = static_cast<int>(threadIdx.x) % kTile;
  const int i0 = static_cast<int>(blockIdx.y) * kTile, j0 = static_cast<int>(blockIdx.x) * kTile;
  const int64_t first = static_cast<int64_t>(blockIdx.z) * n;
  const float sum = multiply(
      d, [&](int i, int c) { return i0 + i < n && c < d ? p.q[(first + i0 + i) * d + c] : 0.0f; },
      [&](int c, int j) { return j0 + j < n && c < d ? p.k[(first + j0 + j) * d + c] : 0.0f; });
  const int i = i0 + row, j = j0 + column;
  if (i < n && j < n) p.workspace[(first + i) * n + j] = sum * p.scale;
}

/// A warp for each row.
__global__ void __launch_bounds__(32) softmax(Attention<float> p) {
  const int n = p.seqlen, lane = static_cast<int>(threadIdx.x);
  float* row = p.workspace + static_cast<int64_t>(blockIdx.x) * n;
  float largest = -INFINITY;
  for (int j = lane; j < n; j += 32) largest = fmaxf(largest, row[j]);
  largest = warp_max(largest);
  float sum = 0;
  for (int j = lane; j < n; j += 32) sum += row[j] = expf(row[j] - largest);
  sum = warp_sum(sum);
  for (int j = lane; j < n; j += 32) row[j] /= sum;
  if (lane == 0) p.lse[blockIdx.x] = largest + logf(sum);
}

__global__ void __launch_bounds__(kThreads) outputs(Attention<float> p) {
  const int n = p.seqlen, d = p.head_dim;
  const int row = static_cast<int>(threadIdx.x) / kTile, column = static_cast<int>(threadIdx.x) % kTile;
  const int i0 = static_cast<int>(blockIdx.y) * kTile, c0 = static_cast<int>(blockIdx.x) * kTile;
  const int64_t first = static_cast<int64_t>(blockIdx.z) * n;
  const float sum = multiply(
      n, [&](int i, int j) { return i0 + i < n && j < n ? p.workspace[(first + i0 + i) * n + j] : 0.0f; },
      [&](int j, int c) { return j < n && c0 + c < d ? p.v[(first + j) * d + c0 + c] : 0.0f; });
  const int i = i0 + row, c = c0 + column;
  if (i < n && c < d) p.o[(first + i) * d + c] = sum;
}

/// p.workspace: S and then P of all entries of the batch, batch x seqlen x seqlen.
void run(const Attention<float>& p) {
  const unsigned rows = blocks_of(p.seqlen, kTile), batch = static_cast<unsigned>(p.batch);
  launch(scores, {rows, rows, batch}, kThreads, 0, p);
  launch(softmax, {static_cast<unsigned>(p.batch * p.seqlen)}, 32, 0, p);
  launch(outputs, {blocks_of(p.head_dim, kTile), rows, batch}, kThreads, 0, p);
}

}  // namespace ladder::attention_three_kernels
