// The backward where queries have lists of keys: the equations of backward.cpp over the tiles of forward_lists.cpp.
//
// A work item is one key head with a range of its queries. The query heads of a query finish its dQ; what they add to dK and
// dV of the keys of its list goes to a float32 copy of both that belongs to the range, and the copies are summed in order
// afterwards. The ranges depend on the problem alone, so each run gives the same bits, for any number of threads.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/backward_work.hpp"
#include "cpu/forward.hpp"
#include "cpu/key_lists.hpp"
#include "cpu/parallel.hpp"

namespace fovea::cpu {

using namespace backward_pass;

namespace {

constexpr double kMinFlopsPerThread = 1e6;
// Pairs of rows and entries for each key, with fewer of which clearing and summing a copy costs much beside a range's
// products: 2 to 3 us, as the pairs take in bfloat16 on AMX.
constexpr int64_t kMinRowsAKey = 1024;
// One row takes as long as three in a panel would.
constexpr int64_t kLeastRows = 3;
constexpr int64_t kMaxCopyBytes = int64_t{1} << 30;
// Keys that one thread sums at a time.
constexpr int64_t kSumKeys = 32;

struct ListSchedule : Schedule {
  int64_t range_queries;
  bool rows;  ///< dot products along the head size

  ListSchedule(const AttentionProblem& p, const Staging& s, int64_t one_thread = 1)
      : Schedule(p, s, kWantedItems) {
    const int64_t copy = std::max<int64_t>(1, groups * p.seqlen_k * (s.padded_d + s.padded_dv) * 4);
    const double rows_a_key = static_cast<double>(p.seqlen_q) * static_cast<double>(p.list_size) *
                              static_cast<double>(std::max(p.group(), kLeastRows)) /
                              static_cast<double>(std::max<int64_t>(1, p.seqlen_k));
    const auto worthwhile = static_cast<int64_t>(std::min(rows_a_key / kMinRowsAKey, 1e6));
    const int64_t most = std::max<int64_t>(1, std::min(kMaxCopyBytes / copy, worthwhile));
    ranges = std::clamp<int64_t>(ceil_div(kWantedItems, std::max<int64_t>(1, groups / one_thread)), 1, most);
    range_queries = std::max<int64_t>(1, ceil_div(p.seqlen_q, ranges));
    ranges = std::max<int64_t>(1, ceil_div(p.seqlen_q, range_queries));
    staged_keys = kBlockKeys;
    dq_panel = 0;  // dQ is finished where it is computed
    rows = !p.expressions && takes_rows(p, s);
  }
};

ItemIndex items_of(const AttentionProblem& p, const Schedule& schedule) {
  return {p.batch, p.heads_kv, schedule.ranges};
}

/// Where chains of work items take whole groups together, queries are divided into more ranges.
ListSchedule schedule_of(const AttentionProblem& p, const Staging& s) {
  const ListSchedule schedule(p, s);
  const TensorGradients gradients(p, items_of(p, schedule), expr::Variable::kQ);
  const int64_t one_thread =
      (gradients.chains(kItemBatch) ? p.batch : 1) * (gradients.chains(kItemHead) ? p.heads_kv : 1);
  return {p, s, std::max<int64_t>(1, one_thread)};
}

/// What all threads share: also the copies of dK and dV, by (group, range, key).
struct ListShared : Shared {
  float *dk, *dv;

  ListShared(Scratch& memory, const ListSchedule& plan, const AttentionProblem& p, const Staging& s,
             const TensorGradients& gradients)
      : Shared(memory, plan, gradients) {
    dk = memory.take<float>(plan.groups * plan.ranges * p.seqlen_k * s.padded_d);
    dv = memory.take<float>(plan.groups * plan.ranges * p.seqlen_k * s.padded_dv);
  }
};

/// The scratch of tiles, the rows of a block of entries, and what belongs to one query.
struct ListScratch : ThreadScratch {
  char *key_rows, *value_rows;
  int32_t* positions;
  float *dq, *lse2, *delta;               ///< of the panels of a tile
  float *q, *d_o, *p_by_key, *ds_by_key;  ///< of rows

