// Attention on Hopper, first step: tiles come by TMA. One thread issues copies of whole boxes, and a barrier in
// shared memory counts their bytes; products are still mma.sync. Blocks of keys go from the last to the first,
// so that only the first step can reach behind the end.
#include "ladder/harness/hopper.cuh"
#include "ladder/harness/launch.cuh"
#include "ladder/harness/online.cuh"
#include "ladder/harness/ptx.cuh"

namespace ladder::hopper_tma {

using Bf16 = __nv_bfloat16;
constexpr int kD = 128;  ///< head size
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileM = 16 * kWarps, kTileN = 128;      ///< queries of a block, keys of a step
constexpr int kSTiles = kTileN / 8, kOTiles = kD / 8;  ///< accumulators of a warp: 16 x 8 each
constexpr int kStages = 2;
constexpr uint32_t kRow = 128, kStrip = kTileN * kRow;  ///< bytes of a row of 64 columns, of all rows
constexpr uint32_t kQBytes = kTileM * kD * 2, kTile = 2 * kStrip;  ///< of all columns
constexpr size_t kBytes = kQBytes + 2 * kStages * kTile + 8 * (kStages + 1);
static_assert(kTileM == kTileN, "Q, K and V come in the same boxes");

struct Maps {
  CUtensorMap q, k, v;
};

/// Loads rows from `row` on of a sequence, in strips of 64 columns; `barrier` counts their bytes.
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier, int row,
                                          int sequence) {
  ptx::tma_load(to, map, barrier, 0, row, sequence);
  ptx::tma_load(to + kStrip, map, barrier, 64, row, sequence);
}

/// 16 x 16 elements at (row, column), multiples of 16, for ldmatrix: a lane adds one constant offset.
__device__ __forceinline__ uint32_t operand(uint32_t tile, int row, int column, int lane_row,
                                            int lane_chunk) {
  const auto own = static_cast<uint32_t>(lane_row * 128 + (lane_chunk ^ lane_row % 8) * 16);
  return ((tile + own) ^ static_cast<uint32_t>(column % 64 * 2)) + static_cast<uint32_t>(row) * kRow +
         static_cast<uint32_t>(column / 64) * kStrip;
}

/// S = Q K^T.
__device__ __forceinline__ void multiply_qk(float (&acc_s)[kSTiles][4], uint32_t sQ, int row, uint32_t sK,
                                            int lane) {
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t q[4];
    ptx::ldmatrix_x4(q, operand(sQ, row, c, lane % 16, lane / 16));
#pragma unroll
    for (int j = 0; j < kTileN; j += 16) {
      uint32_t k[4];
      ptx::ldmatrix_x4(k, operand(sK, j, c, lane % 8 + lane / 16 * 8, lane / 8 % 2));
      ptx::mma_bf16(acc_s[j / 8], q, k[0], k[1]);
      ptx::mma_bf16(acc_s[j / 8 + 1], q, k[2], k[3]);
    }
  }
}

/// O += P V.
__device__ __forceinline__ void multiply_pv(float (&acc_o)[kOTiles][4],
                                            const uint32_t (&weights)[kSTiles / 2][4], uint32_t sV,
                                            int lane) {
#pragma unroll
  for (int j = 0; j < kTileN; j += 16) {
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, operand(sV, j, c, lane % 16, lane / 16));
      ptx::mma_bf16(acc_o[c / 8], weights[j / 16], v[0], v[1]);
      ptx::mma_bf16(acc_o[c / 8 + 1], weights[j / 16], v[2], v[3]);
    }
  }
}

/// Stores O and L of this warp's queries, from row i0 of `first` on.
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

__global__ void __launch_bounds__(kThreads)
    attention(const __grid_constant__ Maps maps, const Attention<Bf16> p) {
  const uint32_t sQ = ptx::shared_address(shared_memory<Bf16>()), sK = sQ + kQBytes,
                 sV = sK + kStages * kTile;
  const uint32_t full = sV + kStages * kTile, full_q = full + 8 * kStages;  // barriers
  const int n = p.seqlen, thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int sequence = static_cast<int>(blockIdx.y), i0 = static_cast<int>(blockIdx.x) * kTileM;
  const int last = (n - 1) / kTileN * kTileN;  // first key of the last block
  const float scale_log2 = p.scale * kLog2e;
  const auto load_keys = [&](int j0, uint32_t stage) {
    ptx::mbarrier_arrive_expect(full + 8 * stage, 2 * kTile);
    load_tile(sK + stage * kTile, maps.k, full + 8 * stage, j0, sequence);
    load_tile(sV + stage * kTile, maps.v, full + 8 * stage, j0, sequence);
  };
  if (thread == 0) {
    for (int i = 0; i <= kStages; ++i) ptx::mbarrier_init(full + 8 * i, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(full_q, kQBytes);
    load_tile(sQ, maps.q, full_q, i0, sequence);
    load_keys(last, 0);
  }
  __syncthreads();  // the barriers are initialised
  ptx::mbarrier_wait(full_q, 0);

  float acc_o[kOTiles][4] = {};
  OnlineRow rows[2];
  uint32_t stage = 0, phase = 0;
  for (int j0 = last; j0 >= 0; j0 -= kTileN) {
    ptx::mbarrier_wait(full + 8 * stage, phase);
    __syncthreads();  // all warps have read the block before: its stage may be overwritten
    if (thread == 0 && j0 > 0) load_keys(j0 - kTileN, stage ^ 1);
    float acc_s[kSTiles][4] = {}, factor[2];
    uint32_t weights[kSTiles / 2][4];
    multiply_qk(acc_s, sQ, warp * 16, sK + stage * kTile, lane);
    if (j0 + kTileN > n) mask(acc_s, n - j0, lane);
    if (raise_max(acc_s, rows, factor, scale_log2)) rescale(acc_o, factor);
    weigh(acc_s, rows, scale_log2);
    pack(acc_s, weights);
    multiply_pv(acc_o, weights, sV + stage * kTile, lane);
    stage ^= 1;
    phase ^= stage == 0;
  }
  store_rows(p, acc_o, rows, static_cast<int64_t>(sequence) * n, i0 + warp * 16, lane);
}

void run(const Attention<Bf16>& p) {
  const auto map = [&](const Bf16* x) { return tensor_map(x, p.batch, p.seqlen, kD, kTileN); };
  launch(attention, {blocks_of(p.seqlen, kTileM), static_cast<unsigned>(p.batch)}, kThreads, kBytes,
         Maps{map(p.q), map(p.k), map(p.v)}, p);
}

}  // namespace ladder::hopper_tma
