// Packing of query heads, splits over keys, sections of heads of a forward, and the layout of the workspace.
#include "cuda/launch/schedule.hpp"

#include <algorithm>
#include <bit>
#include <random>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/launch/decode_clusters.hpp"
#include "cuda/launch/params.hpp"
#include "cuda/launch/sizes.hpp"
#include "cuda/launch/tile_order.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cuda {
namespace {

/// Whether a query has a list of keys that others do not share.
bool has_lists_of_its_own(const AttentionProblem& p) {
  return p.has(Role::kKeys) && p[Role::kKeys].stride[2] != 0;
}

/// Room for a tensor of queries or keys as bf16x3, in `columns` columns.
int64_t take_copy(Parts& parts, const AttentionProblem& p, Role role, int columns) {
  const bool of_queries = role == Role::kQ || role == Role::kDO;
  const int64_t length = of_queries ? p.seqlen_q : p.seqlen_k;
  const int64_t rows = p.packed ? (of_queries ? p.total_q : p.total_k) : saturating_product(p.batch, length);
  return parts.take(saturating_product(rows, of_queries ? p.heads_q : p.heads_kv),
                    int64_t{size_of(DType::kBF16)} * kBf16x3Parts * columns);
}

int64_t elements_of(const TensorDesc& t) {
  int64_t count = t.present ? 1 : 0;
  for (size_t d = 0; d < static_cast<size_t>(t.ndim); ++d)
    if (t.stride[d] != 0)
      count = saturating_product(count, t.shape[d]);  // 0: a dimension that stands for all
  return count;
}

}  // namespace

bool adds_to_named(const AttentionProblem& p) {
  if (!p.expressions || !p.expressions->score || p.batch * p.heads_q == 0 || p.seqlen_q == 0) return false;
  return std::any_of(p.named.begin(), p.named.end(),
                     [](const NamedTensor& t) { return elements_of(t.gradient) > 0; });
}

int log2_of_named_count(const AttentionProblem& p) {
  int64_t count =
      saturating_product(p.packed ? p.total_q : saturating_product(p.batch, p.seqlen_q), p.heads_q);
  count = saturating_product(count, p.has(Role::kKeys) ? p.list_size : p.seqlen_k);
  int64_t places = 0;  // of a pair
  if (p.expressions && p.expressions->score)
    expr::for_each_element(*p.expressions->score, [&](const expr::Graph&, const expr::Node&) { ++places; });
  count = saturating_product(count, places);
  return count > 1 ? static_cast<int>(std::bit_width(static_cast<uint64_t>(count - 1))) : 0;
}

bool can_invert_lists(const AttentionProblem& p) {
  return saturating_product(p.seqlen_q, p.list_size) < int64_t{1} << 31;
}

int64_t Parts::take(int64_t count, int64_t element_bytes) {
  const int64_t at = end_;
  const int64_t bytes = saturating_product(count, element_bytes);
  end_ = std::min(end_ + ceil_div(bytes, kPartAlignment) * kPartAlignment, kTooMuch);
  return at;
}

int64_t m_blocks(const AttentionProblem& p, bool pack_group, int tile_m) {
  if (has_lists_of_its_own(p)) return std::max<int64_t>(1, p.seqlen_q * ceil_div(p.group(), tile_m));
  const int64_t rows = p.seqlen_q * (pack_group ? p.group() : 1);
  return std::max<int64_t>(1, ceil_div(rows, tile_m));
}

bool may_have_reach(const AttentionProblem& p, const Kernel& kernel) {
  // With fewer the norms, which take the time of reading q and k, cost more than the slopes of ALiBi's paper save.
  constexpr int64_t kFewestKeys = 2048, kFewestQueries = 1024;
  return kernel.alibi_norms && p.has(Role::kAlibi) && !p.has_cache() && p.seqlen_k >= kFewestKeys &&
         p.seqlen_q >= kFewestQueries && std::max(p.heads_q, p.batch) <= kMostOfGrid;
}