  ListScratch(Scratch& memory, const AttentionProblem& problem, const Staging& s, const ListSchedule& plan,
              const PairPrograms& programs)
      : ThreadScratch(memory, problem, s, plan, programs) {
    key_rows = memory.take<char>(kBlockKeys * s.d * size_of(s.type));
    value_rows = memory.take<char>(kBlockKeys * s.d_v * size_of(s.type));
    positions = memory.take<int32_t>(kBlockKeys);
    dq = memory.take<float>(kPanels * s.padded_d * kPanel);
    lse2 = memory.take<float>(kPanels * kPanel);
    delta = memory.take<float>(kPanels * kPanel);
    const int64_t rows = plan.rows ? problem.group() : 0;
    q = memory.take<float>(rows * s.padded_d);
    d_o = memory.take<float>(rows * s.padded_dv);
    p_by_key = memory.take<float>(kBlockKeys * rows);
    ds_by_key = memory.take<float>(kBlockKeys * rows);
  }
};

template <class Make>
int64_t bytes_of(const Make& make) {
  Scratch count(nullptr);
  make(count);
  return count.used();
}

/// Where the entries of one query add to dK and dV.
struct KeySums {
  float *dk, *dv;
  int64_t ld, ld_v;

  void fetch(int64_t j) const {
    constexpr int64_t kLine = 16;  // floats
    for (int64_t c = 0; c < ld; c += kLine) __builtin_prefetch(dk + j * ld + c, 1);
    for (int64_t c = 0; c < ld_v; c += kLine) __builtin_prefetch(dv + j * ld_v + c, 1);
  }
};

class ListBackward final : public Prepared {
 public:
  ListBackward(const AttentionProblem& p, const Ops& ops, const PrepareOptions& options)
      : problem_(p),
        staging_(p, ops),
        schedule_(schedule_of(p, staging_)),
        gradients_(problem_, items_of(p, schedule_), expr::Variable::kQ),
        programs_(p, false, gradients_.layouts()) {
    const auto by_work = static_cast<int64_t>(options.flops / kMinFlopsPerThread);
    num_threads_ = static_cast<int>(std::clamp<int64_t>(
        std::min(by_work, schedule_.groups * schedule_.ranges), 1, std::max(1, options.num_threads)));
    shared_bytes_ = bytes_of([&](Scratch& m) { ListShared(m, schedule_, p, staging_, gradients_); });
    thread_bytes_ = bytes_of([&](Scratch& m) { ListScratch(m, p, staging_, schedule_, programs_); });
    workspace_size = static_cast<size_t>(shared_bytes_ + num_threads_ * thread_bytes_);
    summary = programs_.summary();
  }

  void run(const Buffers& buffers) const override {
    Scratch memory(buffers.workspace);
    const Run r{buffers, ScoreTerms(problem_, buffers, programs_),
                ListShared(memory, schedule_, problem_, staging_, gradients_)};
    if (problem_.batch == 0 && problem_.packed) clear_rows_of_no_sequence(problem_, buffers);
    row_statistics_of_all(r);
    WorkQueue cleared(gradients_.pieces());
    run_threads(num_threads_, [&](int) { gradients_.clear(buffers, r.shared.sums, cleared); });
    const ItemChains chains(items_of(problem_, schedule_), gradients_);
    WorkQueue queue(chains.count());
    run_threads(num_threads_, [&](int thread) {
      const ListScratch t = scratch_of(r, thread);
      for (int64_t x; (x = queue.next()) >= 0;)
        chains.visit(x, [&](const ItemIndex& item) { range_of_queries(r, t, item); });
    });
    sum_copies(r);
    WorkQueue written(gradients_.pieces());
    run_threads(num_threads_, [&](int) { gradients_.write(buffers, r.shared.sums, written); });
    if (!problem_.has(Role::kDSink)) return;
    for (int64_t head = 0; head < problem_.heads_q; ++head) sink_gradient(problem_, buffers, r.shared, head);
  }

 private:
  struct Run {
    const Buffers& buffers;
    ScoreTerms terms;
    ListShared shared;
  };
  ListScratch scratch_of(const Run& r, int thread) const {
    Scratch memory(static_cast<char*>(r.buffers.workspace) + shared_bytes_ + thread * thread_bytes_);
    return {memory, problem_, staging_, schedule_, programs_};
  }
  Group group_at(const Run& r, int64_t index) const {
    return {problem_, r.buffers, index / problem_.heads_kv, index % problem_.heads_kv};
  }
  KeySums sums_of(const Run& r, int64_t group_index, int64_t range) const {
    const int64_t first = (group_index * schedule_.ranges + range) * problem_.seqlen_k;
    return {r.shared.dk + first * staging_.padded_d, r.shared.dv + first * staging_.padded_dv,
            staging_.padded_d, staging_.padded_dv};
  }
  MatrixView gather(const Group& group, Role role, int64_t size, const ListScratch& t, int64_t n) const {
    return gather_rows(staging_, group.key_rows(role), size, t.positions, n,
                       role == Role::kK ? t.key_rows : t.value_rows);
  }
  void row_statistics_of_all(const Run& r) const;
  void range_of_queries(const Run& r, const ListScratch& t, const ItemIndex& item) const;
  void query_by_tiles(const Problem& a, const ListScratch& t, int64_t query, const KeySums& sums) const;
  void tile_of_query(const Problem& a, const ListScratch& t, int64_t query, int64_t first_row, int64_t panels,
                     const KeySums& sums) const;
  void stage_block(const Group& group, const ListScratch& t, int64_t n, KeyBlock& block) const;
  void query_by_rows(const Problem& a, const ListScratch& t, int64_t query, const KeySums& sums) const;
  void sum_copies(const Run& r) const;

