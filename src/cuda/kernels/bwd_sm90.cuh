// The backward on Hopper: TMA, wgmma, specialised warpgroups.
//
//   S^T = K Q^T    P = exp2(scale_log2 S - lse_log2)    dP^T = V dO^T    dS = P o (dP - delta)
//   dV += P^T dO   dK += dS^T Q   (in registers, over all query blocks and heads of the group)
//   dQ += dS K     (float32 sums in global memory)
// With a softcap c: P = exp2(c log2(e) t - lse_log2), t = tanh(scale S / c), and dS is times 1 - t^2. P times that factor, or
// P itself, is called the factor of dS below. With ALiBi P = exp2(scale_log2 S - slope_log2 |distance| - lse_log2).
//
// A CTA stays on its SM and takes tile after tile: 128 or 64 keys of one key head, against all blocks of kTileM queries
// that see any of them, head by head of the group. S and dP are computed transposed, keys in rows, so that P^T and dS^T
// are in registers what dV and dK want as left operands. Two ways to share the work, by what registers hold:
//
//   both gradients (D <= 192)   Each of two consumers, warpgroups, sums dK and dV of its own 64 keys. dQ of a step is
//                               computed one step later, a slice a consumer: by then both have written dS, and nobody
//                               waits. It is staged in shared memory, and a warp for each consumer adds it to global
//                               memory by bulk reductions.
//     D + Dv > 256              S and dP take turns in registers, and each consumer computes its half of dQ's columns behind a
//                               step's other products and adds it straight from registers.
//   one gradient (D > 128)      Both work on the same 64 keys: the first computes P and sums dV, the second takes the
//                               factor over, computes dS and sums dK. A third warpgroup computes dQ, slice by slice, and
//                               adds it straight from registers.
//
// Where key blocks wait for one another (BwdSm90Turn) the first to add stores its part, so that nobody writes zeros before.
// Where the order of additions is fixed the last block to add can write dq instead (`last_writes`): the writer brings the sums of the others
// to where dQ is staged, and the consumer adds its part and writes. With one gradient whoever waits for turns brings them to inboxes, and the
// warpgroup of dQ adds and writes; with `first_stores` alone it only stores what is first in that order.
//
// Where a cluster has all blocks of keys of a head (`chain`, both gradients), dQ is added up along its CTAs instead, and written
// by the last (bwd_sm90_chain.cuh).
//
// Files
//   bwd_sm90_config.cuh     configuration, shared memory, barriers, what the warps are told of a tile, the fixed order
//   bwd_sm90_producers.cuh  planner, loaders, writers of dQ
//   bwd_sm90_consumer.cuh   the products and the mainloop
//   bwd_sm90_scores.cuh     what is done element by element
//   bwd_sm90_keys.cuh       tiles, statistics and masks, which consumers of bwd_sm90_bf16x3 share
//   bwd_sm90_dq.cuh         dQ in slices of 64 queries x 64 columns, or of half of the columns
//   bwd_sm90_chain.cuh      the way of dQ through a cluster
// Shared memory (bwd_sm90_config.cuh)
//   K (twice where it fits: the next tile's arrives while dQ of the last step is computed), V; Q, dO two stages; all in
//   strips of 64 columns, rows of 128 bytes, swizzled as TMA's and wgmma's 128-byte mode (at D = 96 K in strips of 16, the others of
//   32, in the modes of their rows). dS (queries, keys), two buffers of a strip for each 64 keys; P passes through them. Staged dQ, float32. lse_log2 and delta of each stage.
// Registers of a consumer's thread
//   both: acc_dk D / 2, acc_dv Dv / 2, acc_s and acc_dp kTileM / 2 each (64 + 64 + 32 + 32 of 232 at D = 128)
//         at D = 192, Dv = 128 sums 160, and S, dP or dQ 48 at most, of 240
//   one:  D / 2 and kTileM / 2 (128 + 32 of 208 at D = 256)
//   K and V, as far as they are kept, 4 for 16 columns: 20 and 24 at D = 96, 12 of K at D = 128, 48 at D = 192, 8 at D = 256
// Bytes that shared memory moves a step, against 128 B a clock of the five products' time:
//   D = 128: S 52, dP 64, dQ 64, dV 32, dK 32, dS written 16, dQ staged and read 64, Q and dO arriving 32 KB: 356 of 320 (float16 368).
//   D = 96:  S 28, dP 24, dQ 56, dV 24, dK 24, dS written 16, dQ staged and read 48, Q and dO arriving 24 KB: 244 of 240.
//   D = 192: S 24, dP 24, dQ 48, dV 24, dK 24, P and dS 24, Q and dO arriving 48 KB: 216 of 240; dQ leaves through L1, 48.
//   D = 256: S 60, dP 60, dQ 64, dV 32, dK 32, P and dS 24, Q and dO arriving 64 KB: 336 of 320; dQ leaves through L1, 64.
// Barriers                                                                    who arrives -> who waits
//   full_work[t] empty_work[t]  the tile is planned, or has been read             a loader, or the planner -> all, and back
//   loaded                      all of the tile has been asked for                loader -> planner
//   full_k[s] full_v            K, or V, is there                                 loaders, bytes -> consumers
//   empty_k[s] empty_v          no product reads them any more                    their readers -> loaders
//   full_q[s] full_do[s]        Q and lse_log2, or dO and delta, are there        loaders, bytes -> consumers
//   empty_q[s] empty_do[s]      nobody reads them any more                        consumers -> loaders
//   full_ds[b]                  dS of all keys is written                         consumers -> those that compute dQ
//   empty_ds[b]                 nobody reads it any more                         they, and writers that add dbias -> consumers
//   full_factor[b]              the factor of dS is written where dS will be      first consumer -> second
//   kFactorTaken                all have read it: dS may take its place           among the second's warps
//   turn[b] added[b]            this step may be added to dQ, or has been         those that take turns -> dQ, and back
//   passed_on[b]                and the next block's turn has come                among those that take turns
//   full_inbox[w]               dQ of later keys is in the consumer's inbox       the sending CTA's messenger -> consumer
//                               with one gradient, sums of a slice are there     who waits for turns, bytes -> warpgroup of dQ
//   empty_inbox[i]              these have been read                             it -> who waits for turns
//   room[way][w]                the inbox of the CTA above, or below, is free     its messenger -> consumer
//   kOwnKeys + w                K of the consumer is finite                       among its warps
//   kDqStaged + w empty_dq[w]   dQ of the consumer is staged, or has been read    consumer -> its writer, or messenger, and back
//                               with last_writes, or dq is written; or sums are there for the consumer to add to
//   kOddRows + w                rows that take no part are zeros                  consumer -> the other
// dS and staged dQ are written by ordinary stores and read by the asynchronous proxy: the reader fences, behind the
// barrier, once for all writers. So does who copies to where registers were loaded from (inboxes, V that is kept): an arrival may overtake loads.
//
// What is not finite. Consumers make K finite: a row that sees a NaN in K has lse NaN, hence P = NaN, whatever K holds;
// an infinity becomes the largest finite number, which gives the weights 0 or NaN that infinity would give. Q and dO of
// rows whose lse is not finite become 0 before any product reads them (P of the keys that such a row sees is NaN, or 0
// where the row takes no part). V and delta enter dS, which is a number of one pair: masked pairs get P = dS = 0 by
// selection.
//
// Launch
//   grid    bwd_sm90_grid: at most as many CTAs as the GPU holds at a time
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_preprocess (lse_log2, delta, zeros in dq_semaphore, and in dq_sum unless the first to add stores), zeros in dbias where it is added to; may still run (ptx/grid.cuh)
//   after   bwd_postprocess (dq; zeros in rows of dk, dv beyond used_k); a chain and last_writes need none
//   cluster args.b.cluster CTAs, in a chain
#pragma once

