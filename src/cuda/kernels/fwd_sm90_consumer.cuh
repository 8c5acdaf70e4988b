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
#include "cuda/kernels/fwd_sm90_softmax_e4m3.cuh"
#include "cuda/kernels/fwd_sm90_sums.cuh"
#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/alibi.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/pair_elements.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// The registers of a consumer's thread, and its steps. All steps are inlined into the kernel, so that the
/// arrays stay in registers. Every thread of the warpgroup calls every step.
template <class Instance>
struct FwdSm90Consumer {
  static constexpr FwdSm90Config kConfig = Instance::kConfig;
  using Element = typename Instance::Element;  ///< of O
  /// What wgmma multiplies.
  using Operand =
      std::conditional_t<kConfig.e4m3, E4M3, std::conditional_t<kConfig.bf16x3, __nv_bfloat16, Element>>;
  using Memory = FwdSm90Memory<Instance>;
  using WgmmaMajor = ptx::WgmmaMajor;
  using WgmmaStart = ptx::WgmmaStart;
  static constexpr int kTileN = kConfig.tile_n, kRows = kConfig.kRows, kConsumers = kConfig.consumers;
  static constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.ring(), kRowBytes = kConfig.kRowBytes;
  static constexpr int kStripsQ = kConfig.strips(kDim), kStripsV = kConfig.strips(kDimV);
  static constexpr int kParts = kConfig.parts(), kProducts = products_of_parts(kParts);
  /// A step of a product takes 32 bytes of each row of its operands.
  static constexpr int kOfStep = 32 / kConfig.element_bytes(), kStepsQk = kDim / kOfStep,
                       kStepsPv = kTileN / kOfStep;
  /// Columns of P V: with row_sum_in_mma the last eight hold the row sum.
  static constexpr int kColumnsO = kDimV + (kConfig.row_sum_in_mma ? 8 : 0);
  /// wgmma truncates its sums at about the 24th bit. Over thousands of keys float32 would lose too much, so
  /// with bf16x3 each block of P V has an accumulator of its own, which FADD adds to acc_o.
  static constexpr bool kAccumulatorPerBlock = kConfig.bf16x3;
  /// Without Q in registers the last Q K^T of the tile frees sQ.
  static constexpr bool kQInShared = !kConfig.q_in_registers;
  /// Where tiles have few blocks, as soon as it is done; else with the softmax of its block.
  static constexpr bool kReleasesQAhead = kQInShared && Expression::kHasSees;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;
  static constexpr bool kHasExpression = Expression::kHasScore || Expression::kHasSees;
  static_assert(kConfig.expression == kHasExpression);
  static_assert(kConfig.bf16x3 == (std::is_same_v<Element, float> && !kConfig.e4m3));
  static_assert(!kAccumulatorPerBlock || !kConfig.intra_warpgroup_overlap);
  static_assert(!kConfig.e4m3 || !(kConfig.dropout || kHasExpression || kConfig.row_sum_in_mma));
  static_assert(kTileN % kOfStep == 0 && kDim % kOfStep == 0 && kDimV % 16 == 0);
  static_assert(!kConfig.row_sum_in_mma || kDimV % kConfig.strip() == 0, "ones have a strip of their own");

  /// Whether exponents take what a lane's distances in a block have in common: with 128 keys registers are short.
  static constexpr bool kShifts = kConfig.alibi && kTileN < 128;

  using AccS = float[kTileN / 2];
  using Weights = uint32_t[kParts][kStepsPv][4];
  using Rows = std::conditional_t<kConfig.e4m3, FwdSm90RowsE4M3<kTileN>,
                                  FwdSm90Rows<Operand, kTileN, !kConfig.row_sum_in_mma, kParts, kShifts>>;

  const TmaForwardArgs& args;
  const Memory& memory;
  const int w;        ///< number of this consumer
  const bool leader;  ///< lane 0 of its warp
  const int base16;   ///< start of shared memory in units of 16 bytes, warp-uniform
  const int q16;      ///< start of its Q, likewise

