// A consumer of fwd_sm90: one warpgroup, 64 rows of queries, and the steps it takes with each tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_sm90_epilogue.cuh"
#include "cuda/kernels/fwd_sm90_softmax.cuh"
#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// The registers of a consumer's thread, and its steps. All steps are inlined into the kernel, so that the
/// arrays stay in registers. Every thread of the warpgroup calls every step.
template <class Instance>
struct FwdSm90Consumer {
  using Element = typename Instance::Element;
  /// What wgmma multiplies.
  using Operand = std::conditional_t<std::is_same_v<Element, float>, __nv_bfloat16, Element>;
  using Memory = FwdSm90Memory<Instance>;
  using WgmmaMajor = ptx::WgmmaMajor;
  using WgmmaStart = ptx::WgmmaStart;
  static constexpr FwdSm90Config kConfig = Instance::kConfig;
  static constexpr int kTileN = kConfig.tile_n, kRows = kConfig.kRows, kConsumers = kConfig.consumers;
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages, kRowBytes = kConfig.kRowBytes;
  static constexpr int kStripsQ = kConfig.strips(kDim), kStripsV = kConfig.strips(kDimV);
  static constexpr int kParts = kConfig.parts(), kProducts = products_of_parts(kParts);
  static constexpr int kStepsQk = kDim / 16, kStepsPv = kTileN / 16;
  /// Columns of P V: with row_sum_in_mma the last eight hold the row sum.
  static constexpr int kColumnsO = kDimV + (kConfig.row_sum_in_mma ? 8 : 0);
  /// wgmma truncates its sums at about the 24th bit. Over thousands of keys float32 would lose too much, so
  /// with bf16x3 each block of P V has an accumulator of its own, which FADD adds to acc_o.
  static constexpr bool kAccumulatorPerBlock = kConfig.bf16x3;
  /// Without Q in registers the last Q K^T of the tile frees sQ.
  static constexpr bool kQInShared = !kConfig.q_in_registers;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;
  static constexpr bool kHasExpression = Expression::kHasScore || Expression::kHasSees;
  static_assert(kConfig.expression == kHasExpression);
  static_assert(kConfig.bf16x3 == std::is_same_v<Element, float>);
  static_assert(!kAccumulatorPerBlock || !kConfig.intra_warpgroup_overlap);
  static_assert(kTileN % 16 == 0 && kDim % 16 == 0 && kDimV % 16 == 0);
  static_assert(!kConfig.row_sum_in_mma || kDimV % kConfig.kStrip == 0, "ones have a strip of their own");

  using AccS = float[kTileN / 2];
  using Weights = uint32_t[kParts][kStepsPv][4];
  using Rows = FwdSm90Rows<Operand, kTileN, !kConfig.row_sum_in_mma, kParts>;

  const TmaForwardArgs& args;
  const Memory& memory;
  const int w;        ///< number of this consumer
  const bool leader;  ///< lane 0 of its warp
  const int base16;   ///< start of shared memory in units of 16 bytes, warp-uniform
  const int q16;      ///< start of its Q, likewise

  float acc_o[kColumnsO / 2];
  float acc_block[kAccumulatorPerBlock ? kColumnsO / 2 : 1];
  Weights weights;  ///< P as operand A
  uint32_t q_fragments[kConfig.q_in_registers ? kStepsQk : 1][4];
  Rows rows;
  /// Of this lane's two rows: the slope as a factor of Q K^T, negative, and the key position of the query.
  float alibi_factor[kConfig.alibi ? 2 : 1];
  int diagonal[kConfig.alibi ? 2 : 1];
  /// Whether scores may grow by so much from one block to the next that weights against the maxima of the blocks before
  /// would overflow: then maxima follow each block.
  bool steep = false;
  const FwdSm90WorkTile* work = nullptr;  ///< in shared memory
  tile::Dropout dropout;
  StageRing<kStages> ring;
  bool all_begun = false;  ///< every row of the warp has seen a key, so it has a maximum

