// Few query rows, at the speed of memory: each element of K and V is read once.
//
//   for each step of keys, for each key head that goes through the keys with others
//     S = Q K^T                   while rows of V are on their way from memory
//     P = exp2(factor * S - m)
//     O = O * alpha + P V         while rows of K are
//
// Few instructions a key let it be: dot products along the head size where rows are few for their type, which fetch the values of this step and
// the keys of the next one; else products of tiles, where the table has them. All three operations on tiles fetch the next step. Lines come at an
// even pace either way.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/forward.hpp"
#include "cpu/forward_work.hpp"

namespace fovea::cpu::forward_pass {

// All rows are one strip of a program, and its registers hold a strip of a panel.
static_assert(kBlockKeys == kProgramWidth && kProgramRows * kProgramWidth <= kStripRows * kPanel);

// Scores of a block, products with the values, and behind them those as tiles leave them.
static_assert(3 * kTileQueries <= kPanel);

RowQueries::RowQueries(const Staging& s, const Group& group, const Lanes& lanes, std::optional<DType> met,
                       float* memory)
    : q{}, qv{} {
  // To put 16 rows on lanes takes as long as their products with 20 to 40 keys.
  constexpr int64_t kLeastLaneKeys = 64;
  const bool on_lanes = met.has_value() && s.ops->row_lanes != nullptr && group.span.used_k >= kLeastLaneKeys;
  const auto convert = [&](Role role, DType type, int64_t size, int64_t ld) {
    FewRows to{memory, ld, lanes.count};
    for (int64_t r = 0; r < to.count; ++r)
      s.ops->to_float(group.row_data(role, lanes.first_row + r), type, size, memory + r * ld);
    memory += to.count * ld;
    if (on_lanes && s.ops->row_lanes(to.rows, ld, to.count, size, *met, memory)) {
      to.lanes = memory;
      memory += ceil_div(to.count, 16) * lane_floats(size);
    }
    return to;
  };
  q = convert(Role::kQ, s.query_type, s.d, s.padded_d);
  if (s.has_qv()) qv = convert(Role::kQV, s.type, s.d_v, s.padded_dv);
}

void add_value_products(const RowProblem& a, int64_t n, float* row_scores, const float* products) {
  for (int64_t r = 0; r < a.lanes.count; ++r) {
    float* row = row_scores + r * kBlockKeys;
    for (int64_t j = 0; j < n; ++j) row[j] = row[j] * a.group.key_share + products[r * kBlockKeys + j];
  }
}

namespace {

void scale_row(const RowProblem& a, int64_t r, float alpha) {
  if (alpha == 1.0f) return;
  for (int64_t c = 0; c < a.ld_o; ++c) a.o[r * a.ld_o + c] *= alpha;
}

}  // namespace

bool weigh_rows(const RowProblem& a, const RowBlock& block, float* row_scores, bool on_tiles) {
  const Ops& ops = *a.s.ops;
  const int64_t n = block.keys.size();
  const Program* program = a.terms.programs.program_of(block.seen);
  bool masked = program != nullptr;
  if (program != nullptr) {
    ProgramInputs in = a.terms.inputs_of(a.group, a.lanes, block.positions(), n);
    in.tiles = {row_scores, nullptr, nullptr};
    in.scratch = a.t.pairs.registers;
    for (int64_t r = 0; a.terms.any && r < a.lanes.count; ++r)
      scale_products(a.group, row_scores + r * kBlockKeys, n);
    ops.run_program(*program, in);
  }
  for (int64_t r = 0; r < a.lanes.count && block.list == nullptr; ++r) {
    if (block.keys.begin >= a.lanes.begin[r] && block.keys.end <= a.lanes.end[r]) continue;
    for (int64_t j = 0; j < n; ++j) {
      const int64_t key = block.keys.begin + j;
      if (key < a.lanes.begin[r] || key >= a.lanes.end[r])
        row_scores[r * kBlockKeys + j] = -std::numeric_limits<float>::infinity();
    }
    masked = true;
  }
  for (int64_t r = 0; r < a.lanes.count; r += kWeighedRows) {
    if (on_tiles) ops.tile_awake();
    const int64_t count = std::min(kWeighedRows, a.lanes.count - r);
    float alpha[kWeighedRows];
    ops.row_softmax(row_scores + r * kBlockKeys, kBlockKeys, count, n, a.terms.factor_of(a.group),
                    {a.out.row_max + r, a.out.row_sum + r, alpha});
    for (int64_t i = 0; i < count; ++i) {
      scale_row(a, r + i, alpha[i]);
      if (a.second_row != 0) scale_row(a, r + i + a.second_row, alpha[i]);
    }
  }
  return masked;
}

void add_rows_exactly(const RowProblem& a, const MatrixView& values, DType type, int64_t n,
                      const float* row_scores) {
  const int64_t bytes = size_of(type);
  for (int64_t r = 0; r < a.lanes.count; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      const float weight = row_scores[r * kBlockKeys + j];
      if (weight == 0) continue;
      const char* value = values.data + j * values.stride * bytes;
      for (int64_t c = 0; c < a.s.d_v; ++c) a.o[r * a.ld_o + c] += weight * load_element(value, type, c);
    }
  }
}