  float acc_o[kColumnsO / 2];
  float acc_block[kAccumulatorPerBlock ? kColumnsO / 2 : 1];
  FwdSm90Sums<Memory> sums;  ///< with operands of 8 bits: what acc_o had added up before
  Weights weights;           ///< P as operand A
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
  int pair_parity = 0;     ///< of the copies of pair elements: that of the next block
  bool all_begun = false;  ///< every row of the warp has seen a key, so it has a maximum

  __device__ __forceinline__ FwdSm90Consumer(const TmaForwardArgs& args_, const Memory& memory_, int w_,
                                             int lane)
      : args(args_),
        memory(memory_),
        w(w_),
        leader(lane == 0),
        base16(uniform(static_cast<int>(memory_.base / 16))),
        q16(uniform(static_cast<int>(memory_.q(w_) / 16))),
        sums{memory_, w_},
        rows(args_.scale_log2),
        dropout(kConfig.dropout ? uniform_dropout(args_.f.p) : tile::Dropout()) {}

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
  /// Indices of blocks of keys, warp-uniform. Those outside of [full_begin, full_end) need a mask. Of the blocks that are
  /// loaded this consumer needs those of [begin, end), and passes over `before` that come first, and `after`.
  struct KeyBlocks {
    int begin, end, full_begin, full_end, before, after;
    SeenWords seen;  ///< that were looked up last
    __device__ __forceinline__ bool window_cuts(int n) const { return n < full_begin || n >= full_end; }
  };
  /// A block, and whether the expression keeps some of its pairs from seeing each other.
  struct Block {
    int n;
    bool expression_cuts;
  };

  /// The expression's share of this lane's two rows.
  struct PairTerms {
    Expression::Head head;
    Expression::Query query[2];
    const uint32_t* seen;  ///< the lane's pairs of block 0 (tile::SeenBlocksView), or null
  };
  /// Heads of a group are not packed into a tile that has an expression: its rows are of one head.
  __device__ __forceinline__ PairTerms pair_terms() const {
    const Expression::Head head = expression_head(args.f.p, work->span, work->batch, work->head);
    const int row = work->first_row + 16 * warp_index() + lane_index() / 4;
    const tile::SeenBlocksView& seen = args.f.seen;
    const uint32_t* pairs = nullptr;
    if (Expression::kHasSees && seen.pairs != nullptr) {
      static_assert(kRows == tile::kSeenQueries);
      pairs = seen.pairs + seen.pairs_offset(work->batch, work->head, work->first_row / tile::kSeenQueries) +
              warp_index() * seen.words_of_rows() + lane_index();
    }
    return {head,
            {Expression::Query(head, query_in_use(work->span, row)),
             Expression::Query(head, query_in_use(work->span, row + 8))},
            pairs};
  }

