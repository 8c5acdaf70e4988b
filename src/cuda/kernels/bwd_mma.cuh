// The backward on mma.sync: sm_80 class (cp.async, ldmatrix, m16n8k16) and, with m16n8k8, sm_75.
//
//   S^T = K Q^T    P = exp2(scale_log2 S - lse_log2)    dP^T = V dO^T    dS = P o (dP - delta)
//   dV += P^T dO   dK += dS^T Q   (in registers, over all query blocks and heads of the group)
//   dQ += dS K     (float32 sums in global memory)
//
// A CTA owns kTileN keys of one key head and walks over the blocks of kTileM queries that see any of them,
// head by head of the group: dK and dV need no atomics and no buffer per query head. S and dP are computed
// transposed, keys in rows, so that P^T and dS^T have the shape in which dV and dK want their left operands.
// Three GEMMs, three ways to share them out:
//
//   S^T, dP^T   warp (n, q) has 32 keys (n) and kSliceM queries (q), kChunkM at a time
//   dV, dK      warp (n, q) has the same 32 keys and every kWarpsQ-th 16 columns from 16 q on
//   dQ          kWarpsDqM x kWarpsDqD warps over queries x columns
//
// With warps_q = 1 P^T and dS^T go from accumulator to operand in registers; else through shared memory.
// 32 keys a warp: each B fragment that ldmatrix brings feeds two mma; with 16 shared memory (128 B a clock)
// would take longer than the mma. With `stream` (wide heads) a CTA owns a slice of the columns of dK, dV, dQ,
// and all columns of Q, K, dO, V pass through shared memory for S and dP.
//
// Shared memory
//   sK, sV     (kTileN, D | Dv), later the tiles of dK and dV; sV with `stream`: chunks on their way
//   sQ, sdO    (kTileM, D | Dv), 1 or 2 stages
//   sdS^T      (kTileN, kTileM); sP^T likewise, only where kWarpsQ > 1
//   lse_log2 and delta of two blocks; BwdWork
//   with `dropout` a word for each chunk of a thread, which it alone reads: the weights that are kept in the step
// Registers
//   acc_dk, acc_dv 32 (D + Dv) / kWarpsQ / 32 a lane; acc_s, acc_dp kChunkM each
//
// Barriers of a step
//   A  the block's Q, dO, lse, delta have arrived for everyone (each thread waited for its own copies), and
//      nobody reads the last step's P, dS, Q, dO any more: their second stages take the next block. All have
//      added to the last step's dQ: the turn can be passed on. The block behind the step's is known, where an
//      expression passes over some
//   B  P and dS of all warps can be read, and it is this CTA's turn to add to dQ
//   C  nobody reads dO any more (only where Q has two stages and dO one)
//   D  nobody reads Q (and dO) any more (only where Q has one stage)
//
// NaN and infinity
//   K is made finite once a CTA. A row that sees a NaN in K has lse NaN, hence P = NaN, whatever K holds; an
//   infinity becomes the largest finite number, which gives the weights 0 or NaN that infinity would give.
//   Q and dO of rows whose lse is not finite become 0 before they are used: P of the keys that such a row sees is
//   NaN, or 0 where the row takes no part.
//   V only enters dP, which belongs to one pair: pairs that take no part get dS = 0 by selection.
//
// Launch
//   grid    bwd_mma_grid: (key_blocks * heads_kv * batch, slices or 1, 1)
//   block   threads()
//   shared  shared_bytes(), dynamic
//   before  bwd_preprocess (lse_log2, delta, zeros in dq_sum and dq_semaphore)
//   after   bwd_postprocess (dq; zeros in rows of dk, dv beyond used_k)
//
// CTA x has key block x % key_blocks of key head x / key_blocks % heads_kv, so that CTAs that run together
// share a head's Q, dO and dq_sum in L2. Key block 0, first in a head, has most queries under causal: longest
// first.
//
// With `dq_semaphore` key blocks add to a tile of dQ one after the other, from the last that sees it to the first:
// the same bits each time. A CTA takes its number when it begins, so the CTAs that it waits for have begun before
// it, in whatever order CTAs start. A head has room for one more block for each tile that the block before has left,
// so numbers go round as many heads as keep CTAs from waiting (heads_at_once).
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_mma_config.cuh"
#include "cuda/kernels/bwd_mma_cta.cuh"
#include "cuda/kernels/bwd_mma_products.cuh"
#include "cuda/kernels/bwd_mma_terms.cuh"
#include "cuda/kernels/bwd_mma_weights.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// acc += rows of `left` times rows of `right` over all columns, in chunks that pass through sV: S or dP of wide
/// heads. Rows of the left are the CTA's keys, of the right the queries of the step.
template <class Instance>
__device__ __forceinline__ void multiply_streamed(const BwdMmaCta<Instance>& cta, const BwdStep& step,
                                                  const RowTarget& left, const RowTarget& right, int thread,
                                                  float (&acc)[2][BwdMma<Instance>::kChunkN8][4]) {
  using B = BwdMma<Instance>;
  using StreamN = typename B::StreamN;
  using StreamM = typename B::StreamM;
  const auto stage = [&](int c) { return cta.s_v() + static_cast<uint32_t>((c & 1) * B::kC.stream_bytes()); };
  const auto load = [&](int c) {
    copy_tile_either<StreamN, B::kThreads>(stage(c), cta.columns_from(left, c * B::kStream), cta.work.j0,
                                           cta.index_again());
    copy_tile_either<StreamM, B::kThreads>(stage(c) + StreamN::kBytes,
                                           cta.columns_from(right, c * B::kStream), step.block * B::kM,
                                           cta.index_again());
    ptx::cp_async_commit();
  };
  __syncthreads();  // nobody reads the chunks of the last product any more
  load(0);
  const int chunks = (left.columns + B::kStream - 1) / B::kStream;
#pragma unroll 1
  for (int c = 0; c < chunks; ++c) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // chunk c is here for everyone, chunk c - 1 has been read
    if (c + 1 < chunks) load(c + 1);
    const typename B::Place at(thread);
    multiply_across<Instance, StreamN, StreamM>(at, stage(c), stage(c) + StreamN::kBytes, 0, acc);
  }
}