bool packs_group(const AttentionProblem& p, const Kernel& kernel) {
  if (!kernel.can_pack || p.group() == 1 || p.seqlen_q == 0) return false;
  if (p.has(Role::kKeys)) return true;  // who shares a list shares a tile
  // A box of rows is of whole groups, or of a part of one.
  const int64_t box = kernel.group_divides;
  if (box != 0 && box % p.group() != 0 && p.group() % box != 0) return false;
  // Rows are 32-bit in kernels, and so is row * group, by which query_magic divides.
  if (saturating_product(p.seqlen_q, p.group()) >= (int64_t{1} << 30) / p.group()) return false;
  // A packed tile gathers its rows of Q and O from several heads; that pays once it saves a quarter of the
  // tiles.
  const int64_t packed = m_blocks(p, true, kernel.tile_m);
  const int64_t apart = m_blocks(p, false, kernel.tile_m) * p.group();
  return 4 * packed <= 3 * apart;
}

int stream_lanes(int64_t heads, int64_t slots) {
  // So much of the GPU may stay idle for it: reading takes fewer SMs than there are.
  constexpr double kLeastBusy = 0.95;
  for (int64_t lanes = std::min(heads, slots); lanes > 1; --lanes) {
    const auto busy = static_cast<double>(slots / lanes * lanes);
    if (heads % lanes == 0 && busy >= kLeastBusy * static_cast<double>(slots)) return static_cast<int>(lanes);
  }
  return 1;
}

int64_t tiles_of_few_rows(const AttentionProblem& p, const Kernel& kernel) {
  return saturating_product(packs_group(p, kernel) ? p.heads_kv : p.heads_q, p.batch);
}

int64_t keys_of_tile(const AttentionProblem& p, const Kernel& kernel) {
  const int64_t keys = p.has(Role::kKeys) ? p.list_size : p.seqlen_k;
  if (p.window_left < 0 || p.window_right < 0) return keys;
  return std::min(keys, p.window_left + p.window_right + kernel.tile_m);
}

int heads_at_once(const AttentionProblem& p, bool pack_group, size_t l2_bytes) {
  const int64_t bytes = saturating_product(p.seqlen_k, (p.head_dim + p.head_dim_v) * size_of(p.dtype));
  // A quarter of the cache. It is two halves, and what SMs of both sides read may lie in both; Q, O and what
  // others do pass through it, too. (With half of it a forward of 4 x 32 heads of 1 MB read 667 MB of memory
  // for 268 on an H200.)
  constexpr int64_t kShareOfL2 = 4;
  const int64_t fitting =
      std::max<int64_t>(1, static_cast<int64_t>(l2_bytes) / kShareOfL2 / std::max<int64_t>(1, bytes));
  const int64_t heads = (pack_group ? p.heads_kv : p.heads_q) * p.batch;
  return static_cast<int>(std::clamp<int64_t>(fitting * (pack_group ? 1 : p.group()), 1,
                                              std::clamp<int64_t>(heads, 1, int64_t{1} << 30)));
}

