// A tile of query rows against keys: what forward.cpp says of a block, and the same of a run of blocks in one step, where the table of
// operations has that (AMX).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/forward.hpp"
#include "cpu/forward_work.hpp"
#include "cpu/panel.hpp"
#include "cpu/subnormals.hpp"

namespace fovea::cpu::forward_pass {
namespace {

/// O^T = O^T * alpha + V^T P^T, skipping zero weights, so that NaN and Inf in V of a masked or dropped key do not
/// spread.
void accumulate_exactly(const Staging& s, const MatrixView& values, int64_t n, const float* weights,
                        const float* alpha, float* o) {
  for (int64_t c = 0; c < s.d_v; ++c) {
    for (int x = 0; x < kPanel; ++x) o[c * kPanel + x] *= alpha[x];
  }
  for (int64_t j = 0; j < n; ++j) {
    const char* row = values.data + j * values.stride * size_of(s.row_type);
    for (int64_t c = 0; c < s.d_v; ++c) {
      const float value = load_element(row, s.row_type, c);
      for (int x = 0; x < kPanel; ++x) {
        const float weight = weights[j * kPanel + x];
        if (weight != 0) o[c * kPanel + x] += weight * value;
      }
    }
  }
}

}  // namespace

void panel_step(const Staging& s, const Group& group, const Lanes& lanes, const ScoreTerms& terms, Seen seen,
                const KeyBlock& block, FiniteValues& finite, const float* queries, const Partial& out,
                const ThreadScratch& t) {
  const Ops& ops = *s.ops;
  const int64_t n = block.n;
  const int64_t key_rows = round_up(n, ops.row_multiple);
  std::fill_n(t.maxima, kPanel, -std::numeric_limits<float>::infinity());
  const bool masked = panel_scores(ops, group, lanes, terms, seen, s.score_operands(block.keys, queries),
                                   key_rows, n, block.positions(), t.scores, t.maxima, t.pairs);
  const bool zeros = masked || terms.any || terms.dropout;
  const bool exact = zeros && !finite.all(s);
  const bool pairs = s.ops->word_elements == 2 && !exact;
  auto* pair_weights = reinterpret_cast<uint32_t*>(t.weights);
  ops.softmax(t.scores, n, terms.factor_of(group), t.maxima, {out.row_max, out.row_sum, t.alpha},
              pairs ? pair_weights : nullptr);
  if (terms.dropout) {
    dropout_bits(ops, group, lanes, terms, n, block.positions(), t.kept);
    // The factor of what is kept waits for the last step, as that of the softmax does.
    if (pairs) {
      ops.keep_pairs(pair_weights, t.kept, n);
    } else {
      ops.multiply_kept(t.scores, t.kept, 1.0f, n);
    }
  }
  if (exact) {
    accumulate_exactly(s, block.rows, n, t.scores, t.alpha, out.o);
    return;
  }
  const WithoutSubnormals mode;
  const int64_t words = s.words_of(n);
  const float* right = pairs ? t.weights : t.scores;
  if (pairs) {
    const int64_t filled = ceil_div(n, 2);
    std::fill(t.weights + filled * kPanel, t.weights + words * kPanel, 0.0f);
  }
  const LaneEnds ends = ends_of(lanes, block.positions(), n, ops.word_elements);
  ops.accumulate(block.values, right, round_up(s.d_v, ops.row_multiple), words, out.o, t.alpha, &ends);
}

namespace {

/// Neighbouring blocks of keys.
struct BlockRun {
  std::array<KeyBlock, kRunBlocks> blocks;
  std::array<FiniteValues, kRunBlocks> finite;
  std::array<AttendBlock, kRunBlocks> operands;
  Seen own[kMaxPanels * kRunBlocks];
  uint32_t own_strips[kMaxPanels * kRunBlocks];
  SeenTable seen;                      ///< what panels see
  std::array<bool, kRunBlocks> met{};  ///< blocks with keys that some panel sees; nothing is known of others
  std::array<bool, kRunBlocks> finite_parts{};
  int64_t count = 0;

