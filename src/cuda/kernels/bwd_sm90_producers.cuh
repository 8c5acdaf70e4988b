// The producers of bwd_sm90, a warp each: two loaders, of which one plans, and the writers, which add dQ of the consumers, and dS
// to the gradient of a bias.
#pragma once

#include "cuda/kernels/bwd_sm90_chain.cuh"
#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_dq.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/warp/alibi_reach.cuh"
#include "tile/wgmma_strips.hpp"

namespace fovea::cuda {

/// A block of keys of a key head, counted over all sequences (tile::head_of_plane).
struct BwdSm90Place {
  int plane, block;
};
/// Sections of heads_at_once heads, in each block by block, the first keys, which most causal queries see, first, or where the order of
/// additions is fixed in that order (BwdSm90Turn).
template <class Instance>
__device__ __forceinline__ BwdSm90Place bwd_sm90_place(const BackwardArgs& b, int index) {
  const int section = min(index / (b.heads_at_once * b.key_blocks), b.whole_sections);
  index -= section * b.heads_at_once * b.key_blocks;
  const int head = section * b.heads_at_once;
  const int heads = section < b.whole_sections ? b.heads_at_once : b.p.heads_kv * b.p.batch - head;
  const int place = index / heads;
  const bool last_keys_first = b.dq_semaphore != nullptr && !BwdSm90Order<Instance>{b}.last_first();
  return {head + index % heads, last_keys_first
                                    ? b.key_blocks - 1 - place
                                    : tile::KeyRounds{b.key_rounds}.block_at(place, b.key_blocks)};
}
/// Of a chain: a head for each cluster in turn, a block for each rank.
__device__ __forceinline__ BwdSm90Place bwd_sm90_place_in_chain(const BackwardArgs& b, int index,
                                                                const BwdSm90Work& work) {
  const int rank = ptx::cta_rank(), tile = index / (static_cast<int>(gridDim.x) / b.cluster);
  const bool upwards = b.mirrors && tile % 2 != 0;
  work.set(BwdSm90Work::kUpwards, upwards ? 1 : 0);
  return {index, upwards ? b.cluster - 1 - rank : rank};
}

/// Fills in the tile of this index. Whether it has any key.
template <class Instance>
__device__ __forceinline__ bool bwd_sm90_make_work(const BackwardArgs& b, int index,
                                                   const BwdSm90Work& work) {
  constexpr bool kChain = Instance::kConfig.chain;
  constexpr int kTileN = Instance::kConfig.tile_n();
  const bool last_first = BwdSm90Order<Instance>{b}.last_first();
  const tile::AttentionParams& p = b.p;
  const auto [plane, block] =
      kChain ? bwd_sm90_place_in_chain(b, index, work) : bwd_sm90_place<Instance>(b, index);
  constexpr bool kAlibi = Instance::kConfig.alibi;
  const auto of_plane = tile::head_of_plane(plane, p.heads_kv, p.batch,
                                            (Instance::kConfig.expression || kAlibi) && b.sequences_first);
  const int batch = of_plane.batch,
            head = kAlibi ? longest_head_first(b.alibi_norms, of_plane.head, p.heads_kv) : of_plane.head;
  const int first_key = block * kTileN;
  work.set(BwdSm90Work::kFirstKey, first_key);
  work.set(BwdSm90Work::kBatch, batch);
  work.set(BwdSm90Work::kHeadKv, head);
  int reach = tile::kEverywhere;
  if constexpr (kAlibi) reach = alibi_reach_of_group(p, b.alibi_norms, batch, head);
  work.set(BwdSm90Work::kReach, reach);
  const tile::SequenceSpan span = tile::sequence_span(p, batch);
  if (first_key >= span.used_k) return false;
  work.set(BwdSm90Work::kRowQ, static_cast<int>(span.row_q));
  work.set(BwdSm90Work::kRowK, static_cast<int>(span.row_k));
  work.set(BwdSm90Work::kUsedQ, span.used_q);
  work.set(BwdSm90Work::kUsedK, span.used_k);
  const auto queries_of = [&](int key) { return bwd_sm90_queries_of<Instance>(p, span, key, reach); };
  tile::KvBlocks blocks = queries_of(first_key);
  if (first_key + kTileN > span.used_k) blocks.full_begin = blocks.full_end = blocks.begin;
  int count = blocks.end - blocks.begin;
  if constexpr (Expression::kHasSees) {
    const BwdSm90Walk walk = BwdSm90Walk::of(b, work);
    // The first step's block is seen.
    if (last_first) {
      blocks.end = walk.seen.before(blocks.end, blocks.begin) + 1;
    } else {
      blocks.begin = walk.seen.from(blocks.begin, blocks.end);
    }
    count = walk.seen.count(blocks.begin, blocks.end);
  }
  work.set(BwdSm90Work::kMBegin, blocks.begin);
  work.set(BwdSm90Work::kMEnd, blocks.end);
  work.set(BwdSm90Work::kFullBegin, blocks.full_begin);
  work.set(BwdSm90Work::kFullEnd, blocks.full_end);
  work.set(BwdSm90Work::kSteps, p.group * count);
  if (kChain || b.dq_semaphore != nullptr) {
    const tile::KvBlocks before = queries_of(first_key + (last_first ? -b.key_rounds * kTileN : kTileN));
    work.set(BwdSm90Work::kBeforeBegin, before.begin);
    work.set(BwdSm90Work::kBeforeEnd, before.end);
  }
  if constexpr (Instance::kConfig.last_writes) {
    const tile::KvBlocks after =
        queries_of(last_first ? tile::KeyRounds{b.key_rounds}.behind(block) * kTileN : first_key - kTileN);
    work.set(BwdSm90Work::kAfterBegin, after.empty() ? blocks.end : after.begin);
  }
  if constexpr (kChain) {
    const tile::KvBlocks after = queries_of(first_key - kTileN);
    work.set(BwdSm90Work::kAfterBegin, after.begin);
    work.set(BwdSm90Work::kAfterEnd, after.end);
  }
  return true;
}

/// The next tile that no CTA has. The first of each is that of its index; where the order of additions is fixed it is
/// taken like the others, so that whom a CTA waits for has begun, in whatever order CTAs start. In a chain all CTAs of a
/// cluster take the same, and clusters take turns.
template <class Instance>
__device__ __forceinline__ int bwd_sm90_first_index(const TmaBackwardArgs& args) {
  const int block = static_cast<int>(blockIdx.x);
  if constexpr (Instance::kConfig.chain) return block / args.b.cluster;
  if (args.b.dq_semaphore == nullptr) return block;
  ptx::wait_for_launches_before();  // the counter is zero
  return atomicAdd(args.b.tile_counter, 1);
}
template <class Instance>
__device__ __forceinline__ int bwd_sm90_next_index(const TmaBackwardArgs& args, int index) {
  ptx::wait_for_launches_before();  // the counter is zero
  if constexpr (Instance::kConfig.chain) return index + static_cast<int>(gridDim.x) / args.b.cluster;
  // As many as CTAs, or where there are fewer tiles than slots all.
  const int given = args.b.dq_semaphore != nullptr ? 0 : args.b.slots;
  return given + atomicAdd(args.b.tile_counter, 1);
}

/// Plans tile number `tile` of this CTA: that of `index` or, where it has no keys, the next that nobody has; whether there is any.
/// One thread.
template <class Instance>
__device__ __forceinline__ bool bwd_sm90_plan(const TmaBackwardArgs& args,
                                              const BwdSm90Memory<Instance>& memory, uint32_t tile,
                                              int index) {
  const BackwardArgs& b = args.b;
  const int count = (Instance::kConfig.chain ? 1 : b.key_blocks) * b.p.heads_kv * b.p.batch;
  ptx::mbarrier_wait(memory.empty_work(tile), (tile / 2 & 1) ^ 1);
  while (index < count && !bwd_sm90_make_work<Instance>(b, index, memory.work(tile)))
    index = bwd_sm90_next_index<Instance>(args, index);
  if (index >= count) memory.work(tile).set(BwdSm90Work::kSteps, -1);
  ptx::mbarrier_arrive(memory.full_work(tile));
  return index < count;
}
/// Plans the tiles of this CTA, where the loader of Q does not. One thread.
template <class Instance>
__device__ __forceinline__ void bwd_sm90_plan_tiles(const TmaBackwardArgs& args,
                                                    const BwdSm90Memory<Instance>& memory) {
  if constexpr (Expression::kHasSees || Instance::kConfig.alibi)
    ptx::wait_for_launches_before();  // which blocks are seen, or in reach, is known
  int index = bwd_sm90_first_index<Instance>(args);
  for (uint32_t tile = 0; bwd_sm90_plan(args, memory, tile, index); ++tile) {
    ptx::mbarrier_wait(memory.loaded(), tile & 1);  // all of it has been asked for
    index = bwd_sm90_next_index<Instance>(args, index);
  }
}

/// Loads K or V of a tile, the CTA's number `keys`.
template <class Instance, bool kK>
__device__ __forceinline__ void bwd_sm90_load_keys(const TmaBackwardArgs& args,
                                                   const BwdSm90Memory<Instance>& memory,
                                                   const BwdSm90Work& work, int batch, uint32_t keys) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  const RingSlot<kConfig.k_stages> k(keys);
  const uint32_t full = kK ? memory.full_k(k.index) : memory.full_v();
  if constexpr (kK) {
    ptx::mbarrier_wait(memory.empty_k(k.index), k.phase ^ 1);
  } else {
    ptx::mbarrier_wait(memory.empty_v(), (keys & 1) ^ 1);
    // Where all of V goes to registers its loads may be on their way yet when their warps have arrived.
    if constexpr (16 * kConfig.v_steps == kConfig.head_dim_v) ptx::async_proxy_fence();
  }
  ptx::mbarrier_arrive_expect(full, kK ? kConfig.k_bytes() : kConfig.v_bytes());
  using Strips = tile::WgmmaStrips<kK ? kConfig.k_strip : kConfig.strip>;
#pragma unroll 1
  for (int c = 0; c < kConfig.parts * Strips::of(kK ? kConfig.head_dim : kConfig.head_dim_v); ++c)
    ptx::tma_load((kK ? memory.k(k.index) : memory.v()) + c * kConfig.tile_n() * Strips::kRowBytes,
                  kK ? args.k : args.v, full, c * Strips::kColumns,
                  work[BwdSm90Work::kRowK] + work[BwdSm90Work::kFirstKey], work[BwdSm90Work::kHeadKv], batch);
}