  __device__ __forceinline__ FwdSm90Consumer(const TmaForwardArgs& args_, const Memory& memory_, int w_,
                                             int lane)
      : args(args_),
        memory(memory_),
        w(w_),
        leader(lane == 0),
        base16(uniform(static_cast<int>(memory_.base / 16))),
        q16(uniform(static_cast<int>(memory_.q(w_) / 16))),
        rows(args_.scale_log2),
        dropout(kConfig.dropout ? uniform_dropout(args_.f.p) : tile::Dropout()) {}

  /// Takes tiles until the planner says that there are no more.
  __device__ __forceinline__ void run() {
    if (kConfig.ping_pong && w == kConsumers - 1) pass_turn();
    for (uint32_t tile_count = 0; begin_tile(tile_count); ++tile_count) {
      const KeyBlocks blocks = key_blocks();
      const PairTerms terms = pair_terms();
      clear();
      skip_blocks(blocks, blocks.load_end, max(blocks.end, blocks.load_begin));
      if (blocks.before(blocks.end) >= blocks.begin) {
        if constexpr (kConfig.intra_warpgroup_overlap) {
          mainloop_overlapped(blocks, terms);
        } else {
          mainloop_queued(blocks, terms);
        }
      } else if (kQInShared) {
        __syncwarp();  // every lane has seen the phase of full_q
        release(memory.empty_q(w));
      }
      end_tile(blocks);
    }
    if (kConfig.ping_pong && w == 0) ptx::barrier_wait(1, 256);  // the turn that nobody takes any more
  }

 private:
  /// What is to be asked for each pair of a block: whether the window, or the expression, lets it see.
  struct Mask {
    bool window, expression;
  };
  /// Indices of blocks of keys, warp-uniform. Those outside of [full_begin, full_end) need a mask; the producer
  /// loads [load_begin, load_end), of which this consumer needs [begin, end).
  struct KeyBlocks {
    int begin, end, full_begin, full_end, load_begin, load_end;
    BlockWalk walk;
    __device__ __forceinline__ Mask mask(int n) const {
      return {n < full_begin || n >= full_end,
              Expression::kHasSees && uniform(static_cast<int>(walk.is_partial(n))) != 0};
    }
    /// The block to do before block n; less than `begin` where there is none.
    __device__ __forceinline__ int before(int n) const {
      return Expression::kHasSees ? uniform(walk.before(n, begin)) : n - 1;
    }
  };

  /// The expression's share of this lane's two rows.
  struct PairTerms {
    Expression::Head head;
    Expression::Query query[2];
  };
  /// Heads of a group are not packed into a tile that has an expression: its rows are of one head.
  __device__ __forceinline__ PairTerms pair_terms() const {
    const Expression::Head head = expression_head(args.f.p, work->span, work->batch, work->head);
    const int row = work->first_row + 16 * warp_index() + lane_index() / 4;
    return {head,
            {Expression::Query(head, query_in_use(work->span, row)),
             Expression::Query(head, query_in_use(work->span, row + 8))}};
  }

