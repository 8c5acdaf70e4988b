// Attention on tensor cores, swizzled tiles: the number of a row permutes its 16-byte chunks, so that the eight
// rows of a matrix, which are 256 bytes apart, lie in different banks.
#include "ladder/harness/launch.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::tensor_swizzle {

using Bf16 = __nv_bfloat16;
constexpr int kD = 128;  ///< head size
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileM = 16 * kWarps, kTileN = 64;       ///< queries of a block, keys of a step
constexpr int kSTiles = kTileN / 8, kOTiles = kD / 8;  ///< accumulators of a warp: 16 x 8 each
constexpr size_t kBytes = (kTileM + 2 * kTileN) * kD * sizeof(Bf16);

/// Element (row, column) of a tile in shared memory. The row's last three bits permute its chunks of eight
/// elements.
__device__ __forceinline__ int offset(int row, int column) {
  return row * kD + (column ^ (row % 8 * 8));
}

/// Rows [first, first + rows) of a matrix of n rows into a tile, 16 bytes at a time; 0 behind the end.
__device__ __forceinline__ void load_tile(Bf16* tile, const Bf16* from, int first, int rows, int n) {
  for (int at = static_cast<int>(threadIdx.x); at < rows * kD / 8; at += kThreads) {
    const int r = at / (kD / 8), column = at % (kD / 8) * 8;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (first + r < n)
      x = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(first + r) * kD + column);
    *reinterpret_cast<uint4*>(tile + offset(r, column)) = x;
  }
}

/// Where this lane reads the operand of 16 x 16 elements at (row, column). Order of the four matrices: down
/// first (rows 0-7, 8-15, then columns 8-15) for operand A and, with .trans, for two B whose rows are k;
/// across first for two B whose rows are n. row and column are multiples of 16 and do not change the
/// swizzle of a lane's row, so a lane keeps one offset.
__device__ __forceinline__ uint32_t down_first(const Bf16* tile, int row, int column, int lane) {
  return ptx::shared_address(tile + row * kD + (offset(lane % 16, lane / 16 * 8) ^ column));
}
__device__ __forceinline__ uint32_t across_first(const Bf16* tile, int row, int column, int lane) {
  return ptx::shared_address(tile + row * kD + (offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) ^ column));
}

/// S = Q K^T: the 16 queries of the tile from `row` on.
__device__ __forceinline__ void multiply_qk(float (&acc_s)[kSTiles][4], const Bf16* sQ, int row,
                                            const Bf16* sK, int lane) {
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t q[4];
    ptx::ldmatrix_x4(q, down_first(sQ, row, c, lane));
#pragma unroll
    for (int j = 0; j < kTileN; j += 16) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, across_first(sK, j, c, lane));
      ptx::mma_bf16(acc_s[j / 8], q, k[0], k[1]);
      ptx::mma_bf16(acc_s[j / 8 + 1], q, k[2], k[3]);
    }
  }
}

/// O += P V.
__device__ __forceinline__ void multiply_pv(float (&acc_o)[kOTiles][4], const float (&acc_s)[kSTiles][4],
                                            const Bf16* sV, int lane) {
#pragma unroll
  for (int j = 0; j < kTileN; j += 16) {
    const float(&left)[4] = acc_s[j / 8], (&right)[4] = acc_s[j / 8 + 1];
    const uint32_t weights[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                                 pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, down_first(sV, j, c, lane));
      ptx::mma_bf16(acc_o[c / 8], weights, v[0], v[1]);
      ptx::mma_bf16(acc_o[c / 8 + 1], weights, v[2], v[3]);
    }
  }
}

/// Turns scores into weights, and updates the rows' state and the output. The tile has `keys` keys.
__device__ __forceinline__ void softmax_step(float (&acc_s)[kSTiles][4], float (&acc_o)[kOTiles][4],
                                             OnlineRow (&rows)[2], int keys, float scale, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    OnlineRow block;
#pragma unroll
    for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = acc_s[nt][2 * half + e];
        s = nt * 8 + 2 * (lane % 4) + e < keys ? s * scale : -INFINITY;
        block.max = fmaxf(block.max, s);
      }
    }
    block.max = quad_max(block.max);
    const float factor = rows[half].merge(block);
#pragma unroll
    for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = acc_s[nt][2 * half + e];
        s = expf(s - rows[half].max);
        rows[half].sum += s;  // of this lane's keys; summed over the lanes at the end
      }
    }
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot) {
      acc_o[ot][2 * half] *= factor;
      acc_o[ot][2 * half + 1] *= factor;
    }
  }
}

/// Stores O and L of 16 queries from row i0 on.
__device__ __forceinline__ void store_rows(const Attention<Bf16>& p, const float (&acc_o)[kOTiles][4],
                                           const OnlineRow (&rows)[2], int64_t first, int i0, int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i0 + lane / 4 + 8 * half;
    const float sum = quad_sum(rows[half].sum), inverse = __fdividef(1.0f, sum);
    if (i >= p.seqlen) continue;
    if (lane % 4 == 0) p.lse[first + i] = rows[half].max + logf(sum);
    auto* o = reinterpret_cast<uint32_t*>(p.o + (first + i) * kD);
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot)
      o[ot * 4 + lane % 4] = pack_bf16(acc_o[ot][2 * half] * inverse, acc_o[ot][2 * half + 1] * inverse);
  }
}

__global__ void __launch_bounds__(kThreads) attention(Attention<Bf16> p) {
  Bf16* sQ = shared_memory<Bf16>();
  Bf16 *sK = sQ + kTileM * kD, *sV = sK + kTileN * kD;
  const int n = p.seqlen, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * n;
  const int i0 = static_cast<int>(blockIdx.x) * kTileM;
  float acc_o[kOTiles][4] = {};
  OnlineRow rows[2];
  load_tile(sQ, p.q + first * kD, i0, kTileM, n);

  for (int j0 = 0; j0 < n; j0 += kTileN) {
    __syncthreads();  // all warps have read the tiles before: they may be overwritten
    load_tile(sK, p.k + first * kD, j0, kTileN, n);
    load_tile(sV, p.v + first * kD, j0, kTileN, n);
    __syncthreads();  // the tiles are complete and may be read
    float acc_s[kSTiles][4] = {};
    multiply_qk(acc_s, sQ, warp * 16, sK, lane);
    softmax_step(acc_s, acc_o, rows, n - j0, p.scale, lane);
    multiply_pv(acc_o, acc_s, sV, lane);
  }
  store_rows(p, acc_o, rows, first, i0 + warp * 16, lane);
}

void run(const Attention<Bf16>& p) {
  launch(attention, {blocks_of(p.seqlen, kTileM), static_cast<unsigned>(p.batch)}, kThreads, kBytes, p);
}

}  // namespace ladder::tensor_swizzle
