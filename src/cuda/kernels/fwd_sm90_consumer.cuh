// A consumer of fwd_sm90: one warpgroup, 64 rows of queries, and the steps it takes with each tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_sm90_epilogue.cuh"
#include "cuda/kernels/fwd_sm90_scores.cuh"
#include "cuda/kernels/fwd_sm90_shared_rows.cuh"
#include "cuda/kernels/fwd_sm90_sums.cuh"
#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/expression.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// The registers of a consumer's thread, and its steps. All steps are inlined into the kernel, so that the
/// arrays stay in registers. Every thread of the warpgroup calls every step.
template <class Instance>
struct FwdSm90Consumer : FwdSm90Scores<Instance> {
  using Base = FwdSm90Scores<Instance>;
  using Base::args, Base::memory, Base::w, Base::work, Base::rows, Base::steep;
  using Base::kConfig, Base::kTileN, Base::kRows, Base::kParts, Base::kOfStep, Base::kStepsPv,
      Base::kWholeWarp;
  using Base::pair_terms, Base::begin_alibi, Base::distances_of, Base::block_terms, Base::seen_of,
      Base::copy_pairs, Base::apply_terms;
  using Element = typename Instance::Element;  ///< of O
  using Operand = typename Base::Operand;
  using Memory = typename Base::Memory;
  using AccS = typename Base::AccS;
  using KeyBlocks = typename Base::KeyBlocks;
  using Block = typename Base::Block;
  using Distances = typename Base::Alibi::Operand;
  using PairTerms = typename Base::PairTerms;
  using BlockTerms = typename Base::BlockTerms;
  using Kept = typename Base::Kept;
  using Seen = typename Base::Seen;
  using WgmmaMajor = ptx::WgmmaMajor;
  using WgmmaStart = ptx::WgmmaStart;
  static constexpr int kConsumers = kConfig.consumers;
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages_of_ring(), kRowBytes = kConfig.kRowBytes;
  static constexpr int kStripsQ = kConfig.strips(kDim), kStripsV = kConfig.strips(kDimV);
  static constexpr int kProducts = products_of_parts(kParts), kStepsQk = kDim / kOfStep;
  /// Columns of P V: with row_sum_in_mma the last eight hold the row sum.
  static constexpr int kColumnsO = kDimV + (kConfig.row_sum_in_mma ? 8 : 0);
  /// wgmma truncates its sums at about the 24th bit. Over thousands of keys float32 would lose too much, so
  /// with bf16x3 each block of P V has an accumulator of its own, which FADD adds to acc_o.
  static constexpr bool kAccumulatorPerBlock = kConfig.bf16x3;
  /// Without Q in registers the last Q K^T of the tile frees sQ.
  static constexpr bool kQInShared = !kConfig.q_in_registers;
  /// Where tiles have few blocks, as soon as it is done; else with the softmax of its block.
  static constexpr bool kReleasesQAhead = kQInShared && Expression::kHasSees;
  static_assert(kConfig.bf16x3 == (std::is_same_v<Element, float> && !kConfig.e4m3));
  static_assert(!kAccumulatorPerBlock || !kConfig.intra_warpgroup_overlap);
  static_assert(!kConfig.e4m3 || !(kConfig.dropout || kConfig.expression || kConfig.row_sum_in_mma));
  static_assert(kTileN % kOfStep == 0 && kDim % kOfStep == 0 && kDimV % 16 == 0);
  static_assert(!kConfig.row_sum_in_mma || kDimV % kConfig.strip() == 0, "ones have a strip of their own");

  static_assert(!kConfig.shared_rows || kConfig.can_share_rows());

  using Weights = uint32_t[kParts][kStepsPv][4];

  const bool leader;  ///< lane 0 of its warp
  const int base16;   ///< start of shared memory in units of 16 bytes, warp-uniform
  const int q16;      ///< start of its Q, likewise

  float acc_o[kColumnsO / 2];
  float acc_block[kAccumulatorPerBlock ? kColumnsO / 2 : 1];
  FwdSm90Sums<Memory> sums;  ///< with operands of 8 bits: what acc_o had added up before
  Weights weights;           ///< P as operand A
  uint32_t q_fragments[kConfig.q_in_registers ? kStepsQk : 1][4];
  StageRing<kStages> ring;
  bool all_begun = false;  ///< every row of the warp has seen a key, so it has a maximum

