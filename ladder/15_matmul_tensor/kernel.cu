// C = A B on tensor cores: a warp multiplies 16 x 8 by 8 x 8 with one instruction, its operands rounded to
// tf32 (a float32 with 10 bits behind the point), its sums in float32.
#include "ladder/harness/launch.cuh"
#include "ladder/harness/ptx.cuh"

namespace ladder::matmul_tensor {

constexpr int kTile = 128;               ///< a block computes kTile x kTile elements
constexpr int kStep = 16;                ///< terms of the sum at a time
constexpr int kThreads = 256;            ///< 8 warps, 2 x 4 of them
constexpr int kWarpM = 64, kWarpN = 32;  ///< elements of a warp: 4 x 4 accumulators of 16 x 8
constexpr int kMTiles = kWarpM / 16, kNTiles = kWarpN / 8;
// Fragments are read with rows g and columns t of a lane: these lengths of rows put all 32 lanes into
// different banks.
constexpr int kRowA = kStep + 4, kRowB = kTile + 8;

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
__device__ __forceinline__ uint4 to_tf32(float4 x) {
  return make_uint4(ptx::to_tf32(x.x), ptx::to_tf32(x.y), ptx::to_tf32(x.z), ptx::to_tf32(x.w));
}

__global__ void __launch_bounds__(kThreads) multiply(Matmul p) {
  __shared__ __align__(16) uint32_t a[kTile][kRowA];
  __shared__ __align__(16) uint32_t b[kStep][kRowB];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int row = warp / 4 * kWarpM, column = warp % 4 * kWarpN;
  const int i0 = static_cast<int>(blockIdx.y) * kTile, j0 = static_cast<int>(blockIdx.x) * kTile;
  float sums[kMTiles][kNTiles][4] = {};
  for (int l0 = 0; l0 < p.k; l0 += kStep) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int ai = thread / 4 + part * kTile / 2, al = thread % 4 * 4;
      const int bl = thread / 32 + part * kStep / 2, bj = thread % 32 * 4;
      float4 x = make_float4(0, 0, 0, 0), y = x;
      if (i0 + ai < p.m) x = load4(p.a + static_cast<int64_t>(i0 + ai) * p.k, l0 + al, p.k);
      if (l0 + bl < p.k) y = load4(p.b + static_cast<int64_t>(l0 + bl) * p.n, j0 + bj, p.n);
      *reinterpret_cast<uint4*>(&a[ai][al]) = to_tf32(x);
      *reinterpret_cast<uint4*>(&b[bl][bj]) = to_tf32(y);
    }
    __syncthreads();  // the tiles are complete and may be read
#pragma unroll
    for (int l = 0; l < kStep; l += 8) {
      uint32_t fragment_a[kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int r = 0; r < 4; ++r) fragment_a[mt][r] = a[row + mt * 16 + r % 2 * 8 + g][l + r / 2 * 4 + t];
      }
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
        const uint32_t b0 = b[l + t][column + nt * 8 + g], b1 = b[l + 4 + t][column + nt * 8 + g];
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) ptx::mma_tf32(sums[mt][nt], fragment_a[mt], b0, b1);
      }
    }
    __syncthreads();  // all have read the tiles: they may be overwritten
  }
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = i0 + row + mt * 16 + e / 2 * 8 + g, j = j0 + column + nt * 8 + 2 * t + e % 2;
        if (i < p.m && j < p.n) p.c[static_cast<int64_t>(i) * p.n + j] = sums[mt][nt][e];
      }
    }
  }
}

void run(const Matmul& p) {
  launch(multiply, {blocks_of(p.n, kTile), blocks_of(p.m, kTile)}, kThreads, 0, p);
}

}  // namespace ladder::matmul_tensor
