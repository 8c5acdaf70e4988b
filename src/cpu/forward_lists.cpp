// The forward where queries have lists of keys. The query heads of a group share a list, so a tile is one query's rows of
// them against the entries of its list, a block at a time:
//
//   K' = rows of K that the block names, V' likewise, side by side
//   S^T = K' Q^T, then as in forward.cpp, with the positions of the entries in place of neighbours
//
// Entries that the band leaves out are dropped before their rows are read. Groups of a few heads take dot products along
// the head size, as few rows do. No row depends on another, so results do not depend on the number of threads.
#include <algorithm>

#include "cpu/forward.hpp"
#include "cpu/forward_work.hpp"
#include "cpu/key_lists.hpp"
#include "cpu/parallel.hpp"

namespace fovea::cpu {

using namespace forward_pass;

namespace {

// Below this much work a second thread costs more than it brings (an OpenMP fork is about 5 us).
constexpr double kMinFlopsPerThread = 1e6;

/// Tiles of some panels of one query's heads.
struct ListSchedule : Schedule {
  int64_t head_tiles;  ///< of each query

  ListSchedule(const AttentionProblem& p, const Staging& s, const PrepareOptions& options)
      : Schedule(p, *s.ops, options) {
    const int64_t all_panels = ceil_div(p.group(), kPanel);
    splits = 1;
    in_turn = false;
    panels = std::clamp<int64_t>(groups * p.seqlen_q * all_panels / (8 * std::max(1, options.num_threads)), 1,
                                 s.ops->max_panels);
    panels = std::min(panels, all_panels);
    head_tiles = ceil_div(all_panels, panels);
    tiles = std::max<int64_t>(1, p.seqlen_q) * head_tiles;  // the first of a head also clears unused rows
    row_path = takes_rows(p, s);
    heads = 1;
  }
};

/// The scratch of tiles, and the rows of a block of entries.
struct ListScratch : ThreadScratch {
  char *entry_keys, *entry_values;
  int32_t* positions;
  float *q, *o;  ///< of rows

  ListScratch(Scratch& memory, const AttentionProblem& p, const Staging& s, const Schedule& schedule,
              const PairPrograms& programs)
      : ThreadScratch(memory, p, s, schedule, programs) {
    entry_keys = memory.take<char>(kBlockKeys * s.d * size_of(s.row_type));
    entry_values = memory.take<char>(kBlockKeys * s.d_v * size_of(s.row_type));
    positions = memory.take<int32_t>(kBlockKeys);
    const int64_t few = schedule.row_path ? p.group() : 0;
    q = memory.take<float>(row_query_floats(s, few));
    o = memory.take<float>(few * s.padded_dv);
  }
};

int64_t thread_bytes(const AttentionProblem& p, const Staging& s, const Schedule& schedule,
                     const PairPrograms& programs) {
  Scratch count(nullptr);
  ListScratch(count, p, s, schedule, programs);
  return count.used();
}

class ListForward final : public Prepared {
 public:
  ListForward(const AttentionProblem& p, const Ops& ops, const PrepareOptions& options)
      : problem_(p),
        staging_(p, ops),
        schedule_(p, staging_, options),
        programs_(p, schedule_.row_path),
        thread_bytes_(thread_bytes(p, staging_, schedule_, programs_)) {
    const auto by_work = static_cast<int64_t>(options.flops / kMinFlopsPerThread);
    num_threads_ = static_cast<int>(
        std::clamp<int64_t>(std::min(by_work, schedule_.items()), 1, std::max(1, options.num_threads)));
    workspace_size = static_cast<size_t>(num_threads_ * thread_bytes_);
    summary = summary_of(programs_, schedule_, options.splits);
  }

  void run(const Buffers& buffers) const override {
    write_rng_state(problem_, buffers);
    if (problem_.batch == 0 && problem_.packed) return write_rows_of_no_sequence(problem_, buffers);
    const ScoreTerms terms(problem_, buffers, programs_);
    WorkQueue items(schedule_.items());
    run_threads(num_threads_, [&](int thread) {
      Scratch memory(static_cast<char*>(buffers.workspace) + thread * thread_bytes_);
      const ListScratch t(memory, problem_, staging_, schedule_, programs_);
      for (int64_t item; (item = items.next()) >= 0;) attend(buffers, terms, t, item);
    });
  }

 private:
  void attend(const Buffers& buffers, const ScoreTerms& terms, const ListScratch& t, int64_t item) const;
  void tile_forward(const Group& group, const ScoreTerms& terms, const ListScratch& t, int64_t query,
                    const Lanes* lanes, int64_t panels) const;
  void rows_forward(const Group& group, const ScoreTerms& terms, const ListScratch& t, int64_t query,
                    const Lanes& lanes) const;
  Seen seen() const { return programs_.has_sees ? Seen::kSome : Seen::kAll; }
  MatrixView gather(const Group& group, Role role, int64_t size, const ListScratch& t, int64_t n) const {
    return gather_rows(staging_, group.key_rows(role), size, t.positions, n,
                       role == Role::kK ? t.entry_keys : t.entry_values);
  }
  Partial panel_of(const ListScratch& t, int64_t x) const {
    return {t.partials + x * Partial::size(staging_, 0), 0};
  }