namespace {

constexpr int64_t kTileStep = 32;  // keys of a step of Ops::tile_weigh()

/// From so many rows on that takes less time than to weigh them one by one. Beside bfloat16 it fetches lines, too.
int64_t least_weighed_rows(DType key_type) {
  return key_type == DType::kBF16 ? 1 : 4;
}

// From so many rows on products of tiles take less time than dot products. Those grow with the rows: a row and key of 128 elements take
// 4 ns, more from the fifth row on, and 19 the first where the elements have 8 bits. Tiles multiply 16 rows at once, and take 12 to 28 ns.
int64_t least_tile_rows(DType type, DType key_type) {
  switch (key_type) {
    case DType::kE4M3:
      return type == DType::kF32 ? 2 : 1;
    case DType::kBF16:
      return 3;
    case DType::kF16:
      return 5;
    default:
      return kTileQueries + 1;  // a float32 is three parts
  }
}

bool all_finite(const KeyRows& values, const tile::Range& keys, const Staging& s) {
  bool finite = true;
  values.for_each_run(keys.begin, keys.size(), [&](int64_t, const MatrixView& run, int64_t n) {
    finite = finite && cpu::all_finite(*s.ops, run, s.key_type, n, s.d_v);
  });
  return finite;
}

/// Where the rows of a step lie: groups of those of K, behind them those of V.
class StepRows {
 public:
  /// What a step has of K or of V.
  struct Part {
    const KeyRows& rows;
    int64_t size;  ///< elements of a row
    char* buffer;
  };

  /// Rows of several pages in one group are copied to the part's buffer, which has room for a step; where that is null, the first stands for
  /// all, which is enough to fetch. A pointer for each row would take as long as its products.
  void find(const Part& keys, const Part& values, const tile::Range& range) {
    n_ = range.size();
    far_apart_ = n_ > 0;
    in_order_ = size_of(keys.rows.type()) == 1;
    if (n_ == 0) return;  // behind the last key there may be no page
    find(keys, range, groups_);
    find(values, range, groups_ + groups());
  }
  TileRows keys(int64_t size, DType type) const { return {groups_, n_, size, type}; }
  TileRows values(int64_t size, DType type) const { return {groups_ + groups(), n_, size, type}; }
  /// All of them: one of each group in turn, which are pages of their own, or, of which a page has few, in the order of memory, so that
  /// fewer pages are looked up at a time.
  RowsAhead ahead() const {
    if (far_apart_) return {groups_, 2 * groups(), groups(), n_};
    return {groups_, 2 * groups(), 1, n_ > 0 ? kGroupRows : 0};
  }
  /// Those of K, or of V, alone.
  RowsAhead keys_ahead() const { return part_ahead(groups_); }
  RowsAhead values_ahead() const { return part_ahead(groups_ + groups()); }