  AttentionProblem problem_;
  Staging staging_;
  ListSchedule schedule_;
  TensorGradients gradients_;
  PairPrograms programs_;
  int num_threads_;
  int64_t shared_bytes_, thread_bytes_;
};

void ListBackward::row_statistics_of_all(const Run& r) const {
  WorkQueue panels(schedule_.groups * schedule_.panels);
  run_threads(num_threads_, [&](int) {
    for (int64_t item; (item = panels.next()) >= 0;) {
      const int64_t group_index = item / schedule_.panels, panel = item % schedule_.panels;
      const Group group = group_at(r, group_index);
      if (panel * kPanel >= group.rows()) continue;
      const int64_t stats = r.shared.stats_of(group_index, panel);
      row_statistics(staging_, group, Lanes(group, panel * kPanel), r.shared.lse2 + stats,
                     r.shared.delta + stats);
    }
  });
}

/// dQ of a range of queries, and what they add to dK and dV.
void ListBackward::range_of_queries(const Run& r, const ListScratch& t, const ItemIndex& item) const {
  const int64_t range = item[kItemRange],
                group_index = item[kItemBatch] * problem_.heads_kv + item[kItemHead];
  const Group group = group_at(r, group_index);
  if (range == 0) clear_unused_rows(staging_, group);
  const int64_t begin = range * schedule_.range_queries;
  const int64_t end = std::min(begin + schedule_.range_queries, group.span.used_q);
  if (range > 0 && begin >= end) return;
  const KeySums sums = sums_of(r, group_index, range);
  std::fill_n(sums.dk, group.span.used_k * sums.ld, 0.0f);
  std::fill_n(sums.dv, group.span.used_k * sums.ld_v, 0.0f);
  std::array<GradientTarget, kMaxTermTensors> targets;
  gradients_.targets_of(r.buffers, r.shared.sums, item, targets);
  SeenBlocks blocks(problem_, r.buffers, programs_, t.pairs.seen);
  const Problem a{staging_, group, r.terms, r.shared, t, blocks, group_index, range, targets.data()};
  for (int64_t query = begin; query < end; ++query) {
    if (schedule_.rows) {
      query_by_rows(a, t, query, sums);
    } else {
      query_by_tiles(a, t, query, sums);
    }
  }
}

void ListBackward::query_by_tiles(const Problem& a, const ListScratch& t, int64_t query,
                                  const KeySums& sums) const {
  const int64_t end_row = (query + 1) * a.group.size();
  for (int64_t row = query * a.group.size(); row < end_row; row += kPanels * kPanel)
    tile_of_query(a, t, query, row, std::min(kPanels, ceil_div(end_row - row, kPanel)), sums);
}

/// A block of entries, staged.
void ListBackward::stage_block(const Group& group, const ListScratch& t, int64_t n, KeyBlock& block) const {
  const Staging& s = staging_;
  const MatrixView keys = gather(group, Role::kK, s.d, t, n), values = gather(group, Role::kV, s.d_v, t, n);
  block.j0 = 0;
  block.n = n;
  block.rows = round_up(n, s.ops->row_multiple);
  block.keys = s.stage_rows(keys, n, s.d, s.words_d, t.keys);
  block.values = s.stage_rows(values, n, s.d_v, s.words_dv, t.values);
  block.columns = s.ops->word_elements == 1 ? Operand{block.keys.data, 1, block.keys.row_stride}
                                            : s.stage_columns(keys, n, s.d, t.key_columns);
  block.dk = t.dk;
  block.dv = t.dv;
  std::fill_n(block.dk, block.rows * s.padded_d, 0.0f);
  std::fill_n(block.dv, block.rows * s.padded_dv, 0.0f);
  block.key_rows = keys;
  block.keys_finite = all_finite(*s.ops, keys, s.type, n, s.d);
  block.list = t.positions;
}

/// Adds rows of a block to those of its entries.
void scatter_rows(const float* rows, int64_t ld, const int32_t* positions, int64_t n, float* sums) {
  constexpr int64_t kAhead = 4, kLine = 16;  // rows, floats
  for (int64_t j = 0; j < n; ++j) {
    if (j + kAhead < n) {
      const float* next = sums + positions[j + kAhead] * ld;
      for (int64_t c = 0; c < ld; c += kLine) __builtin_prefetch(next + c, 1);
    }
    const float* __restrict from = rows + j * ld;
    float* __restrict to = sums + positions[j] * ld;
    for (int64_t c = 0; c < ld; ++c) to[c] += from[c];
  }
}

void ListBackward::tile_of_query(const Problem& a, const ListScratch& t, int64_t query, int64_t first_row,
                                 int64_t panels, const KeySums& sums) const {
  const Staging& s = staging_;
  const bool exact_checks = a.terms.any || a.terms.dropout || programs_.has_sees;
  const int64_t stats = a.shared.stats_of(a.group_index, 0), dq_panel = s.padded_d * kPanel;
  Lanes lanes[kPanels];
  bool finite[kPanels];
  for (int64_t x = 0; x < panels; ++x) {
    lanes[x] = Lanes(a.group, first_row + x * kPanel, (query + 1) * a.group.size());
    want_lanes(a, lanes[x]);
    stage_panel(a, lanes[x], x);
    finite[x] = !exact_checks || panel_finite(s, a.group, lanes[x]);
    for (int lane = 0; lane < kPanel; ++lane) {
      const bool used = lane < lanes[x].count;
      const int64_t row = stats + lanes[x].first_row + lane, at = x * kPanel + lane;
      t.lse2[at] = used ? a.shared.lse2[row] : std::numeric_limits<float>::infinity();
      t.delta[at] = used ? a.shared.delta[row] : 0;
      // A row whose lse is NaN makes its masked weights NaN, too; only gradients_float() tells them apart.
      if (exact_checks && std::isnan(t.lse2[at])) finite[x] = false;
    }
  }
  std::fill_n(t.dq, panels * dq_panel, 0.0f);
  ListReader list(a.group, query);
  for (int64_t n; (n = list.read(t.positions, kBlockKeys)) > 0;) {
    KeyBlock block;
    stage_block(a.group, t, n, block);
    const Seen seen = programs_.has_sees ? Seen::kSome : Seen::kAll;
    int64_t used_keys[kPanels];
    for (int64_t x = 0; x < panels; ++x) {
      const bool done = panel_step(a, block,
                                   {lanes[x], seen, n, x, seen == Seen::kSome, finite[x], t.lse2 + x * kPanel,
                                    t.delta + x * kPanel, t.dq + x * dq_panel});
      used_keys[x] = done ? n : 0;
    }
    add_key_gradients(a, block, used_keys, panels, lanes[panels - 1].count);
    scatter_rows(block.dk, s.padded_d, t.positions, n, sums.dk);
    scatter_rows(block.dv, s.padded_dv, t.positions, n, sums.dv);
  }
  for (int64_t x = 0; x < panels; ++x) write_query_rows(s, a.group, lanes[x], t.dq + x * dq_panel, t.temp);
}

/// P and dS of a few rows against n entries, key by key.
void weigh_rows(const Problem& a, const ListScratch& t, int64_t first_row, int64_t rows, int64_t n) {
  const int64_t stats = a.shared.stats_of(a.group_index, 0) + first_row;
  for (int64_t r = 0; r < rows; ++r) {
    float* p = t.scores + r * kBlockKeys;
    float* ds = t.dp + r * kBlockKeys;
    const float lse2 = a.shared.lse2[stats + r], delta = a.shared.delta[stats + r];
    if (lse2 == std::numeric_limits<float>::infinity()) {
      std::fill_n(p, n, 0.0f);
    } else {
      a.s.ops->row_exp2(p, n, a.terms.factor, lse2);
    }
    for (int64_t j = 0; j < n; ++j) {
      ds[j] = p[j] == 0 ? 0.0f : p[j] * (ds[j] - delta);
      t.p_by_key[j * rows + r] = p[j];
      t.ds_by_key[j * rows + r] = ds[j];
    }
  }
}

/// Dot products along the head size: P and dS of all rows, dQ, and one addition to dK and dV for each entry.
void ListBackward::query_by_rows(const Problem& a, const ListScratch& t, int64_t query,
                                 const KeySums& sums) const {
  constexpr int64_t kAhead = 8;
  const Staging& s = staging_;
  const Ops& ops = *s.ops;
  const int64_t rows = a.group.size(), first_row = query * rows, ld = s.padded_d, ld_v = s.padded_dv;
  for (int64_t r = 0; r < rows; ++r) {
    ops.to_float(a.group.row_data(Role::kQ, first_row + r), s.type, s.d, t.q + r * ld);
    ops.to_float(a.group.row_data(Role::kDO, first_row + r), s.type, s.d_v, t.d_o + r * ld_v);
  }
  std::fill_n(t.dq, rows * ld, 0.0f);
  ListReader list(a.group, query);
  RowsAhead none;  // rows are gathered
  for (int64_t n; (n = list.read(t.positions, kBlockKeys)) > 0;) {
    const MatrixView keys = gather(a.group, Role::kK, s.d, t, n);
    const MatrixView values = gather(a.group, Role::kV, s.d_v, t, n);
    ops.row_dots({t.q, ld, rows}, keys.data, s.type, s.d, n, s.d, t.scores, kBlockKeys, none);
    ops.row_dots({t.d_o, ld_v, rows}, values.data, s.type, s.d_v, n, s.d_v, t.dp, kBlockKeys, none);
    weigh_rows(a, t, first_row, rows, n);
    ops.row_sums(t.dp, kBlockKeys, rows, keys.data, s.type, s.d, n, s.d, t.dq, ld, none);
    for (int64_t j = 0; j < std::min(kAhead, n); ++j) sums.fetch(t.positions[j]);
    for (int64_t j = 0; j < n; ++j) {
      if (j + kAhead < n) sums.fetch(t.positions[j + kAhead]);
      const int64_t key = t.positions[j];
      ops.row_sums(t.ds_by_key + j * rows, rows, 1, t.q, DType::kF32, ld, rows, s.d, sums.dk + key * ld, ld,
                   none);
      ops.row_sums(t.p_by_key + j * rows, rows, 1, t.d_o, DType::kF32, ld_v, rows, s.d_v,
                   sums.dv + key * ld_v, ld_v, none);
    }
  }
  const auto scale = static_cast<float>(problem_.scale);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < s.d; ++c) t.dq[r * ld + c] *= scale;
    ops.from_float(t.dq + r * ld, s.d, (*a.group.problem)[Role::kDQ].dtype,
                   a.group.row_data(Role::kDQ, first_row + r));
  }
}