namespace {

/// Of tiles of `tile_rows`, of all heads and sequences together where sees does not tell them apart.
tile::SeenBlocksView seen_blocks_of(const AttentionProblem& p, int64_t heads, int64_t rows, int tile_rows,
                                    int64_t walked, int block_rows) {
  using expr::Variable;
  const bool by_head = expr::depends_on(*p.expressions->sees, {Variable::kH, Variable::kHk});
  const bool same_lengths = !p.packed && !p.has(Role::kSeqUsedQ) && !p.has(Role::kSeqUsedK);
  tile::SeenBlocksView view;
  view.batches =
      same_lengths && !expr::depends_on(*p.expressions->sees, {Variable::kB}) ? 1 : static_cast<int>(p.batch);
  view.heads = by_head ? static_cast<int>(heads) : 1;
  view.pair_heads = by_head ? static_cast<int>(p.heads_q) : 1;
  view.tiles = static_cast<int>(std::max<int64_t>(1, ceil_div(rows, tile_rows)));
  view.blocks = static_cast<int>(std::max<int64_t>(1, ceil_div(walked, block_rows)));
  view.tile_rows = tile_rows;
  view.block_rows = block_rows;
  return view;
}

/// Takes memory for the answers, and for those of each pair where that is little: beside what the user's tensors take, or less
/// than the L2 cache holds on most chips.
void take_seen_blocks(const AttentionProblem& p, const tile::SeenBlocksView& view, Parts& parts,
                      SeenBlocksParts& layout) {
  layout.blocks = parts.take(view.size(), 2 * 4);
  int64_t named_bytes = 0;
  for (const NamedTensor& named : p.named) {
    int64_t bytes = size_of(named.tensor.dtype);
    for (size_t d = 0; d < static_cast<size_t>(named.tensor.ndim); ++d)
      if (named.tensor.stride[d] != 0) bytes = saturating_product(bytes, named.tensor.shape[d]);
    named_bytes = std::max(named_bytes, bytes);
  }
  constexpr int64_t kFewBytes = int64_t{32} << 20, kShareOfTensors = 4;
  const int64_t words = saturating_product(
      saturating_product(int64_t{view.batches} * view.pair_heads, int64_t{view.tiles} * view.blocks),
      view.words_of_block());
  if (saturating_product(words, 4) <= std::max(kFewBytes, named_bytes / kShareOfTensors))
    layout.pairs = parts.take(words, 4);
}

/// Whether the tiles of a forward are passed over in part because slopes have a reach.
bool uses_reach(const AttentionProblem& p, const Kernel& kernel, const ForwardArgs& args) {
  return may_have_reach(p, kernel) && !args.pack_group;
}

/// Without splits.
int64_t ctas_of(const AttentionProblem& p, const Kernel& kernel, bool pack_group) {
  const int64_t slices = kernel.value_slice > 0 ? ceil_div(p.head_dim_v, kernel.value_slice) : 1;
  return m_blocks(p, pack_group, kernel.tile_m) * (pack_group ? p.heads_kv : p.heads_q) * p.batch * slices;
}

/// Parts of the keys: those that are asked for, else those that end soonest with `ctas_per_sm` CTAs at a time on each of `sms`.
int num_splits_of(const AttentionProblem& p, const Kernel& kernel, bool pack_group, int sms, int ctas_per_sm,
                  int64_t most_bytes, const KeySplits& asked) {
  const int64_t steps = ceil_div(keys_of_tile(p, kernel), kernel.tile_n);
  const int64_t largest = largest_parts(p, most_bytes);
  if (asked.most == 0 && many_rows(p, kernel))
    return static_cast<int>(soonest_parts(p, kernel, sms, largest));
  const int64_t slots = int64_t{sms} * ctas_per_sm / kernel.cluster;
  if (asked.most == 0) return best_num_splits(ctas_of(p, kernel, pack_group), steps, slots, largest);
  return static_cast<int>(std::max<int64_t>(1, std::min({int64_t{asked.most}, steps, kMostSplits, largest})));
}

/// Which tiles a forward computes side by side. `args` has the packing of groups and the slots.
void order_tiles(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device,
                 ForwardArgs& args) {
  args.heads_at_once = heads_at_once(p, args.pack_group, device.l2_bytes);
  const bool reach = uses_reach(p, kernel, args);
  args.sequences_first = shares_bias(p) || reach;
  if (kernel.persistent && !tiles_differ(p) && !reach) {
    // CTAs that stay and have tiles of one length read the same heads at the same time: a quarter of a wave
    // of neighbours (512 to 2,048 keys: 3 % faster than what the cache would hold, H200).
    const int64_t blocks = m_blocks(p, args.pack_group, kernel.tile_m);
    args.heads_at_once =
        static_cast<int>(std::clamp<int64_t>(args.slots / (4 * blocks), 1, args.heads_at_once));
  }
  // Tiles of unequal work: three for each CTA that the GPU holds are left for the end. (Simulated at d256,
  // causal, 8,192 keys: sections of one head to the end keep 90 % of the GPU busy, three tiles a CTA 98 %.)
  // Where CTAs do not stay, the grid has sections of one size only.
  constexpr int64_t kLastTilesPerSlot = 3;
  const int64_t planes = (args.pack_group ? p.heads_kv : p.heads_q) * (p.packed ? 1 : p.batch);
  const int64_t group = args.pack_group ? 1 : p.group();  // of heads that share their keys
  int64_t last = 1;
  if (tiles_differ(p) && !p.packed) {
    last = ceil_div(kLastTilesPerSlot * args.slots, m_blocks(p, args.pack_group, kernel.tile_m));
    last = ceil_div(last, group) * group;
  }
  if (p.arriving_keys > 0) {
    // No section, nor what is left for the end, has heads that arrive at different times: first tiles wait for first arrivals alone.
    const int64_t together = p.arriving_heads * (args.pack_group ? 1 : p.group());
    while (together % args.heads_at_once != 0) --args.heads_at_once;
    last = std::min(last, together);
  }
  if (!kernel.persistent) {
    args.heads_at_once =
        static_cast<int>(std::max<int64_t>(args.heads_at_once, std::min(last, std::max<int64_t>(planes, 1))));
  }
  args.whole_sections = tile::whole_sections(planes, args.heads_at_once, last);
}

/// Memory for the results of splits, whose number is known where the kernel does not decide it.
void take_split_parts(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device,
                      bool may_split, Parts& parts, ForwardLayout& layout) {
  ForwardArgs& args = layout.args;
  if (kernel.splits_in_cluster) {
    args.slots = device.sm_count;  // several CTAs on an SM take turns
    const ClusterSplits shared = cluster_splits(p, kernel, device);
    args.cluster_ctas = may_split ? shared.ctas : ctas_of_cluster(p, kernel, device);
    args.num_splits = may_split ? shared.splits : 1;
    args.sharing = cluster_sharing(p, kernel, device, args.cluster_ctas);
  }
  int64_t part_rows = saturating_product(args.num_splits, rows_of_parts(p));
  if (kernel.stream_k) {
    const int64_t heads = args.pack_group ? p.heads_kv : p.heads_q, slots = std::max(1, args.slots);
    args.part_lanes = stream_lanes(heads, slots);
    const int64_t blocks = std::max<int64_t>(1, ceil_div(p.seqlen_k, kernel.tile_n));
    const int64_t units = saturating_product(std::max<int64_t>(1, p.batch * heads / args.part_lanes), blocks);
    args.num_splits = static_cast<int>(std::min(units, slots / args.part_lanes) * args.part_lanes);
    args.part_rows = static_cast<int>(std::max<int64_t>(1, p.seqlen_q * (args.pack_group ? p.group() : 1)));
    args.part_tag = (uint64_t{std::random_device()()} << 32) | std::random_device()();
    layout.part_flags = parts.take(int64_t{2} * args.num_splits, sizeof(uint64_t));
    part_rows = int64_t{2} * args.num_splits * args.part_rows;
  }
  if (args.num_splits > 1) {
    layout.part_o = parts.take(part_rows, p.head_dim_v * 4);
    layout.part_lse = parts.take(part_rows, 4);
  }
}

}  // namespace