  void add(const KeyBlock& block, const AttendBlock& operand) {
    operands[static_cast<size_t>(count)] = operand;
    blocks[static_cast<size_t>(count)] = block;
    finite[static_cast<size_t>(count)] = {&blocks[static_cast<size_t>(count)], {}};
    ++count;
  }
  int64_t first() const { return blocks[0].j0; }
  int64_t end() const {
    const KeyBlock& last = blocks[static_cast<size_t>(count - 1)];
    return last.j0 + last.n;
  }
  /// Those of a range from the first block of which panel x sees some to the last.
  tile::Range keys_seen_by(int64_t x, const tile::Range& keys) const {
    const tile::Range of_blocks = seen.blocks_with_words(x, count);
    return {std::max(keys.begin, first() + of_blocks.begin * kBlockKeys),
            std::min(keys.end, first() + of_blocks.end * kBlockKeys)};
  }
  /// How much panel x sees of all blocks.
  Seen seen_by(int64_t x) const { return seen.seen_by(x, count); }
};

/// What the terms of a panel's scores are read from.
struct PanelTerms {
  const void* elements[kPanel];
  float factors[kPanel];
  const char* queries[kPanel];
};

/// A tile against runs of blocks.
struct TilePass : TileProblem {
  PartBlocks parts;
  RowBlocks by_rows;
  std::array<bool, kMaxPanels> finite_queries{};  ///< of each panel, where there are parts
  std::array<bool, kMaxPanels> has_o{};           ///< panels whose O is there: it has no zeros to begin from