/// dK and dV: the sums of their copies, in order.
void ListBackward::sum_copies(const Run& r) const {
  const int64_t pieces = ceil_div(problem_.seqlen_k, kSumKeys);
  const auto scale = static_cast<float>(problem_.scale);
  WorkQueue queue(schedule_.groups * pieces);
  run_threads(num_threads_, [&](int) {
    for (int64_t item; (item = queue.next()) >= 0;) {
      const int64_t group_index = item / pieces, first = item % pieces * kSumKeys;
      const Group group = group_at(r, group_index);
      const int64_t end = std::min(first + kSumKeys, group.span.used_k);
      const auto write = [&](Role role, float* KeySums::*copy, int64_t ld, int64_t size, float factor) {
        float* sum = sums_of(r, group_index, 0).*copy;
        const MatrixView out = group.keys(role);
        const DType type = problem_[role].dtype;
        for (int64_t j = first; j < end; ++j) {
          float* row = sum + j * ld;
          for (int64_t range = 1; range * schedule_.range_queries < group.span.used_q; ++range) {
            const float* part = sums_of(r, group_index, range).*copy + j * ld;
            for (int64_t c = 0; c < ld; ++c) row[c] += part[c];
          }
          for (int64_t c = 0; c < ld; ++c) row[c] *= factor;
          staging_.ops->from_float(row, size, type, out.data + j * out.stride * size_of(type));
        }
      };
      write(Role::kDK, &KeySums::dk, staging_.padded_d, staging_.d, scale);
      write(Role::kDV, &KeySums::dv, staging_.padded_dv, staging_.d_v, 1.0f);
    }
  });
}

}  // namespace

std::unique_ptr<const Prepared> prepare_backward_of_lists(const AttentionProblem& problem, const Ops& ops,
                                                          const PrepareOptions& options) {
  return std::make_unique<ListBackward>(problem, ops, options);
}

}  // namespace fovea::cpu