 private:
  static constexpr int64_t kPageBytes = 4096;

  int64_t groups() const { return ceil_div(n_, kGroupRows); }
  RowsAhead part_ahead(const RowGroup* of) const {
    if (n_ == 0) return {};
    RowsAhead ahead{of, groups(), 1, kGroupRows};
    if (in_order_) ahead = {of, groups(), groups(), n_};
    ahead.lines = n_ * ceil_div(of[0].bytes, kLineBytes);
    return ahead;
  }
  void find(const Part& part, const tile::Range& range, RowGroup* to) {
    const KeyRows& rows = part.rows;
    const int64_t bytes = size_of(rows.type()), stride = rows.stride() * bytes, row_bytes = part.size * bytes;
    const bool one_run = rows.run(range.begin, n_) == n_;
    far_apart_ = far_apart_ && one_run && stride * kGroupRows > kPageBytes;
    in_order_ = in_order_ && one_run;
    const char* const first = rows.row(range.begin);
    for (int64_t x = 0; x < n_; x += kGroupRows, ++to) {
      const int64_t j = range.begin + x, count = std::min(kGroupRows, n_ - x);
      if (one_run) {
        *to = {first + x * stride, stride, row_bytes};
      } else if (rows.run(j, count) == count) {
        *to = {rows.row(j), stride, row_bytes};
      } else if (part.buffer == nullptr) {
        *to = {rows.row(j), 0, row_bytes};
      } else {
        char* const copy = part.buffer + x * row_bytes;
        for (int64_t r = 0; r < count; ++r)
          std::memcpy(copy + r * row_bytes, rows.row(j + r), static_cast<size_t>(row_bytes));
        *to = {copy, row_bytes, row_bytes};
      }
    }
  }

