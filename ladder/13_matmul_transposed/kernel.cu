// C = A B with the tile of A transposed in shared memory: a thread computes kRows rows of a column, whose
// values of A then lie side by side and come four at a time.
#include "ladder/harness/launch.cuh"

namespace ladder::matmul_transposed {

constexpr int kTile = 64;  ///< a block computes kTile x kTile elements
constexpr int kStep = 16;  ///< terms of the sum at a time
constexpr int kThreads = 256;
constexpr int kRows = kTile * kTile / kThreads;  ///< of a thread: 16

__global__ void __launch_bounds__(kThreads) multiply(Matmul p) {
  __shared__ __align__(
      16) float a[kStep][kTile + 4];  // transposed; 4 more, so that rows stay aligned to 16 bytes
  __shared__ float b[kStep][kTile];
  const int thread = static_cast<int>(threadIdx.x);
  const int first_row = thread / kTile * kRows, column = thread % kTile;
  const int i0 = static_cast<int>(blockIdx.y) * kTile, j0 = static_cast<int>(blockIdx.x) * kTile;
  float sums[kRows] = {};
  for (int l0 = 0; l0 < p.k; l0 += kStep) {
    for (int at = thread; at < kTile * kStep; at += kThreads) {
      const int i = at / kStep, l = at % kStep;
      a[l][i] = i0 + i < p.m && l0 + l < p.k ? p.a[static_cast<int64_t>(i0 + i) * p.k + l0 + l] : 0.0f;
    }
    for (int at = thread; at < kTile * kStep; at += kThreads) {
      const int l = at / kTile, j = at % kTile;
      b[l][j] = l0 + l < p.k && j0 + j < p.n ? p.b[static_cast<int64_t>(l0 + l) * p.n + j0 + j] : 0.0f;
    }
    __syncthreads();  // the tiles are complete and may be read
    for (int l = 0; l < kStep; ++l) {
      const float value_b = b[l][column];
#pragma unroll
      for (int r = 0; r < kRows; r += 4) {
        const float4 values_a = *reinterpret_cast<const float4*>(&a[l][first_row + r]);
        sums[r] += values_a.x * value_b;
        sums[r + 1] += values_a.y * value_b;
        sums[r + 2] += values_a.z * value_b;
        sums[r + 3] += values_a.w * value_b;
      }
    }
    __syncthreads();  // all have read the tiles: they may be overwritten
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int i = i0 + first_row + r, j = j0 + column;
    if (i < p.m && j < p.n) p.c[static_cast<int64_t>(i) * p.n + j] = sums[r];
  }
}

void run(const Matmul& p) {
  launch(multiply, {blocks_of(p.n, kTile), blocks_of(p.m, kTile)}, kThreads, 0, p);
}

}  // namespace ladder::matmul_transposed