  __device__ __forceinline__ FwdSm90Consumer(const TmaForwardArgs& args_, const Memory& memory_, int w_,
                                             int lane)
      : Base(args_, memory_, w_),
        leader(lane == 0),
        base16(uniform(static_cast<int>(memory_.base / 16))),
        q16(uniform(static_cast<int>(memory_.q(row_group()) / 16))),
        sums{memory_, w_},
        ring{kConfig.shared_rows ? uniform(w_ * kStages) : 0} {}

  /// Takes tiles until the planner says that there are no more.
  __device__ __forceinline__ void run() {
    if (kConfig.ping_pong && w == kConsumers - 1) pass_turn();
    for (uint32_t tile_count = 0; begin_tile(tile_count); ++tile_count) {
      KeyBlocks blocks = key_blocks();
      const PairTerms terms = pair_terms();
      clear();
      skip_blocks(blocks.before);
      if (blocks.begin < blocks.end) {
        if constexpr (kConfig.intra_warpgroup_overlap) {
          mainloop_overlapped(blocks, terms);
        } else {
          mainloop_queued(blocks, terms);
        }
      } else if (kQInShared) {
        __syncwarp();  // every lane has seen the phase of full_q
        release_q();
      }
      end_tile(blocks);
      if constexpr (kConfig.stream_k) {
        if (args.f.num_splits > 1 && work->split >= 0) {
          __syncwarp();  // the warp's rows are written
          release(memory.part_written(work->split));
        }
      }
    }
    if (kConfig.ping_pong && w == 0) ptx::barrier_wait(1, 256);  // the turn that nobody takes any more
  }