  /// Arrives for the warp. Call it after a wait for products or __syncwarp(): a lane that has not seen the
  /// barrier's phase yet would miss it.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (leader) ptx::mbarrier_arrive(barrier);
  }
  /// Nothing reads the tile's Q in shared memory any more.
  __device__ __forceinline__ void release_q() const { release(memory.empty_q(w)); }
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
    const int begin = uniform(work->blocks.begin), end = uniform(work->blocks.end),
              full_begin = uniform(work->blocks.full_begin), full_end = uniform(work->blocks.full_end);
    if constexpr (Expression::kHasSees) {
      const SeenTile seen = work->seen;
      return {begin, end, full_begin, full_end, uniform(seen.before), 0, seen.words};
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
    if constexpr (!Expression::kHasSees) return {n - 1, false};
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
        ptx::ldmatrix_x4(q_fragments[step],
                         memory.q(w) + step / 4 * kRows * kRowBytes + r * kRowBytes + (chunk ^ r % 8) * 16);
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

  /// Writes O and lse, and skips the blocks behind the consumer's last one. Writing comes first, beside the
  /// other consumers' products, as the loader has stages left meanwhile; with bf16x3 that would take
  /// registers that are not there.
  __device__ __forceinline__ void end_tile(const KeyBlocks& blocks) {
    if (kConfig.bf16x3) skip_blocks(blocks_after(blocks));
    if constexpr (kConfig.e4m3) sums.add_to(acc_o);
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

  /// S = Q K^T of the block in `stage`, queued.
  __device__ __forceinline__ void issue_qk(AccS& acc_s, int stage) const {
    const uint64_t q = Memory::first_q().encode_from(q16),
                   k = Memory::first_k().encode_from(stage16(stage, kConfig.k_bytes()));
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

  /// The key of score i of the lane, and of i + 2. Keys behind the last one get that, so that every tensor has their
  /// elements: the window takes them out.
  __device__ __forceinline__ Expression::Key key_of(int i, int n, const PairTerms& terms) const {
    const int k = n * kTileN + 2 * (lane_index() % 4) + i / 4 * 8 + i % 2;
    return Expression::Key(terms.head, Expression::kReadsByKey ? max(min(k, work->span.used_k - 1), 0) : k);
  }
  /// From Q K^T to what the expression makes of it.
  __device__ __forceinline__ void apply_expression(AccS& acc_s, int n, const PairTerms& terms) const {
    const float scale = args.f.p.scale;
#pragma unroll
    for (int i = 0; i < kTileN / 2; i += (i % 2 == 0 ? 1 : 3)) {
      const Expression::Key key = key_of(i, n, terms);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& s = acc_s[i + 2 * half];
        s = Expression::score(terms.head, terms.query[half], key, s * scale);
      }
    }
  }
  /// The same with elements of a tensor of pairs that have been copied: this block's before those of the next one.
  __device__ __forceinline__ void apply_with_pairs(AccS& acc_s, int n, const PairTerms& terms) const {
    const uint32_t from = memory.pairs(w, warp_index(), pair_parity) +
                          lane_index() % 16 * kConfig.pair_row_bytes() + lane_index() / 16 * 16;
    for_each_pair_element<kStepsPv>([&](int step) { return from + step * 32; },
                                    [&](int i, float pair) {
                                      acc_s[i] = Expression::score_with(terms.head, terms.query[i / 2 % 2],
                                                                        key_of(i & ~2, n, terms),
                                                                        acc_s[i] * args.f.p.scale, pair);
                                    });
  }
  using Kept = KeptWeights<kConfig.dropout ? kStepsPv : 1>;
  using Seen = PairBits<Expression::kHasSees ? kStepsPv : 1>;
  /// What is known of a block's pairs before their scores are.
  struct BlockTerms {
    bool window_cuts, expression_cuts;  ///< whether there are pairs that it does not let see
    Seen seen;                          ///< pairs that the expression lets see, where it cuts
    Kept kept;                          ///< weights that dropout keeps
  };
  /// Of block `at`, whose pairs `seen` are known, and which become those of `next`, the one to do behind it: they come from
  /// memory. To be called beside products.
  __device__ __forceinline__ BlockTerms block_terms(const KeyBlocks& blocks, const Block& at,
                                                    const Block& next, Seen& seen, const PairTerms& terms) {
    BlockTerms block;
    block.window_cuts = blocks.window_cuts(at.n);
    block.expression_cuts = at.expression_cuts;
    if constexpr (Expression::kHasSees) {
      block.seen = seen;
      if (next.n >= blocks.begin) seen = seen_of(next, terms);
    }
    if constexpr (kConfig.dropout) find_kept(block.kept, at.n);
    if constexpr (kConfig.stages_pairs()) {
      copy_pairs(blocks, next.n, terms);
      ptx::cp_async_wait<1>();
      __syncwarp();  // every lane's part of this block is there
    }
    return block;
  }
  /// The pairs of a block that the expression lets see each other, where it cuts.
  __device__ __forceinline__ Seen seen_of(const Block& at, const PairTerms& terms) const {
    if constexpr (Expression::kHasSees) {
      Seen seen;
      if (at.expression_cuts) find_seen(seen, at.n, terms);
      return seen;
    } else {
      return {};
    }
  }
  /// Begins to copy the elements of a tensor of pairs of block n, if there is one.
  __device__ __forceinline__ void copy_pairs(const KeyBlocks& blocks, int n, const PairTerms& terms) {
    const uint32_t to = memory.pairs(w, warp_index(), pair_parity);
    __syncwarp();  // every lane has read what was there
    if (n >= blocks.begin)
      copy_pair_elements<16, kTileN / 8>(
          terms.head, work->span, work->first_row + 16 * warp_index(), n * kTileN, lane_index(),
          [&](int row, int chunk) { return to + row * kConfig.pair_row_bytes() + chunk * 16; });
    ptx::cp_async_commit();
    pair_parity ^= 1;
  }
  /// Which pairs of block n the expression lets see each other.
  __device__ __forceinline__ void find_seen(Seen& seen, int n, const PairTerms& terms) const {
    if (terms.seen != nullptr) {
      seen.load(terms.seen + int64_t{n} * args.f.seen.words_of_block());
      return;
    }
    seen.template ask<8>([&](int i) {
      return Expression::sees(terms.head, terms.query[i / 2 % 2], key_of(i & ~2, n, terms));
    });
  }

  /// Which weights of block n dropout keeps.
  __device__ __forceinline__ void find_kept(Kept& kept, int n) const {
    const uint32_t head = tile::dropout_head(args.f.p, work->batch, work->head);
    const uint32_t row = tile::Dropout::row_of_cell(
        static_cast<uint32_t>(work->first_row + 16 * warp_index() + lane_index() / 4));
    const int column = n * kTileN / 4 + lane_index() % 4;
    kept.template set<(kTileN > 64 ? 2 : 4)>([&](int step, uint32_t(&of_step)[4]) {
      const tile::PhiloxWords cell = dropout.cell(head, row, static_cast<uint32_t>(column + 4 * step));
#pragma unroll
      for (size_t r = 0; r < 4; ++r) of_step[r] = dropout.kept(cell[r]);
    });
  }
  /// ALiBi of block n. Where its keys lie on one side of all rows, what the distances of a lane have in common is left to the
  /// exponents: an instruction an element for two.
  __device__ __forceinline__ void add_alibi(AccS& acc_s, int n) {
    const int first_key = n * kTileN;
    const bool before = __all_sync(kWholeWarp, first_key + kTileN - 1 <= min(diagonal[0], diagonal[1])),
               behind = __all_sync(kWholeWarp, first_key >= max(diagonal[0], diagonal[1]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto distance = static_cast<float>(diagonal[half] - first_key - 2 * (lane_index() % 4));
      if constexpr (kShifts) {
        const float factor = before ? alibi_factor[half] : -alibi_factor[half];
        rows.shift[half] = before || behind ? factor * distance : 0;
        if (before || behind) {
          add_columns(acc_s, half, -factor);
          continue;
        }
      }
      add_distances<-1>(acc_s, half, alibi_factor[half], distance);
    }
  }
  /// From Q K^T to scores: softcap, ALiBi or an expression, and the mask where block n needs one.
  __device__ __forceinline__ void apply_terms(AccS& acc_s, int n, const BlockTerms& block,
                                              const PairTerms& terms) {
    if constexpr (kConfig.softcap) {
#pragma unroll
      for (float& s : acc_s) s = tanh_of_log2(s * args.cap_scale_log2);
    }
    if constexpr (kConfig.alibi) add_alibi(acc_s, n);
    if constexpr (kConfig.stages_pairs()) {
      apply_with_pairs(acc_s, n, terms);
    } else if constexpr (Expression::kHasScore) {
      apply_expression(acc_s, n, terms);
    }
    if constexpr (Expression::kHasSees)
      if (block.expression_cuts) block.seen.keep(acc_s, -INFINITY);
    // The other kernels are tuned with the code of the mask in its place.
    const bool cuts = kConfig.e4m3 ? __builtin_expect(block.window_cuts, 0) : block.window_cuts;
    if (cuts) mask_window(acc_s, args.f, *work, n * kTileN);
  }

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
      ptx::wgmma_fence();
      issue_qk(acc_s, ring.stage);
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
    wait_for_turn();
    ptx::wgmma_fence();
    issue_qk(acc_s, ring.stage);
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
      wait_for_turn();
      ptx::wgmma_fence();
      issue_qk(acc_s, ring.stage);
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