/// Loads Q and lse of each step and K of each tile, and plans the tiles unless a warp of its own does (kQ); or loads dO, delta and V. One
/// thread.
template <class Instance, bool kQ>
__device__ __forceinline__ void bwd_sm90_load(const TmaBackwardArgs& args,
                                              const BwdSm90Memory<Instance>& memory) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  using Strips = tile::WgmmaStrips<kConfig.strip>;
  constexpr int kTileM = kConfig.tile_m,
                kStrips = kConfig.parts * Strips::of(kQ ? kConfig.head_dim : kConfig.head_dim_v);
  constexpr int kBytes = (kQ ? kConfig.q_bytes() : kConfig.do_bytes()) + kConfig.statistics_bytes();
  const BackwardArgs& b = args.b;
  uint32_t step = 0, keys = 0;
  int next = 0;
  if constexpr (Expression::kHasSees || Instance::kConfig.alibi)
    ptx::wait_for_launches_before();  // which blocks are seen, or in reach, is known
  constexpr bool kPlans = kQ && !kConfig.plans_apart();
  if constexpr (kPlans) next = bwd_sm90_first_index<Instance>(args);
  [[maybe_unused]] BwdSm90Routes routes{b, kConfig.chain ? ptx::cta_rank() : 0};
  for (uint32_t tile = 0;; ++tile) {
    if constexpr (kPlans) bwd_sm90_plan(args, memory, tile, next);
    ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
    const BwdSm90Work work = memory.work(tile);
    BwdSm90Steps<Instance> steps(b, work);
    if (steps.left < 0) return;
    const int batch = b.p.cu_seqlens_q != nullptr ? 0 : work[BwdSm90Work::kBatch];
    // The ends of blocks are read again: loaders of 24 registers have none to spare, and no other was faster with them in registers.
    for (bool first = true; steps.left > 0; steps.next(work), ++step, first = false) {
      const RingSlot<kQ ? kConfig.q_stages : kConfig.do_stages> slot(step);
      const int s = slot.index;
      const uint32_t full = kQ ? memory.full_q(s) : memory.full_do(s), to = kQ ? memory.q(s) : memory.d_o(s);
      if (first) bwd_sm90_load_keys<Instance, kQ>(args, memory, work, batch, keys++);
      // All is looked up before the wait: consumers wait for what follows it.
      const int n = steps.n(), head = steps.head_of_sequence(work),
                row = work[BwdSm90Work::kRowQ] + n * kTileM;
      const float* const statistics =
          (kQ ? b.lse_log2 : b.delta) + (int64_t{steps.head(work)} * b.rows + n * kTileM);
      ptx::mbarrier_wait(kQ ? memory.empty_q(s) : memory.empty_do(s), slot.phase ^ 1);
      if constexpr (kQ && kConfig.chain) routes.next(work, steps, kTileM).write(memory.route(step));
      ptx::mbarrier_arrive_expect(full, kBytes);
#pragma unroll
      for (int c = 0; c < kStrips; ++c)
        ptx::tma_load(to + c * kTileM * Strips::kRowBytes, kQ ? args.q : args.d_o, full, c * Strips::kColumns,
                      0, row, head, batch);
      if (step == 0) ptx::wait_for_launches_before();  // statistics are there
      ptx::bulk_load(kQ ? memory.lse(s) : memory.delta(s), statistics, kConfig.statistics_bytes(), full);
    }
    ptx::mbarrier_arrive(memory.empty_work(tile));
    // Not earlier: the steps that are loaded ahead hide the wait, and a tile that lies reserved keeps others from their turn.
    if constexpr (kPlans) next = bwd_sm90_next_index<Instance>(args, next);
    if constexpr (kQ && kConfig.plans_apart()) ptx::mbarrier_arrive(memory.loaded());
  }
}