/// S and dP of a chunk: 32 keys of the warp by chunk_m queries. dP comes right behind S: its mma cover the
/// exponentials.
template <class Instance>
__device__ __forceinline__ void multiply_s_dp(const BwdMmaCta<Instance>& cta, const BwdStep& step, int chunk,
                                              int thread, float (&acc_s)[2][BwdMma<Instance>::kChunkN8][4],
                                              float (&acc_dp)[2][BwdMma<Instance>::kChunkN8][4]) {
  using B = BwdMma<Instance>;
  const tile::AttentionParams& p = cta.p;
  clear(acc_s);
  if constexpr (B::kC.stream > 0) {
    multiply_streamed<Instance>(cta, step, cta.k_rows(p.k, p.head_dim, tile::kAlignedK),
                                cta.q_rows(p.q, step.head, p.head_dim, tile::kAlignedQ), thread, acc_s);
  } else {
    multiply_across<Instance, typename B::TileK, typename B::TileQ>(typename B::Place(thread), cta.s_k(),
                                                                    cta.s_q(step.parity), chunk, acc_s);
  }
  clear(acc_dp);
  if constexpr (B::kC.stream > 0) {
    multiply_streamed<Instance>(cta, step, cta.k_rows(p.v, p.head_dim_v, tile::kAlignedV),
                                cta.q_rows(p.d_o, step.head, p.head_dim_v, tile::kAlignedDO), thread, acc_dp);
  } else {
    multiply_across<Instance, typename B::TileV, typename B::TileDO>(typename B::Place(thread), cta.s_v(),
                                                                     cta.s_do(step.parity), chunk, acc_dp);
  }
}

/// P and dS of a step, and where they stay in registers (warps_q = 1) dV += P^T dO, dK += dS^T Q.
template <class Instance>
__device__ __forceinline__ void make_p_ds(const BwdMmaCta<Instance>& cta, const BwdStep& step,
                                          float scale_log2, int thread,
                                          float (&acc_dk)[2][2 * BwdMma<Instance>::kOwnD16][4],
                                          float (&acc_dv)[2][2 * BwdMma<Instance>::kOwnDv16][4]) {
  using B = BwdMma<Instance>;
  using Place = typename B::Place;
  const tile::AttentionParams& p = cta.p;
  BwdWork& work = cta.work;
  const int i0 = step.block * B::kM;
  const float* const s_lse = cta.statistics(step.parity);
#pragma unroll 1
  for (int chunk = 0; chunk < B::kChunks; ++chunk) {
    const BwdMmaTerms<Instance> terms(cta, step, chunk, scale_log2);
    float acc_s[2][B::kChunkN8][4], acc_dp[2][B::kChunkN8][4];
    multiply_s_dp<Instance>(cta, step, chunk, thread, acc_s, acc_dp);

    uint32_t rounded_p[2][B::kChunkN8][2], rounded_ds[2][B::kChunkN8][2];
    const typename BwdMmaTerms<Instance>::Kept kept = terms.kept_of(step, chunk);
    if constexpr (B::kC.general) {
      const Place at(thread);
      bwd_weights_general<Instance>(cta.args, typename B::Pairs(p, work.span), work, step.head,
                                    i0 + at.column0(chunk), work.j0 + at.warp_n * 32,
                                    s_lse + at.column0(chunk), at.lane, kept, acc_s, rounded_p);
    }
    if (B::kC.general || !typename B::Pairs(p, work.span).all_see(i0, work.j0)) {
      bwd_weights<Instance, true>(step, terms, chunk, s_lse, cta.s_p(), cta.s_ds(), thread, acc_s, acc_dp,
                                  kept, rounded_p, rounded_ds);
    } else {
      bwd_weights<Instance, false>(step, terms, chunk, s_lse, cta.s_p(), cta.s_ds(), thread, acc_s, acc_dp,
                                   kept, rounded_p, rounded_ds);
    }

    if constexpr (!B::kC.exchanges_p()) {
      const Place at(thread);
      add_from_registers<Instance, typename B::TileDO>(at, rounded_p, cta.s_do(step.parity), chunk, acc_dv);
      add_from_registers<Instance, typename B::TileQ>(at, rounded_ds, cta.s_q(step.parity), chunk, acc_dk);
    }
  }
}

