// Attention on Hopper with wgmma: four warps multiply together, 64 queries by 128 keys, and read K, V and Q
// from shared memory themselves. The products are asynchronous; here each is waited for at once.
#include "ladder/harness/hopper.cuh"
#include "ladder/harness/launch.cuh"
#include "ladder/harness/online.cuh"
#include "ladder/harness/ptx.cuh"

namespace ladder::hopper_wgmma {

using Bf16 = __nv_bfloat16;
constexpr int kD = 128;  ///< head size
constexpr int kWarpgroups = 2, kThreads = 128 * kWarpgroups;
constexpr int kTileM = 64 * kWarpgroups, kTileN = 128;  ///< queries of a block, keys of a step
constexpr int kSTiles = kTileN / 8, kOTiles = kD / 8;   ///< accumulators of a warp: 16 x 8 each
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

/// Issues S = Q K^T of a warpgroup's 64 queries. 16 columns are 32 bytes of a strip, two units of a
/// descriptor.
__device__ __forceinline__ void issue_qk(float (&acc_s)[kSTiles][4], uint32_t sQ, uint32_t sK) {
  const uint64_t q = ptx::k_major(sQ), k = ptx::k_major(sK);
  ptx::wgmma<true>(acc_s, q, k);
#pragma unroll
  for (int c = 16; c < kD; c += 16) {
    const uint32_t step = (c / 64 * kStrip + c % 64 * 2) / 16;
    ptx::wgmma<false>(acc_s, q + step, k + step);
  }
  ptx::wgmma_commit();
}

/// Issues O += P V.
__device__ __forceinline__ void issue_pv(float (&acc_o)[kOTiles][4],
                                         const uint32_t (&weights)[kSTiles / 2][4], uint32_t sV) {
  const uint64_t v = ptx::mn_major(sV, kStrip);
#pragma unroll
  for (int j = 0; j < kTileN; j += 16) ptx::wgmma(acc_o, weights[j / 16], v + j * kRow / 16);
  ptx::wgmma_commit();
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
  const int warpgroup = __shfl_sync(kWholeWarp, thread / 128, 0);  // marks the value warp-uniform
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
    float acc_s[kSTiles][4], factor[2];
    uint32_t weights[kSTiles / 2][4];
    ptx::wgmma_fence();
    issue_qk(acc_s, sQ + warpgroup * 64 * kRow, sK + stage * kTile);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_s);
    if (j0 + kTileN > n) mask(acc_s, n - j0, lane);
    if (raise_max(acc_s, rows, factor, scale_log2)) rescale(acc_o, factor);
    weigh(acc_s, rows, scale_log2);
    pack(acc_s, weights);
    ptx::wgmma_fence();
    issue_pv(acc_o, weights, sV + stage * kTile);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_o);
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

}  // namespace ladder::hopper_wgmma
