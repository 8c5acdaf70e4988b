// The gradients on tensor cores: a block owns 64 keys, a warp 16 of them, and loops over the queries. With keys
// as rows, the accumulators of P^T and dS^T are operand A of dV += P^T dO and dK += dS^T Q in the same lanes;
// only dQ += dS K needs the transpose of dS^T, through shared memory.
#include "ladder/harness/launch.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::backward_tensor {

using Bf16 = __nv_bfloat16;
using Problem = AttentionGradient<Bf16>;
constexpr int kD = 64, kTile = 64;  ///< head size; keys of a block, queries of a step
constexpr int kWarps = kTile / 16, kThreads = 32 * kWarps;
constexpr uint32_t kTileBytes = kTile * kD * 2;  ///< K, V, Q, dO and dS^T: all are 64 x 64
constexpr size_t kBytes = 5 * kTileBytes + 2 * kTile * sizeof(float);
constexpr float kLog2e = 1.4426950408889634f;

/// Byte of element (row, column) of a tile. The row's last three bits permute its chunks of eight
/// elements.
__device__ __forceinline__ uint32_t offset(int row, int column) {
  return static_cast<uint32_t>(row * kD + (column ^ (row % 8 * 8))) * 2;
}
/// Rows [first, first + kTile) of a matrix of n rows; 0 behind the end.
__device__ __forceinline__ void load_tile(uint32_t tile, const Bf16* from, int first, int n) {
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kD / 8; at += kThreads) {
    const int r = at / (kD / 8), column = at % (kD / 8) * 8;
    ptx::cp_async_16(tile + offset(r, column), from + static_cast<int64_t>(first + r) * kD + column,
                     first + r < n);
  }
}
/// The operand of 16 x 16 elements at (row, column), multiples of 16, as in 43_tensor_cp_async.
__device__ __forceinline__ uint32_t down_first(uint32_t tile, int row, int column, int lane) {
  return ((tile + offset(lane % 16, lane / 16 * 8)) ^ static_cast<uint32_t>(column * 2)) +
         static_cast<uint32_t>(row * kD * 2);
}
__device__ __forceinline__ uint32_t across_first(uint32_t tile, int row, int column, int lane) {
  return ((tile + offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8)) ^ static_cast<uint32_t>(column * 2)) +
         static_cast<uint32_t>(row * kD * 2);
}

/// acc (16 x 64) = A B^T: rows `row` to `row` + 16 of one tile against all rows of another.
__device__ __forceinline__ void multiply_rows(float (&acc)[kTile / 8][4], uint32_t sA, int row, uint32_t sB,
                                              int lane) {
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t a[4];
    ptx::ldmatrix_x4(a, down_first(sA, row, c, lane));
#pragma unroll
    for (int j = 0; j < kTile; j += 16) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, across_first(sB, j, c, lane));
      ptx::mma_bf16(acc[j / 8], a, b[0], b[1]);
      ptx::mma_bf16(acc[j / 8 + 1], a, b[2], b[3]);
    }
  }
}

/// acc (16 x 64) += A B: A (16 x 64) from the registers `weights`, B a tile.
__device__ __forceinline__ void multiply_weights(float (&acc)[kD / 8][4],
                                                 const uint32_t (&weights)[kTile / 16][4], uint32_t sB,
                                                 int lane) {
#pragma unroll
  for (int l = 0; l < kTile; l += 16) {
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, down_first(sB, l, c, lane));
      ptx::mma_bf16(acc[c / 8], weights[l / 16], b[0], b[1]);
      ptx::mma_bf16(acc[c / 8 + 1], weights[l / 16], b[2], b[3]);
    }
  }
}
/// Accumulators, rounded, as the operand A.
__device__ __forceinline__ void pack(uint32_t (&weights)[kTile / 16][4], const float (&acc)[kTile / 8][4]) {
#pragma unroll
  for (int l = 0; l < kTile / 16; ++l) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
      weights[l][r] = pack_bf16(acc[2 * l + r / 2][r % 2 * 2], acc[2 * l + r / 2][r % 2 * 2 + 1]);
  }
}

/// D_i = dO_i . O_i, a warp a row: each lane has two of its 64 elements.
__global__ void __launch_bounds__(32) row_dots(Problem p, float* dots) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kD + threadIdx.x;
  const float sum = warp_sum(static_cast<float>(p.d_o[at]) * static_cast<float>(p.o[at]) +
                             static_cast<float>(p.d_o[at + 32]) * static_cast<float>(p.o[at + 32]));
  if (threadIdx.x == 0) dots[blockIdx.x] = sum;
}