/// dV += P^T dO and dK += dS^T Q from the P and dS of all warps, and the copies whose place that sets free.
template <class Instance>
__device__ __forceinline__ void add_dv_dk(const BwdMmaCta<Instance>& cta, const BwdStep& step,
                                          float (&acc_dk)[2][2 * BwdMma<Instance>::kOwnD16][4],
                                          float (&acc_dv)[2][2 * BwdMma<Instance>::kOwnDv16][4]) {
  using B = BwdMma<Instance>;
  using Place = typename B::Place;
  if constexpr (B::kC.exchanges_p()) {
    add_from_tile<Instance, typename B::TileDO>(Place(cta.index_again()), cta.s_p(), cta.s_do(step.parity),
                                                acc_dv);
    if constexpr (B::kC.stages_do == 1 && B::kC.stages_q == 2) {
      __syncthreads();  // C
      if (const BwdStep next = cta.next_of(step); next.exists) cta.load_do(next);
      ptx::cp_async_commit();
    }
    add_from_tile<Instance, typename B::TileQ>(Place(cta.index_again()), cta.s_ds(), cta.s_q(step.parity),
                                               acc_dk);
  }
  if constexpr (B::kC.stages_q == 1) {
    if constexpr (B::kC.exchanges_p()) __syncthreads();  // D; in registers dK and dV were done before B
    if (const BwdStep next = cta.next_of(step); next.exists) {
      cta.load_q(next);
      if constexpr (B::kC.stages_do == 1) cta.load_do(next);
    }
    ptx::cp_async_commit();
  } else if constexpr (B::kC.stages_do == 1 && !B::kC.exchanges_p()) {
    if (const BwdStep next = cta.next_of(step); next.exists) cta.load_do(next);
    ptx::cp_async_commit();
  }
}

/// dQ += dS K, into the sums of the step's head.
template <class Instance>
__device__ __forceinline__ void add_dq(const BwdMmaCta<Instance>& cta, const BwdStep& step) {
  using B = BwdMma<Instance>;
  const BackwardArgs& args = cta.args;
  float* const dq = args.dq_sum + (static_cast<int64_t>(cta.work.batch) * cta.p.heads_q + step.head) *
                                      args.rows * args.dq_columns;
#pragma unroll 1
  for (int first = 0; first < B::kDqD16; first += B::kDqGroup) {
    float acc[B::kDqM16][2 * B::kDqGroup][4];
    clear(acc);
    const typename B::Place at(cta.index_again());
    const FragmentAddresses<typename B::TileP, LdmatrixOrder::kAcrossFirst> left(
        at.lane, 0, at.warp_dq_m * (2 * B::kDqM16));
    const FragmentAddresses<typename B::TileK, LdmatrixOrder::kDownFirst> right(
        at.lane, 0, 2 * (at.warp_dq_d + first * B::kWarpsDqD));
    multiply<typename Instance::Element, B::kC.mma, B::kDqM16, B::kDqGroup, B::kN / 16>(
        acc,
        [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4_trans(a, left.at(cta.s_ds(), k * 16, m)); },
        [&](uint32_t(&b)[4], int k, int n) {
          ptx::ldmatrix_x4_trans(b, right.at(cta.s_k(), k * 16, B::kWarpsDqD * n));
        });
#pragma unroll
    for (int m = 0; m < B::kDqM16; ++m) {
      const int row16 = step.block * (B::kM / 16) + at.warp_dq_m * B::kDqM16 + m;
#pragma unroll
      for (int n = 0; n < 2 * B::kDqGroup; ++n) {
        const int column8 =
            2 * (at.warp_dq_d + (first + n / 2) * B::kWarpsDqD) + n % 2 + cta.slice_at(B::kD) / 8;
        if (B::kC.stream > 0 && column8 * 8 >= args.dq_columns)
          continue;  // the last slice may be wider than the heads
        ptx::red_add_v4(dq + dq_fragment(row16, column8, args.dq_columns) + at.lane * 4, acc[m][n][0],
                        acc[m][n][1], acc[m][n][2], acc[m][n][3]);
      }
    }
  }
}

