// Products of tiles of float32 by three of tf32 each, in a warp's registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/warp/tf32_split.cuh"
#include "cuda/warp/tf32_tile.cuh"

namespace fovea::cuda {

/// acc = A B^T: rows of both are in shared memory. acc[m][n][e] is row 16 m + 8 (e / 2) + g of A and row
/// 8 n + 2 t + e % 2 of B. Columns from `columns` on are zeros.
///
/// Small terms have accumulators of their own: the tensor core truncates what it adds at the magnitude of the accumulator.
template <int kM, int kN, int kColumns>
__device__ __forceinline__ void multiply_rows(float (&acc)[kM][kN][4], const Tf32AlongRows<kColumns>& a_rows,
                                              const Tf32AlongRows<kColumns>& b_rows, int columns) {
  float corrections[kM][kN][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = corrections[m][n][e] = 0.0f;
    }
  }
#pragma unroll
  for (int kk = 0; kk < kColumns / 16; ++kk) {
    // A wide instance serves smaller head sizes as well. The branch also keeps the compiler from interleaving steps, for
    // which there are no registers.
    if (kColumns > 64 && kk * 16 >= columns) break;
    Tf32Fragment a[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = a_rows.at(m * 16 + half * 8, kk);
        a[m][0].set(half, x.x);
        a[m][0].set(half + 2, x.y);
        a[m][1].set(half, x.z);
        a[m][1].set(half + 2, x.w);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float4 y = b_rows.at(n * 8, kk);
      const Tf32Pair b[4] = {split_tf32(y.x), split_tf32(y.y), split_tf32(y.z), split_tf32(y.w)};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_3xtf32(acc[m][n], corrections[m][n], a[m][step], b[2 * step], b[2 * step + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] += corrections[m][n][e];
    }
  }
}

/// out = merge(out, W B), element by element: W are accumulators (as multiply_rows leaves them), rows of B
/// are in shared memory. out[m][4 block + i][e] is row 16 m + 8 (e / 2) + g, column
/// 32 block + 8 t + 4 (e % 2) + i. `merge` gets the old value, the new sum, m, and e / 2. Blocks of 32 columns
/// from `columns` on stay as they are.
///
/// W B has accumulators of its own. An ordinary instruction, which rounds to nearest, adds them to the sum over all tiles:
/// the tensor core's truncation would add up over a long sequence.
template <int kM, int kSteps, int kColumns, class Merge>
__device__ __forceinline__ void multiply_weights(float (&out)[kM][kColumns / 8][4],
                                                 const float (&weights)[kM][kSteps][4],
                                                 const Tf32DownRows<kColumns>& b_rows, int columns,
                                                 const Merge& merge) {
#pragma unroll
  for (int block = 0; block < kColumns / 32; ++block) {
    if (kColumns > 64 && block * 32 >= columns) break;  // as in multiply_rows
    float acc[kM][4][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][i][e] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Tf32Fragment a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        a[m].set(0, weights[m][step][0]);
        a[m].set(1, weights[m][step][2]);
        a[m].set(2, weights[m][step][1]);
        a[m].set(3, weights[m][step][3]);
      }
      const float4 even = b_rows.even_at(step, block), odd = b_rows.odd_at(step, block);
      const float b[4][2] = {{even.x, odd.x}, {even.y, odd.y}, {even.z, odd.z}, {even.w, odd.w}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Tf32Pair b0 = split_tf32(b[i][0]), b1 = split_tf32(b[i][1]);
#pragma unroll
        for (int m = 0; m < kM; ++m) mma_3xtf32(acc[m][i], acc[m][i], a[m], b0, b1);
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = out[m][block * 4 + i][e];
          x = merge(x, acc[m][i][e], m, e / 2);
        }
      }
    }
  }
}

/// Whether this lane's elements of half `half` (rows 0 to 7 or 8 to 15) of an m16 tile are all finite.
template <int kTiles>
__device__ __forceinline__ bool half_is_finite(const float (&acc)[kTiles][4], int half) {
  bool finite = true;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) finite &= isfinite(acc[n][2 * half]) && isfinite(acc[n][2 * half + 1]);
  return finite;
}

/// Writes this lane's elements of half `half` of an m16 tile that multiply_weights summed, times `factor`: eight adjacent
/// columns of each 32. Columns from `columns` on do not exist; `vectors`: 16-byte stores are safe.
template <int kTiles>
__device__ __forceinline__ void store_half(const float (&acc)[kTiles][4], int half, int t, float* to,
                                           int columns, bool vectors, float factor) {
#pragma unroll
  for (int block = 0; block < kTiles / 4; ++block) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 x =
          make_float4(acc[block * 4][2 * half + e] * factor, acc[block * 4 + 1][2 * half + e] * factor,
                      acc[block * 4 + 2][2 * half + e] * factor, acc[block * 4 + 3][2 * half + e] * factor);
      const int column = block * 32 + 8 * t + 4 * e;
      if (vectors) {
        if (column < columns) *reinterpret_cast<float4*>(to + column) = x;
      } else {
        if (column < columns) to[column] = x.x;
        if (column + 1 < columns) to[column + 1] = x.y;
        if (column + 2 < columns) to[column + 2] = x.z;
        if (column + 3 < columns) to[column + 3] = x.w;
      }
    }
  }
}

}  // namespace fovea::cuda
