// C = A B with a tile of 8 x 8 sums in the registers of each thread: 16 values from shared memory make 64
// products. All copies are of four values at a time.
#include "ladder/harness/launch.cuh"

namespace ladder::matmul_registers {

constexpr int kTile = 128;  ///< a block computes kTile x kTile elements
constexpr int kStep = 8;    ///< terms of the sum at a time
constexpr int kThreads = 256;
constexpr int kSide = 8;          ///< a thread computes kSide x kSide elements
constexpr int kHalf = kTile / 2;  ///< of its rows and columns half lie kHalf further on: neighbours
                                  ///< then read neighbouring 16 bytes

/// Four values from column `column` of a row; 0 behind its end. One access where all rows are aligned to it.
__device__ __forceinline__ float4 load4(const float* row, int column, int columns) {
  if (columns % 4 == 0 && column < columns) return *reinterpret_cast<const float4*>(row + column);
  float4 x;
  x.x = column < columns ? row[column] : 0.0f;
  x.y = column + 1 < columns ? row[column + 1] : 0.0f;
  x.z = column + 2 < columns ? row[column + 2] : 0.0f;
  x.w = column + 3 < columns ? row[column + 3] : 0.0f;
  return x;
}

__global__ void __launch_bounds__(kThreads) multiply(Matmul p) {
  __shared__ __align__(16) float a[kStep][kTile + 4];  // transposed
  __shared__ __align__(16) float b[kStep][kTile];
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / 16 * 4, column = thread % 16 * 4;
  const int i0 = static_cast<int>(blockIdx.y) * kTile, j0 = static_cast<int>(blockIdx.x) * kTile;
  float sums[kSide][kSide] = {};
  for (int l0 = 0; l0 < p.k; l0 += kStep) {
    const int ai = thread / 2, al = thread % 2 * 4, bl = thread / 32, bj = thread % 32 * 4;
    float4 x = make_float4(0, 0, 0, 0), y = x;
    if (i0 + ai < p.m) x = load4(p.a + static_cast<int64_t>(i0 + ai) * p.k, l0 + al, p.k);
    if (l0 + bl < p.k) y = load4(p.b + static_cast<int64_t>(l0 + bl) * p.n, j0 + bj, p.n);
    a[al][ai] = x.x;
    a[al + 1][ai] = x.y;
    a[al + 2][ai] = x.z;
    a[al + 3][ai] = x.w;
    *reinterpret_cast<float4*>(&b[bl][bj]) = y;
    __syncthreads();  // the tiles are complete and may be read
#pragma unroll
    for (int l = 0; l < kStep; ++l) {
      const float4 a0 = *reinterpret_cast<const float4*>(&a[l][row]);
      const float4 a1 = *reinterpret_cast<const float4*>(&a[l][kHalf + row]);
      const float4 b0 = *reinterpret_cast<const float4*>(&b[l][column]);
      const float4 b1 = *reinterpret_cast<const float4*>(&b[l][kHalf + column]);
      const float values_a[kSide] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
      const float values_b[kSide] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
      for (int r = 0; r < kSide; ++r) {
#pragma unroll
        for (int c = 0; c < kSide; ++c) sums[r][c] += values_a[r] * values_b[c];
      }
    }
    __syncthreads();  // all have read the tiles: they may be overwritten
  }
#pragma unroll
  for (int r = 0; r < kSide; ++r) {
    const int i = i0 + row + r % 4 + r / 4 * kHalf;
    if (i >= p.m) continue;
#pragma unroll
    for (int c = 0; c < kSide; ++c) {
      const int j = j0 + column + c % 4 + c / 4 * kHalf;
      if (j < p.n) p.c[static_cast<int64_t>(i) * p.n + j] = sums[r][c];
    }
  }
}

void run(const Matmul& p) {
  launch(multiply, {blocks_of(p.n, kTile), blocks_of(p.m, kTile)}, kThreads, 0, p);
}

}  // namespace ladder::matmul_registers
