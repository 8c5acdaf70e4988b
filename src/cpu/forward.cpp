// The tiled forward: for a tile of query rows, walk over the key blocks that they see, with the online
// softmax (Milakov and Gimelshein 2018; Dao 2023, "FlashAttention-2", algorithm 1) in transposed form:
//
//   for each block of keys:                       per lane (query row):
//     S^T = K Q^T                                   m' = max(m, max_j s_j)
//     P^T = exp2(factor * S^T - m')                 alpha = exp2(m - m')
//     O^T = O^T * alpha + V^T P^T                   l = l * alpha + sum_j p_j
//   O = O^T / l, lse = ln 2 * m + ln l
//
// Key blocks start at multiples of kBlockKeys in every tile, and no lane depends on another, so results do not
// depend on the number of threads or on the tile height. (The number of splits depends on the batch, unless
// batch_invariant is asked for, so the last bits may differ between a sequence alone and the same sequence in a batch.)
#include "cpu/forward.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/forward_work.hpp"
#include "cpu/key_reach.hpp"
#include "cpu/panel.hpp"
#include "cpu/parallel.hpp"

namespace fovea::cpu {

using namespace forward_pass;

namespace forward_pass {

namespace {

/// How rows of a panel end.
struct PanelEnds {
  alignas(64) float maxima[kPanel], sums[kPanel];
  alignas(64) float factors[kPanel];  ///< of O
  alignas(64) float lse[kPanel];
};

/// The sink of a head is one more score of each of its rows, without a value.
void add_sinks(const Group& group, const Lanes& lanes, const float* sinks, PanelEnds& ends) {
  const int64_t stride = (*group.problem)[Role::kSink].stride[0];
  for (int x = 0; x < lanes.count; ++x) {
    const float sink = sinks[lanes.head[x] * stride] * kLog2e, maximum = ends.maxima[x];
    const float raised = std::max(maximum, sink);
    const float subtract = raised == -std::numeric_limits<float>::infinity() ? 0.0f : raised;
    const float factor = std::exp2(maximum - subtract);
    ends.sums[x] = ends.sums[x] * factor + std::exp2(sink - subtract);
    ends.factors[x] *= factor;
    ends.maxima[x] = raised;
  }
}

PanelEnds ends_of(const Ops& ops, const Group& group, const Lanes& lanes, const Partial& result) {
  const AttentionProblem& p = *group.problem;
  PanelEnds ends;
  std::copy_n(result.row_max, kPanel, ends.maxima);
  std::copy_n(result.row_sum, kPanel, ends.sums);
  std::fill_n(ends.factors, kPanel, keep_scale(p) * group.value_scale);
  if (const auto* sinks = group.buffers->get<const float>(Role::kSink)) add_sinks(group, lanes, sinks, ends);
  ops.end_rows(ends.maxima, ends.sums, kPanel, ends.factors, ends.lse);
  return ends;
}

void write_lse(const Group& group, const Lanes& lanes, const PanelEnds& ends) {
  const TensorDesc& t = (*group.problem)[Role::kLse];
  auto* to = reinterpret_cast<float*>(
      stats_of(*group.problem, *group.buffers, Role::kLse, group.batch, 0, group.span.row_q).data);
  for (int x = 0; x < lanes.count; ++x)
    to[lanes.head[x] * t.stride[1] + lanes.query[x] * t.stride[2]] = ends.lse[x];
}

}  // namespace

void write_panel(const Staging& s, const Group& group, const Lanes& lanes, const Partial& result,
                 float* rows) {
  const AttentionProblem& p = *group.problem;
  const DType o_type = p[Role::kO].dtype;
  const PanelEnds ends = ends_of(*s.ops, group, lanes, result);
  if (p.has(Role::kLse)) write_lse(group, lanes, ends);
  char* outputs[kPanel];
  const HeadRows rows_of_o = group.head_rows(Role::kO);
  for (int x = 0; x < lanes.count; ++x) outputs[x] = rows_of_o.row(lanes.query[x], lanes.head[x]);
  if (result.rows > 0) {
    if (s.ops->write_rows != nullptr && o_type == DType::kBF16)
      return s.ops->write_rows(result.o, s.padded_dv, s.d_v, ends.factors, lanes.count, outputs);
    rows = result.o;
  } else {
    if (s.ops->write_lanes != nullptr && o_type == DType::kBF16)
      return s.ops->write_lanes(result.o, s.d_v, ends.factors, lanes.count, outputs);
    // Whole vectors of four lanes: lanes past the last row are not read.
    s.ops->transpose(result.o, kPanel, s.d_v, round_up(lanes.count, 4), rows, s.padded_dv);
  }
  for (int x = 0; x < lanes.count; ++x) {
    float* values = rows + x * s.padded_dv;
    if (ends.factors[x] == 0.0f) {
      std::fill_n(values, s.d_v, 0.0f);
    } else {
      for (int64_t c = 0; c < s.d_v; ++c) values[c] *= ends.factors[x];
    }
    s.ops->from_float(values, s.d_v, o_type, outputs[x]);
  }
}

std::string summary_of(const PairPrograms& programs, const Schedule& schedule, const KeySplits& asked) {
  std::string text = programs.summary();
  const auto add = [&](const std::string& more) { text += (text.empty() ? "" : ", ") + more; };
  if (schedule.splits > 1) {
    add("keys split in " + std::to_string(schedule.splits) +
        (schedule.in_turn ? ", one after the other" : ""));
  }
  if (asked.batch_invariant) add("the same in any batch");
  return text;
}

void write_unused_rows(const Group& group) {
  const AttentionProblem& p = *group.problem;
  const TensorDesc& o = p[Role::kO];
  for (int64_t row = group.rows(); row < group.span.length_q * group.size(); ++row) {
    std::memset(group.row_data(Role::kO, row), 0, static_cast<size_t>(p.head_dim_v * size_of(o.dtype)));
    if (p.has(Role::kLse)) *group.stat(Role::kLse, row) = -std::numeric_limits<float>::infinity();
  }
}

void write_rng_state(const AttentionProblem& p, const Buffers& buffers) {
  if (!p.has(Role::kRngState)) return;
  auto* state = buffers.get<int64_t>(Role::kRngState);
  state[0] = static_cast<int64_t>(buffers.seed);
  state[p[Role::kRngState].stride[0]] = static_cast<int64_t>(buffers.offset);
}

void write_rows_of_no_sequence(const AttentionProblem& p, const Buffers& buffers) {
  for (int64_t head = 0; head < p.heads_q; ++head) {
    const MatrixView o = rows_of(p, buffers, Role::kO, 0, head, 0);
    const MatrixView lse = stats_of(p, buffers, Role::kLse, 0, head, 0);
    for (int64_t i = 0; i < p.total_q; ++i) {
      const int64_t bytes = size_of(p[Role::kO].dtype);
      std::memset(o.data + i * o.stride * bytes, 0, static_cast<size_t>(p.head_dim_v * bytes));
      if (lse) lse.at<float>(i, 0) = -std::numeric_limits<float>::infinity();
    }
  }
}

}  // namespace forward_pass

namespace {

// Below this much work a second thread costs more than it brings (an OpenMP fork is about 5 us).
constexpr double kMinFlopsPerThread = 1e6;

/// What older sums of a row and those of a part are multiplied by when they are added up.
struct RowFactors {
  float keep[kPanel], add[kPanel];
};

/// Adds the sums of weights of `part` to those of `sum`, both rescaled to the larger of their maxima.
RowFactors add_sums(const Partial& sum, const Partial& part, int64_t rows) {
  RowFactors factors;
  for (int64_t x = 0; x < rows; ++x) {
    const float raised = std::max(sum.row_max[x], part.row_max[x]);
    const float subtract = raised == -std::numeric_limits<float>::infinity() ? 0.0f : raised;
    factors.keep[x] = std::exp2(sum.row_max[x] - subtract);
    factors.add[x] = std::exp2(part.row_max[x] - subtract);
    sum.row_sum[x] = sum.row_sum[x] * factors.keep[x] + part.row_sum[x] * factors.add[x];
    sum.row_max[x] = raised;
  }
  return factors;
}

/// 0 * Inf is NaN: a part whose factor is 0 is skipped.
float add_scaled(float older, float keep, float newer, float add) {
  return (keep == 0 ? 0.0f : older * keep) + (add == 0 ? 0.0f : newer * add);
}

/// Adds the partial result `part` to `sum`.
void add_partial(const Staging& s, const Partial& sum, const Partial& part) {
  const int64_t rows = sum.rows > 0 ? sum.rows : kPanel;
  const RowFactors f = add_sums(sum, part, rows);
  if (sum.rows == 0) {
    for (int64_t c = 0; c < s.d_v; ++c) {
      float *to = sum.o + c * kPanel, *from = part.o + c * kPanel;
      for (int64_t x = 0; x < kPanel; ++x) to[x] = add_scaled(to[x], f.keep[x], from[x], f.add[x]);
    }
    return;
  }
  for (int64_t x = 0; x < rows; ++x) {
    float *to = sum.o + x * s.padded_dv, *from = part.o + x * s.padded_dv;
    const float keep = f.keep[x], add = f.add[x];
    for (int64_t c = 0; c < s.d_v; ++c) to[c] = add_scaled(to[c], keep, from[c], add);
  }
}

/// Results of the splits: one Partial per (group, tile, panel, split).
struct SplitStore {
  float* base;
  int64_t partial_size;
  const Schedule* schedule;
  float* at(int64_t tile_index, int64_t split) const {
    return base + (tile_index * schedule->splits + split) * schedule->panels * partial_size;
  }
};

int64_t thread_bytes(const AttentionProblem& p, const Staging& s, const Schedule& schedule,
                     const PairPrograms& programs) {
  Scratch count(nullptr);
  ThreadScratch(count, p, s, schedule, programs);
  return count.used();
}

int64_t split_bytes(const Staging& s, const Schedule& schedule) {
  if (schedule.splits_apart() == 1) return 0;
  const int64_t results = schedule.groups * schedule.tiles * schedule.splits_apart() * schedule.panels;
  return round_up(results * Partial::size(s, schedule.few_rows()) * 4, kAlignment);
}

int threads_for(const PrepareOptions& options, const Schedule& schedule) {
  const auto by_work = static_cast<int64_t>(options.flops / kMinFlopsPerThread);
  return static_cast<int>(
      std::clamp<int64_t>(std::min(by_work, schedule.items()), 1, std::max(1, options.num_threads)));
}

/// The tiled forward of one problem.
class Forward final : public Prepared {
 public:
  Forward(const AttentionProblem& p, const Ops& ops, const PrepareOptions& options)
      : problem_(p),
        staging_(p, ops),
        schedule_(p, ops, options),
        order_(schedule_.groups, schedule_.tiles, std::max(1, options.num_threads)),
        programs_(p, schedule_.row_path),
        result_rows_(RowBlocks(staging_, programs_, p.dropout > 0).present && !schedule_.row_path
                         ? kPanel
                         : schedule_.few_rows()),
        num_threads_(threads_for(options, schedule_)),
        shared_(p, staging_, schedule_, programs_),
        shared_seen_(p, ops, programs_),
        reach_(p, programs_),
        thread_bytes_(thread_bytes(p, staging_, schedule_, programs_)),
        split_offset_(options.num_threads * thread_bytes_),
        shared_offset_(split_offset_ + split_bytes(staging_, schedule_)),
        seen_offset_(shared_offset_ + round_up(shared_.bytes(), kAlignment)) {
    if (schedule_.row_path) {  // few rows ask for themselves
      shared_seen_ = {};
      reach_ = {};
    }
    reach_offset_ = seen_offset_ + round_up(shared_seen_.bytes(), kAlignment);
    workspace_size = static_cast<size_t>(reach_offset_ + reach_.bytes());
    summary = summary_of(programs_, schedule_, options.splits);
  }

