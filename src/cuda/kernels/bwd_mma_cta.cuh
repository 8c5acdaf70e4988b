// A CTA of bwd_mma apart from its products: what it works on, its copies between global and shared memory, rows
// that are not finite, and its turn at the sums of dQ.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_mma_config.cuh"
#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/alibi_reach.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/finite_tile.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace fovea::cuda {

/// One block of queries of one head. `parity` alternates from step to step and selects among two stages.
struct BwdStep {
  int head, block, parity;
  bool exists;
};

template <class Instance>
struct BwdMmaCta {
  using T = typename Instance::Element;
  using B = BwdMma<Instance>;
  using TileK = typename B::TileK;
  using TileV = typename B::TileV;
  using TileQ = typename B::TileQ;
  using TileDO = typename B::TileDO;
  static constexpr BwdConfig kC = B::kC;
  static constexpr int kM = B::kM, kN = B::kN, kThreads = B::kThreads;
  /// Whether it passes over blocks that the expression hides.
  static constexpr bool kWalks = kC.expression && Expression::kHasSees;

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  unsigned char* const shared;
  const uint32_t base;  ///< shared address of `shared`
  BwdWork& work;

  __device__ __forceinline__ BwdMmaCta(const BackwardArgs& arguments, unsigned char* shared_memory)
      : args(arguments),
        p(arguments.p),
        shared(shared_memory),
        base(ptx::shared_address(shared_memory)),
        work(*reinterpret_cast<BwdWork*>(shared_memory + kC.offset_work())) {}

  // Shared addresses.
  __device__ __forceinline__ uint32_t s_k() const { return base + kC.offset_k(); }
  __device__ __forceinline__ uint32_t s_v() const { return base + kC.offset_v(); }
  __device__ __forceinline__ uint32_t s_q(int parity) const {
    return base + kC.offset_q() + stage_q(parity) * TileQ::kBytes;
  }
  __device__ __forceinline__ uint32_t s_do(int parity) const {
    return base + kC.offset_do() + stage_do(parity) * TileDO::kBytes;
  }
  __device__ __forceinline__ uint32_t s_ds() const { return base + kC.offset_ds(); }
  __device__ __forceinline__ uint32_t s_p() const { return base + kC.offset_p(); }
  /// lse_log2 of the queries of a step, then delta.
  __device__ __forceinline__ float* statistics(int parity) const {
    return reinterpret_cast<float*>(shared + kC.offset_stats()) + parity * 2 * kM;
  }
  /// This thread's word of a chunk: which weights dropout keeps.
  __device__ __forceinline__ uint32_t kept(int chunk) const {
    return base + kC.offset_kept() + static_cast<uint32_t>(chunk * kThreads + index_again()) * 4;
  }
  static __device__ __forceinline__ int stage_q(int parity) { return parity % kC.stages_q; }
  static __device__ __forceinline__ int stage_do(int parity) { return parity % kC.stages_do; }

  /// The thread's index, asked for anew: what is derived from it is not kept in registers, which limit this kernel.
  static __device__ __forceinline__ int index_again() { return static_cast<int>(ptx::thread_index()); }

  /// Blocks of queries that see any of the kN keys from j0 on, and have them in the reach of their slopes.
  __device__ __forceinline__ tile::Span32 blocks_of_queries(int j0, int reach) const {
    if (j0 >= work.span.used_k) return {};
    const int end = min(j0 + kN, work.span.used_k);
    const tile::Span32 queries = tile::queries_of_any(p, work.span, j0, end);
    if (queries.empty()) return {};
    const tile::Span32 blocks = {queries.begin / kM, (queries.end + kM - 1) / kM};
    if constexpr (!kC.alibi) return blocks;
    const tile::KvBlocks near = tile::queries_in_reach({blocks.begin, blocks.begin, blocks.begin, blocks.end},
                                                       work.span, j0, end, reach, kM);
    return {near.begin, near.end};
  }