  int64_t n_ = 0;
  bool far_apart_ = false;  ///< all of them lie evenly, and few in a page
  /// All of them lie evenly, and elements have 8 bits, which come faster in the order of memory.
  bool in_order_ = false;
  RowGroup groups_[2 * kBlockKeys / kGroupRows];
};

/// While it lives, tiles have their shape.
class Tiles {
 public:
  explicit Tiles(const Ops& ops) : ops_(ops) { ops_.tile_start(); }
  ~Tiles() { ops_.tile_stop(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  const Ops& ops_;
};

/// A block of keys of one head.
struct RowStep {
  RowBlock block;
  int64_t head;
};

/// Few rows of some key heads against the keys that they see.
class RowPass {
 public:
  RowPass(const Staging& staging, const ScoreTerms& terms, SeenBlocks& blocks, RowHeads heads,
          const tile::Range& split, const ThreadScratch& scratch, bool on_tiles);

  bool ends(const RowStep& step) const { return step.block.keys.empty(); }
  RowStep first();
  RowStep behind(const RowStep& step);
  void go_on() { now_ ^= 1; }
  void dots(const RowStep& step);
  bool weigh(const RowStep& step);
  void sums(const RowStep& step);
  void write() const;

 private:
  /// Of one head.
  struct Work {
    RowProblem problem;
    RowQueries queries;
    KeyRows keys, values;
    uint32_t *tiles, *value_tiles;  ///< queries that tiles multiply with k and v; null where none do
  };
  const Work& at(const RowStep& step) const { return *work_[step.head]; }
  int64_t rows() const { return heads_[0]->lanes.count; }
  int64_t bytes() const { return size_of(s_.key_type); }
  RowStep step_from(int64_t j, int64_t head) const;
  void find_rows(const RowStep& step, int which);
  void stage_queries(Work& work) const;
  void dots_of(const RowStep& step, const FewRows& q, const uint32_t* tiles, bool with_values, float* scores);
  bool dots_as_rows(const RowStep& step, const uint32_t* tiles, bool with_values, float* scores);
  void tile_dots(const uint32_t* tiles, bool with_values);
  void scores_as_rows(const RowStep& step);
  bool takes_whole_tiles(const RowStep& step) const;
  bool weigh_tiles(const RowStep& step);
  void weights_as_rows(const RowStep& step);
  void turn_columns(const Work& work, bool to_tiles) const;
  float* tile_scores() const { return t_.scores + 2 * kTileQueries * kBlockKeys; }

  const Staging& s_;
  SeenBlocks& blocks_;
  RowHeads heads_;
  const ThreadScratch& t_;
  int64_t step_keys_;
  tile::Range seen_;
  std::optional<Work> work_[kMostRowHeads];
  std::optional<Tiles> tiles_;
  StepRows step_rows_[2];     ///< those of this step and of the next one
  int now_ = 0;               ///< this one's
  RowsAhead ahead_;           ///< the rows of the next step
  bool whole_tiles_ = false;  ///< tile_scores() are those of all rows and keys of this step
  bool weighed_ = false;      ///< weights_ are those of this step
  alignas(64) uint32_t weights_[kTileWeightWords];
};

RowPass::RowPass(const Staging& staging, const ScoreTerms& terms, SeenBlocks& blocks, RowHeads heads,
                 const tile::Range& split, const ThreadScratch& scratch, bool on_tiles)
    : s_(staging), blocks_(blocks), heads_(heads), t_(scratch) {
  const AttentionProblem& p = *heads[0]->group.problem;
  const int64_t head_size = row_head_size(s_, p.seqlen_q * p.group());
  const tile::Range& any = heads[0]->lanes.any;  // that of all heads
  seen_ = {std::max(split.begin, any.begin), std::min(split.end, any.end)};
  if (on_tiles) tiles_.emplace(*s_.ops);
  step_keys_ = row_step_keys(p);
  const std::optional<DType> met = on_tiles ? std::nullopt : std::optional(s_.key_type);
  const int64_t result_rows = tiles_ ? kTileQueries : rows();
  const int64_t ld_o = tiles_ ? tile_row_size(s_.d_v) : s_.padded_dv;
  for (size_t x = 0; x < heads.size(); ++x) {
    const RowHead& head = *heads[x];
    float* memory = t_.row_heads + static_cast<int64_t>(x) * head_size;
    float* o = memory + row_query_floats(s_, rows());
    std::fill_n(o, result_rows * ld_o, 0.0f);
    head.out.reset_sums();
    work_[x].emplace(Work{{s_, head.group, terms, head.lanes, head.out, t_, o, ld_o},
                          RowQueries(s_, head.group, head.lanes, met, memory),
                          head.group.key_rows(Role::kK),
                          head.group.key_rows(Role::kV),
                          nullptr,
                          nullptr});
  }
}

/// The queries of a head as operands of tiles.
void RowPass::stage_queries(Work& work) const {
  auto* tiles = reinterpret_cast<uint32_t*>(work.problem.o + kTileQueries * work.problem.ld_o);
  uint32_t* value_tiles = tiles + tile_query_words(s_.d);
  work.problem.second_row = s_.ops->tile_second_row(rows(), s_.type);
  const RowQueries& q = work.queries;
  if (s_.ops->tile_queries(q.q.rows, q.q.ld, rows(), s_.d, s_.type, s_.key_type, tiles)) work.tiles = tiles;
  if (q.qv.rows != nullptr &&
      s_.ops->tile_queries(q.qv.rows, q.qv.ld, rows(), s_.d_v, s_.type, s_.key_type, value_tiles)) {
    work.value_tiles = value_tiles;
  }
}

/// The step of key j and a head, or the first behind it of which some pair is seen.
RowStep RowPass::step_from(int64_t j, int64_t head) const {
  RowStep step{{}, head};
  for (;;) {
    step.block.keys = {j, std::min((j / step_keys_ + 1) * step_keys_, seen_.end)};
    if (ends(step)) return step;
    const RowHead& of = *heads_[static_cast<size_t>(step.head)];
    step.block.seen = seen_of(of.group, of.lanes.first_row, rows(), j, step.block.keys.size(), blocks_);
    if (step.block.seen != Seen::kNone) return step;
    if (++step.head == static_cast<int64_t>(heads_.size())) {
      step.head = 0;
      j = step.block.keys.end;
    }
  }
}

/// For tiles, the rows of the first step come while queries are staged.
RowStep RowPass::first() {
  const RowStep step = step_from(seen_.begin, 0);
  find_rows(step, now_);
  if (!tiles_) return step;
  ahead_ = step_rows_[now_].ahead();
  RowFetch(ahead_).rest();
  for (size_t x = 0; x < heads_.size(); ++x) stage_queries(*work_[x]);
  return step;
}

RowStep RowPass::behind(const RowStep& step) {
  const bool last = step.head + 1 == static_cast<int64_t>(heads_.size());
  const RowStep next =
      last ? step_from(step.block.keys.end, 0) : step_from(step.block.keys.begin, step.head + 1);
  if (tiles_) s_.ops->tile_awake();
  find_rows(next, now_ ^ 1);
  ahead_ = step_rows_[now_ ^ 1].ahead();
  return next;
}

void RowPass::find_rows(const RowStep& step, int which) {
  const Work& work = at(step);
  step_rows_[which].find({work.keys, s_.d, tiles_ ? t_.step_keys[which] : nullptr},
                         {work.values, s_.d_v, tiles_ ? t_.step_values[which] : nullptr}, step.block.keys);
}

/// Products as tiles leave them.
void RowPass::tile_dots(const uint32_t* tiles, bool with_values) {
  const StepRows& here = step_rows_[now_];
  const TileRows rows_of = with_values ? here.values(s_.d_v, s_.key_type) : here.keys(s_.d, s_.key_type);
  s_.ops->tile_dots(tiles, rows(), s_.type, rows_of, tile_scores(), ahead_);
}

bool RowPass::dots_as_rows(const RowStep& step, const uint32_t* tiles, bool with_values, float* scores) {
  tile_dots(tiles, with_values);
  return s_.ops->tile_scores(tile_scores(), step.block.keys.size(), rows(), s_.type, s_.key_type, scores,
                             kBlockKeys);
}

/// Products of queries with k, or with v, of a step; those with k fetch v.
void RowPass::dots_of(const RowStep& step, const FewRows& q, const uint32_t* tiles, bool with_values,
                      float* scores) {
  const Work& work = at(step);
  const tile::Range& range = step.block.keys;
  const KeyRows& rows_of = with_values ? work.values : work.keys;
  const int64_t size = with_values ? s_.d_v : s_.d;
  if (tiles != nullptr && dots_as_rows(step, tiles, with_values, scores)) return;
  RowsAhead ahead = with_values ? RowsAhead{} : step_rows_[now_].values_ahead();
  const int64_t lines = ahead.lines;
  rows_of.for_each_part(range.begin, range.size(), size, with_values ? t_.value_rows : t_.key_rows,
                        [&](int64_t x, const MatrixView& run, int64_t n) {
                          ahead.lines = lines * n / range.size();
                          s_.ops->row_dots(q, run.data, s_.key_type, run.stride, n, size, scores + x,
                                           kBlockKeys, ahead);
                        });
}

/// The scores of a step: as tiles leave them, where those are all.
void RowPass::dots(const RowStep& step) {
  if (tiles_) s_.ops->tile_awake();
  whole_tiles_ = takes_whole_tiles(step);
  if (whole_tiles_)
    tile_dots(at(step).tiles, false);
  else
    scores_as_rows(step);
}

void RowPass::scores_as_rows(const RowStep& step) {
  const Work& work = at(step);
  const RowQueries& queries = work.queries;
  dots_of(step, queries.q, work.tiles, false, t_.scores);
  if (queries.qv.rows == nullptr) return;
  float* products = t_.scores + rows() * kBlockKeys;
  dots_of(step, queries.qv, work.value_tiles, true, products);
  add_value_products(work.problem, step.block.keys.size(), t_.scores, products);
}

/// Whether every row sees all keys of a step, and products are scores.
bool RowPass::takes_whole_tiles(const RowStep& step) const {
  const Work& work = at(step);
  const RowBlock& block = step.block;
  if (work.tiles == nullptr || rows() < least_weighed_rows(s_.key_type) ||
      block.keys.size() % kTileStep != 0 || work.queries.qv.rows != nullptr)
    return false;
  const RowProblem& a = work.problem;
  if (a.terms.programs.program_of(block.seen) != nullptr) return false;
  if (block.list != nullptr) return true;
  for (int64_t r = 0; r < rows(); ++r)
    if (block.keys.begin < a.lanes.begin[r] || block.keys.end > a.lanes.end[r]) return false;
  return true;
}

/// Turns products into weights that tiles multiply, and rescales older sums. False where one is NaN.
bool RowPass::weigh_tiles(const RowStep& step) {
  const RowProblem& a = at(step).problem;
  return s_.ops->tile_weigh(tile_scores(), step.block.keys.size(), rows(), s_.type, s_.key_type,
                            a.terms.factor_of(a.group), {a.out.row_max, a.out.row_sum, a.o, a.ld_o}, weights_,
                            ahead_);
}

/// Turns the scores of a step into weights. True where its values are added, too: one by one, as some are not finite and some
/// weights may be 0.
bool RowPass::weigh(const RowStep& step) {
  weighed_ = whole_tiles_ && weigh_tiles(step);
  if (weighed_) return false;
  if (whole_tiles_) scores_as_rows(step);
  const Work& work = at(step);
  const tile::Range& keys = step.block.keys;
  const bool masked = weigh_rows(work.problem, step.block, t_.scores, tiles_.has_value());
  if (!masked || all_finite(work.values, keys, s_)) {
    if (work.tiles != nullptr)
      s_.ops->tile_weights(t_.scores, kBlockKeys, keys.size(), rows(), s_.type, s_.key_type, weights_);
    return false;
  }
  turn_columns(work, false);
  work.values.for_each_run(keys.begin, keys.size(), [&](int64_t x, const MatrixView& run, int64_t count) {
    add_rows_exactly(work.problem, run, s_.key_type, count, t_.scores + x);
  });
  turn_columns(work, true);
  return true;
}

/// Sums that tiles added up in the order of their columns, for those who know no other; and back.
void RowPass::turn_columns(const Work& work, bool to_tiles) const {
  if (work.tiles == nullptr) return;
  for (int64_t r = 0; r < rows(); ++r) {
    float* o = work.problem.o + r * work.problem.ld_o;
    s_.ops->tile_columns(o, s_.d_v, s_.key_type, to_tiles, o);
  }
}

/// The weights of weigh_tiles() row by row, from their scores again: for values that have no parts.
void RowPass::weights_as_rows(const RowStep& step) {
  const RowProblem& a = at(step).problem;
  const RowQueries& queries = at(step).queries;
  dots_of(step, queries.q, nullptr, false, t_.scores);
  for (int64_t r = 0; r < rows(); ++r) {
    s_.ops->row_exp2(t_.scores + r * kBlockKeys, step.block.keys.size(), a.terms.factor_of(a.group),
                     a.out.row_max[r]);
  }
}

/// Adds the values of a step; fetches the keys of the next.
void RowPass::sums(const RowStep& step) {
  const Work& work = at(step);
  const tile::Range& range = step.block.keys;
  float* o = work.problem.o;
  const int64_t ld_o = work.problem.ld_o;
  int64_t done = 0;  // columns
  if (work.tiles != nullptr) {
    done = s_.ops->tile_sums(weights_, rows(), s_.type, step_rows_[now_].values(s_.d_v, s_.key_type), o, ld_o,
                             ahead_);
    if (done == s_.d_v) return;
    if (weighed_) weights_as_rows(step);
    turn_columns(work, false);
  }
  RowsAhead ahead = step_rows_[now_ ^ 1].keys_ahead();
  const int64_t lines = ahead.lines;
  work.values.for_each_part(
      range.begin, range.size(), s_.d_v, t_.value_rows, [&](int64_t x, const MatrixView& run, int64_t n) {
        ahead.lines = lines * n / range.size();
        s_.ops->row_sums(t_.scores + x, kBlockKeys, rows(), run.data + done * bytes(), s_.key_type,
                         run.stride, n, s_.d_v - done, o + done, ld_o, ahead);
      });
  turn_columns(work, true);
}

/// Hands the sums over.
void RowPass::write() const {
  for (size_t x = 0; x < heads_.size(); ++x) {
    const Work& work = *work_[x];
    const RowProblem& a = work.problem;
    for (int64_t r = 0; r < rows(); ++r) {
      float *o = a.o + r * a.ld_o, *to = heads_[x]->out.o + r * s_.padded_dv;
      for (int64_t c = 0; a.second_row != 0 && c < a.ld_o; ++c) o[c] += o[a.second_row * a.ld_o + c];
      if (work.tiles != nullptr) {
        s_.ops->tile_columns(o, s_.d_v, s_.key_type, false, to);
      } else {
        std::copy_n(o, s_.d_v, to);
      }
    }
  }
}

}  // namespace

bool tiles_take_rows(const AttentionProblem& p, const Ops& ops) {
  return ops.tile_dots != nullptr && p.seqlen_q * p.group() >= least_tile_rows(p.dtype, p[Role::kK].dtype);
}

namespace {

void run(RowPass& pass) {
  for (RowStep step = pass.first(); !pass.ends(step);) {
    const RowStep next = pass.behind(step);
    pass.dots(step);
    const bool added = pass.weigh(step);
    if (!added) pass.sums(step);
    step = next;
    pass.go_on();
  }
  pass.write();
}

/// By their bits: compilers make vectors of integers, of comparisons of floats they do not.
bool any_nan(const Staging& s, const RowHead& head) {
  int32_t largest = 0;
  for (int64_t r = 0; r < head.lanes.count; ++r) {
    const float* o = head.out.o + r * s.padded_dv;
    for (int64_t c = 0; c < s.d_v; ++c)
      largest = std::max(largest, std::bit_cast<int32_t>(o[c]) & std::numeric_limits<int32_t>::max());
  }
  return largest > std::bit_cast<int32_t>(std::numeric_limits<float>::infinity());
}

}  // namespace

void rows_forward(const Staging& s, const ScoreTerms& terms, SeenBlocks& blocks, RowHeads heads,
                  int64_t first_key, int64_t last_key, const ThreadScratch& t) {
  const tile::Range split{first_key, last_key};
  const bool on_tiles = tiles_take_rows(*heads[0]->group.problem, *s.ops);
  {
    RowPass pass(s, terms, blocks, heads, split, t, on_tiles);
    run(pass);
  }
  if (!on_tiles || s.key_type != DType::kBF16) return;
  // Tiles multiply such values where they lie, those of the neighbouring column by zeros: NaN where they are not finite. Each head by itself, so
  // that no result depends on which heads are together.
  for (size_t x = 0; x < heads.size(); ++x) {
    if (!any_nan(s, *heads[x])) continue;
    RowPass again(s, terms, blocks, heads.subspan(x, 1), split, t, false);
    run(again);
  }
}

}  // namespace fovea::cpu::forward_pass

namespace fovea::cpu {

bool few_rows_on_tiles(const AttentionProblem& p, const Ops& ops) {
  return p.pass == Pass::kForward && !p.has(Role::kKeys) && forward_pass::Schedule(p, ops, {}).row_path &&
         forward_pass::tiles_take_rows(p, ops);
}

}  // namespace fovea::cpu