  /// Arrives for the warp. Call it after a wait for products or __syncwarp(): a lane that has not seen the
  /// barrier's phase yet would miss it.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (leader) ptx::mbarrier_arrive(barrier);
  }
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
    wait_for_tile(memory.full_q(w), tile_count);
    work = memory.work_tile(w, tile_count);
    return !uniform(work->last);
  }

  __device__ __forceinline__ KeyBlocks key_blocks() const {
    return {uniform(work->blocks.begin),
            uniform(work->blocks.end),
            uniform(work->blocks.full_begin),
            uniform(work->blocks.full_end),
            uniform(work->load_begin),
            uniform(work->load_end),
            fwd_sm90_walk(args.f, work->batch, work->head, (work->first_row - w * kRows) / kConfig.tile_m())};
  }

  /// Q goes to registers where the configuration says so; O and the rows' statistics start empty.
  __device__ __forceinline__ void clear() {
    if constexpr (kConfig.q_in_registers) {
#pragma unroll
      for (int step = 0; step < kStepsQk; ++step) {
        const int lane = lane_index(), r = 16 * warp_index() + lane % 16, chunk = step % 4 * 2 + lane / 16;
        ptx::ldmatrix_x4(q_fragments[step],
                         memory.q(w) + step / 4 * kRows * kRowBytes + r * kRowBytes + (chunk ^ r % 8) * 16);
      }
      release(memory.empty_q(w));
    }
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
#pragma unroll
    for (float& x : acc_block) x = 0.0f;
    rows.start();
    all_begun = false;
    if constexpr (kConfig.alibi) begin_alibi();
    if constexpr (Expression::kHasScore) steep = true;  // nobody knows how a score of the user's grows
  }
  __device__ __forceinline__ void begin_alibi() {
    const tile::AttentionParams& p = args.f.p;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A row behind the last one has a slope, too, that nobody looks at.
      const int row =
          min(work->first_row + 16 * warp_index() + lane_index() / 4 + 8 * half, work->end_row - 1);
      const QueryRow query = query_row(args.f, *work, max(row, 0));
      alibi_factor[half] = -alibi_slope(p, work->batch, query.head) / p.scale;
      diagonal[half] = query.query + work->span.used_k - work->span.used_q;
    }
    constexpr float kMostGrowth = 100;  // of log2; float32 ends at 128, and products grow as well
    const float slope = fmaxf(fabsf(alibi_factor[0]), fabsf(alibi_factor[1])) * args.scale_log2;
    steep = __any_sync(kWholeWarp, !(slope * kTileN <= kMostGrowth));
  }

  /// Passes over blocks [begin, end), which other consumers need, the last first. It waits for each: an arrival
  /// before the block is there could count for the stage's earlier block.
  __device__ __forceinline__ void skip_blocks(const KeyBlocks& blocks, int end, int begin) {
    const auto before = [&](int n) {
      return Expression::kHasSees ? uniform(blocks.walk.before(n, begin)) : n - 1;
    };
#pragma unroll 1
    for (int n = before(end); n >= begin; n = before(n)) {
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

  /// Writes O and lse, and skips the blocks behind the consumer's last one. Writing comes first, beside the
  /// other consumers' products, as the loader has stages left meanwhile; with bf16x3 that would take
  /// registers that are not there.
  __device__ __forceinline__ void end_tile(const KeyBlocks& blocks) {
    const int end = min(blocks.begin, blocks.load_end);
    if (kConfig.bf16x3) skip_blocks(blocks, end, blocks.load_begin);
    FwdSm90Epilogue<Instance>(args, *work)
        .write(acc_o, rows);  // the planner overwrites *work two tiles later
    if (!kConfig.bf16x3) {
      ptx::wgmma_fence();  // .aligned, as in begin_tile: the stage is to stay in uniform registers
      skip_blocks(blocks, end, blocks.load_begin);
    }
  }

  // --- products ---

  /// Start of stage `stage` in units of 16 bytes, of stages of `bytes`.
  __device__ __forceinline__ int stage16(int stage, int bytes) const {
    return base16 + stage * static_cast<int>(tile::wgmma_start_step(bytes));
  }

  /// S = Q K^T of the block in `stage`, queued.
  __device__ __forceinline__ void issue_qk(AccS& acc_s, int stage) const {
    const uint64_t q = descriptor(Memory::first_q(), q16),
                   k = descriptor(Memory::first_k(), stage16(stage, kConfig.k_bytes()));
    using Product = ptx::Wgmma<kTileN>;
#pragma unroll
    for (int i = 0; i < kProducts * kStepsQk; ++i) {
      const PartPair part = part_pair(kParts, i / kStepsQk);
      const int step = i % kStepsQk, inside = step % 4 * 32;
      const uint64_t a =
          q + tile::wgmma_start_step((part.a * kStripsQ + step / 4) * kRows * kRowBytes + inside);
      const uint64_t b =
          k + tile::wgmma_start_step((part.b * kStripsQ + step / 4) * kTileN * kRowBytes + inside);
      if constexpr (kConfig.q_in_registers) {
        if (i == 0) {
          Product::template rs<Operand, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, q_fragments[0], b);
        } else {
          Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, q_fragments[step], b);
        }
      } else {
        if (i == 0) {
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
    const uint64_t v = descriptor(Memory::first_v(), stage16(stage, kConfig.v_stage_bytes()));
    using Product = ptx::Wgmma<kColumnsO>;
#pragma unroll
    for (int i = 0; i < kProducts * kStepsPv; ++i) {
      const PartPair part = part_pair(kParts, i / kStepsPv);
      const int step = i % kStepsPv;
      const uint32_t(&a)[4] = weights[part.a][step];
      const uint64_t b = v + tile::wgmma_start_step((part.b * kStripsV * kTileN + step * 16) * kRowBytes);
      if constexpr (!kAccumulatorPerBlock) {
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
  }

  // --- softmax ---

  /// Calls visit(score, half, key) for each score of a block: that of the lane's row `half` and this key.
  template <class Visit>
  __device__ __forceinline__ void for_each_pair(AccS& acc_s, int n, const PairTerms& terms,
                                                Visit&& visit) const {
    const int first_key = n * kTileN + 2 * (lane_index() % 4);
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += (i % 2 == 0 ? 1 : 3)) {
      // Keys behind the last one get that, so that every tensor has their elements: the window takes them out.
      const int k = first_key + i / 4 * 8 + i % 2;
      const Expression::Key key(terms.head,
                                Expression::kReadsByKey ? max(min(k, work->span.used_k - 1), 0) : k);
      visit(acc_s[i], 0, key);
      visit(acc_s[i + 2], 1, key);
    }
  }
  /// From Q K^T to what the expression makes of it.
  __device__ __forceinline__ void apply_expression(AccS& acc_s, int n, const PairTerms& terms) const {
    const float scale = args.f.p.scale;
    for_each_pair(acc_s, n, terms, [&](float& s, int half, const Expression::Key& key) {
      s = Expression::score(terms.head, terms.query[half], key, s * scale);
    });
  }
  /// Scores of keys that the expression does not let a row see become -inf.
  __device__ __forceinline__ void mask_by_expression(AccS& acc_s, int n, const PairTerms& terms) const {
    for_each_pair(acc_s, n, terms, [&](float& s, int half, const Expression::Key& key) {
      if (!Expression::sees(terms.head, terms.query[half], key)) s = -INFINITY;
    });
  }

  /// From Q K^T to scores: softcap, ALiBi or an expression, and the mask where block n needs one.
  __device__ __forceinline__ void apply_terms(AccS& acc_s, int n, Mask masked, const PairTerms& terms) const {
    if constexpr (kConfig.softcap) {
      const tile::AttentionParams& p = args.f.p;
#pragma unroll
      for (float& s : acc_s) s = p.softcap * tanh_of(s * (p.scale / p.softcap));
    }
    if constexpr (kConfig.alibi) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        add_distances<-1>(acc_s, half, alibi_factor[half],
                          static_cast<float>(diagonal[half] - n * kTileN - 2 * (lane_index() % 4)));
    }
    if constexpr (Expression::kHasScore) apply_expression(acc_s, n, terms);
    if constexpr (Expression::kHasSees)
      if (masked.expression) mask_by_expression(acc_s, n, terms);
    if (masked.window) mask_window(acc_s, args.f, *work, n * kTileN);
  }

  using Kept = KeptWeights<kConfig.dropout ? kStepsPv : 1>;
  /// Which weights of block n dropout keeps: to be found beside products.
  __device__ __forceinline__ void find_kept(Kept& kept, int n) const {
    const auto head = static_cast<uint32_t>(work->batch * args.f.p.heads_q + work->head);
    const uint32_t row = tile::Dropout::row_of_cell(
        static_cast<uint32_t>(work->first_row + 16 * warp_index() + lane_index() / 4));
    const int column = n * kTileN / 4 + lane_index() % 4;
    kept.template set<(kTileN > 64 ? 2 : 4)>([&](int step, uint32_t(&of_step)[4]) {
      const tile::PhiloxWords cell = dropout.cell(head, row, static_cast<uint32_t>(column + 4 * step));
#pragma unroll
      for (size_t r = 0; r < 4; ++r) of_step[r] = dropout.kept(cell[r]);
    });
  }
  /// Dropped weights become 0. The epilogue has the factor of the others.
  __device__ __forceinline__ void drop(const Kept& kept) {
    static_assert(kParts == 1);
#pragma unroll
    for (int x = 0; x < kTileN / 4; ++x)
      weights[0][x / 4][x % 4] &= ptx::halves_by_signs(kept.signs(x / 4, x % 4));
  }

  /// O follows the last raise of the maxima.
  __device__ __forceinline__ void rescale_o() {
#pragma unroll
    for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] *= rows.factor[i / 2 % 2];
  }

  /// From Q K^T of block n to packed weights. No P V is under way.
  __device__ __forceinline__ void softmax(AccS& acc_s, int n, bool first, Mask masked,
                                          const PairTerms& terms) {
    apply_terms(acc_s, n, masked, terms);
    if (first) rows.guess(acc_s);
    if (!all_begun) all_begun = !steep && rows.all_have_maxima();
    if (all_begun && rows.weigh_stale(acc_s, weights)) return;
    if (rows.raise(acc_s)) rescale_o();
    rows.weigh(acc_s);
    rows.pack_weights(acc_s, weights);
  }

  /// From Q K^T of block n to weights in the registers of S, while P V of the block before reads acc_o and
  /// `weights`. Whether rescale_o() is due once that is done.
  __device__ __forceinline__ bool softmax_in_place(AccS& acc_s, int n, Mask masked, const PairTerms& terms) {
    apply_terms(acc_s, n, masked, terms);
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
  __device__ __forceinline__ void mainloop_queued(const KeyBlocks& blocks, const PairTerms& terms) {
    const int first_block = blocks.before(blocks.end);
    for (int n = first_block, next = 0; n >= blocks.begin; n = next) {
      AccS acc_s;
      const bool first = n == first_block;
      next = blocks.before(n);
      ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
      ptx::wgmma_fence();
      issue_qk(acc_s, ring.stage);
      const Mask masked = blocks.mask(n);
      Kept kept;
      if constexpr (kConfig.dropout) find_kept(kept, n);
      ptx::wgmma_wait<0>();  // Q K^T of this block, and P V of the one before
      if (!first) pass_turn();
      ptx::wgmma_done(acc_s);
      finish_pv();
      release(memory.empty_k(ring.stage));
      if (!first) release(memory.empty_v(ring.before()));
      if (kQInShared && next < blocks.begin) release(memory.empty_q(w));
      softmax(acc_s, n, first, masked, terms);
      if constexpr (kConfig.dropout) drop(kept);
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
  __device__ __forceinline__ void mainloop_overlapped(const KeyBlocks& blocks, const PairTerms& terms) {
    AccS acc_s;
    ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
    wait_for_turn();
    ptx::wgmma_fence();
    issue_qk(acc_s, ring.stage);
    pass_turn();
    const int first = blocks.before(blocks.end);
    Kept kept;
    if constexpr (kConfig.dropout) find_kept(kept, first);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_s);
    release(memory.empty_k(ring.stage));
    softmax(acc_s, first, true, blocks.mask(first), terms);
    if constexpr (kConfig.dropout) drop(kept);
    for (int n = blocks.before(first); n >= blocks.begin; n = blocks.before(n)) {
      const StageRing<kStages> before = ring;
      ring.advance();
      ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
      ptx::mbarrier_wait(memory.full_v(before.stage), before.phase);
      wait_for_turn();
      ptx::wgmma_fence();
      issue_qk(acc_s, ring.stage);
      issue_pv(before.stage);
      pass_turn();
      const Mask masked = blocks.mask(n);
      if constexpr (kConfig.dropout) find_kept(kept, n);
      ptx::wgmma_wait<1>();  // Q K^T of this block
      ptx::wgmma_done(acc_s);
      release(memory.empty_k(ring.stage));
      const bool raised = softmax_in_place(acc_s, n, masked, terms);
      ptx::wgmma_wait<0>();  // P V of the block before
      finish_pv();
      release(memory.empty_v(before.stage));
      if (raised) rescale_o();
      rows.pack_weights(acc_s, weights);  // only now: P V has read the registers of P
      if constexpr (kConfig.dropout) drop(kept);
    }
    if (kQInShared) release(memory.empty_q(w));
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