  void run(const Buffers& buffers) const override;

 private:
  /// The panels of one tile of one group.
  struct Tile {
    Group group;
    int64_t first_row, panels;
  };
  Group group_at(const Buffers& buffers, int64_t index) const {
    return {problem_, buffers, index / problem_.heads_kv, index % problem_.heads_kv};
  }
  Tile tile_at(const Buffers& buffers, const TileOrder::Place& place) const {
    const tile::Range panels = panels_of_tile(ceil_div(schedule_.rows, kPanel), schedule_.tiles, place.tile);
    const Group group = group_at(buffers, place.group);
    const int64_t first_row = panels.begin * kPanel;
    return {group, first_row, std::min(panels.size(), ceil_div(group.rows() - first_row, kPanel))};
  }
  ThreadScratch scratch_of(char* workspace, int thread) const {
    Scratch memory(workspace + thread * thread_bytes_);
    return {memory, problem_, staging_, schedule_, programs_};
  }
  Partial panel_of(float* partials, int64_t x) const {
    return {partials + x * Partial::size(staging_, result_rows_), result_rows_};
  }
  /// What threads make for each other.
  struct Shared {
    SharedBlocks blocks;
    SharedSeen seen;
    KeyReach reach;
  };
  /// What one item works with.
  struct Item {
    const Tile& tile;
    const Lanes* lanes;
    const ScoreTerms& terms;
    const Shared& shared;
    SeenBlocks& blocks;
    const ThreadScratch& t;
  };
  void attend_split(const Item& item, int64_t split, float* partials) const;
  void attend_in_turn(const Item& item) const;
  void compute_item(const Buffers& buffers, const ScoreTerms& terms, const Shared& shared, SeenBlocks& blocks,
                    const SplitStore& store, const ThreadScratch& t, int64_t item) const;
  void attend_rows(const Buffers& buffers, const ScoreTerms& terms, SeenBlocks& blocks,
                   const ThreadScratch& t, int64_t first_group, int64_t split, float* partials,
                   int64_t partial_stride) const;
  void compute_rows(const Buffers& buffers, const ScoreTerms& terms, SeenBlocks& blocks,
                    const SplitStore& store, const ThreadScratch& t, int64_t item) const;
  void merge_tile(const Buffers& buffers, const SplitStore& store, const ThreadScratch& t,
                  int64_t tile_index) const;