/// Writes dK and dV of the CTA: through the tiles of K and V, but for float32.
template <class Instance>
__device__ __forceinline__ void store_dk_dv(const BwdMmaCta<Instance>& cta,
                                            const float (&acc_dk)[2][2 * BwdMma<Instance>::kOwnD16][4],
                                            const float (&acc_dv)[2][2 * BwdMma<Instance>::kOwnDv16][4]) {
  using B = BwdMma<Instance>;
  const tile::AttentionParams& p = cta.p;
  if (p.dk_is_f32) {
    store_gradient_f32<Instance>(acc_dk, cta.f32_rows(p.dk, p.head_dim, cta.slice_at(B::kD)), cta.work.j0,
                                 p.scale, cta.index_again());
    store_gradient_f32<Instance>(acc_dv, cta.f32_rows(p.dv, p.head_dim_v, cta.slice_at(B::kDv)), cta.work.j0,
                                 1.0f, cta.index_again());
    return;
  }
  stage_gradient<Instance, typename B::TileK>(acc_dk, cta.s_k(), p.scale, cta.index_again());
  stage_gradient<Instance, typename B::TileV>(acc_dv, cta.s_v(), 1.0f, cta.index_again());
  __syncthreads();  // the tiles of dK and dV are complete
  store_tile<typename B::TileK, B::kThreads>(
      cta.s_k(), cta.columns_from(cta.k_rows(p.dk, p.head_dim, tile::kAlignedDK), cta.slice_at(B::kD)),
      cta.work.j0, cta.index_again());
  store_tile<typename B::TileV, B::kThreads>(
      cta.s_v(), cta.columns_from(cta.k_rows(p.dv, p.head_dim_v, tile::kAlignedDV), cta.slice_at(B::kDv)),
      cta.work.j0, cta.index_again());
}

/// An instance is a type that names its element type and its configuration:
///   struct Example { using Element = __half; static constexpr BwdConfig kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    bwd_mma(const __grid_constant__ BackwardArgs args) {
  using B = BwdMma<Instance>;
  extern __shared__ __align__(1024) unsigned char shared[];
  BwdMmaCta<Instance> cta(args, shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) cta.find_work();
  __syncthreads();  // the work is known
  if (cta.work.j0 >= cta.work.span.used_k) return;

  const float scale_log2 = args.p.scale * tile::kLog2e;
  BwdStep step{cta.work.head_kv * args.p.group, cta.work.m_first, 0, cta.work.m_first < cta.work.m_end};
  const bool any_step = step.exists;
  if (any_step) cta.load_first(step);

  float acc_dk[2][2 * B::kOwnD16][4], acc_dv[2][2 * B::kOwnDv16][4];
  clear(acc_dk);
  clear(acc_dv);
  BwdMmaTerms<Instance>::find_kept(cta, step);
#pragma unroll 1
  while (any_step) {
    ptx::cp_async_wait<0>();
    cta.look_for_broken_rows(step);
    cta.find_block_behind(step);
    __syncthreads();  // A
    cta.release_turn(step.parity ^ 1);
    if (cta.work.not_finite[step.parity]) cta.clear_broken_rows(step);
    cta.load_second_stages(step);
    make_p_ds<Instance>(cta, step, scale_log2, thread, acc_dk, acc_dv);
    cta.acquire_turn(step);
    __syncthreads();  // B
    // Of two warps of a CTA that share a scheduler one does so before its products, the other behind them.
    const bool looks_first = B::kThreads <= 128 || cta.index_again() < 128;
    if (looks_first) BwdMmaTerms<Instance>::find_kept(cta, cta.next_of(step));
    add_dv_dk<Instance>(cta, step, acc_dk, acc_dv);
    if (!looks_first) BwdMmaTerms<Instance>::find_kept(cta, cta.next_of(step));
    add_dq<Instance>(cta, step);
    step = cta.next_of(step);
    if (!step.exists) break;
  }

  __syncthreads();  // nobody reads K, V, Q, dO any more: sK and sV become tiles of dK and dV; all have added
  cta.release_last_turn();
  store_dk_dv<Instance>(cta, acc_dk, acc_dv);
}

}  // namespace fovea::cuda
