// bwd_sm90 where the blocks of keys of a head are the CTAs of a cluster: dQ of a block of queries goes from CTA to CTA, from
// the last keys that see it to the first. Each adds its part, and the last to add writes dq. So dQ needs no sums in global
// memory, nobody clears or converts any, and the additions have one order.
//
//   rank 3     S dP .. dQ --> inbox of rank 2
//   rank 2       S dP .. dQ + inbox --> inbox of rank 1
//   rank 1         S dP .. dQ + inbox --> inbox of rank 0
//   rank 0           S dP .. dQ + inbox --> dq
//
// Ranks follow each other at a distance of less than a step. Under a causal mask the first keys have the most steps: every other
// tile goes round the other way, so that two tiles give all ranks the same number. A consumer's slice of dQ, 64 queries x 64
// columns, goes from its registers to the inbox of the same consumer of the next CTA by ordinary stores, 16 KB. A warp for each
// consumer, the messenger, tells the other CTAs: of what was sent behind a fence, which takes longer than the stores. (st.async
// needs no fence, but two registers an instruction for its addresses, which D = 128 has not.)
#pragma once

#include <cstdint>

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"

namespace fovea::cuda {

/// The way of dQ of a step, as the loader of Q tells the consumers, or without a chain the consumer's writer.
struct BwdSm90Route {
  enum Flag : uint32_t {
    kReceives = 1,    ///< there are sums of other keys to add to
    kInboxPhase = 2,  ///< parity in which they come
    kSends = 4,       ///< earlier keys see these queries, too; else this CTA writes dq
    kRoomPhase = 8,   ///< parity in which the next inbox has room
    kUp = 16,         ///< the way of this tile
    kRoomAbove = 32   ///< whose sums come next to this inbox: the rank's above, else below
  };
  uint32_t flags;
  int rows;  ///< of the block that exist
  char* dq;  ///< its first row

  /// Of a step whose rows of dq are written.
  template <class Steps>
  __device__ __forceinline__ static BwdSm90Route to_dq(const BackwardArgs& b, uint32_t flags,
                                                       const BwdSm90Work& work, const Steps& step,
                                                       int tile_m) {
    const tile::RowsView& dq = b.p.dq;
    const int batch = work[BwdSm90Work::kBatch], row = step.n() * tile_m;
    return {flags, work[BwdSm90Work::kUsedQ] - row,
            dq.data + dq.offset(batch, work[BwdSm90Work::kRowQ] + row, step.head_of_sequence(work)) *
                          (b.p.dq_is_f32 ? 4 : 2)};
  }
  __device__ __forceinline__ void write(uint32_t to) const {
    const auto address = reinterpret_cast<uint64_t>(dq);
    ptx::st_shared_16(to, uint4{flags, static_cast<uint32_t>(rows), static_cast<uint32_t>(address),
                                static_cast<uint32_t>(address >> 32)});
  }
  __device__ __forceinline__ static uint32_t flags_at(uint32_t from) { return ptx::ld_shared_4(from); }
  __device__ __forceinline__ static BwdSm90Route read(uint32_t from) {
    const uint4 x = ptx::ld_shared_16(from);
    return {x.x, static_cast<int>(x.y), reinterpret_cast<char*>(x.z | uint64_t{x.w} << 32)};
  }
};

/// Of all steps of a CTA in their order. One thread.
struct BwdSm90Routes {
  const BackwardArgs& b;
  const int rank;
  uint32_t received = 0, sent_down = 0, sent_up = 0;  ///< slices of dQ so far

  template <class Steps>
  __device__ __forceinline__ BwdSm90Route next(const BwdSm90Work& work, const Steps& step, int tile_m) {
    const bool up = work[BwdSm90Work::kUpwards] != 0;
    uint32_t flags = up ? BwdSm90Route::kUp : 0;
    if (step.n() >= work[BwdSm90Work::kBeforeBegin] && step.n() < work[BwdSm90Work::kBeforeEnd]) {
      flags |= BwdSm90Route::kReceives | (received++ & 1 ? BwdSm90Route::kInboxPhase : 0);
      // Sums come from the same side again, but for the ranks between the ends, where a tile ends that the next one mirrors.
      const bool turns = b.mirrors && step.left == 1 && rank > 0 && rank + 1 < b.cluster;
      if (up == turns) flags |= BwdSm90Route::kRoomAbove;
    }
    if (step.n() >= work[BwdSm90Work::kAfterBegin] && step.n() < work[BwdSm90Work::kAfterEnd])
      flags |= BwdSm90Route::kSends | ((up ? sent_up++ : sent_down++) & 1 ? BwdSm90Route::kRoomPhase : 0);
    return BwdSm90Route::to_dq(b, flags, work, step, tile_m);
  }
};

/// Tells who sends first to this CTA that its inboxes have room. All threads; behind it all CTAs of the cluster are ready.
template <class Instance>
__device__ __forceinline__ void bwd_sm90_open_inboxes(const BackwardArgs& b,
                                                      const BwdSm90Memory<Instance>& memory, int rank) {
  ptx::cluster_barrier();  // the barriers of all CTAs are initialised
  // The first tile goes down; the rank of its last keys receives only from tiles that go up.
  const bool last = rank + 1 == b.cluster;
  const int slice = static_cast<int>(threadIdx.x);
  if (slice < memory.kConfig.kConsumers && (last ? b.mirrors && rank > 0 : true))
    ptx::mbarrier_arrive_in_cta(ptx::address_in_cta(memory.room(last, slice), last ? rank - 1 : rank + 1));
}

/// Tells the CTAs beside this one what a consumer has done with dQ of its slice: step by step, that it has been sent, and that
/// its inbox has been read. One warp, whose first lane does it: a fence for all the stores of a consumer, off its way.
template <class Instance>
struct BwdSm90Messenger {
  const TmaBackwardArgs& args;
  const BwdSm90Memory<Instance>& memory;
  const int w, lane;

  __device__ __forceinline__ void step(uint32_t count) const {
    ptx::barrier_wait(kDqStaged + w, kConsumerAndWriter);
    if (lane != 0) return;
    const uint32_t flags = BwdSm90Route::flags_at(memory.route(count));
    const int rank = ptx::cta_rank();
    if (flags & BwdSm90Route::kReceives) {
      const bool above = (flags & BwdSm90Route::kRoomAbove) != 0;
      ptx::mbarrier_arrive_in_cta(ptx::address_in_cta(memory.room(!above, w), above ? rank + 1 : rank - 1));
    }
    if (flags & BwdSm90Route::kSends)
      ptx::mbarrier_arrive_cluster(
          ptx::address_in_cta(memory.full_inbox(w), flags & BwdSm90Route::kUp ? rank + 1 : rank - 1));
    ptx::mbarrier_arrive(memory.empty_dq(w));
  }
  __device__ __forceinline__ void run() const {
    uint32_t count = 0;
    for (uint32_t tile = 0;; ++tile) {
      ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
      const int steps = memory.work(tile)[BwdSm90Work::kSteps];
      if (steps < 0) return;
      for (int left = steps; left > 0; --left, ++count) {
        step(count);
        __syncwarp();  // the warp waits for the next as a whole
      }
      ptx::mbarrier_arrive(memory.empty_work(tile));
    }
  }
};

}  // namespace fovea::cuda