/// Stores a gradient of 16 rows from row i0 on, times `factor`, or adds it atomically.
template <bool kAdd>
__device__ __forceinline__ void put_rows(float* to, const float (&acc)[kD / 8][4], int i0, int n,
                                         float factor, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i0 + lane / 4 + half * 8;
    if (i >= n) continue;
    float* row = to + static_cast<int64_t>(i) * kD + 2 * (lane % 4);
#pragma unroll
    for (int ct = 0; ct < kD / 8; ++ct) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float x = acc[ct][2 * half + e] * factor;
        if (kAdd) {
          atomicAdd(row + ct * 8 + e, x);
        } else {
          row[ct * 8 + e] = x;
        }
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) gradients(Problem p, const float* dots) {
  unsigned char* shared = shared_memory<unsigned char>();
  const uint32_t sK = ptx::shared_address(shared), sV = sK + kTileBytes, sQ = sV + kTileBytes,
                 sDO = sQ + kTileBytes, sDS = sDO + kTileBytes;
  unsigned char* dS = shared + 4 * kTileBytes;
  auto *row_lse = reinterpret_cast<float*>(shared + 5 * kTileBytes), *row_dot = row_lse + kTile;
  const int n = p.seqlen, j0 = static_cast<int>(blockIdx.x) * kTile, thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32, own = warp * 16;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * n;
  float dk[kD / 8][4] = {}, dv[kD / 8][4] = {};
  load_tile(sK, p.k + first * kD, j0, n);
  load_tile(sV, p.v + first * kD, j0, n);
  for (int i0 = 0; i0 < n; i0 += kTile) {
    __syncthreads();  // all have read the queries and dS before: they may be overwritten
    load_tile(sQ, p.q + first * kD, i0, n);
    load_tile(sDO, p.d_o + first * kD, i0, n);
    ptx::cp_async_commit();
    if (thread < kTile) {  // queries behind the end get weight 0: exp(-inf)
      row_lse[thread] = i0 + thread < n ? p.lse[first + i0 + thread] * kLog2e : INFINITY;
      row_dot[thread] = i0 + thread < n ? dots[first + i0 + thread] : 0.0f;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();                                    // the tiles are complete and may be read
    float s[kTile / 8][4] = {}, dp[kTile / 8][4] = {};  // transposed: keys are rows
    multiply_rows(s, sK, own, sQ, lane);
    multiply_rows(dp, sV, own, sDO, lane);
#pragma unroll
    for (int nt = 0; nt < kTile / 8; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = nt * 8 + 2 * (lane % 4) + e % 2;
        const bool exists = j0 + own + lane / 4 + e / 2 * 8 < n;
        s[nt][e] = exists ? ptx::ex2(fmaf(s[nt][e], p.scale * kLog2e, -row_lse[i])) : 0.0f;
        dp[nt][e] = s[nt][e] * (dp[nt][e] - row_dot[i]);
      }
      // Two queries of a key lie side by side; rows of a lane's two keys are swizzled alike.
      const uint32_t at = offset(own + lane / 4, 2 * (lane % 4)) ^ static_cast<uint32_t>(nt * 16);
      *reinterpret_cast<uint32_t*>(dS + at) = pack_bf16(dp[nt][0], dp[nt][1]);
      *reinterpret_cast<uint32_t*>(dS + at + 8 * kD * 2) = pack_bf16(dp[nt][2], dp[nt][3]);
    }
    uint32_t weights[kTile / 16][4];
    pack(weights, s);
    multiply_weights(dv, weights, sDO, lane);
    pack(weights, dp);
    multiply_weights(dk, weights, sQ, lane);
    __syncthreads();  // dS^T of all warps is complete and may be read
                      // This warp's 16 queries of dQ = dS K: operand A is dS, from its transpose.
#pragma unroll
    for (int l = 0; l < kTile; l += 16)
      ptx::ldmatrix_x4_trans(weights[l / 16], across_first(sDS, l, own, lane));
    float dq[kD / 8][4] = {};
    multiply_weights(dq, weights, sK, lane);
    put_rows<true>(p.dq + first * kD, dq, i0 + own, n, p.scale, lane);
  }
  put_rows<false>(p.dk + first * kD, dk, j0 + own, n, p.scale, lane);
  put_rows<false>(p.dv + first * kD, dv, j0 + own, n, 1.0f, lane);
}

/// p.workspace: D, batch x seqlen.
void run(const Problem& p) {
  const int64_t rows = static_cast<int64_t>(p.batch) * p.seqlen;
  launch(row_dots, {static_cast<unsigned>(rows)}, 32, 0, p, p.workspace);
  fill_zero(p.dq, static_cast<size_t>(rows * kD));
  launch(gradients, {blocks_of(p.seqlen, kTile), static_cast<unsigned>(p.batch)}, kThreads, kBytes, p,
         p.workspace);
}

}  // namespace ladder::backward_tensor