ForwardLayout forward_layout(const AttentionProblem& p, const Kernel& kernel, const DeviceProperties& device,
                             int ctas_per_sm, bool may_split, const KeySplits& splits) {
  ForwardLayout layout;
  ForwardArgs& args = layout.args;
  args.p = params_of(p);
  layout.arriving_keys = p.arriving_keys;
  layout.arriving_heads = p.arriving_heads;
  args.pack_group = packs_group(p, kernel);
  if (args.pack_group) args.query_magic = static_cast<uint32_t>((int64_t{1} << 32) / p.group() + 1);
  args.slots = device.sm_count * ctas_per_sm / kernel.cluster;
  order_tiles(p, kernel, device, args);
  args.parts_in_turn = splits.batch_invariant;
  if (may_split && kernel.can_split && kernel.tile_n > 0) {
    args.num_splits =
        splits.batch_invariant
            ? num_splits_of(p.of_one_sequence(), kernel, args.pack_group, kInvariantSms, ctas_per_sm,
                            kMaxPartBytesOfSequence, splits)
            : num_splits_of(p, kernel, args.pack_group, device.sm_count, ctas_per_sm, kMaxPartBytes, splits);
  }
  Parts parts;
  take_split_parts(p, kernel, device, may_split, parts, layout);
  if (kernel.bf16x3) {
    args.bf16x3_columns = kernel.head_dim;
    layout.bf16x3 = {take_copy(parts, p, Role::kQ, kernel.head_dim),
                     take_copy(parts, p, Role::kK, kernel.head_dim),
                     take_copy(parts, p, Role::kV, kernel.head_dim)};
  }
  if (kernel.e4m3_operands) {
    const int64_t blocks =
        TransposedValues::blocks_of(p.packed_k, p.batch, p.seqlen_k, p.total_k, kernel.tile_n);
    args.transposed_v = {nullptr, blocks, kernel.tile_n, kernel.head_dim_v};
    layout.transposed_v = parts.take(saturating_product(p.heads_kv, blocks), args.transposed_v.block_bytes());
  }
  // A counter is set to 0 by a launch of its own (clear_counter). Two tiles a CTA, longest first, are even without it (two sequences of
  // 1,024 tokens, 16 heads of 128, causal: 24.9 us for 26.4; where there are more, it is worth 10 to 40 %), but where some wait for keys.
  const int64_t waves_in_turn = p.arriving_keys > 0 ? 1 : 2;
  const int64_t ctas = ctas_of(p, kernel, args.pack_group) * args.num_splits;
  args.one_tile_each = kernel.persistent && !kernel.stream_k && !kernel.seen_blocks && args.num_splits == 1 &&
                       ctas <= args.slots && are_whole(p) && std::max(p.heads_q, p.batch) <= kMostOfGrid;
  args.loads_first = args.one_tile_each && !args.pack_group && args.p.window_left < 0 &&
                     p.arriving_keys == 0 && p.seqlen_k > 0 && !uses_reach(p, kernel, args);
  if (uses_reach(p, kernel, args)) {
    args.alibi_norms.wanted = true;
    layout.alibi_norms = parts.take(tile::AlibiNorms::size(p.batch, p.heads_q), 4);
  }
  if (kernel.persistent && !kernel.stream_k && ctas > waves_in_turn * args.slots &&
      (tiles_differ(p) || args.alibi_norms.wanted))
    layout.tile_counter = parts.take(1, 4);
  if (kernel.seen_blocks && p.expressions && p.expressions->sees) {
    // The consumers of a persistent kernel walk over blocks of their own, the warps of others over those of their tile.
    const int rows = kernel.persistent ? tile::kSeenQueries : kernel.tile_m;
    args.seen = seen_blocks_of(p, p.heads_q, p.seqlen_q, rows, p.seqlen_k, kernel.tile_n);
    take_seen_blocks(p, args.seen, parts, layout.seen);
  }
  layout.workspace_size = parts.size();
  return layout;
}