  /// Finds the CTA's keys and their queries, by one thread. With dq_semaphore the CTA takes its number now, so that CTAs
  /// that it waits for have begun before it.
  __device__ __forceinline__ void find_work() {
    const bool in_turn = args.dq_semaphore != nullptr;
    const int number = in_turn ? atomicAdd(args.dq_semaphore + blockIdx.y, 1) : static_cast<int>(blockIdx.x);
    const int first_head = number / (args.heads_at_once * args.key_blocks) * args.heads_at_once;
    const int heads = min(args.heads_at_once, p.heads_kv * p.batch - first_head);
    const int place = number - first_head * args.key_blocks, head_index = first_head + place % heads;
    work.head_kv = head_index % p.heads_kv;
    if constexpr (kC.alibi) work.head_kv = longest_head_first(args.alibi_norms, work.head_kv, p.heads_kv);
    work.batch = head_index / p.heads_kv;
    work.block = in_turn ? args.key_blocks - 1 - place / heads : place / heads;
    work.j0 = work.block * kN;
    work.span = tile::sequence_span(p, work.batch);
    int reach = tile::kEverywhere;
    if constexpr (kC.alibi) reach = alibi_reach_of_group(p, args.alibi_norms, work.batch, work.head_kv);
    const tile::Span32 mine = blocks_of_queries(work.j0, reach),
                       before = blocks_of_queries(work.j0 + kN, reach);
    work.m_first = mine.begin, work.m_end = mine.end;
    if constexpr (kWalks) {
      work.seen = args.seen.at(work.batch, work.head_kv, work.block);
      work.m_first = work.seen.from(mine.begin, mine.end);
    }
    work.before_first = before.begin, work.before_end = before.end;
    work.not_finite[0] = work.not_finite[1] = false;
    work.turn[1] = nullptr;
    if constexpr (kC.general || kC.dropout) work.dropout = tile::dropout_of(p);
  }

  // Rows of a tensor: of this CTA's key head, or of a head of queries.
  __device__ __forceinline__ RowTarget rows_of(const tile::RowsView& view, int64_t row, int head, int used,
                                               int columns, uint32_t bit) const {
    return {view.data + view.offset(work.batch, row, head) * 2, view.row * 2, used, columns,
            (p.aligned16 & bit) != 0};
  }
  __device__ __forceinline__ RowTarget k_rows(const tile::RowsView& view, int columns, uint32_t bit) const {
    return rows_of(view, work.span.row_k, work.head_kv, work.span.used_k, columns, bit);
  }
  __device__ __forceinline__ RowTarget q_rows(const tile::RowsView& view, int head, int columns,
                                              uint32_t bit) const {
    return rows_of(view, work.span.row_q, head, work.span.used_q, columns, bit);
  }
  /// Rows of a gradient of float32: columns of this CTA's slice, from `first` on.
  __device__ __forceinline__ RowTarget f32_rows(const tile::RowsView& view, int columns, int first) const {
    return {view.data + (view.offset(work.batch, work.span.row_k, work.head_kv) + first) * 4, view.row * 4,
            work.span.used_k, columns - first, false};
  }
  /// Columns from `first` on: those of this CTA's slice, or a chunk that is streamed.
  static __device__ __forceinline__ RowTarget columns_from(RowTarget rows, int first) {
    rows.data += first * 2;
    rows.columns -= first;
    return rows;
  }
  /// First column of this CTA's slice of `width` columns.
  static __device__ __forceinline__ int slice_at(int width) {
    return kC.stream > 0 ? static_cast<int>(blockIdx.y) * width : 0;
  }

  /// Starts copying the queries of a step.
  __device__ __forceinline__ void load_q(const BwdStep& step) const {
    copy_tile_either<TileQ, kThreads>(
        s_q(step.parity), columns_from(q_rows(p.q, step.head, p.head_dim, tile::kAlignedQ), slice_at(B::kD)),
        step.block * kM, index_again());
  }
  /// Starts copying dO of a step.
  __device__ __forceinline__ void load_do(const BwdStep& step) const {
    copy_tile_either<TileDO, kThreads>(
        s_do(step.parity),
        columns_from(q_rows(p.d_o, step.head, p.head_dim_v, tile::kAlignedDO), slice_at(B::kDv)),
        step.block * kM, index_again());
  }
  /// Starts copying lse_log2 and delta of a step: a thread copies one of them.
  __device__ __forceinline__ void load_statistics(const BwdStep& step) const {
    const int thread = index_again();
    if (thread < 2 * kM) {
      const float* const from = thread < kM ? args.lse_log2 : args.delta;
      ptx::cp_async_4(base + kC.offset_stats() + static_cast<uint32_t>(step.parity * 2 * kM + thread) * 4,
                      from + (static_cast<int64_t>(work.batch) * p.heads_q + step.head) * args.rows +
                          step.block * kM + thread % kM,
                      true);
    }
  }
  /// Copies K, V, and all of the first step, and makes K finite.
  __device__ __forceinline__ void load_first(const BwdStep& step) const {
    copy_tile_either<TileK, kThreads>(s_k(),
                                      columns_from(k_rows(p.k, p.head_dim, tile::kAlignedK), slice_at(B::kD)),
                                      work.j0, index_again());
    load_q(step);
    if constexpr (kC.stream == 0) {
      copy_tile_either<TileV, kThreads>(s_v(), k_rows(p.v, p.head_dim_v, tile::kAlignedV), work.j0,
                                        index_again());
    }
    load_do(step);
    load_statistics(step);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    make_finite<T, TileK, kThreads>(s_k(), index_again());
  }

