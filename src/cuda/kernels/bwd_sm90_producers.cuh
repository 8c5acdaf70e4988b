// The producers of bwd_sm90, a warp each: the planner, two loaders, and the one that adds dQ of the consumers.
#pragma once

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_dq.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace fovea::cuda {

/// Fills in the tile of this index: sections of heads_at_once heads, in each block by block, the first keys first.
/// Whether it has any key.
template <class Instance>
__device__ __forceinline__ bool bwd_sm90_make_work(const BackwardArgs& b, int index,
                                                   const BwdSm90Work& work) {
  constexpr int kTileN = Instance::kConfig.tile_n();
  const tile::AttentionParams& p = b.p;
  const int section = index / (b.heads_at_once * b.key_blocks);
  index -= section * b.heads_at_once * b.key_blocks;
  int head = section * b.heads_at_once;
  const int heads = min(b.heads_at_once, p.heads_kv * p.batch - head);
  const int first_key = index / heads * kTileN;
  head += index % heads;
  const int batch = head / p.heads_kv;
  work.set(BwdSm90Work::kFirstKey, first_key);
  work.set(BwdSm90Work::kBatch, batch);
  work.set(BwdSm90Work::kHeadKv, head - batch * p.heads_kv);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  if (first_key >= span.used_k) return false;
  work.set(BwdSm90Work::kRowQ, static_cast<int>(span.row_q));
  work.set(BwdSm90Work::kRowK, static_cast<int>(span.row_k));
  work.set(BwdSm90Work::kUsedQ, span.used_q);
  work.set(BwdSm90Work::kUsedK, span.used_k);
  tile::KvBlocks blocks =
      tile::q_blocks(p, span, first_key, min(first_key + kTileN, span.used_k), Instance::kConfig.tile_m);
  if (blocks.begin >= blocks.end) blocks = {};
  if (first_key + kTileN > span.used_k) blocks.full_begin = blocks.full_end = blocks.begin;
  work.set(BwdSm90Work::kMBegin, blocks.begin);
  work.set(BwdSm90Work::kMEnd, blocks.end);
  work.set(BwdSm90Work::kFullBegin, blocks.full_begin);
  work.set(BwdSm90Work::kFullEnd, blocks.full_end);
  work.set(BwdSm90Work::kSteps, p.group * (blocks.end - blocks.begin));
  return true;
}

/// Plans the tiles of this CTA: its first is that of its index, each other one the next that nobody has. One thread.
template <class Instance>
__device__ __forceinline__ void bwd_sm90_plan(const TmaBackwardArgs& args,
                                              const BwdSm90Memory<Instance>& memory) {
  const BackwardArgs& b = args.b;
  const int count = b.key_blocks * b.p.heads_kv * b.p.batch;
  int index = static_cast<int>(blockIdx.x);
  for (uint32_t tile = 0;; ++tile) {
    ptx::mbarrier_wait(memory.empty_work(tile), (tile / 2 & 1) ^ 1);
    while (index < count && !bwd_sm90_make_work<Instance>(b, index, memory.work(tile)))
      index = static_cast<int>(gridDim.x) + atomicAdd(args.tile_counter, 1);
    if (index >= count) memory.work(tile).set(BwdSm90Work::kSteps, -1);
    ptx::mbarrier_arrive(memory.full_work(tile));
    if (index >= count) return;
    index = static_cast<int>(gridDim.x) + atomicAdd(args.tile_counter, 1);
  }
}

/// Loads K of a tile, or V, the CTA's number `keys`.
template <class Instance, bool kKeys>
__device__ __forceinline__ void bwd_sm90_load_keys(const TmaBackwardArgs& args,
                                                   const BwdSm90Memory<Instance>& memory,
                                                   const BwdSm90Work& work, int batch, uint32_t keys) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  const uint32_t full = kKeys ? memory.full_k() : memory.full_v(), to = kKeys ? memory.k() : memory.v();
  ptx::mbarrier_wait(kKeys ? memory.empty_k() : memory.empty_v(), (keys & 1) ^ 1);
  ptx::mbarrier_arrive_expect(full, kKeys ? kConfig.k_bytes() : kConfig.v_bytes());
#pragma unroll 1
  for (int c = 0; c < kConfig.strips(kKeys ? kConfig.head_dim : kConfig.head_dim_v); ++c)
    ptx::tma_load(to + c * kConfig.tile_n() * kConfig.kRowBytes, kKeys ? args.k : args.v, full,
                  c * kConfig.kStrip, work[BwdSm90Work::kRowK] + work[BwdSm90Work::kFirstKey],
                  work[BwdSm90Work::kHeadKv], batch);
}