/// Adds what consumer w stages of dQ to dq_sum: at each step that of the step before. One warp, whose first lane issues.
template <class Instance>
struct BwdSm90Writer {
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  const TmaBackwardArgs& args;
  const BwdSm90Memory<Instance>& memory;
  const int w, lane;
  /// Where a step's dQ goes, and its turn where the order is fixed. Null: there is no step.
  struct Step {
    float* sums = nullptr;
    BwdSm90Turn turn{nullptr, 0, 0, false, false};
    /// Whether the consumer writes dq: adds what it has to the sums, which this warp brings.
    bool last = false;
  };
  Step staged;  ///< what is staged next; at the first step of all, what nobody wants

  /// Adds what is staged, or stores it as the first of all; where the consumer has written dq there is nothing to add. Behind it will be
  /// what find_next() finds. What one step of this takes, all blocks of a head wait for, one after the other.
  template <class FindNext>
  __device__ __forceinline__ void add(const FindNext& find_next) {
    const bool any = lane == 0 && staged.sums != nullptr && !staged.last,
               in_turn = any && BwdSm90Turn::wanted(args.b);
    if (in_turn) staged.turn.acquire();  // while the consumer still computes what to add
    __syncwarp();
    ptx::barrier_wait(kDqStaged + w, kConsumerAndWriter);
    if (any) {
      ptx::async_proxy_fence();  // what the consumer has written, for the reductions
#pragma unroll 1
      for (int warp = 0; warp < 4; ++warp)
        BwdSm90Dq<Instance>::add(memory.dq(w), staged.sums, w, warp, staged.turn.first);
      ptx::bulk_commit();
    }
    Step next = find_next();  // while they are read
    if (any) ptx::bulk_wait_read<0>();
    const bool brings = next.last && !next.turn.first;
    if (lane == 0 && !brings) ptx::mbarrier_arrive(memory.empty_dq(w));
    if (in_turn && staged.turn.is_awaited(args.b)) {
      const int seen = next.turn.look();  // while the sums are on their way
      ptx::bulk_wait<0>();                // they are in memory
      staged.turn.release(next.turn, seen);
    }
    if (lane == 0 && brings) {
      next.turn.acquire();
      // The sums, which others have added, and the place, which the consumer has read, for the copies.
      ptx::async_proxy_fence_all();
      BwdSm90Dq<Instance>::bring(memory.dq(w), next.sums, w, memory.empty_dq(w));
    }
    staged = next;
    __syncwarp();  // the warp waits for the next as a whole
  }
  /// Whether the block is the last to add to dQ of a step: tells the consumer its way then.
  __device__ __forceinline__ bool tell(const BwdSm90Work& work, const BwdSm90Steps<Instance>& steps,
                                       const BwdSm90Turn& turn) const {
    const bool last = steps.n() < work[BwdSm90Work::kAfterBegin];
    if (last && lane == 0)
      BwdSm90Route::to_dq(args.b, turn.first ? 0 : BwdSm90Route::kReceives, work, steps, kConfig.tile_m)
          .write(memory.route(w));
    return last;
  }
  /// Adds the consumer's dS of step number `count` to the gradient of the bias. One lane.
  __device__ __forceinline__ void add_dbias(uint32_t count, const BwdSm90Work& work,
                                            const BwdSm90Steps<Instance>& steps) const {
    const RingSlot<kConfig.kBuffers> ds(count);
    const tile::PairsView& dbias = args.b.p.dbias;
    const int batch = work[BwdSm90Work::kBatch];
    ptx::mbarrier_wait(memory.full_ds(ds.index), ds.phase);
    ptx::async_proxy_fence();  // what the consumer has written, for the reduction
    ptx::tma_add(args.dbias, memory.ds(ds.index, w), work[BwdSm90Work::kFirstKey] + w * kConfig.kRows,
                 steps.n() * kConfig.tile_m, dbias.head != 0 ? steps.head_of_sequence(work) : 0,
                 dbias.batch != 0 ? batch : 0);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::mbarrier_arrive(memory.empty_ds(ds.index));
  }
  __device__ __forceinline__ void run() {
    ptx::wait_for_launches_before();  // sums, semaphores are zeros
    [[maybe_unused]] uint32_t count = 0;
    for (uint32_t tile = 0;; ++tile) {
      ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
      const BwdSm90Work work = memory.work(tile);
      BwdSm90Steps<Instance> steps(args.b, work);
      if (steps.left < 0) break;
      const int first_head = steps.first_head(work);
      for (; steps.left > 0; steps.next()) {
        if constexpr (kConfig.adds_dbias()) {
          if (args.b.adds_dbias && lane == 0)
            add_dbias(count, work, steps);  // before dQ of the step before is staged
          ++count;
          __syncwarp();  // the warp waits for what is staged as a whole
        }
        add([&] {
          const int head = first_head + steps.order.head(steps.at), n = steps.n();
          Step step{BwdSm90Dq<Instance>::sums_of(args.b, head, n),
                    BwdSm90Turn::of<Instance>(args.b, work, head, n, w)};
          if constexpr (kConfig.last_writes) step.last = tell(work, steps, step.turn);
          return step;
        });
      }
      ptx::mbarrier_arrive(memory.empty_work(tile));
    }
    if (staged.sums != nullptr) add([] { return Step{}; });
    if (lane == 0) ptx::bulk_wait<0>();  // shared memory is this CTA's until its last addition has read it
  }
};