 private:
  /// Arrives for the warp. Call it after a wait for products or __syncwarp(): a lane that has not seen the
  /// barrier's phase yet would miss it.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (leader) ptx::mbarrier_arrive(barrier);
  }
  /// Which 64 rows of the tile are the consumer's.
  __device__ __forceinline__ int row_group() const { return kConfig.shared_rows ? 0 : w; }
  /// Nothing reads the tile's Q in shared memory any more.
  __device__ __forceinline__ void release_q() const { release(memory.empty_q(row_group())); }
  /// Ping-pong: waits until the consumer before has passed the tensor cores on.
  __device__ __forceinline__ void wait_for_turn() const {
    if constexpr (kConfig.ping_pong) ptx::barrier_wait(1 + w, 256);
  }
  /// Ping-pong: passes the tensor cores on to the next consumer.
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kConfig.ping_pong) ptx::barrier_arrive(1 + (w + 1 == kConsumers ? 0 : w + 1), 256);
  }

  // --- start and end of a tile ---

  /// Waits for the tile and its Q, and loads Q where it goes to registers. False: there is no tile any more.
  __device__ __forceinline__ bool begin_tile(uint32_t tile_count) {
    wait_for_tile(memory.full_q(row_group()), tile_count);
    work = memory.work_tile(row_group(), tile_count);
    if (uniform(work->last) != 0) return false;
    clear_rows_of_others(args.f, *work, memory.q(row_group()), kParts * kStripsQ, w);
    return true;
  }

  __device__ __forceinline__ KeyBlocks key_blocks() const {
    const int begin = uniform(work->blocks.begin), end = uniform(work->blocks.end),
              full_begin = uniform(work->blocks.full_begin), full_end = uniform(work->blocks.full_end);
    if constexpr (Expression::kHasSees) {
      const SeenTile seen = work->seen;
      return {begin, end, full_begin, full_end, uniform(seen.before), 0, seen.words};
    } else if constexpr (kConfig.shared_rows) {
      return {begin, end - uniform(w), full_begin, full_end, 0, 0, {}};  // all that are loaded are the rows'
    } else {
      const int load_begin = uniform(work->load_begin), load_end = uniform(work->load_end);
      return {begin,
              end,
              full_begin,
              full_end,
              load_end - max(end, load_begin),
              min(begin, load_end) - load_begin,
              {}};
    }
  }
  /// Blocks that are loaded for others after the consumer's first one. Where an expression says what is seen, registers are short.
  __device__ __forceinline__ int blocks_after(const KeyBlocks& blocks) const {
    if constexpr (Expression::kHasSees) return uniform(SeenTile(work->seen).after);
    return blocks.after;
  }

  __device__ __forceinline__ SeenWords words_at(int at) const {
    // Found again: with w here the compiler would keep it, and all that follows from it, out of uniform registers.
    const int own = uniform(static_cast<int>(ptx::thread_index() / 128) - 1);
    return TileBlocks<kConsumers>(args.f, work->batch, work->head, work->first_row - own * kRows)
        .words_of(own, at);
  }
  /// Block n of those that were looked up.
  __device__ __forceinline__ static Block block_at(const KeyBlocks& blocks, int n) {
    return {uniform(n),
            Expression::kHasSees && uniform(static_cast<int>(blocks.seen.some >> (n & 31) & 1)) != 0};
  }
  /// The last block before n that is loaded; less than `begin` where there is none.
  __device__ __forceinline__ Block block_before(KeyBlocks& blocks, int n) const {
    if constexpr (!Expression::kHasSees)
      return {n - kConfig.rings(), false};  // consumers that share rows have every other block
    n = tile::block_before(n, blocks.begin, [&](int at) {
      if (at != blocks.seen.at) blocks.seen = words_at(at);
      return blocks.seen.any;
    });
    return block_at(blocks, n);
  }

  /// Q goes to registers where the configuration says so; O and the rows' statistics start empty.
  __device__ __forceinline__ void clear() {
    if constexpr (kConfig.q_in_registers) {
#pragma unroll
      for (int step = 0; step < kStepsQk; ++step) {
        const int lane = lane_index(), r = 16 * warp_index() + lane % 16, chunk = step % 4 * 2 + lane / 16;
        ptx::ldmatrix_x4(q_fragments[step], memory.q(row_group()) + step / 4 * kRows * kRowBytes +
                                                r * kRowBytes + (chunk ^ r % 8) * 16);
      }
      release_q();
    }
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
#pragma unroll
    for (float& x : acc_block) x = 0.0f;
    rows.start();
    all_begun = false;
    if constexpr (kConfig.e4m3) begin_sequence();
    if constexpr (kConfig.alibi) begin_alibi();
    // Nobody knows how a score of the user's grows; where scores stay until the weights are known, nobody needs to.
    if constexpr (Expression::kHasScore && kConfig.intra_warpgroup_overlap) steep = true;
  }
  /// Factors are those of a sequence and key head.
  __device__ __forceinline__ void begin_sequence() {
    const tile::AttentionParams& p = args.f.p;
    const int head_kv = head_of_keys(args.f, *work);
    rows.scale_log2 = args.scale_log2 * descale_of_products(p, work->batch, head_kv);
    sums.begin();
  }
  /// Passes over blocks that other consumers need. It waits for each: an arrival before the block is there could count
  /// for the stage's earlier block.
  __device__ __forceinline__ void skip_blocks(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_for_turn();
      pass_turn();
      ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
      ptx::mbarrier_wait(memory.full_v(ring.stage), ring.phase);
      __syncwarp();  // every lane has seen the phases
      release(memory.empty_k(ring.stage));
      release(memory.empty_v(ring.stage));
      ring.advance();
    }
  }

  /// Writes O and lse, or its half of the columns, and skips the blocks behind the consumer's last one. Writing comes first, beside the
  /// other consumers' products, as the loader has stages left meanwhile; with bf16x3 that would take
  /// registers that are not there.
  __device__ __forceinline__ void end_tile(const KeyBlocks& blocks) {
    if (kConfig.bf16x3) skip_blocks(blocks_after(blocks));
    if constexpr (kConfig.e4m3) sums.add_to(acc_o);
    if constexpr (kConfig.shared_rows) {
      float half[kColumnsO / 4];
      add_up_shared_rows(memory, w, acc_o, rows, half);
      FwdSm90Epilogue<Instance>(args, *work, w * kConfig.columns_o()).write(half, rows);
      return;
    }
    FwdSm90Epilogue<Instance>(args, *work)
        .write(acc_o, rows);  // the planner overwrites *work two tiles later
    if (!kConfig.bf16x3) {
      ptx::wgmma_fence();  // .aligned, as in begin_tile: the stage is to stay in uniform registers
      skip_blocks(blocks_after(blocks));
    }
  }

  // --- products ---

  /// Start of stage `stage` in units of 16 bytes, of stages of `bytes`.
  __device__ __forceinline__ int stage16(int stage, int bytes) const {
    return base16 + stage * static_cast<int>(tile::wgmma_start_step(bytes));
  }

  /// S = Q K^T of the block in `stage`, and its distances, queued.
  __device__ __forceinline__ void issue_qk(AccS& acc_s, int stage, const Distances& distances) const {
    const uint64_t q = Memory::first_q().encode_from(q16),
                   k = Memory::first_k().encode_from(stage16(stage, kConfig.k_bytes()));
    using Product = ptx::Wgmma<kTileN>;
    // First: behind operands A from shared memory the compiler makes a product of its own of it.
    if constexpr (kConfig.alibi)
      Product::template rs<__nv_bfloat16, WgmmaStart::kZero, WgmmaMajor::kK>(
          acc_s, distances.a, AlibiColumns::at(kConfig.columns_at()).encode_from(base16));
#pragma unroll
    for (int i = 0; i < kProducts * kStepsQk; ++i) {
      const PartPair part = part_pair(kParts, i / kStepsQk);
      const int step = i % kStepsQk, inside = step % 4 * 32;
      const uint64_t a =
          q + tile::wgmma_start_step((part.a * kStripsQ + step / 4) * kRows * kRowBytes + inside);
      const uint64_t b =
          k + tile::wgmma_start_step((part.b * kStripsQ + step / 4) * kTileN * kRowBytes + inside);
      constexpr bool kStarts = !kConfig.alibi;
      if constexpr (kConfig.q_in_registers) {
        if (kStarts && i == 0) {
          Product::template rs<Operand, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, q_fragments[0], b);
        } else {
          Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, q_fragments[step], b);
        }
      } else {
        if (kStarts && i == 0) {
          Product::template ss<Operand, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, a, b);
        } else {
          Product::template ss<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, a, b);
        }
      }
    }
    ptx::wgmma_commit();
  }

  /// O += P V of the block in `stage`, queued.
  __device__ __forceinline__ void issue_pv(int stage) {
    const uint64_t v = Memory::first_v().encode_from(stage16(stage, kConfig.v_stage_bytes()));
    using Product = ptx::Wgmma<kColumnsO>;
#pragma unroll
    for (int i = 0; i < kProducts * kStepsPv; ++i) {
      const PartPair part = part_pair(kParts, i / kStepsPv);
      const int step = i % kStepsPv;
      const uint32_t(&a)[4] = weights[part.a][step];
      const uint64_t b = v + tile::wgmma_start_step(
                                 kConfig.e4m3 ? step * kOfStep * kDimV
                                              : (part.b * kStripsV * kTileN + step * kOfStep) * kRowBytes);
      if constexpr (kConfig.e4m3) {
        Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_o, a, b);
      } else if constexpr (!kAccumulatorPerBlock) {
        Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(acc_o, a, b);
      } else if (i == 0) {
        Product::template rs<Operand, WgmmaStart::kZero, WgmmaMajor::kMN>(acc_block, a, b);
      } else {
        Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(acc_block, a, b);
      }
    }
    ptx::wgmma_commit();
  }

  /// Ends P V: call it after the wait for it, before anything reads acc_o.
  __device__ __forceinline__ void finish_pv() {
    ptx::wgmma_done(acc_o);
    if constexpr (kAccumulatorPerBlock) {
      ptx::wgmma_done(acc_block);
#pragma unroll
      for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] += acc_block[i];
    }
    if constexpr (kConfig.e4m3) sums.end_block(acc_o);
  }

  // --- softmax ---

  /// Dropped weights become 0. The epilogue has the factor of the others.
  __device__ __forceinline__ void drop(const Kept& kept) {
    static_assert(kParts == 1);
    kept.keep(weights[0]);
  }

  /// O follows the last raise of the maxima.
  __device__ __forceinline__ void rescale_o() {
    if constexpr (kConfig.e4m3) sums.scale(rows.factor);
#pragma unroll
    for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] *= rows.factor[i / 2 % 2];
  }

  /// From Q K^T of block n to packed weights. No P V is under way.
  __device__ __forceinline__ void softmax(AccS& acc_s, int n, bool first, const BlockTerms& block,
                                          const PairTerms& terms) {
    apply_terms(acc_s, n, block, terms);
    if constexpr (kConfig.e4m3) {
      if (__builtin_expect(!all_begun, 0)) {
        rows.raise(acc_s);
        rescale_o();
        all_begun = !steep && rows.all_have_maxima();
      }
      if (__builtin_expect(!rows.weigh_within(acc_s, weights), 0)) rescale_o();
    } else {
      if (first) rows.guess(acc_s);
      if (!all_begun) all_begun = !steep && rows.all_have_maxima();
      if (all_begun && rows.weigh_stale(acc_s, weights)) return;
      if (rows.raise(acc_s)) rescale_o();
      rows.weigh(acc_s);
      rows.pack_weights(acc_s, weights);
    }
  }

  /// From Q K^T of block n to weights in the registers of S, while P V of the block before reads acc_o and
  /// `weights`. Whether rescale_o() is due once that is done.
  __device__ __forceinline__ bool softmax_in_place(AccS& acc_s, int n, const BlockTerms& block,
                                                   const PairTerms& terms) {
    apply_terms(acc_s, n, block, terms);
    bool raised;
    if (all_begun) {
      raised = rows.weigh_in_place(acc_s);
    } else {
      raised = rows.raise(acc_s);
      rows.weigh(acc_s);
      all_begun = !steep && rows.all_have_maxima();
    }
    return raised;
  }

  // --- the two schedules ---

  /// Blocks end - 1 to begin: Q K(n) is queued behind P V(n + 1), and the softmax waits for both.
  __device__ __forceinline__ void mainloop_queued(KeyBlocks& blocks, const PairTerms& terms) {
    const Block first = block_at(blocks, blocks.end - 1);
    if constexpr (kConfig.stages_pairs()) copy_pairs(blocks, first.n, terms);
    Seen seen = seen_of(first, terms);
    for (Block at = first, next; at.n >= blocks.begin; at = next) {
      AccS acc_s;
      const bool is_first = at.n == first.n;
      ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
      const Distances distances = distances_of(at.n);
      ptx::wgmma_fence();
      issue_qk(acc_s, ring.stage, distances);
      next = block_before(blocks, at.n);
      const BlockTerms block = block_terms(blocks, at, next, seen, terms);
      ptx::wgmma_wait<0>();  // Q K^T of this block, and P V of the one before
      if (!is_first) pass_turn();
      ptx::wgmma_done(acc_s);
      finish_pv();
      release(memory.empty_k(ring.stage));
      if (!is_first) release(memory.empty_v(ring.before()));
      if (kQInShared && next.n < blocks.begin) release_q();
      softmax(acc_s, at.n, is_first, block, terms);
      if constexpr (kConfig.dropout) drop(block.kept);
      ptx::mbarrier_wait(memory.full_v(ring.stage), ring.phase);
      wait_for_turn();
      ptx::wgmma_fence();
      issue_pv(ring.stage);
      ring.advance();
    }
    ptx::wgmma_wait<0>();
    pass_turn();
    finish_pv();
    release(memory.empty_v(ring.before()));
  }

  /// The same, but softmax(n) runs while this consumer's own P V(n + 1) does.
  __device__ __forceinline__ void mainloop_overlapped(KeyBlocks& blocks, const PairTerms& terms) {
    AccS acc_s;
    const Block first = block_at(blocks, blocks.end - 1);
    if constexpr (kConfig.stages_pairs()) copy_pairs(blocks, first.n, terms);
    Seen seen = seen_of(first, terms);
    ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
    const Distances distances_of_first = distances_of(first.n);
    wait_for_turn();
    ptx::wgmma_fence();
    issue_qk(acc_s, ring.stage, distances_of_first);
    pass_turn();
    Block next = block_before(blocks, first.n);
    const BlockTerms of_first = block_terms(blocks, first, next, seen, terms);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_s);
    release(memory.empty_k(ring.stage));
    if (kReleasesQAhead && next.n < blocks.begin) release_q();
    softmax(acc_s, first.n, true, of_first, terms);
    if constexpr (kConfig.dropout) drop(of_first.kept);
    while (next.n >= blocks.begin) {
      const Block at = next;
      const StageRing<kStages> before = ring;
      ring.advance();
      ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
      ptx::mbarrier_wait(memory.full_v(before.stage), before.phase);
      const Distances distances = distances_of(at.n);
      wait_for_turn();
      ptx::wgmma_fence();
      issue_qk(acc_s, ring.stage, distances);
      issue_pv(before.stage);
      pass_turn();
      next = block_before(blocks, at.n);
      const BlockTerms block = block_terms(blocks, at, next, seen, terms);
      ptx::wgmma_wait<1>();  // Q K^T of this block
      ptx::wgmma_done(acc_s);
      release(memory.empty_k(ring.stage));
      if (kReleasesQAhead && next.n < blocks.begin) release_q();
      const bool raised = softmax_in_place(acc_s, at.n, block, terms);
      ptx::wgmma_wait<0>();  // P V of the block before
      finish_pv();
      release(memory.empty_v(before.stage));
      if (raised) rescale_o();
      rows.pack_weights(acc_s, weights);  // only now: P V has read the registers of P
      if constexpr (kConfig.dropout) drop(block.kept);
    }
    if (kQInShared && !kReleasesQAhead) release_q();
    ptx::mbarrier_wait(memory.full_v(ring.stage), ring.phase);
    ptx::wgmma_fence();
    issue_pv(ring.stage);
    ptx::wgmma_wait<0>();
    finish_pv();
    release(memory.empty_v(ring.stage));
    ring.advance();
  }
};

}  // namespace fovea::cuda