  /// Tells the others when the row of this thread has an lse that is not finite (rows that are NaN or take no part;
  /// those beyond used_q are 0 already). Read behind barrier A.
  __device__ __forceinline__ void look_for_broken_rows(const BwdStep& step) const {
    if (const int row = index_again(); row < kM && !(fabsf(statistics(step.parity)[row]) < INFINITY) &&
                                       step.block * kM + row < work.span.used_q) {
      work.not_finite[step.parity] = true;
    }
  }
  /// Finds the block behind that of the step, by one thread. Read behind barrier A.
  __device__ __forceinline__ void find_block_behind(const BwdStep& step) const {
    if (kWalks && index_again() == 0) work.behind[step.parity] = work.seen.from(step.block + 1, work.m_end);
  }
  /// Rows of Q and dO whose lse is not finite become zeros.
  __device__ __forceinline__ void clear_broken_rows(const BwdStep& step) const {
    float* const s_lse = statistics(step.parity);
    int first = index_again();
    ptx::make_opaque(first);
    for (int index = first; index < kM * (B::kD + B::kDv) / 8; index += kThreads) {
      const int row = index % kM, c = index / kM;
      if (fabsf(s_lse[row]) < INFINITY) continue;
      unsigned char* const chunk =
          shared + (c < B::kD / 8
                        ? kC.offset_q() + stage_q(step.parity) * TileQ::kBytes + TileQ::offset(row, c)
                        : kC.offset_do() + stage_do(step.parity) * TileDO::kBytes +
                              TileDO::offset(row, c - B::kD / 8));
      if constexpr (kC.general) {
        // A bias of -inf does not take a key out of a row whose q is NaN: the scores are NaN, not -inf.
        const uint4 words = *reinterpret_cast<const uint4*>(chunk);
        NonFinite<T> bad;
        bad.look(words.x), bad.look(words.y), bad.look(words.z), bad.look(words.w);
        if (c < B::kD / 8 && bad.any()) s_lse[kM + row] = INFINITY;
      }
      *reinterpret_cast<uint4*>(chunk) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();  // such rows are zeros for everyone, and all have read that there are any
    if (index_again() == 0) work.not_finite[step.parity] = false;
  }

  /// The step to come. Read anew from `work` behind each barrier, which keeps it out of the registers.
  __device__ __forceinline__ BwdStep next_of(const BwdStep& step) const {
    const int behind = kWalks ? work.behind[step.parity] : step.block + 1;
    const bool wraps = behind == work.m_end;
    return {step.head + wraps, wraps ? work.m_first : behind, step.parity ^ 1,
            step.head + wraps < (work.head_kv + 1) * p.group};
  }
  /// Starts copying what the next step has a second stage for. Behind barrier A.
  __device__ __forceinline__ void load_second_stages(const BwdStep& step) const {
    if (const BwdStep next = next_of(step); next.exists) {
      if constexpr (kC.stages_q > 1) load_q(next);
      if constexpr (kC.stages_do > 1) load_do(next);
      load_statistics(next);
      ptx::cp_async_commit();
    }
  }

  /// Passes on the turn at the tile of dQ of the step before. Behind a barrier after all have added to it.
  __device__ __forceinline__ void release_turn(int parity_before) const {
    if (args.dq_semaphore != nullptr && index_again() == 0 && work.turn[parity_before] != nullptr)
      ptx::st_release(work.turn[parity_before], work.block + 1);
  }
  /// Waits, by one thread of warp 1, for the turn at the tile of dQ of the step. All may add behind barrier B.
  __device__ __forceinline__ void acquire_turn(const BwdStep& step) const {
    if (args.dq_semaphore != nullptr && index_again() == 32) {
      int* const turn = args.dq_semaphore + args.semaphore_at(work.batch, step.head, step.block * kM,
                                                              static_cast<int>(blockIdx.y));
      work.turn[step.parity] = turn;
      if (step.block >= work.before_first && step.block < work.before_end)
        ptx::wait_for(turn, work.block + 2);
    }
  }
  /// Passes on the turn of the last step.
  __device__ __forceinline__ void release_last_turn() const {
    if (args.dq_semaphore != nullptr && index_again() == 0 && work.m_first < work.m_end)
      ptx::st_release(work.turn[((work.m_end - work.m_first) * p.group - 1) & 1], work.block + 1);
  }
};

}  // namespace fovea::cuda
