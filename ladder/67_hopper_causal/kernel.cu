// Causal attention on Hopper: query i sees keys 0 to i. A consumer has as many queries as a block has keys, so it
// masks one block, its first, and skips those behind it; the order of tiles is that of rung 52.
#include "ladder/harness/hopper.cuh"
#include "ladder/harness/launch.cuh"
#include "ladder/harness/online.cuh"
#include "ladder/harness/order.cuh"
#include "ladder/harness/ptx.cuh"

namespace ladder::hopper_causal {

using Bf16 = __nv_bfloat16;
constexpr int kD = 128;                                           ///< head size
constexpr int kConsumers = 3, kThreads = 128 * (kConsumers + 1);  ///< warpgroups; the first one loads
constexpr int kTileM = 64 * kConsumers, kTileN = 64;              ///< queries of a block, keys of a step
static_assert(kTileN == 64);                                      // a consumer's first block is the diagonal
constexpr int kSTiles = kTileN / 8, kOTiles = kD / 8;             ///< accumulators of a warp: 16 x 8 each
constexpr int kStages = 4;
// Barriers, two for each stage: full (loads are done), empty (all warps have read it).
constexpr int kFullK = 0, kFullV = kStages, kEmptyK = 2 * kStages, kEmptyV = 3 * kStages,
              kFullQ = 4 * kStages, kEmptyQ = kFullQ + kConsumers,
              kBarriers = kEmptyQ + kConsumers;  // Q: one for each consumer
// 65,536 registers over 512 threads are 128 each; a producer thread releases 96, a consumer thread takes 32.
constexpr int kProducerRegisters = 32, kConsumerRegisters = 160;
constexpr uint32_t kRow = 128, kStrip = kTileN * kRow;         ///< bytes of a row of 64 columns, of all rows
constexpr uint32_t kTile = 2 * kStrip;                         ///< of all columns
constexpr uint32_t kQStrip = 64 * kRow, kQTile = 2 * kQStrip;  ///< of a consumer: Q, and O
constexpr size_t kBytes = kConsumers * 2 * kQTile + 2 * kStages * kTile + 8 * kBarriers;

struct Maps {
  CUtensorMap q, k, v, o;
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
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                          uint32_t strip, int row, int sequence) {
  ptx::tma_load(to, map, barrier, 0, row, sequence);
  ptx::tma_load(to + strip, map, barrier, 64, row, sequence);
}

/// Issues S = Q K^T of a warpgroup's 64 queries. 16 columns are 32 bytes of a strip, two units of a
/// descriptor.
__device__ __forceinline__ void issue_qk(float (&acc_s)[kSTiles][4], uint32_t sQ, uint32_t sK) {
  const uint64_t q = ptx::k_major(sQ), k = ptx::k_major(sK);
  ptx::wgmma<true>(acc_s, q, k);
#pragma unroll
  for (int c = 16; c < kD; c += 16) {
    const uint32_t inside = c % 64 * 2;
    ptx::wgmma<false>(acc_s, q + (c / 64 * kQStrip + inside) / 16, k + (c / 64 * kStrip + inside) / 16);
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

/// Computes packed weights against the maxima of earlier blocks. False when one may exceed 2^kLazy, which their
/// sums show: then nothing else has changed, and the caller computes them again.
__device__ __forceinline__ bool weigh_stale(const float (&acc_s)[kSTiles][4],
                                            uint32_t (&weights)[kSTiles / 2][4], OnlineRow (&rows)[2],
                                            float scale_log2) {
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < 2 * kSTiles; ++i) {
    const float(&s)[4] = acc_s[i / 2];
    const int half = i % 2;
    const float base = rows[half].max * scale_log2;
    const float left = ptx::ex2(fmaf(s[2 * half], scale_log2, -base));
    const float right = ptx::ex2(fmaf(s[2 * half + 1], scale_log2, -base));
    sum[half] += left + right;
    weights[i / 4][i % 4] = pack_bf16(left, right);
  }
  constexpr float kBound = kTileN / 4 << static_cast<int>(kLazy);  // 2^kLazy for each key of a lane
  if (__any_sync(kWholeWarp, sum[0] > kBound || sum[1] > kBound)) return false;
  rows[0].sum += sum[0];
  rows[1].sum += sum[1];
  return true;
}

/// Stores O and L of this warp's queries, from row i0 of a sequence on: into its 16 rows of both strips at sO,
/// then by TMA, which skips rows behind the end.
__device__ __forceinline__ void store_rows(const Attention<Bf16>& p, const CUtensorMap& map,
                                           const float (&acc_o)[kOTiles][4], const OnlineRow (&rows)[2],
                                           uint32_t sO, int sequence, int i0, int lane) {
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = i0 + lane / 4 + 8 * half;
    const float sum = quad_sum(rows[half].sum);
    inverse[half] = __fdividef(1.0f, sum);
    if (lane % 4 == 0 && i < p.seqlen)
      p.lse[static_cast<int64_t>(sequence) * p.seqlen + i] = rows[half].max * p.scale + logf(sum);
  }
  if (lane == 0) ptx::tma_store_wait_read();
  __syncwarp();  // the store of the O before has read shared memory: it may be overwritten
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&o)[4] = acc_o[c / 8 + i / 2];
      x[i] = pack_bf16(o[i % 2 * 2] * inverse[i % 2], o[i % 2 * 2 + 1] * inverse[i % 2]);
    }
    const int r = lane % 16, chunk = c / 8 % 8 + lane / 16;
    ptx::stmatrix_x4(sO + c / 64 * kQStrip + r * kRow + (chunk ^ r % 8) * 16, x);
  }
  ptx::async_proxy_fence();
  __syncwarp();  // all rows are written and visible to TMA
  if (lane == 0 && i0 < p.seqlen) {
    ptx::tma_store(map, sO, 0, i0, sequence);
    ptx::tma_store(map, sO + kQStrip, 64, i0, sequence);
    ptx::tma_store_commit();
  }
}