namespace {

int64_t rows_of_keys(const AttentionProblem& p) {
  return p.packed ? p.total_k : saturating_product(p.batch, p.seqlen_k);
}

/// Memory for float32 sums of dk and dv.
void take_key_sums(const AttentionProblem& p, Parts& parts, BackwardLayout& layout) {
  BackwardArgs& args = layout.args;
  constexpr int64_t kFour = 4;  // columns are added to, and cleared, by fours
  args.dk_columns = static_cast<int>(ceil_div(p.head_dim, kFour) * kFour);
  args.dv_columns = static_cast<int>(ceil_div(p.head_dim_v, kFour) * kFour);
  args.key_rows = saturating_product(rows_of_keys(p), p.heads_kv);
  layout.key_sums = parts.take(args.key_rows, int64_t{args.dk_columns + args.dv_columns} * 4);
}

/// Memory for the queries that name each key: of what the lists take, and at most as much once more.
void take_list_inverse(const AttentionProblem& p, const DeviceProperties& device, Parts& parts,
                       BackwardLayout& layout) {
  constexpr int64_t kWarpsOfSm = 32;  // enough for the latency of atomic operations
  ListInverse& inverse = layout.args.inverse;
  inverse.heads = p[Role::kKeys].stride[1] == 0 ? 1 : static_cast<int>(p.heads_kv);
  inverse.keys = saturating_product(rows_of_keys(p), inverse.heads);
  const bool shared = !has_lists_of_its_own(p);
  const int64_t lists = shared ? 1 : p.seqlen_q;
  const int64_t filling =
      ceil_div(kWarpsOfSm * device.sm_count, std::max<int64_t>(1, p.batch * inverse.heads));
  const int64_t fitting = lists * p.list_size / std::max<int64_t>(1, p.seqlen_k);
  inverse.chunks =
      static_cast<int>(std::clamp<int64_t>(std::min({filling, fitting, lists}), 1, int64_t{1} << 15));
  layout.list_counts = parts.take(ceil_div(inverse.words_to_clear(), 4), 16);
  layout.list_starts = parts.take(inverse.keys, 8);
  const int64_t rows = !shared && p.packed ? p.total_q : saturating_product(p.batch, lists);
  layout.list_queries = parts.take(saturating_product(rows, inverse.heads), p.list_size * 4);
}

}  // namespace