  explicit TilePass(const TileProblem& problem)
      : TileProblem(problem),
        parts(problem.s),
        by_rows(problem.s, problem.terms.programs, problem.terms.dropout) {}
  float* part_queries(int64_t x) const { return t.part_queries + x * parts.parts * parts.query_part(); }
  float* queries(int64_t x) const { return t.queries + x * s.score_words() * kPanel; }
  Partial partial(int64_t x) const {
    const int64_t rows = by_rows.present ? kPanel : 0;
    return {partials + x * Partial::size(s, rows), rows};
  }
  tile::Range begin(int64_t first_key, int64_t last_key);
  MatrixView value_rows(int64_t j0, int64_t n) const;
  MatrixView value_rows_in_place(int64_t j0, int64_t n) const;
  KeyBlock staged(int64_t j0, int64_t n) const;
  void add(BlockRun& run, int64_t j0, int64_t n) const;
  void add_rows(BlockRun& run, int64_t j0, int64_t n) const;
  int64_t run_keys() const;
  void attend_run(int64_t j0, int64_t end);
  bool look(BlockRun& run, int64_t j0, int64_t end) const;
  void meet(BlockRun& run, int64_t j0, int64_t end) const;
  Seen seen_of_part(const BlockRun& run, size_t i, int64_t x, int64_t begin, int64_t end) const;
  tile::Range seen_keys(const BlockRun& run, size_t i, int64_t x) const;
  bool can_attend(int64_t x, const BlockRun& run) const;
  bool takes_block(BlockRun& run, int64_t x, size_t i) const;
  bool takes_blocks(BlockRun& run, int64_t x) const;
  bool takes_together(BlockRun& run, const bool* takes) const;
  DistanceValues distances(const BlockRun& run) const;
  AttendPanel taker(const BlockRun& run, int64_t x, const DistanceValues& values,
                    PanelTerms& panel_terms) const;
  float attend_factor() const;
  /// Of what is added to scores before that factor.
  float unit_of_added() const { return kLog2e / attend_factor(); }
  void attend(BlockRun& run, bool* taken);
  void attend_panel(BlockRun& run, int64_t x, bool* taken);
  void attend_panels(BlockRun& run, const bool* taken);
  bool attends_to(BlockRun& run, size_t i, int64_t x);
  bool sees_some(const KeyBlock& block, int64_t x, Seen seen) const;
  void step(BlockRun& run, size_t i, int64_t x);
  void step_blocks(BlockRun& run, const bool* taken);
};

/// Stages Q and clears what the tile adds to. Returns the keys that some panel sees.
tile::Range TilePass::begin(int64_t first_key, int64_t last_key) {
  tile::Range seen{std::numeric_limits<int64_t>::max(), 0};
  for (int64_t x = 0; x < panels; ++x) {
    if (!by_rows.present) s.stage_queries(group, lanes[x], queries(x), t.rows);
    if (parts.parts > 0)
      finite_queries[static_cast<size_t>(x)] = s.ops->split_lanes(
          queries(x), s.d, parts.parts, reinterpret_cast<uint32_t*>(part_queries(x)), parts.query_part());
    partial(x).reset_sums();
    const tile::Range keys{std::max(first_key, lanes[x].any.begin), std::min(last_key, lanes[x].any.end)};
    if (keys.empty()) continue;
    seen = {std::min(seen.begin, keys.begin), std::max(seen.end, keys.end)};
  }
  return seen;
}

/// Rows of V, where they lie or gathered.
MatrixView TilePass::value_rows(int64_t j0, int64_t n) const {
  return s.block(group.key_rows(Role::kV), j0, n, s.d_v, t.value_rows);
}

/// Those that shared blocks do not make needless.
MatrixView TilePass::value_rows_in_place(int64_t j0, int64_t n) const {
  return shared.gathered() ? MatrixView{} : value_rows(j0, n);
}

KeyBlock TilePass::staged(int64_t j0, int64_t n) const {
  if (shared.bytes() > 0 && parts.parts == 0 && !by_rows.present)
    return {shared.keys(s, group, j0), shared.values(s, group, j0), value_rows_in_place(j0, n), j0, n};
  const MatrixView values = value_rows(j0, n);
  const MatrixView keys = s.block(group.key_rows(Role::kK), j0, n, s.d, t.key_rows);
  const Operand columns = s.stage_columns(values, n, s.d_v, t.values);
  if (s.ops->attend != nullptr && parts.parts == 0 && n % kAttendStrip != 0) {
    // Rows behind the last are read, which memory that is not ours need not have.
    s.copy_keys(keys, values, n, t.keys);
    return {{t.keys, s.score_words(), 1}, columns, values, j0, n};
  }
  return {s.stage_keys(keys, values, n, t.keys), columns, values, j0, n};
}

/// A block for the step of the table; of parts and rows, whatever else reads it is staged where something does.
void TilePass::add(BlockRun& run, int64_t j0, int64_t n) const {
  const bool is_shared = shared.bytes() > 0;
  const auto i = static_cast<size_t>(run.count);
  if (parts.parts == 0) {
    if (by_rows.present) {
      add_rows(run, j0, n);
    } else {
      const KeyBlock block = staged(j0, n);
      run.add(block, {block.keys, block.values});
    }
    if (shared.looks() && run.met[i]) run.finite[i].known = shared.finite(group, j0);
    return;
  }
  const MatrixView values = value_rows_in_place(j0, n);
  run.add({{}, {}, values, j0, n}, is_shared ? shared.parts(group, j0) : parts.at(t.part_block));
  if (is_shared) {
    run.finite_parts[i] = run.met[i] && shared.finite(group, j0);
  } else {
    const MatrixView keys = s.block(group.key_rows(Role::kK), j0, n, s.d, t.key_rows);
    run.finite_parts[i] = parts.stage(s, keys, values, n, t.part_block, t.part_rows);
  }
}

void TilePass::add_rows(BlockRun& run, int64_t j0, int64_t n) const {
  const MatrixView values = value_rows_in_place(j0, n);
  run.add({{}, {}, values, j0, n}, shared.bytes() > 0 ? shared.rows(group, j0) : by_rows.at(t.row_block));
  if (shared.bytes() > 0) return;
  by_rows.stage(s, s.block(group.key_rows(Role::kK), j0, n, s.d, t.key_rows), values, n, t.row_block);
}

/// Keys that are staged at the same time, so that panels may attend to them in one step.
int64_t TilePass::run_keys() const {
  if (shared.bytes() == 0) return kBlockKeys;
  if (s.ops->attend == nullptr) return kRunPairBlocks * kBlockKeys;
  if (parts.parts > 0) return kRunPartBlocks * kBlockKeys;
  return (s.d + s.d_v > 128 ? kLargeRunBlocks : kRunBlocks) * kBlockKeys;
}

/// Finds out what the panels see of the keys of a run; nothing else of it is known yet. False where that is nothing.
bool TilePass::look(BlockRun& run, int64_t j0, int64_t end) const {
  if (shared_seen.present()) {
    run.seen = shared_seen.table(group, lanes[0].first_row / kPanel, j0);
    const int64_t count = ceil_div(end - j0, kBlockKeys);
    for (int64_t x = 0; x < panels; ++x)
      if (run.seen.seen_by(x, count) != Seen::kNone) return true;
    return false;
  }
  run.seen = {run.own, t.seen_pairs, run.own_strips, kRunBlocks};
  const SeenSearch search{*s.ops, group, terms, blocks, t.scores, t.pairs.registers};
  return search.look(lanes, panels, j0, end, run.seen);
}

/// Finds out which blocks of a run the panels meet, and sees to it that shared ones are staged.
void TilePass::meet(BlockRun& run, int64_t j0, int64_t end) const {
  tile::Range keys{end, j0};
  for (int64_t x = 0; x < panels; ++x) {
    if (lanes[x].any.empty()) continue;
    keys = {std::min(keys.begin, lanes[x].any.begin), std::max(keys.end, lanes[x].any.end)};
  }
  const int64_t count = ceil_div(end - j0, kBlockKeys);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = j0 + i * kBlockKeys;
    bool sees = false;
    for (int64_t x = 0; x < panels; ++x) sees = sees || run.seen.seen_of(x, i) != Seen::kNone;
    run.met[static_cast<size_t>(i)] = sees && keys.begin < first + kBlockKeys && first < keys.end;
  }
  // Tiles of a head that begin together share the blocks.
  const int64_t start = lanes[0].first_row * count / group.rows();
  shared.stage(s, group, j0, count, start, run.met.data(), t);
}

/// How much panel x sees of keys [begin, end) of block i; `begin` is a multiple of kSeenStep.
Seen TilePass::seen_of_part(const BlockRun& run, size_t i, int64_t x, int64_t begin, int64_t end) const {
  if (!terms.programs.mask)
    return seen_of(group, lanes[x].first_row, kPanel, run.blocks[i].j0 + begin, end - begin, blocks);
  return seen_of_words(run.seen.words_of(x, static_cast<int64_t>(i)) + begin / kSeenKeys * kPanel,
                       end - begin);
}

/// The keys of block i, by their place in it, from the first step on of which panel x sees some pair to the last.
tile::Range TilePass::seen_keys(const BlockRun& run, size_t i, int64_t x) const {
  const auto none = [&](int64_t begin, int64_t end) {
    return seen_of_part(run, i, x, begin, end) == Seen::kNone;
  };
  tile::Range keys{0, run.blocks[i].n};
  while (!keys.empty() && none(keys.begin, std::min(keys.begin + kSeenStep, keys.end)))
    keys.begin += kSeenStep;
  while (!keys.empty()) {
    const int64_t last = (keys.end - 1) / kSeenStep * kSeenStep;
    if (!none(last, keys.end)) break;
    keys.end = last;
  }
  return keys;
}

/// Whether the table has a step for panel x and the keys of a run, some of which it sees.
bool TilePass::can_attend(int64_t x, const BlockRun& run) const {
  const bool has_parts = parts.parts == 0 || finite_queries[static_cast<size_t>(x)];
  const bool has_unit = !terms.programs.has_form || std::isfinite(unit_of_added());
  return s.ops->attend != nullptr && has_parts && has_unit && group.key_share == 1.0f &&
         run.seen_by(x) != Seen::kNone && lanes[x].any.begin < run.end() && run.first() < lanes[x].any.end;
}

/// Whether the step may take panel x and block i: no value that is not finite meets a weight of 0, and none has parts.
bool TilePass::takes_block(BlockRun& run, int64_t x, size_t i) const {
  if (parts.parts > 0) return run.finite_parts[i];
  const KeyBlock& block = run.blocks[i];
  const tile::Range& all = lanes[x].all;
  const bool whole = !terms.dropout && !terms.any &&
                     run.seen.seen_of(x, static_cast<int64_t>(i)) == Seen::kAll && all.begin <= block.j0 &&
                     block.j0 + block.n <= all.end;
  return whole || run.finite[i].all(s);
}

/// The same for all blocks that it sees.
bool TilePass::takes_blocks(BlockRun& run, int64_t x) const {
  for (size_t i = 0; i < static_cast<size_t>(run.count); ++i) {
    if (sees_some(run.blocks[i], x, run.seen.seen_of(x, static_cast<int64_t>(i))) && !takes_block(run, x, i))
      return false;
  }
  return true;
}

/// Whether it may take all of these panels together: those that see nothing of a block have weights of 0 there.
bool TilePass::takes_together(BlockRun& run, const bool* takes) const {
  for (size_t i = 0; i < static_cast<size_t>(run.count); ++i) {
    for (int64_t x = 0; x < panels; ++x) {
      if (run.met[i] && takes[x] && !takes_block(run, x, i)) return false;
    }
  }
  return true;
}

/// f of the score's form for all rows of the tile. Keys and rows that do not exist have 0.
DistanceValues TilePass::distances(const BlockRun& run) const {
  const Lanes& last = lanes[panels - 1];
  const int64_t rows = last.first_row + last.count - lanes[0].first_row, pad = kAttendStrip * group.size();
  const int64_t size = pad + DistanceValues::size(*group.problem, panels * kPanel, run_keys());
  std::fill_n(t.distances, size, 0.0f);
  return distance_values(*s.ops, group, terms, lanes[0].first_row, rows, run.first(), run.end() - run.first(),
                         unit_of_added(), t.pairs.registers, t.distances + pad);
}

/// Panel x as the step takes it.
AttendPanel TilePass::taker(const BlockRun& run, int64_t x, const DistanceValues& values,
                            PanelTerms& panel_terms) const {
  const Partial out = partial(x);
  const Lanes& rows = lanes[x];
  AttendPanel panel{parts.parts > 0 ? part_queries(x) : queries(x),
                    out.row_max,
                    out.row_sum,
                    out.o,
                    rows.count,
                    rows.begin,
                    rows.end,
                    rows.any,
                    rows.all};
  panel.query = rows.query;
  panel.head = rows.head;
  panel.fresh = !has_o[static_cast<size_t>(x)];
  if (run.seen_by(x) == Seen::kSome) {
    panel.seen = run.seen.words_of(x, 0);
    panel.seen_strips = run.seen.strips_of(x, 0);
    panel.any = run.keys_seen_by(x, rows.any);
  }
  if (terms.dropout) {
    uint8_t* kept = t.kept + x * kept_bytes(run_keys());
    dropout_bits(*s.ops, group, rows, terms, std::min(run.end(), rows.any.end) - run.first(),
                 KeyPositions(run.first()), kept);
    panel.kept = kept;
  }
  if (values.data != nullptr) {
    panel.distance = values.of(rows.first_row, run.first(), group.size());
    panel.step = group.size();
  }
  if (const auto& elements = terms.programs.elements) {
    element_rows(group, rows, terms, *elements, run.first(), panel_terms.elements);
    element_factors(*s.ops, group, rows, terms, unit_of_added(), t.pairs.registers, panel_terms.factors);
    panel.elements = panel_terms.elements;
    panel.factors = panel_terms.factors;
    panel.dtype = elements->dtype;
  }
  if (by_rows.present) {
    const HeadRows of_q = group.head_rows(Role::kQ);
    for (int lane = 0; lane < kPanel; ++lane)
      panel_terms.queries[lane] = of_q.row(rows.query[lane], rows.head[lane]);
    panel.query_rows = panel_terms.queries;
  }
  return panel;
}

/// The factor of scores in units of log2: of products, but where a program makes scores of them before.
float TilePass::attend_factor() const {
  if (!terms.programs.has_form) return terms.factor_of(group);
  return static_cast<float>(group.problem->scale) * group.product_scale * kLog2e;
}

/// Attends in one step to a run, for those panels that can; taken[x]: panel x has. Which ones can must not depend on the others, since
/// the number of threads decides which panels are a tile.
void TilePass::attend(BlockRun& run, bool* taken) {
  bool can[kMaxPanels];
  for (int64_t x = 0; x < panels; ++x) can[x] = taken[x] = can_attend(x, run);
  if (takes_together(run, taken)) return attend_panels(run, taken);
  std::fill_n(taken, panels, false);
  for (int64_t x = 0; x < panels; ++x) {
    if (can[x] && takes_blocks(run, x)) attend_panel(run, x, taken);
  }
}

/// Panel x alone.
void TilePass::attend_panel(BlockRun& run, int64_t x, bool* taken) {
  bool alone[kMaxPanels] = {};
  alone[x] = taken[x] = true;
  attend_panels(run, alone);
}

/// The step of the table, for the panels that are taken.
void TilePass::attend_panels(BlockRun& run, const bool* taken) {
  const int64_t count = std::count(taken, taken + panels, true);
  if (count == 0) return;
  const PairPrograms& programs = terms.programs;
  const DistanceValues values = programs.of_distance.empty() ? DistanceValues{} : distances(run);
  std::array<AttendPanel, kMaxPanels> takers;
  std::array<PanelTerms, kMaxPanels> panel_terms;
  AttendPanel* next = takers.data();
  for (int64_t x = 0; x < panels; ++x) {
    if (taken[x]) *next++ = taker(run, x, values, panel_terms[static_cast<size_t>(x)]);
  }
  const bool has_parts = parts.parts > 0;
  AttendKeys keys{run.operands.data(),
                  run.first(),
                  run.end(),
                  has_parts ? parts.words : s.score_words(),
                  has_parts ? parts.columns : round_up(s.d_v, s.ops->row_multiple),
                  attend_factor()};
  if (has_parts) {
    keys.parts = parts.parts;
    keys.query_part = parts.query_part();
    keys.key_part = parts.key_part();
    keys.value_part = parts.value_part();
  }
  if (by_rows.present) {
    keys.by_rows = true;
    keys.size = s.d;
    keys.row_of_o = s.padded_dv;
    keys.columns = by_rows.columns;
  }
  keys.key_elements = s.ops->key_elements;
  ProgramInputs inputs = terms.inputs_of(group, nullptr, nullptr, KeyPositions(run.first()));
  inputs.scratch = t.pairs.registers;
  const AttendProgram program{&programs.strip, &inputs, group.product_scale, s.ops->run_program};
  if (!programs.strip.empty()) keys.program = &program;
  s.ops->attend(keys, takers.data(), count, t.scores);
  for (int64_t x = 0; x < panels; ++x) has_o[static_cast<size_t>(x)] |= taken[x];
}

bool TilePass::sees_some(const KeyBlock& block, int64_t x, Seen seen) const {
  return lanes[x].any.end > block.j0 && block.j0 + block.n > lanes[x].any.begin && seen != Seen::kNone;
}

/// Panel x against the keys of block i, of which it sees some.
void TilePass::step(BlockRun& run, size_t i, int64_t x) {
  const KeyBlock& block = run.blocks[i];
  Seen seen = run.seen.seen_of(x, static_cast<int64_t>(i));
  // Keys behind the last one that any lane sees are left out. Keys before the first are masked, so that
  // the block's start stays aligned with the staged pairs. Only whole reduction steps: a step must not
  // reach beyond the keys that the mask and the check for NaN cover.
  const int64_t used =
      std::min(block.n, round_up(lanes[x].any.end - block.j0, s.ops->k_multiple * s.ops->word_elements));
  tile::Range part{0, used};
  if (seen == Seen::kSome) {
    part = seen_keys(run, i, x);
    part.end = std::min(part.end, used);
    if (part.empty()) return;
    if (part.size() < used) seen = seen_of_part(run, i, x, part.begin, part.end);
  }
  const Partial rows = partial(x);
  if (!std::exchange(has_o[static_cast<size_t>(x)], true)) rows.clear(s);
  Partial out = rows;
  if (by_rows.present) {
    s.ops->transpose(rows.o, s.padded_dv, kPanel, s.padded_dv, t.rows, kPanel);
    out.o = t.rows;
    out.rows = 0;
  }
  panel_step(s, group, lanes[x], terms, seen, block.part(s, part.begin, part.end), run.finite[i], queries(x),
             out, t);
  if (by_rows.present) s.ops->transpose(out.o, kPanel, s.padded_dv, kPanel, rows.o, s.padded_dv);
}

/// Attends to block i alone in one step, if panel x can.
bool TilePass::attends_to(BlockRun& run, size_t i, int64_t x) {
  if (run.count == 1 || !can_attend(x, run) || !takes_block(run, x, i)) return false;
  BlockRun alone;
  alone.add(run.blocks[i], run.operands[i]);
  alone.seen = run.seen.from(0, static_cast<int64_t>(i));
  bool taken[kMaxPanels];
  attend_panel(alone, x, taken);
  return true;
}

/// Panels that have not attended to the run in one step.
void TilePass::step_blocks(BlockRun& run, const bool* taken) {
  for (size_t i = 0; i < static_cast<size_t>(run.count); ++i) {
    KeyBlock& block = run.blocks[i];
    bool is_ready = false;
    for (int64_t x = 0; x < panels; ++x) {
      if (taken[x] || !sees_some(block, x, run.seen.seen_of(x, static_cast<int64_t>(i)))) continue;
      if (attends_to(run, i, x)) continue;
      // Rows that are gathered take the place of those of other blocks.
      if (!is_ready) block = staged(block.j0, block.n);
      is_ready = true;
      // Only values that are not finite are read as rows.
      if (block.rows.data == nullptr && !run.finite[i].all(s)) block.rows = value_rows(block.j0, block.n);
      // Only here are queries wanted on lanes, then.
      if (by_rows.present) s.stage_queries(group, lanes[x], queries(x), t.rows);
      step(run, i, x);
    }
  }
}

/// All panels against the keys [j0, end).
void TilePass::attend_run(int64_t j0, int64_t end) {
  BlockRun run;
  if (!look(run, j0, end)) return;
  meet(run, j0, end);
  for (; j0 < end; j0 += kBlockKeys) add(run, j0, std::min(kBlockKeys, end - j0));
  bool taken[kMaxPanels];
  attend(run, taken);
  step_blocks(run, taken);
}

}  // namespace

void tile_forward(const TileProblem& problem, int64_t first_key, int64_t last_key) {
  TilePass tile(problem);
  const tile::Range seen = tile.begin(first_key, last_key);
  // Runs begin where they do in every tile.
  const int64_t keys = tile.run_keys();
  for (int64_t j0 = first_key + (seen.begin - first_key) / keys * keys; j0 < seen.end; j0 += keys)
    tile.attend_run(j0, std::min({j0 + keys, round_up(seen.end, kBlockKeys), last_key}));
}

}  // namespace fovea::cpu::forward_pass

namespace fovea::cpu {

bool many_rows_as_parts(const AttentionProblem& p) {
  // Keys and values are taken apart for each tile; from so many rows on that pays, and where heads are not much shorter than a tile.
  const int64_t least_rows = p.dtype == DType::kF16 ? 64 : 160, least_size = p.dtype == DType::kF16 ? 16 : 32;
  const bool same_type = p[Role::kQ].dtype == p.dtype && p[Role::kK].dtype == p.dtype;
  return p.pass == Pass::kForward && !p.has(Role::kKeys) && !p.has(Role::kQV) && same_type &&
         p.seqlen_q * p.group() >= least_rows && p.head_dim >= least_size;
}

}  // namespace fovea::cpu