/// Masks: the row of this lane sees the block's keys up to `own`, the row eight below it eight more.
__device__ __forceinline__ void mask_causal(float (&acc_s)[kSTiles][4], int own, int lane) {
#pragma unroll
  for (int i = 0; i < 4 * kSTiles; ++i) {
    if (i / 4 * 8 + 2 * (lane % 4) + i % 2 > own + i / 2 % 2 * 8) acc_s[i / 4][i % 4] = -INFINITY;
  }
}

/// First key of the last block that any query of a tile sees.
__device__ __forceinline__ int last_block(int n, CausalOrder::Place at) {
  return min(at.i0 + kTileM, (n + kTileN - 1) / kTileN * kTileN) - kTileN;
}

__global__ void __launch_bounds__(kThreads)
    attention(const __grid_constant__ Maps maps, const Attention<Bf16> p, const CausalOrder order) {
  const uint32_t sQ = ptx::shared_address(shared_memory<Bf16>()), sO = sQ + kConsumers * kQTile,
                 sK = sO + kConsumers * kQTile, sV = sK + kStages * kTile, barriers = sV + kStages * kTile;
  const auto barrier = [&](int i) { return barriers + 8 * static_cast<uint32_t>(i); };
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, block = static_cast<int>(blockIdx.x);
  const int warpgroup = __shfl_sync(kWholeWarp, thread / 128, 0);  // marks the value warp-uniform
  if (thread == 0) {
    for (int i = 0; i < kBarriers; ++i)
      ptx::mbarrier_init(barrier(i), i >= kEmptyQ ? 4 : i >= kEmptyK && i < kFullQ ? 4 * kConsumers : 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are initialised
  Ring ring;

  if (warpgroup == 0) {
    ptx::give_registers<kProducerRegisters>();
    const auto load_q = [&](CausalOrder::Place at, int w, uint32_t phase) {
      ptx::mbarrier_wait(barrier(kEmptyQ + w), phase ^ 1);
      ptx::mbarrier_arrive_expect(barrier(kFullQ + w), kQTile);
      load_tile(sQ + w * kQTile, maps.q, barrier(kFullQ + w), kQStrip, at.i0 + 64 * w, at.sequence);
    };
    const auto load = [&](uint32_t to, const CUtensorMap& map, int full, int empty, int j0, int sequence) {
      ptx::mbarrier_wait(barrier(empty + ring.stage), ring.phase ^ 1);
      ptx::mbarrier_arrive_expect(barrier(full + ring.stage), kTile);
      load_tile(to + ring.stage * kTile, map, barrier(full + ring.stage), kStrip, j0, sequence);
    };
    for (int round = 0, tile; (tile = order.tile(round, block)) < order.tiles; ++round) {
      const CausalOrder::Place at = order.at(tile);
      if (thread == 0) {
        for (int j0 = last_block(p.seqlen, at); j0 >= 0; j0 -= kTileN, ring.advance()) {
          load(sK, maps.k, kFullK, kEmptyK, j0, at.sequence);
          load(sV, maps.v, kFullV, kEmptyV, j0, at.sequence);
        }
      } else if (thread == 32) {
        for (int w = 0; w < kConsumers; ++w) load_q(at, w, round % 2);
      }
    }
    return;
  }

  ptx::take_registers<kConsumerRegisters>();
  const int w = warpgroup - 1, warp = thread / 32 % 4;  // consumer, and warp of it
  const float scale_log2 = p.scale * kLog2e;
  const auto release = [&](int empty) {  // after a wait for products, at which all lanes of a warp meet
    if (lane == 0) ptx::mbarrier_arrive(barrier(empty));
  };
  for (int round = 0, tile; (tile = order.tile(round, block)) < order.tiles; ++round) {
    const CausalOrder::Place at = order.at(tile);
    const int i0 = at.i0 + 64 * w;  // first of this consumer's queries, and key of its last block
    const int first = i0 < p.seqlen ? i0 : -kTileN;  // none for queries behind the last
    for (int j0 = last_block(p.seqlen, at); j0 > first; j0 -= kTileN, ring.advance()) {
      ptx::mbarrier_wait(barrier(kFullK + ring.stage), ring.phase);
      ptx::mbarrier_wait(barrier(kFullV + ring.stage), ring.phase);
      __syncwarp();  // all lanes have seen the phases: lane 0 may arrive for the warp
      release(kEmptyK + ring.stage);
      release(kEmptyV + ring.stage);
    }
    float acc_o[kOTiles][4] = {};
    OnlineRow rows[2];
    ptx::mbarrier_wait(barrier(kFullQ + w), round % 2);
    float factor[2];
    uint32_t weights[kSTiles / 2][4];
    Ring before;
    for (int j0 = first; j0 >= 0; j0 -= kTileN, ring.advance()) {
      float acc_s[kSTiles][4];
      ptx::mbarrier_wait(barrier(kFullK + ring.stage), ring.phase);
      ptx::wgmma_fence();
      issue_qk(acc_s, sQ + w * kQTile, sK + ring.stage * kTile);
      ptx::wgmma_wait<0>();  // S of this block and O of the one before are done
      ptx::wgmma_done(acc_s);
      ptx::wgmma_done(acc_o);
      release(kEmptyK + ring.stage);
      if (j0 < first) release(kEmptyV + before.stage);
      if (j0 == 0) release(kEmptyQ + w);
      if (j0 == first) mask_causal(acc_s, 16 * warp + lane / 4, lane);
      if (j0 == first || !weigh_stale(acc_s, weights, rows, scale_log2)) {
        if (raise_max(acc_s, rows, factor, scale_log2)) rescale(acc_o, factor);
        weigh(acc_s, rows, scale_log2);
        pack(acc_s, weights);
      }
      ptx::mbarrier_wait(barrier(kFullV + ring.stage), ring.phase);
      ptx::wgmma_fence();
      issue_pv(acc_o, weights, sV + ring.stage * kTile);
      before = ring;
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_o);
    release(first >= 0 ? kEmptyV + before.stage : kEmptyQ + w);
    store_rows(p, maps.o, acc_o, rows, sO + w * kQTile + warp * 16 * kRow, at.sequence, i0 + 16 * warp, lane);
  }
  if (lane == 0) ptx::tma_store_wait_read();  // shared memory must outlive the stores
}

void run(const Attention<Bf16>& p) {
  const auto map = [&](const Bf16* x, int box_rows) {
    return tensor_map(x, p.batch, p.seqlen, kD, box_rows);
  };
  const CausalOrder order = causal_order(p.batch, p.seqlen, kTileM, sm_count());
  launch(attention, {static_cast<unsigned>(order.blocks)}, kThreads, kBytes,
         Maps{map(p.q, 64), map(p.k, kTileN), map(p.v, kTileN), map(p.o, 16)}, p, order);
}

}  // namespace ladder::hopper_causal