BackwardLayout backward_layout(const AttentionProblem& p, const Kernel& kernel,
                               const DeviceProperties& device, int ctas_per_sm, bool deterministic) {
  BackwardLayout layout;
  BackwardArgs& args = layout.args;
  args.p = params_of(p);
  args.rows = ceil_div(p.seqlen_q, BackwardArgs::kRowPadding) * BackwardArgs::kRowPadding;
  const int64_t padded_dim = kernel.writes_dq ? 0 : (kernel.head_dim > 0 ? kernel.head_dim : p.head_dim);
  args.dq_columns = static_cast<int>(padded_dim);
  const int64_t all_rows = saturating_product(p.batch * p.heads_q, args.rows);
  args.key_blocks = static_cast<int>(
      std::clamp<int64_t>(ceil_div(p.seqlen_k, std::max(1, kernel.tile_n)), 1, int64_t{1} << 30));
  if (deterministic && !kernel.writes_dq) {
    // As many heads as CTAs end, and others begin, while a tile of queries is worked on; in equal sections,
    // as a last one of few heads would wait.
    const int64_t heads = std::max<int64_t>(1, p.batch * p.heads_kv);
    const int64_t tiles = std::max<int64_t>(1, ceil_div(p.seqlen_q, std::max(1, kernel.tile_m)) * p.group());
    const int64_t wanted = ceil_div(int64_t{device.sm_count} * ctas_per_sm, tiles);
    args.heads_at_once = static_cast<int>(ceil_div(heads, ceil_div(heads, std::max<int64_t>(1, wanted))));
  }
  args.slots = device.sm_count * ctas_per_sm;
  args.alibi_norms.wanted = may_have_reach(p, kernel);
  const AdditionOrder order = order_of_additions(p, kernel, args, deterministic);
  args.first_alone = order == AdditionOrder::kFirstAlone;
  args.dq_in_vectors = kernel.last_writes;
  if (kernel.persistent) order_tiles(p, kernel, order, device.l2_bytes, args);
  if (kernel.chain) {
    args.cluster = args.key_blocks;
    args.mirrors = p.window_right >= 0;
  }
  Parts parts;
  layout.lse_log2 = parts.take(all_rows, 4);
  layout.delta = parts.take(all_rows, 4);
  // Side by side with it: such a kernel reads whole tiles, of which the last may end behind the rows.
  if (kernel.dk_alone) parts.take(kernel.tile_m, 4);
  layout.dq_sum = parts.take(all_rows, padded_dim * 4);
  if (order != AdditionOrder::kAny && !kernel.writes_dq)
    layout.dq_semaphore =
        parts.take(1 + all_rows / BackwardArgs::kSemaphoreRows, args.semaphore_columns() * 4);
  if (layout.dq_semaphore >= 0 && kernel.first_stores) args.turn_rows = kernel.tile_m;
  if (kernel.persistent && !kernel.chain) layout.tile_counter = parts.take(1, 4);
  if (p.has(Role::kKeys)) {
    deterministic ? take_list_inverse(p, device, parts, layout) : take_key_sums(p, parts, layout);
  }
  if (kernel.bf16x3) {
    args.bf16x3_columns = kernel.head_dim;
    layout.bf16x3 = {take_copy(parts, p, Role::kQ, kernel.head_dim),
                     take_copy(parts, p, Role::kK, kernel.head_dim),
                     take_copy(parts, p, Role::kV, kernel.head_dim)};
    layout.bf16x3_do = take_copy(parts, p, Role::kDO, kernel.head_dim);
    layout.not_finite = parts.take(1, 4);
  }
  // Where the order of additions is fixed, a tile waits for the one before it at every block that both have: all have all.
  if (kernel.seen_blocks && p.expressions && p.expressions->sees && layout.dq_semaphore < 0) {
    args.seen = seen_blocks_of(p, p.heads_kv, p.seqlen_k, kernel.tile_n, p.seqlen_q, kernel.tile_m);
    take_seen_blocks(p, args.seen, parts, layout.seen);
  }
  if (args.alibi_norms.wanted) layout.alibi_norms = parts.take(tile::AlibiNorms::size(p.batch, p.heads_q), 4);
  args.adds_named = !deterministic;
  if (deterministic && adds_to_named(p)) {
    for (const NamedTensor& named : p.named) layout.named_elements += elements_of(named.gradient);
    layout.named_sums = parts.take(layout.named_elements, kNamedSumBytes);
    layout.named_log2_count = log2_of_named_count(p);
  }
  layout.workspace_size = parts.size();
  return layout;
}