  AttentionProblem problem_;
  Staging staging_;
  ListSchedule schedule_;
  PairPrograms programs_;
  int64_t thread_bytes_;
  int num_threads_;
};

/// One tile of one query.
void ListForward::attend(const Buffers& buffers, const ScoreTerms& terms, const ListScratch& t,
                         int64_t item) const {
  const int64_t group_index = item / schedule_.tiles, tile = item % schedule_.tiles;
  const Group group(problem_, buffers, group_index / problem_.heads_kv, group_index % problem_.heads_kv);
  if (tile == 0) write_unused_rows(group);
  const int64_t query = tile / schedule_.head_tiles;
  if (query >= group.span.used_q) return;
  const int64_t first_row = query * group.size() + tile % schedule_.head_tiles * schedule_.panels * kPanel;
  const int64_t end_row = (query + 1) * group.size();
  const int64_t panels = std::min(schedule_.panels, ceil_div(end_row - first_row, kPanel));
  Lanes lanes[kMaxPanels];
  for (int64_t x = 0; x < panels; ++x) {
    lanes[x] = Lanes(group, first_row + x * kPanel, end_row);
    panel_of(t, x).reset(staging_);
  }
  if (schedule_.row_path) {
    rows_forward(group, terms, t, query, lanes[0]);
  } else {
    tile_forward(group, terms, t, query, lanes, panels);
  }
  for (int64_t x = 0; x < panels; ++x) write_panel(staging_, group, lanes[x], panel_of(t, x), t.rows);
}

void ListForward::tile_forward(const Group& group, const ScoreTerms& terms, const ListScratch& t,
                               int64_t query, const Lanes* lanes, int64_t panels) const {
  const Staging& s = staging_;
  const int64_t panel_words = s.score_words() * kPanel;
  for (int64_t x = 0; x < panels; ++x) s.stage_queries(group, lanes[x], t.queries + x * panel_words, t.rows);
  ListReader list(group, query);
  for (int64_t n; (n = list.read(t.positions, kBlockKeys)) > 0;) {
    const MatrixView keys = gather(group, Role::kK, s.d, t, n), values = gather(group, Role::kV, s.d_v, t, n);
    const KeyBlock block{s.stage_keys(keys, values, n, t.keys),
                         s.stage_columns(values, n, s.d_v, t.values),
                         values,
                         0,
                         n,
                         t.positions};
    FiniteValues finite{&block, {}};
    for (int64_t x = 0; x < panels; ++x) {
      panel_step(s, group, lanes[x], terms, seen(), block, finite, t.queries + x * panel_words,
                 panel_of(t, x), t);
    }
  }
}

void ListForward::rows_forward(const Group& group, const ScoreTerms& terms, const ListScratch& t,
                               int64_t query, const Lanes& lanes) const {
  const Staging& s = staging_;
  const Ops& ops = *s.ops;
  const int64_t rows = lanes.count, ld_o = s.padded_dv;
  float* o = t.o;
  const Partial out = panel_of(t, 0);
  const RowProblem a{s, group, terms, lanes, out, t, o, ld_o};
  std::fill_n(o, rows * ld_o, 0.0f);
  const RowQueries queries(s, group, lanes, s.row_type, t.q);
  ListReader list(group, query);
  RowsAhead none;  // rows are gathered
  for (int64_t n; (n = list.read(t.positions, kBlockKeys)) > 0;) {
    const MatrixView keys = gather(group, Role::kK, s.d, t, n), values = gather(group, Role::kV, s.d_v, t, n);
    ops.row_dots(queries.q, keys.data, s.row_type, s.d, n, s.d, t.scores, kBlockKeys, none);
    if (queries.qv.rows != nullptr) {
      float* products = t.scores + rows * kBlockKeys;
      ops.row_dots(queries.qv, values.data, s.row_type, s.d_v, n, s.d_v, products, kBlockKeys, none);
      add_value_products(a, n, t.scores, products);
    }
    const bool masked = weigh_rows(a, {{0, n}, seen(), t.positions}, t.scores);
    if (masked && !all_finite(*s.ops, values, s.row_type, n, s.d_v)) {
      add_rows_exactly(a, values, s.row_type, n, t.scores);
    } else {
      ops.row_sums(t.scores, kBlockKeys, rows, values.data, s.row_type, s.d_v, n, s.d_v, o, ld_o, none);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < s.d_v; ++c) out.o[c * kPanel + r] = o[r * ld_o + c];
  }
}

}  // namespace

std::unique_ptr<const Prepared> prepare_forward_of_lists(const AttentionProblem& problem, const Ops& ops,
                                                         const PrepareOptions& options) {
  return std::make_unique<ListForward>(problem, ops, options);
}

}  // namespace fovea::cpu
