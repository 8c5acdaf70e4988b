// The order of the tiles of a backward, and of its additions to dq.
#include "cuda/launch/tile_order.hpp"

#include <algorithm>

#include "cuda/launch/sizes.hpp"
#include "expr/pair_expressions.hpp"
#include "tile/tile_scheduler.hpp"

namespace fovea::cuda {

bool tiles_differ(const AttentionProblem& p) {
  return p.packed || p.window_left >= 0 || p.window_right >= 0 || p.has(Role::kSeqUsedQ) ||
         p.has(Role::kSeqUsedK) || (p.expressions && p.expressions->sees);
}

bool are_whole(const AttentionProblem& p) {
  return !p.packed && !p.has_cache() && !p.has(Role::kSeqUsedQ) && !p.has(Role::kSeqUsedK);
}

bool has_many_tiles(const AttentionProblem& p, const Kernel& kernel, int64_t slots) {
  // (With 7.8, 16 sequences of 1,024 tokens, 32 heads over 8 of 64, a fixed order is 2 to 6 % faster; from two down it is slower.)
  constexpr int64_t kManyTiles = 6;
  const int64_t sequences = p.packed ? 1 : p.batch, keys = p.packed ? p.total_k : p.seqlen_k;
  return ceil_div(keys, std::max(1, kernel.tile_n)) * sequences * p.heads_kv >= kManyTiles * slots;
}

bool shares_bias(const AttentionProblem& p) {
  const TensorDesc& bias = p[Role::kBias];
  return p.has(Role::kBias) && !p.packed && p.batch > 1 && bias.stride[0] == 0 && bias.stride[1] != 0;
}

void order_tiles(const AttentionProblem& p, const Kernel& kernel, AdditionOrder order, size_t l2_bytes,
                 BackwardArgs& args) {
  const bool in_turns = order == AdditionOrder::kFixed;
  const int64_t heads = std::max<int64_t>(1, p.batch * p.heads_kv);
  const int64_t blocks =
      p.packed ? std::max<int64_t>(1, ceil_div(p.total_k, p.batch * kernel.tile_n)) : args.key_blocks;
  // Tiles from the first keys on have fewer and fewer steps, as under a causal mask.
  const bool triangle = tiles_differ(p) && p.window_left < 0;
  const bool always = kernel.last_queries_first == LastQueriesFirst::kAlways;
  constexpr int64_t kManyInTurns =
      64;  // (4,096 keys at d256.) In shorter heads tiles wait longer than before.
  args.last_queries_first = always || (kernel.last_queries_first == LastQueriesFirst::kInTurns && in_turns &&
                                       triangle && (p.group() > 1 || blocks >= kManyInTurns));
  // As many heads as fill the GPU, so that CTAs share Q, dO and dq_sum in L2; where tiles differ twice as many, so
  // that the longest of each come first, and the last section has enough to end evenly: two tiles a CTA. (Simulated
  // at d128, causal: with what happens to be left 91 % of the GPU are busy at 2,048 tokens, so 99 %; with heads in groups
  // of four, 4,096 tokens, 85 and 99 %.)
  const int64_t filling = ceil_div(args.slots, blocks), tiles_each = tiles_differ(p) ? 2 : 1;
  int64_t at_once = filling * tiles_each;
  // Else a block would get to a head before the first keys, which have more steps, have been there.
  if (order != AdditionOrder::kAny && args.last_queries_first)
    args.heads_a_block = static_cast<int>(p.group());
  if (in_turns && !args.last_queries_first) {
    // Q, dO and dQ of more leave L2. Where a warpgroup adds dQ, passing a turn on takes longer than a step, and all blocks of a head that
    // begin together wait for one another: half again as many heads, so that fewer do. (Measured at d192, 192/128 and d256, 1,024 to 8,192
    // keys without a mask: 3 to 6 % faster; 512 keys 2 % slower, with a mask 2 to 10 %, twice as many heads 5 to 8 %. Where the first stores
    // 256 to 1,024 keys without a mask 3 to 14 % faster, but 3 % slower with 512 at d256.)
    constexpr int64_t kBlocksThatWait = 16;
    const bool wait =
        !tiles_differ(p) && (kernel.fixed_order || (!kernel.first_stores && blocks >= kBlocksThatWait));
    at_once = wait ? filling * 3 / 2 : filling;
  } else if (in_turns) {
    // With more heads fewer tiles of each run at a time, and wait for one another. Tiles of a long head are at a few of its rows, those of
    // short heads at all: Q and dO (2 bytes) and the sums of dQ (4) are to stay in L2.
    constexpr int64_t kManyBlocks = 32;
    const bool many = blocks >= kManyBlocks;
    const int64_t bytes_of_row = 2 * (p.head_dim + p.head_dim_v) + 4 * p.head_dim;
    const bool stay = 4 * filling * p.seqlen_q * bytes_of_row <= static_cast<int64_t>(l2_bytes);
    if (many) at_once = 2 * filling;
    if (triangle && p.group() == 1) {
      at_once = always ? (many || stay ? 4 : 2) * filling : std::max<int64_t>(2 * filling, 6);
      // Tiles that follow one another begin at least a step and a half of 64 queries apart: about what passing a turn on takes. (Measured
      // with steps of 128 queries, too: two rounds are as good as four, three are slower by 2 % beside as many heads.)
      constexpr int64_t kApart = 3 * 64;
      args.key_rounds = static_cast<int>(ceil_div(kApart, kernel.tile_n));
    }
  }
  args.sequences_first = shares_bias(p) || args.alibi_norms.wanted;
  const int64_t whole = args.sequences_first && p.batch <= 2 * filling ? p.batch : 1;  // all that share
  args.heads_at_once = static_cast<int>(std::clamp<int64_t>(ceil_div(at_once, whole) * whole, 1, heads));
  args.whole_sections = tile::whole_sections(heads, args.heads_at_once, filling * tiles_each);
}

AdditionOrder order_of_additions(const AttentionProblem& p, const Kernel& kernel, const BackwardArgs& args,
                                 bool deterministic) {
  if (deterministic || kernel.fixed_order) return AdditionOrder::kFixed;
  if (!kernel.first_stores || kernel.seen_blocks || kernel.last_queries_first != LastQueriesFirst::kAlways ||
      !has_many_tiles(p, kernel, args.slots))
    return AdditionOrder::kAny;
  const bool wide = kernel.tile_m > 64, differ = tiles_differ(p);
  const bool plain = p.softcap == 0 && p.dropout == 0 && !p.has(Role::kAlibi);  // others were not timed
  if (are_whole(p) && args.key_blocks <= (wide ? 16 : 8) && (wide || !differ))
    return wide && plain && p.group() == 1 ? AdditionOrder::kFirstAlone : AdditionOrder::kFixed;
  constexpr int64_t kFewKeys = 4096;
  const bool few = p.seqlen_k <= kFewKeys || (p.window_left >= 0 && p.window_left < kFewKeys);
  return plain && few && (differ || !wide) ? AdditionOrder::kFirstAlone : AdditionOrder::kAny;
}

}  // namespace fovea::cuda
