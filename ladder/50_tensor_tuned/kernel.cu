// Attention on tensor cores, tuned: blocks of keys from the last to the first, so that only the first step can
// reach behind the end, and the loop over the others checks nothing; exponentials between the products that
// use them; and a limit of registers that lets two blocks share an SM.
#include <type_traits>

#include "ladder/harness/launch.cuh"
#include "ladder/harness/ptx.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::tensor_tuned {

using Bf16 = __nv_bfloat16;
constexpr int kD = 128;  ///< head size
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kMTiles = 2;                                  ///< pieces of 16 queries of a warp
constexpr int kTileM = 16 * kMTiles * kWarps, kTileN = 48;  ///< queries of a block, keys of a step
constexpr int kSTiles = kTileN / 8, kOTiles = kD / 8;       ///< accumulators of a warp: 16 x 8 each
constexpr uint32_t kStage = kTileN * kD * 2;                ///< bytes of a stage of K or of V
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
template <bool kMayEnd>
__device__ __forceinline__ void load_tile(uint32_t tile, const Bf16* from, int first, int rows, int n) {
  constexpr int kChunks = kD / 8, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0);
  const int r0 = static_cast<int>(threadIdx.x) / kChunks,
            column = static_cast<int>(threadIdx.x) % kChunks * 8;
  const uint32_t to = tile + static_cast<uint32_t>(offset(r0, column) * 2);
  const Bf16* source = from + static_cast<int64_t>(first + r0) * kD + column;
#pragma unroll
  for (int r = 0; r < rows; r += kStep)
    ptx::cp_async_16(to + static_cast<uint32_t>(r * kD * 2), source + r * kD, !kMayEnd || first + r0 + r < n);
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

/// S = Q K^T: the queries of the tile from `row` on.
__device__ __forceinline__ void multiply_qk(float (&acc_s)[kMTiles][kSTiles][4], uint32_t sQ, int row,
                                            uint32_t sK, int lane) {
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t q[kMTiles][4];
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) ptx::ldmatrix_x4(q[mt], down_first(sQ, row + mt * 16, c, lane));
#pragma unroll
    for (int j = 0; j < kTileN; j += 16) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, across_first(sK, j, c, lane));
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        ptx::mma_bf16(acc_s[mt][j / 8], q[mt], k[0], k[1]);
        ptx::mma_bf16(acc_s[mt][j / 8 + 1], q[mt], k[2], k[3]);
      }
    }
  }
}

/// Masks keys behind the end of the sequence.
__device__ __forceinline__ void mask(float (&acc_s)[kSTiles][4], int keys, int lane) {
#pragma unroll
  for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (nt * 8 + 2 * (lane % 4) + e % 2 >= keys) acc_s[nt][e] = -INFINITY;
    }
  }
}

/// Raises the maxima of 16 rows when a weight would exceed 2^kLazy, and rescales their sums and outputs.
/// rows[].max is of unscaled scores, and may be smaller than the largest.
__device__ __forceinline__ void raise_max(const float (&acc_s)[kSTiles][4], float (&acc_o)[kOTiles][4],
                                          OnlineRow (&rows)[2], float scale_log2) {
  float largest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    largest[half] = fmaxf(acc_s[0][2 * half], acc_s[0][2 * half + 1]);
#pragma unroll
    for (int nt = 1; nt < kSTiles; ++nt)
      largest[half] = fmaxf(largest[half], fmaxf(acc_s[nt][2 * half], acc_s[nt][2 * half + 1]));
    largest[half] = quad_max(largest[half]);
  }
  const bool raise =
      (largest[0] - rows[0].max) * scale_log2 > kLazy || (largest[1] - rows[1].max) * scale_log2 > kLazy;
  if (!__any_sync(kWholeWarp, raise)) return;  // a vote: all rows of the warp raise together
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

