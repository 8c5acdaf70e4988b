// What a consumer of fwd_sm90 does with scores before they are weighed: softcap, ALiBi, expressions, masks; and which weights dropout
// keeps.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_sm90_alibi.cuh"
#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_sm90_pairs.cuh"
#include "cuda/kernels/fwd_sm90_softmax.cuh"
#include "cuda/kernels/fwd_sm90_softmax_e4m3.cuh"
#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/pair_bits.cuh"
#include "cuda/warp/pair_elements.cuh"

namespace fovea::cuda {

/// A warpgroup's scores: 64 rows of the tile, against blocks of kTileN keys. The base of FwdSm90Consumer: its arrays stay in
/// registers, too.
template <class Instance>
struct FwdSm90Scores {
  static constexpr FwdSm90Config kConfig = Instance::kConfig;
  /// What wgmma multiplies.
  using Operand =
      std::conditional_t<kConfig.e4m3, E4M3,
                         std::conditional_t<kConfig.bf16x3, __nv_bfloat16, typename Instance::Element>>;
  using Memory = FwdSm90Memory<Instance>;
  static constexpr int kTileN = kConfig.tile_n, kRows = kConfig.kRows, kParts = kConfig.parts();
  /// A step of a product takes 32 bytes of each row of its operands.
  static constexpr int kOfStep = 32 / kConfig.element_bytes(), kStepsPv = kTileN / kOfStep;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;
  static_assert(kConfig.expression == (Expression::kHasScore || Expression::kHasSees));

  using AccS = float[kTileN / 2];
  using Rows =
      std::conditional_t<kConfig.e4m3, FwdSm90RowsE4M3<kTileN>,
                         FwdSm90Rows<Operand, kTileN, !kConfig.row_sum_in_mma, kParts, kConfig.alibi>>;

  const TmaForwardArgs& args;
  const Memory& memory;
  const int w;  ///< number of this consumer
  Rows rows;
  using Alibi = std::conditional_t<kConfig.alibi, FwdSm90Alibi, NoAlibi>;
  Alibi alibi;
  /// Whether scores may grow by so much from one block to the next that weights against the maxima of the blocks before
  /// would overflow: then maxima follow each block.
  bool steep = false;
  const FwdSm90WorkTile* work = nullptr;  ///< in shared memory
  tile::Dropout dropout;
  int pair_parity = 0;  ///< of the copies of pair elements: that of the next block

  __device__ __forceinline__ FwdSm90Scores(const TmaForwardArgs& args_, const Memory& memory_, int w_)
      : args(args_),
        memory(memory_),
        w(w_),
        rows(args_.scale_log2),
        dropout(kConfig.dropout ? uniform_dropout(args_.f.p) : tile::Dropout()) {}

  // --- what is known of a tile, and of a block ---

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
  struct PairTerms : LaneQueries {
    const uint32_t* seen;  ///< the lane's pairs of block 0 (tile::SeenBlocksView), or null
  };
  __device__ __forceinline__ PairTerms pair_terms() const {
    const LaneQueries queries = lane_queries(args.f, *work);
    const tile::SeenBlocksView& seen = args.f.seen;
    const uint32_t* pairs = nullptr;
    if (Expression::kHasSees && seen.pairs != nullptr) {
      static_assert(kRows == tile::kSeenQueries);
      pairs = seen.pairs + seen.pairs_offset(work->batch, work->head, work->first_row / tile::kSeenQueries) +
              warp_index() * seen.words_of_rows() + lane_index();
    }
    return {queries, pairs};
  }
  __device__ __forceinline__ void begin_alibi() {
    constexpr float kMostGrowth = 100;  // of log2; float32 ends at 128, and products grow as well
    const float slope = alibi.begin(args.f, *work) * args.scale_log2;
    steep = __any_sync(kWholeWarp, !(slope * kTileN <= kMostGrowth));
  }

  /// Operand A of the step of Q K^T that adds distances of block n. To be made before the fence of the product.
  __device__ __forceinline__ Alibi::Operand distances_of(int n) const {
    if constexpr (kConfig.alibi) return alibi.operand(alibi.side_of(n * kTileN, kTileN));
    return {};
  }

  // --- from Q K^T to scores ---

  __device__ __forceinline__ Expression::Key key_of(int i, int n, const PairTerms& terms) const {
    return lane_key(*work, terms.head, n * kTileN, i);
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
    find_kept_weights<(kTileN > 64 ? 2 : 4)>(kept, dropout, args.f, *work, n * kTileN);
  }
  /// What the product has not added of the distances of block n.
  __device__ __forceinline__ void add_alibi(AccS& acc_s, int n) {
    const FwdSm90Alibi::Side side = alibi.side_of(n * kTileN, kTileN);
#pragma unroll
    for (int half = 0; half < 2; ++half) rows.shift[half] = alibi.shift(side, half, n * kTileN);
    if (side == FwdSm90Alibi::Side::kAcross) alibi.add_each(acc_s, n * kTileN);
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
      apply_expression(acc_s, args.f, *work, terms, n * kTileN);
    }
    if constexpr (Expression::kHasSees)
      if (block.expression_cuts) block.seen.keep(acc_s, -INFINITY);
    // The other kernels are tuned with the code of the mask in its place.
    const bool cuts = kConfig.e4m3 ? __builtin_expect(block.window_cuts, 0) : block.window_cuts;
    if (cuts) mask_window(acc_s, args.f, *work, n * kTileN);
  }
};

}  // namespace fovea::cuda