#include "cuda/kernels/bwd_sm90_chain.cuh"
#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_consumer.cuh"
#include "cuda/kernels/bwd_sm90_dq.cuh"
#include "cuda/kernels/bwd_sm90_producers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/setmaxnreg.cuh"

namespace fovea::cuda {

/// What a configuration has to be.
template <class Instance>
struct BwdSm90Checks {
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  static_assert(kConfig.head_dim % 32 == 0 && kConfig.head_dim_v % 32 == 0);
  static_assert(kConfig.parts == 1 && kConfig.q_stages == kConfig.do_stages,
                "a step has one slot for Q and dO");
  static_assert(!kConfig.chain || (!kConfig.one_gradient && kConfig.k_stages == 2));
  static_assert(!kConfig.last_writes || kConfig.one_gradient ||
                    (kConfig.stages_dq() && kConfig.last_queries_first() == LastQueriesFirst::kAlways),
                "the first keys add first, and a block is the last at the end of its walk");
  static_assert(!kConfig.fixed_order() || (!kConfig.alibi && !kConfig.expression));
  static_assert(!kConfig.first_stores || kConfig.one_gradient);
  // A slice for each consumer; all columns of the slices exist where red.v4 adds them.
  // Behind a step: a slice and a half for each.
  static_assert(kConfig.one_gradient  ? kConfig.head_dim % kConfig.kSlice == 0
                : kConfig.dq_behind() ? kConfig.slices() == 3 && kConfig.tile_m == kConfig.kSlice
                                      : kConfig.slices() == kConfig.kConsumers);
  static_assert(kConfig.slice_columns() % kConfig.k_strip == 0, "a product's columns of K are whole strips");
  static_assert(4 * BwdSm90Work::kFields <= kConfig.kWorkBytes);
  static_assert(kConfig.shared_bytes() <= kConfig.kMostShared);
};

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), 1)
    bwd_sm90(const __grid_constant__ TmaBackwardArgs args) {
  constexpr BwdSm90Config kConfig = Instance::kConfig;
  (void)BwdSm90Checks<Instance>{};

  extern __shared__ __align__(1024) unsigned char shared[];
  const BwdSm90Memory<Instance> memory{ptx::shared_address(shared)};
  const int thread = static_cast<int>(threadIdx.x);
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // warp-uniform
  if (thread == 0) memory.init_barriers(BwdSm90Turn::wanted(args.b), args.b.adds_dbias);
  if constexpr (kConfig.dropout) {
    if (thread < 2) memory.work(static_cast<uint32_t>(thread)).set_dropout(args.b.p);
  }
  ptx::let_next_launch_begin();  // its CTAs find room when CTAs of this one end
  __syncthreads();               // the barriers are ready, and dropout's words in both work tiles
  if constexpr (kConfig.chain) bwd_sm90_open_inboxes<Instance>(args.b, memory, ptx::cta_rank());

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    // Looked up again: the least registers are left.
    const int role = __shfl_sync(0xffffffffu, static_cast<int>(ptx::thread_index() / 32), 0);
    if constexpr (kConfig.stages_dq()) {
      if (role >= 2)
        BwdSm90Writer<Instance>{args, memory, role - 2, static_cast<int>(ptx::thread_index() % 32), {}}.run();
    }
    if constexpr (kConfig.chain) {
      if (role >= 2)
        BwdSm90Messenger<Instance>{args, memory, role - 2, static_cast<int>(ptx::thread_index() % 32)}.run();
    }
    if (ptx::thread_index() % 32 != 0) return;
    if constexpr (kConfig.one_gradient) {
      if (BwdSm90Turn::wanted(args.b)) {
        if (role == 2) bwd_sm90_take_turns<Instance, true>(args, memory);
        if (role == 3) bwd_sm90_take_turns<Instance, false>(args, memory);
      }
    }
    if (role == 0) {
      bwd_sm90_load<Instance, true>(args, memory);
    } else if (role == 1) {
      bwd_sm90_load<Instance, false>(args, memory);
    } else if constexpr (kConfig.plans_apart()) {
      if (role == 2) bwd_sm90_plan_tiles<Instance>(args, memory);
    }
    return;
  }
  // In a cluster addresses have the rank of the CTA in bits above 2^18, which a descriptor has not.
  const uint32_t own_base = kConfig.chain ? memory.base % (1u << 18) : memory.base;
  const int base16 = __shfl_sync(0xffffffffu, static_cast<int>(own_base / 16), 0);
  using Part = BwdSm90Part;
  if constexpr (!kConfig.one_gradient) {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    BwdSm90Consumer<Instance, Part::kBoth>{{{args, memory, base16}, warpgroup - 1}}.run();
    if constexpr (kConfig.chain) ptx::cluster_barrier();  // nobody arrives at this CTA any more: it may end
  } else if (warpgroup == 1) {
    ptx::setmaxnreg_dec<kConfig.kDqRegisters>();
    BwdSm90Dq<Instance>{{args, memory, base16}}.run();
  } else {
    ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
    if (warpgroup == 2) {
      BwdSm90Consumer<Instance, Part::kDv>{{{args, memory, base16}, 0}}.run();
    } else {
      BwdSm90Consumer<Instance, Part::kDk>{{{args, memory, base16}, 1}}.run();
    }
  }
}

}  // namespace fovea::cuda
