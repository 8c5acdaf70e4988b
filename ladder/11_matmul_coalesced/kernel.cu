// C = A B, a thread for each element of C. Neighbouring threads work on neighbouring columns, which lie
// side by side in memory: a warp reads and writes whole lines.
#include "ladder/harness/launch.cuh"

namespace ladder::matmul_coalesced {

constexpr int kTile = 16;  ///< a block computes kTile x kTile elements

__global__ void __launch_bounds__(kTile* kTile) multiply(Matmul p) {
  const int thread = static_cast<int>(threadIdx.x);
  const int i = static_cast<int>(blockIdx.y) * kTile + thread / kTile;
  const int j = static_cast<int>(blockIdx.x) * kTile + thread % kTile;
  if (i >= p.m || j >= p.n) return;
  float sum = 0;
  for (int l = 0; l < p.k; ++l)
    sum += p.a[static_cast<int64_t>(i) * p.k + l] * p.b[static_cast<int64_t>(l) * p.n + j];
  p.c[static_cast<int64_t>(i) * p.n + j] = sum;
}

void run(const Matmul& p) {
  launch(multiply, {blocks_of(p.n, kTile), blocks_of(p.m, kTile)}, kTile * kTile, 0, p);
}

}  // namespace ladder::matmul_coalesced