/// P = exp(S - m), 16 keys at a time, and O += P V.
__device__ __forceinline__ void multiply_pv(float (&acc_o)[kMTiles][kOTiles][4],
                                            float (&acc_s)[kMTiles][kSTiles][4],
                                            OnlineRow (&rows)[kMTiles][2], uint32_t sV, float scale_log2,
                                            int lane) {
#pragma unroll
  for (int j = 0; j < kTileN; j += 16) {
    uint32_t weights[kMTiles][4];
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float(&s)[4] = acc_s[mt][j / 8 + r / 2];
        OnlineRow& row = rows[mt][r % 2];
        const float base = row.max * scale_log2;
        const float left = ptx::ex2(fmaf(s[r % 2 * 2], scale_log2, -base));
        const float right = ptx::ex2(fmaf(s[r % 2 * 2 + 1], scale_log2, -base));
        row.sum += left + right;  // of this lane's keys; summed over the lanes at the end
        weights[mt][r] = pack_bf16(left, right);
      }
    }
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, down_first(sV, j, c, lane));
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        ptx::mma_bf16(acc_o[mt][c / 8], weights[mt], v[0], v[1]);
        ptx::mma_bf16(acc_o[mt][c / 8 + 1], weights[mt], v[2], v[3]);
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

__global__ void __launch_bounds__(kThreads, 2) attention(Attention<Bf16> p, int tiles) {
  const uint32_t sQ = ptx::shared_address(shared_memory<Bf16>());  // in bytes: addresses, not pointers
  const uint32_t sK = sQ + kTileM * kD * 2, sV = sK + 2 * kStage;
  const int n = p.seqlen, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  const int last = (n - 1) / kTileN * kTileN;  // first key of the last block
  const int tiles_of_row = (n + kTileM - 1) / kTileM;
  const auto load_keys = [&](int64_t first, int j0, uint32_t stage, auto may_end) {
    constexpr bool kMayEnd = decltype(may_end)::value;
    load_tile<kMayEnd>(sK + stage * kStage, p.k + first * kD, j0, kTileN, n);
    load_tile<kMayEnd>(sV + stage * kStage, p.v + first * kD, j0, kTileN, n);
    ptx::cp_async_commit();
  };
  const auto load_first = [&](int tile, uint32_t stage) {
    const int64_t first = static_cast<int64_t>(tile / tiles_of_row) * n;
    load_tile<true>(sQ, p.q + first * kD, tile % tiles_of_row * kTileM, kTileM, n);
    load_keys(first, last, stage, std::true_type{});
  };
  const float scale_log2 = p.scale * kLog2e;
  uint32_t stage = 0;
  load_first(static_cast<int>(blockIdx.x), stage);
  for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
    const int64_t first = static_cast<int64_t>(tile / tiles_of_row) * n;
    float acc_o[kMTiles][kOTiles][4] = {};
    OnlineRow rows[kMTiles][2];
    const auto step = [&](int j0, auto masked) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // block j0 may be read, and the stage of the block before may be overwritten
      if (j0 > 0) load_keys(first, j0 - kTileN, stage ^ 1, std::false_type{});
      float acc_s[kMTiles][kSTiles][4] = {};
      multiply_qk(acc_s, sQ, warp * 16 * kMTiles, sK + stage * kStage, lane);
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        if constexpr (decltype(masked)::value) mask(acc_s[mt], n - j0, lane);
        raise_max(acc_s[mt], acc_o[mt], rows[mt], scale_log2);
      }
      multiply_pv(acc_o, acc_s, rows, sV + stage * kStage, scale_log2, lane);
      stage ^= 1;
    };
    step(last, std::true_type{});
    for (int j0 = last - kTileN; j0 >= 0; j0 -= kTileN) step(j0, std::false_type{});
    __syncthreads();  // all warps have read Q: it may be overwritten
    const int next = tile + static_cast<int>(gridDim.x);
    if (next < tiles) load_first(next, stage);
    const int i0 = tile % tiles_of_row * kTileM + warp * 16 * kMTiles;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) store_rows(p, acc_o[mt], rows[mt], first, i0 + mt * 16, lane);
  }
}

void run(const Attention<Bf16>& p) {
  const int tiles = p.batch * static_cast<int>(blocks_of(p.seqlen, kTileM));
  const int at_once =
      sm_count() * (shared_bytes_of_sm() >= 2 * (kBytes + 1024) ? 2 : 1);  // limited by shared memory
  launch(attention, {static_cast<unsigned>(tiles < at_once ? tiles : at_once)}, kThreads, kBytes, p, tiles);
}

}  // namespace ladder::tensor_tuned