/// Brings the sums of a step to the inboxes, slice by slice, ahead of the warpgroup that adds its own. `brought`: slices so far. One thread.
template <class Instance>
__device__ __forceinline__ void bwd_sm90_bring(const BwdSm90Memory<Instance>& memory, const float* sums,
                                               uint32_t& brought) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  ptx::async_proxy_fence_all();  // what others have added, for the copies
#pragma unroll 1
  for (int slice = 0; slice < kConfig.slices(); ++slice, ++brought) {
    const RingSlot<kConfig.inboxes()> slot(brought);
    ptx::mbarrier_wait(memory.empty_inbox(slot.index), slot.phase ^ 1);
    ptx::async_proxy_fence();  // loads of what was there, which may be on their way yet
    BwdSm90Dq<Instance>::bring(memory.dq(slot.index), sums, slice, memory.full_inbox(slot.index));
  }
}

/// Where dQ has a warpgroup of its own and the order is fixed: waits for the turn of each step (kAcquires), or passes it on
/// when all warps have added. A thread for each, so that the warpgroup waits neither for flags nor for its sums to arrive.
template <class Instance, bool kAcquires>
__device__ __forceinline__ void bwd_sm90_take_turns(const TmaBackwardArgs& args,
                                                    const BwdSm90Memory<Instance>& memory) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  ptx::wait_for_launches_before();  // semaphores are zeros
  uint32_t count = 0;
  [[maybe_unused]] uint32_t brought = 0;
  for (uint32_t tile = 0;; ++tile) {
    ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
    const BwdSm90Work work = memory.work(tile);
    BwdSm90Steps<Instance> steps(args.b, work);
    if (steps.left < 0) return;
    for (; steps.left > 0; steps.next(work), ++count) {
      const RingSlot<kConfig.kBuffers> slot(count);
      const BwdSm90Turn turn = BwdSm90Turn::of<Instance>(args.b, work, steps.head(work), steps.n(), 0);
      if constexpr (kAcquires) {
        ptx::mbarrier_wait(memory.passed_on(slot.index), slot.phase ^ 1);
        turn.acquire();
        const bool last = kConfig.last_writes && steps.n() < work[BwdSm90Work::kAfterBegin];
        if (last) BwdSm90Route::to_dq(args.b, 0, work, steps, kConfig.tile_m).write(memory.route(slot.index));
        ptx::mbarrier_arrive(memory.turn(slot.index));
        if constexpr (kConfig.last_writes) {
          if (last && !turn.first)
            bwd_sm90_bring(memory, BwdSm90Dq<Instance>::sums_of(args.b, steps.head(work), steps.n()),
                           brought);
        }
      } else {
        ptx::mbarrier_wait(memory.added(slot.index), slot.phase);
        turn.release();
        ptx::mbarrier_arrive(memory.passed_on(slot.index));
      }
    }
    ptx::mbarrier_arrive(memory.empty_work(tile));
  }
}

}  // namespace fovea::cuda
