// Attention on tensor cores, less rescaling: the softmax does not depend on the number that is subtracted, so a
// row keeps its maximum until a weight would exceed 2^8, and almost no block rescales the output (the idea is
// FlashAttention-4's).
#include "ladder/harness/launch.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::tensor_lazy {

using Bf16 = __nv_bfloat16;
constexpr int kD = 128;  ///< head size
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileM = 16 * kWarps, kTileN = 64;       ///< queries of a block, keys of a step
constexpr int kSTiles = kTileN / 8, kOTiles = kD / 8;  ///< accumulators of a warp: 16 x 8 each
constexpr uint32_t kStage = kTileN * kD * 2;           ///< bytes of a stage of K or of V
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLazy =
    8.0f;  ///< log2 of the largest weight: 2^8 is far below the range of bfloat16 and of the sums
constexpr size_t kBytes = kTileM * kD * sizeof(Bf16) + 4 * kStage;

/// Element (row, column) of a tile in shared memory. The row's last three bits permute its chunks of eight
/// elements.
__device__ __forceinline__ int offset(int row, int column) {
  return row * kD + (column ^ (row % 8 * 8));
}

/// Starts copying rows [first, first + rows) of a matrix of n rows into a tile; 0 behind the end. A
/// thread stays in one column of chunks and goes down eight rows at a time, after which the swizzle repeats:
/// one address serves all.
__device__ __forceinline__ void load_tile(uint32_t tile, const Bf16* from, int first, int rows, int n) {
  constexpr int kChunks = kD / 8, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0);
  const int r0 = static_cast<int>(threadIdx.x) / kChunks,
            column = static_cast<int>(threadIdx.x) % kChunks * 8;
  const uint32_t to = tile + static_cast<uint32_t>(offset(r0, column) * 2);
  const Bf16* source = from + static_cast<int64_t>(first + r0) * kD + column;
#pragma unroll 2
  for (int r = 0; r < rows; r += kStep)
    ptx::cp_async_16(to + static_cast<uint32_t>(r * kD * 2), source + r * kD, first + r0 + r < n);
}

/// Where this lane reads the operand of 16 x 16 elements at (row, column). Order of the four matrices: down
/// first (rows 0-7, 8-15, then columns 8-15) for operand A and, with .trans, for two B whose rows are k;
/// across first for two B whose rows are n. row and column are multiples of 16 and do not change the
/// swizzle of a lane's row, so a lane keeps one offset.
__device__ __forceinline__ uint32_t down_first(uint32_t tile, int row, int column, int lane) {
  const auto own = static_cast<uint32_t>(offset(lane % 16, lane / 16 * 8) * 2);
  return ((tile + own) ^ static_cast<uint32_t>(column % 64 * 2)) +
         static_cast<uint32_t>((row * kD + column / 64 * 64) * 2);
}
__device__ __forceinline__ uint32_t across_first(uint32_t tile, int row, int column, int lane) {
  const auto own = static_cast<uint32_t>(offset(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8) * 2);
  return ((tile + own) ^ static_cast<uint32_t>(column % 64 * 2)) +
         static_cast<uint32_t>((row * kD + column / 64 * 64) * 2);
}

/// S = Q K^T; q: the fragments of 16 queries.
__device__ __forceinline__ void multiply_qk(float (&acc_s)[kSTiles][4], const uint32_t (&q)[kD / 16][4],
                                            uint32_t sK, int lane) {
  uint32_t k[2][kTileN / 16][4];
  const auto load = [&](int step) {
#pragma unroll
    for (int j = 0; j < kTileN; j += 16)
      ptx::ldmatrix_x4(k[step % 2][j / 16], across_first(sK, j, step * 16, lane));
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    if (step + 1 < kD / 16) load(step + 1);
#pragma unroll
    for (int j = 0; j < kTileN; j += 16) {
      const uint32_t(&b)[4] = k[step % 2][j / 16];
      ptx::mma_bf16(acc_s[j / 8], q[step], b[0], b[1]);
      ptx::mma_bf16(acc_s[j / 8 + 1], q[step], b[2], b[3]);
    }
  }
}

/// O += P V.
__device__ __forceinline__ void multiply_pv(float (&acc_o)[kOTiles][4], const float (&acc_s)[kSTiles][4],
                                            uint32_t sV, int lane) {
  constexpr int kPieces = kD / 16, kSteps = kTileN / 16 * kPieces;  // 16 keys by 16 columns
  uint32_t v[2][4];
  const auto load = [&](int step) {
    ptx::ldmatrix_x4_trans(v[step % 2], down_first(sV, step / kPieces * 16, step % kPieces * 16, lane));
  };
  load(0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step + 1 < kSteps) load(step + 1);
    const int j = step / kPieces * 16, c = step % kPieces * 16;
    const float(&left)[4] = acc_s[j / 8], (&right)[4] = acc_s[j / 8 + 1];
    const uint32_t weights[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                                 pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
    ptx::mma_bf16(acc_o[c / 8], weights, v[step % 2][0], v[step % 2][1]);
    ptx::mma_bf16(acc_o[c / 8 + 1], weights, v[step % 2][2], v[step % 2][3]);
  }
}