Grid default_grid(const Kernel& kernel, const ForwardArgs& args) {
  if (kernel.kind != KernelKind::kForward) return {.x = -1};
  const int64_t rows = int64_t{args.p.seqlen_q} * (args.pack_group ? args.p.group : 1);
  const int64_t blocks = std::max<int64_t>(1, ceil_div(rows, kernel.tile_m));
  const int64_t heads = args.pack_group ? args.p.heads_kv : args.p.heads_q;
  const int64_t slices = kernel.value_slice > 0 ? ceil_div(args.p.head_dim_v, kernel.value_slice) : 1;
  return {saturating_product(blocks, heads * args.p.batch), args.num_splits, slices};
}

Grid default_grid(const Kernel& kernel, const BackwardArgs& args) {
  if (kernel.kind == KernelKind::kPreprocess || kernel.kind == KernelKind::kPostprocess) {
    return {std::max<int64_t>(1, ceil_div(args.p.seqlen_q, std::max(1, kernel.tile_m))), args.p.heads_q,
            args.p.batch};
  }
  if (kernel.kind != KernelKind::kBackward) return {.x = -1};
  return {saturating_product(int64_t{args.p.heads_kv} * args.p.batch, args.key_blocks), 1, 1};
}

std::string grid_cannot_because(const Grid& grid) {
  // CUDA's limits of a grid.
  constexpr int64_t kMaxX = 0x7fffffff, kMaxYZ = 65535;
  if (grid.x < 0) return "has a kernel without a grid";
  if (grid.x > kMaxX || grid.y > kMaxYZ || grid.z > kMaxYZ) {
    return "would need a grid of (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " +
           std::to_string(grid.z) + ") CTAs, which is more than a launch takes";
  }
  return "";
}

}  // namespace fovea::cuda
