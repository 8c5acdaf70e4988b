// C = A B over tiles in shared memory: a block reads its part of A and B once, and kTile threads use each
// value.
#include "ladder/harness/launch.cuh"

namespace ladder::matmul_shared {

constexpr int kTile = 32;  ///< a block computes kTile x kTile elements, kTile of the sum's terms at a time

__global__ void __launch_bounds__(kTile* kTile) multiply(Matmul p) {
  __shared__ float a[kTile][kTile];
  __shared__ float b[kTile][kTile];
  const int row = static_cast<int>(threadIdx.x) / kTile, column = static_cast<int>(threadIdx.x) % kTile;
  const int i = static_cast<int>(blockIdx.y) * kTile + row, j = static_cast<int>(blockIdx.x) * kTile + column;
  float sum = 0;
  for (int l0 = 0; l0 < p.k; l0 += kTile) {
    const bool in_a = i < p.m && l0 + column < p.k, in_b = l0 + row < p.k && j < p.n;
    a[row][column] = in_a ? p.a[static_cast<int64_t>(i) * p.k + l0 + column] : 0.0f;
    b[row][column] = in_b ? p.b[static_cast<int64_t>(l0 + row) * p.n + j] : 0.0f;
    __syncthreads();  // the tiles are complete and may be read
    for (int l = 0; l < kTile; ++l) sum += a[row][l] * b[l][column];
    __syncthreads();  // all have read the tiles: they may be overwritten
  }
  if (i < p.m && j < p.n) p.c[static_cast<int64_t>(i) * p.n + j] = sum;
}

void run(const Matmul& p) {
  launch(multiply, {blocks_of(p.n, kTile), blocks_of(p.m, kTile)}, kTile * kTile, 0, p);
}

}  // namespace ladder::matmul_shared