  AttentionProblem problem_;
  Staging staging_;
  Schedule schedule_;
  TileOrder order_;
  PairPrograms programs_;
  int64_t result_rows_;  ///< of a result whose O lies in rows; 0: in lanes
  int num_threads_;
  SharedBlocks shared_;     ///< without memory
  SharedSeen shared_seen_;  ///< the same
  KeyReach reach_;          ///< the same
  int64_t thread_bytes_, split_offset_, shared_offset_, seen_offset_, reach_offset_;
};

/// A tile against one split of the keys.
void Forward::attend_split(const Item& item, int64_t split, float* partials) const {
  const Group& group = item.tile.group;
  const int64_t first_key = split * schedule_.split_keys;
  const int64_t last_key = std::min(first_key + schedule_.split_keys, group.span.used_k);
  tile_forward({staging_, group, item.terms, item.shared.blocks, item.shared.seen, item.blocks, item.lanes,
                item.tile.panels, partials, item.t},
               first_key, last_key);
}

/// A tile against its splits one after the other, added up as merge_tile does.
void Forward::attend_in_turn(const Item& item) const {
  const ThreadScratch& t = item.t;
  attend_split(item, 0, t.partials);
  for (int64_t split = 1; split < schedule_.splits_with_keys(item.tile.group.span.used_k); ++split) {
    attend_split(item, split, t.next_partials);
    for (int64_t x = 0; x < item.tile.panels; ++x)
      add_partial(staging_, panel_of(t.partials, x), panel_of(t.next_partials, x));
  }
}

/// One tile against one split of the keys, or all.
void Forward::compute_item(const Buffers& buffers, const ScoreTerms& terms, const Shared& shared,
                           SeenBlocks& blocks, const SplitStore& store, const ThreadScratch& t,
                           int64_t item) const {
  if (schedule_.row_path) return compute_rows(buffers, terms, blocks, store, t, item);
  const int64_t split = item % schedule_.splits_apart(), tile_index = item / schedule_.splits_apart();
  const TileOrder::Place place = order_.at(tile_index);
  Tile tile = tile_at(buffers, place);
  shared.reach.narrow(tile.group);
  const Group& group = tile.group;
  if (place.tile == 0 && split == 0) write_unused_rows(group);
  if (tile.panels <= 0) return;
  shared.seen.wait_for(group);
  Lanes lanes[kMaxPanels];
  for (int64_t x = 0; x < tile.panels; ++x) lanes[x] = Lanes(group, tile.first_row + x * kPanel);
  const Item what{tile, lanes, terms, shared, blocks, t};
  if (schedule_.splits_apart() > 1) {
    if (split < schedule_.splits_with_keys(group.span.used_k))
      attend_split(what, split, store.at(tile_index, split));
    return;
  }
  attend_in_turn(what);
  for (int64_t x = 0; x < tile.panels; ++x)
    write_panel(staging_, group, lanes[x], panel_of(t.partials, x), t.rows);
}

/// Few rows of the key heads from `first_group` on against one split of the keys; their results lie `partial_stride` floats apart.
void Forward::attend_rows(const Buffers& buffers, const ScoreTerms& terms, SeenBlocks& blocks,
                          const ThreadScratch& t, int64_t first_group, int64_t split, float* partials,
                          int64_t partial_stride) const {
  std::optional<RowHead> heads[kMostRowHeads];
  for (int64_t x = 0; x < schedule_.heads; ++x) {
    const Group group = group_at(buffers, first_group + x);
    heads[x].emplace(
        RowHead{group, Lanes(group, 0), Partial(partials + x * partial_stride, schedule_.few_rows())});
  }
  const int64_t first_key = split * schedule_.split_keys;
  const int64_t last_key = std::min(first_key + schedule_.split_keys, heads[0]->group.span.used_k);
  rows_forward(staging_, terms, blocks, {heads, static_cast<size_t>(schedule_.heads)}, first_key, last_key,
               t);
}

/// Few rows of some key heads against one split of the keys, or all.
void Forward::compute_rows(const Buffers& buffers, const ScoreTerms& terms, SeenBlocks& blocks,
                           const SplitStore& store, const ThreadScratch& t, int64_t item) const {
  const auto [first_group, split] = schedule_.row_item(item);
  const Group group = group_at(buffers, first_group);
  for (int64_t x = 0; x < schedule_.heads && split == 0; ++x)
    write_unused_rows(group_at(buffers, first_group + x));
  if (group.rows() == 0) return;
  const int64_t splits = schedule_.splits_with_keys(group.span.used_k);
  if (schedule_.splits_apart() > 1) {
    if (split < splits)
      attend_rows(buffers, terms, blocks, t, first_group, split, store.at(first_group, split),
                  store.at(first_group + 1, split) - store.at(first_group, split));
    return;
  }
  // As attend_in_turn().
  const int64_t size = Partial::size(staging_, schedule_.few_rows());
  attend_rows(buffers, terms, blocks, t, first_group, 0, t.partials, size);
  for (int64_t turn = 1; turn < splits; ++turn) {
    attend_rows(buffers, terms, blocks, t, first_group, turn, t.next_partials, size);
    for (int64_t x = 0; x < schedule_.heads; ++x)
      add_partial(staging_, panel_of(t.partials, x), panel_of(t.next_partials, x));
  }
  for (int64_t x = 0; x < schedule_.heads; ++x) {
    const Group head = group_at(buffers, first_group + x);
    write_panel(staging_, head, Lanes(head, 0), panel_of(t.partials, x), t.rows);
  }
}

/// Merges the splits of one tile in their order.
void Forward::merge_tile(const Buffers& buffers, const SplitStore& store, const ThreadScratch& t,
                         int64_t tile_index) const {
  const auto [group, first_row, panels] = tile_at(buffers, order_.at(tile_index));
  for (int64_t x = 0; x < panels; ++x) {
    const Partial sum = panel_of(store.at(tile_index, 0), x);
    for (int64_t split = 1; split < schedule_.splits_with_keys(group.span.used_k); ++split) {
      add_partial(staging_, sum, panel_of(store.at(tile_index, split), x));
    }
    write_panel(staging_, group, Lanes(group, first_row + x * kPanel), sum, t.rows);
  }
}

void Forward::run(const Buffers& buffers) const {
  write_rng_state(problem_, buffers);
  if (problem_.batch == 0 && problem_.packed) return write_rows_of_no_sequence(problem_, buffers);
  const ScoreTerms terms(problem_, buffers, programs_);
  char* workspace = static_cast<char*>(buffers.workspace);
  const SplitStore store{reinterpret_cast<float*>(workspace + split_offset_),
                         Partial::size(staging_, schedule_.few_rows()), &schedule_};
  Shared shared{shared_, shared_seen_, reach_};
  shared.blocks.set_memory(buffers, workspace + shared_offset_);
  shared.seen.set_memory(workspace + seen_offset_);
  shared.reach.set_memory(workspace + reach_offset_);
  WorkQueue seen_to_share(shared.seen.items()), heads_to_reach(shared.reach.items());
  WorkQueue items(schedule_.items());
  run_threads(num_threads_, [&](int thread) {
    const ThreadScratch t = scratch_of(workspace, thread);
    SeenBlocks blocks(problem_, buffers, programs_, t.pairs.seen);
    for (int64_t item; (item = seen_to_share.next()) >= 0;)
      shared.seen.find(problem_, buffers, terms, blocks, *staging_.ops, t.scores, t.pairs.registers, item);
    for (int64_t item; (item = heads_to_reach.next()) >= 0;)
      shared.reach.find(*staging_.ops, group_at(buffers, item), terms, t.pairs);
    for (int64_t item; (item = items.next()) >= 0;)
      compute_item(buffers, terms, shared, blocks, store, t, item);
  });
  if (schedule_.splits_apart() == 1) return;
  WorkQueue merges(order_.count());
  run_threads(num_threads_, [&](int thread) {
    const ThreadScratch t = scratch_of(workspace, thread);
    for (int64_t tile; (tile = merges.next()) >= 0;) merge_tile(buffers, store, t, tile);
  });
}

}  // namespace

std::unique_ptr<const Prepared> prepare_forward(const AttentionProblem& problem, const Ops& ops,
                                                const PrepareOptions& options) {
  return std::make_unique<Forward>(problem, ops, options);
}

}  // namespace fovea::cpu
