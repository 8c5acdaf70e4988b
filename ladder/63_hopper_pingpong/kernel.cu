// Attention on Hopper, ping-pong: consumers queue their products in turns, so that one computes exponentials
// while the tensor cores work for the other. A consumer queues its next scores right after the outputs of this
// block.
#include "ladder/harness/hopper.cuh"
#include "ladder/harness/launch.cuh"
#include "ladder/harness/online.cuh"
#include "ladder/harness/ptx.cuh"

namespace ladder::hopper_pingpong {

using Bf16 = __nv_bfloat16;
constexpr int kD = 128;                                           ///< head size
constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);  ///< warpgroups; the first one loads
constexpr int kTileM = 64 * kConsumers, kTileN = 128;             ///< queries of a block, keys of a step
constexpr int kSTiles = kTileN / 8, kOTiles = kD / 8;             ///< accumulators of a warp: 16 x 8 each
constexpr int kStages = 2;
// Barriers, two for each stage: full (loads are done), empty (all warps have read it).
constexpr int kFullK = 0, kFullV = kStages, kEmptyK = 2 * kStages, kEmptyV = 3 * kStages,
              kFullQ = 4 * kStages, kBarriers = kFullQ + 1;
// 65,536 registers over 384 threads are 168 each; a producer thread releases 144, a consumer thread takes 72.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
constexpr uint32_t kRow = 128, kStrip = kTileN * kRow;  ///< bytes of a row of 64 columns, of all rows
constexpr uint32_t kQBytes = kTileM * kD * 2, kTile = 2 * kStrip;  ///< of all columns
constexpr size_t kBytes = kQBytes + 2 * kStages * kTile + 8 * kBarriers;
static_assert(kTileM == kTileN, "Q, K and V come in the same boxes");

struct Maps {
  CUtensorMap q, k, v;
};

/// The current stage of a ring, and the parity of its phase.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
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
                 sV = sK + kStages * kTile, barriers = sV + kStages * kTile;
  const auto barrier = [&](int i) { return barriers + 8 * static_cast<uint32_t>(i); };
  const int n = p.seqlen, thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warpgroup = __shfl_sync(kWholeWarp, thread / 128, 0);  // marks the value warp-uniform
  const int sequence = static_cast<int>(blockIdx.y), i0 = static_cast<int>(blockIdx.x) * kTileM;
  const int last = (n - 1) / kTileN * kTileN;  // first key of the last block
  if (thread == 0) {
    for (int i = 0; i < kBarriers; ++i)
      ptx::mbarrier_init(barrier(i), i >= kEmptyK && i < kFullQ ? 4 * kConsumers : 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are initialised
  Ring ring;

  if (warpgroup == 0) {
    ptx::give_registers<kProducerRegisters>();
    if (thread != 0) return;
    ptx::mbarrier_arrive_expect(barrier(kFullQ), kQBytes);
    load_tile(sQ, maps.q, barrier(kFullQ), i0, sequence);
    const auto load = [&](uint32_t to, const CUtensorMap& map, int full, int empty, int j0) {
      ptx::mbarrier_wait(barrier(empty + ring.stage), ring.phase ^ 1);
      ptx::mbarrier_arrive_expect(barrier(full + ring.stage), kTile);
      load_tile(to + ring.stage * kTile, map, barrier(full + ring.stage), j0, sequence);
    };
    for (int j0 = last; j0 >= 0; j0 -= kTileN, ring.advance()) {
      load(sK, maps.k, kFullK, kEmptyK, j0);
      load(sV, maps.v, kFullV, kEmptyV, j0);
    }
    return;
  }

  ptx::take_registers<kConsumerRegisters>();
  const int row = 64 * (warpgroup - 1);  // first row of this consumer in the tile
  const float scale_log2 = p.scale * kLog2e;
  const auto release = [&](int empty) {  // after a wait for products, at which all lanes of a warp meet
    if (lane == 0) ptx::mbarrier_arrive(barrier(empty));
  };
  float acc_o[kOTiles][4] = {};
  OnlineRow rows[2];
  uint32_t weights[kSTiles / 2][4];  // products read them beyond the step that made them
  const int mine = warpgroup,
            other = kConsumers + 1 - warpgroup;  // named barriers of ping-pong, one per consumer
  if (mine == 2) ptx::named_arrive(other, 256);  // consumer 1 begins
  ptx::mbarrier_wait(barrier(kFullQ), 0);
  for (int j0 = last; j0 >= 0; j0 -= kTileN, ring.advance()) {
    float acc_s[kSTiles][4], factor[2];
    ptx::mbarrier_wait(barrier(kFullK + ring.stage), ring.phase);
    ptx::named_wait(mine, 256);
    ptx::wgmma_fence();
    issue_qk(acc_s, sQ + row * kRow, sK + ring.stage * kTile);
    ptx::named_arrive(other, 256);
    ptx::wgmma_wait<0>();  // S of this block and O of the one before are done
    ptx::wgmma_done(acc_s);
    ptx::wgmma_done(acc_o);
    release(kEmptyK + ring.stage);
    if (j0 < last) release(kEmptyV + (ring.stage + kStages - 1) % kStages);
    if (j0 + kTileN > n) mask(acc_s, n - j0, lane);
    if (raise_max(acc_s, rows, factor, scale_log2)) rescale(acc_o, factor);
    weigh(acc_s, rows, scale_log2);
    pack(acc_s, weights);
    ptx::mbarrier_wait(barrier(kFullV + ring.stage), ring.phase);
    ptx::wgmma_fence();
    issue_pv(acc_o, weights, sV + ring.stage * kTile);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_done(acc_o);
  if (mine == 1)
    ptx::named_wait(mine, 256);  // takes the last turn, so that the barrier is left as it was found
  store_rows(p, acc_o, rows, static_cast<int64_t>(sequence) * n, i0 + row + thread / 32 % 4 * 16, lane);
}

void run(const Attention<Bf16>& p) {
  const auto map = [&](const Bf16* x) { return tensor_map(x, p.batch, p.seqlen, kD, kTileN); };
  launch(attention, {blocks_of(p.seqlen, kTileM), static_cast<unsigned>(p.batch)}, kThreads, kBytes,
         Maps{map(p.q), map(p.k), map(p.v)}, p);
}

}  // namespace ladder::hopper_pingpong