/// Turns scores into weights, and updates the rows' state and the output. The tile has `keys` keys, at least
/// one. rows[].max is of unscaled scores, and may be smaller than the largest.
__device__ __forceinline__ void softmax_step(float (&acc_s)[kSTiles][4], float (&acc_o)[kOTiles][4],
                                             OnlineRow (&rows)[2], int keys, float scale_log2, int lane) {
  float largest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = -INFINITY;
#pragma unroll
    for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = acc_s[nt][2 * half + e];
        if (nt * 8 + 2 * (lane % 4) + e >= keys) s = -INFINITY;
        largest[half] = fmaxf(largest[half], s);
      }
    }
    largest[half] = quad_max(largest[half]);
  }
  const bool raise =
      (largest[0] - rows[0].max) * scale_log2 > kLazy || (largest[1] - rows[1].max) * scale_log2 > kLazy;
  if (__any_sync(kWholeWarp, raise)) {  // a vote: all rows of the warp raise together
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = fmaxf(rows[half].max, largest[half]);
      const float factor = ptx::ex2((rows[half].max - raised) * scale_log2);
      rows[half].max = raised;
      rows[half].sum *= factor;
#pragma unroll
      for (int ot = 0; ot < kOTiles; ++ot) {
        acc_o[ot][2 * half] *= factor;
        acc_o[ot][2 * half + 1] *= factor;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = rows[half].max * scale_log2;
#pragma unroll
    for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& s = acc_s[nt][2 * half + e];
        s = ptx::ex2(fmaf(s, scale_log2, -base));
        rows[half].sum += s;  // of this lane's keys; summed over the lanes at the end
      }
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
    if (lane % 4 == 0) p.lse[first + i] = rows[half].max * p.scale + logf(sum);
    auto* o = reinterpret_cast<uint32_t*>(p.o + (first + i) * kD);
#pragma unroll
    for (int ot = 0; ot < kOTiles; ++ot)
      o[ot * 4 + lane % 4] = pack_bf16(acc_o[ot][2 * half] * inverse, acc_o[ot][2 * half + 1] * inverse);
  }
}

__global__ void __launch_bounds__(kThreads) attention(Attention<Bf16> p) {
  const uint32_t sQ = ptx::shared_address(shared_memory<Bf16>());  // in bytes: addresses, not pointers
  const uint32_t sK = sQ + kTileM * kD * 2, sV = sK + 2 * kStage;
  const int n = p.seqlen, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * n;
  const int i0 = static_cast<int>(blockIdx.x) * kTileM;
  float acc_o[kOTiles][4] = {};
  OnlineRow rows[2];
  const auto load_keys = [&](int j0, uint32_t stage) {
    load_tile(sK + stage * kStage, p.k + first * kD, j0, kTileN, n);
    load_tile(sV + stage * kStage, p.v + first * kD, j0, kTileN, n);
    ptx::cp_async_commit();
  };
  load_tile(sQ, p.q + first * kD, i0, kTileM, n);
  ptx::cp_async_commit();
  load_keys(0, 0);
  ptx::cp_async_wait<1>();
  __syncthreads();  // Q may be read
  uint32_t q[kD / 16][4];
#pragma unroll
  for (int step = 0; step < kD / 16; ++step)
    ptx::ldmatrix_x4(q[step], down_first(sQ, warp * 16, step * 16, lane));

  uint32_t stage = 0;
  for (int j0 = 0; j0 < n; j0 += kTileN, stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // block j0 may be read, and the stage of the block before may be overwritten
    if (j0 + kTileN < n) load_keys(j0 + kTileN, stage ^ 1);
    float acc_s[kSTiles][4] = {};
    multiply_qk(acc_s, q, sK + stage * kStage, lane);
    softmax_step(acc_s, acc_o, rows, n - j0, p.scale * kLog2e, lane);
    multiply_pv(acc_o, acc_s, sV + stage * kStage, lane);
  }
  store_rows(p, acc_o, rows, first, i0 + warp * 16, lane);
}

void run(const Attention<Bf16>& p) {
  launch(attention, {blocks_of(p.seqlen, kTileM), static_cast<unsigned>(p.batch)}, kThreads, kBytes, p);
}

}  // namespace ladder::tensor_lazy