/// Loads Q, lse and K of each tile (kQueries), or dO, delta and V. One thread.
template <class Instance, bool kQueries>
__device__ __forceinline__ void bwd_sm90_load(const TmaBackwardArgs& args,
                                              const BwdSm90Memory<Instance>& memory) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  constexpr int kTileM = kConfig.tile_m, kRowBytes = kConfig.kRowBytes, kPieces = kConfig.pieces;
  constexpr int kSlots = kQueries ? kConfig.q_slots : kConfig.do_slots;
  constexpr int kStrips = kConfig.strips(kQueries ? kConfig.head_dim : kConfig.head_dim_v) / kPieces;
  constexpr int kPieceBytes = kQueries ? kConfig.q_bytes() : kConfig.do_bytes();
  const BackwardArgs& b = args.b;
  const CUtensorMap& rows_map = kQueries ? args.q : args.d_o;
  const bool packed = b.p.cu_seqlens_q != nullptr;
  uint32_t use = 0, keys = 0;
  for (uint32_t tile = 0;; ++tile) {
    ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
    const BwdSm90Work work = memory.work(tile);
    int left = work[BwdSm90Work::kSteps];
    if (left < 0) return;
    int head = work[BwdSm90Work::kHeadKv] * b.p.group, n = work[BwdSm90Work::kMBegin];
    for (bool first = true; left > 0; --left, first = false) {
      const int batch = packed ? 0 : work[BwdSm90Work::kBatch];
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece, ++use) {
        const RingSlot<kSlots> slot(use);
        const uint32_t full = kQueries ? memory.full_q(slot.index) : memory.full_do(slot.index);
        const uint32_t to = kQueries ? memory.q(slot.index) : memory.d_o(slot.index);
        ptx::mbarrier_wait(kQueries ? memory.empty_q(slot.index) : memory.empty_do(slot.index),
                           slot.phase ^ 1);
        ptx::mbarrier_arrive_expect(full, kPieceBytes + (piece == 0 ? kConfig.statistics_bytes() : 0));
#pragma unroll 1
        for (int c = 0; c < kStrips; ++c)
          ptx::tma_load(to + c * kTileM * kRowBytes, rows_map, full, (piece * kStrips + c) * kConfig.kStrip,
                        0, work[BwdSm90Work::kRowQ] + n * kTileM, head, batch);
        if (piece == 0)
          ptx::bulk_load(kQueries ? memory.lse(slot.index) : memory.delta(slot.index),
                         (kQueries ? b.lse_log2 : b.delta) +
                             (int64_t{work[BwdSm90Work::kBatch] * b.p.heads_q + head} * b.rows + n * kTileM),
                         kConfig.statistics_bytes(), full);
      }
      if (first) bwd_sm90_load_keys<Instance, kQueries>(args, memory, work, batch, keys++);
      if (++n == work[BwdSm90Work::kMEnd]) n = work[BwdSm90Work::kMBegin], ++head;
    }
    ptx::mbarrier_arrive(memory.empty_work(tile));
  }
}

/// Adds what the consumers stage of dQ to dq_sum. One warp, whose first lane issues.
template <class Instance>
__device__ __forceinline__ void bwd_sm90_add_dq(const TmaBackwardArgs& args,
                                                const BwdSm90Memory<Instance>& memory, int lane) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  const BackwardArgs& b = args.b;
  for (int w = 0; w < kConfig.kConsumers; ++w) ptx::barrier_arrive(kDqFree + w, kConsumerAndWriter);
  for (uint32_t tile = 0;; ++tile) {
    ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
    const BwdSm90Work work = memory.work(tile);
    int left = work[BwdSm90Work::kSteps];
    if (left < 0) break;
    int head = work[BwdSm90Work::kBatch] * b.p.heads_q + work[BwdSm90Work::kHeadKv] * b.p.group,
        n = work[BwdSm90Work::kMBegin];
    for (; left > 0; --left) {
      float* const sums = BwdSm90Dq<Instance>::sums_of(b, head, n);
#pragma unroll
      for (int w = 0; w < kConfig.kConsumers; ++w) {
        ptx::barrier_wait(kDqStaged + w, kConsumerAndWriter);
        if (lane == 0) {
          ptx::async_proxy_fence();  // what the consumer has written, for the reductions
#pragma unroll 1
          for (int warp = 0; warp < 4; ++warp) BwdSm90Dq<Instance>::add(memory.dq(w), sums, w, warp);
          ptx::bulk_commit();
        }
      }
#pragma unroll
      for (int w = 0; w < kConfig.kConsumers; ++w) {
        if (lane == 0) w == 0 ? ptx::bulk_wait_read<1>() : ptx::bulk_wait_read<0>();
        __syncwarp();  // the other lanes pass on only what the first has seen
        ptx::barrier_arrive(kDqFree + w, kConsumerAndWriter);
      }
      if (++n == work[BwdSm90Work::kMEnd]) n = work[BwdSm90Work::kMBegin], ++head;
    }
    __syncwarp();  // all lanes have read what the tile is
    if (lane == 0) ptx::mbarrier_arrive(memory.empty_work(tile));
  }
  if (lane == 0) ptx::bulk_wait<0>();  // shared memory is this CTA's until its last addition has read it
}

}  // namespace fovea::cuda
