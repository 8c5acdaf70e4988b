// Few query rows: dot products along the head size, at the speed of memory.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/forward_work.hpp"

namespace fovea::cpu::forward_pass {

// All rows are one strip of a program, and its registers hold a strip of a panel.
static_assert(kBlockKeys == kProgramWidth && kProgramRows * kProgramWidth <= kStripRows * kPanel);

// Scores of two blocks, and products of one with the values.
static_assert(3 * kRowPathRows <= kPanel);

RowQueries::RowQueries(const Staging& s, const Group& group, const Lanes& lanes, float* memory)
    : q(memory),
      qv(s.has_qv() ? memory + lanes.count * s.padded_d : nullptr),
      ld_q(s.padded_d),
      ld_qv(s.padded_dv) {
  const auto convert = [&](Role role, DType type, int64_t size, int64_t ld, float* to) {
    for (int64_t r = 0; r < lanes.count; ++r)
      s.ops->to_float(group.row_data(role, lanes.first_row + r), type, size, to + r * ld);
  };
  convert(Role::kQ, s.query_type, s.d, ld_q, memory);
  if (s.has_qv()) convert(Role::kQV, s.type, s.d_v, ld_qv, memory + lanes.count * s.padded_d);
}

void add_value_products(const RowProblem& a, int64_t n, float* row_scores, const float* products) {
  for (int64_t r = 0; r < a.lanes.count; ++r) {
    float* row = row_scores + r * kBlockKeys;
    for (int64_t j = 0; j < n; ++j) row[j] = row[j] * a.group.key_share + products[r * kBlockKeys + j];
  }
}

bool weigh_rows(const RowProblem& a, const RowBlock& block, float* row_scores) {
  const Ops& ops = *a.s.ops;
  const int64_t n = block.keys.size();
  const Program* program = a.terms.programs.program_of(block.seen);
  bool masked = program != nullptr;
  if (program != nullptr) {
    ProgramInputs in = a.terms.inputs_of(a.group, a.lanes, block.positions(), n);
    in.tiles = {row_scores, nullptr, nullptr};
    in.scratch = a.t.pairs.registers;
    for (int64_t r = 0; a.terms.programs.scales && r < a.lanes.count; ++r)
      scale_products(a.group, row_scores + r * kBlockKeys, n);
    ops.run_program(*program, in);
  }
  for (int64_t r = 0; r < a.lanes.count; ++r) {
    float* row = row_scores + r * kBlockKeys;
    if (block.list == nullptr && (block.keys.begin < a.lanes.begin[r] || block.keys.end > a.lanes.end[r])) {
      for (int64_t j = 0; j < n; ++j) {
        const int64_t key = block.keys.begin + j;
        if (key < a.lanes.begin[r] || key >= a.lanes.end[r]) row[j] = -std::numeric_limits<float>::infinity();
      }
      masked = true;
    }
    const float factor = a.terms.factor_of(a.group);
    const float raised = std::max(a.out.row_max[r], ops.row_max(row, n) * factor);
    const float subtract = raised == -std::numeric_limits<float>::infinity() ? 0.0f : raised;
    const float alpha = std::exp2(a.out.row_max[r] - subtract);
    a.out.row_sum[r] = a.out.row_sum[r] * alpha + ops.row_exp2(row, n, factor, subtract);
    a.out.row_max[r] = raised;
    if (alpha != 1.0f) {
      for (int64_t c = 0; c < a.s.d_v; ++c) a.o[r * a.ld_o + c] *= alpha;
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

bool all_finite(const KeyRows& values, const tile::Range& keys, const Staging& s) {
  bool finite = true;
  values.for_each_run(keys.begin, keys.size(), [&](int64_t, const MatrixView& run, int64_t n) {
    finite = finite && cpu::all_finite(run, s.key_type, n, s.d_v);
  });
  return finite;
}

/// A few rows against the keys that they see. Reads K and V once, at the speed of memory.
struct RowPass {
  const RowProblem& a;
  const RowQueries& queries;
  SeenBlocks& blocks;
  KeyRows keys, values;
  tile::Range seen;

  bool meets_values() const { return queries.qv != nullptr; }
  int64_t rows() const { return a.lanes.count; }
  int64_t bytes() const { return size_of(a.s.key_type); }
  RowBlock block_from(int64_t j) const;
  void dots(const tile::Range& block, int64_t from, int64_t to, float* row_scores) const;
  void value_dots(const tile::Range& block, int64_t from, int64_t to, float* row_scores) const;
  void sums(int64_t from, int64_t count, const float* weights, int64_t ahead) const;
  bool weigh(const RowBlock& block, float* row_scores) const;
};

/// The block of key j, or the first behind it of which some pair is seen.
RowBlock RowPass::block_from(int64_t j) const {
  RowBlock block;
  do {
    block.keys = {j, std::min((j / kBlockKeys + 1) * kBlockKeys, seen.end)};
    if (block.keys.empty()) break;
    block.seen = seen_of(a.group, a.lanes.first_row, rows(), block.keys.begin, block.keys.size(), blocks);
    j = block.keys.end;
  } while (block.seen == Seen::kNone);
  return block;
}

/// Scores of keys [from, to) of a block; prefetches the rows of V of the same keys.
void RowPass::dots(const tile::Range& block, int64_t from, int64_t to, float* row_scores) const {
  const Staging& s = a.s;
  const auto visit = [&](int64_t x, const MatrixView& run, int64_t n) {
    s.ops->row_dots(
        queries.q, queries.ld_q, rows(), run.data, s.key_type, run.stride, n, s.d,
        row_scores + (from - block.begin + x), kBlockKeys,
        {values.row(from + x), values.stride() * bytes(), values.run(from + x, n), s.d_v * bytes()});
  };
  keys.for_each_part(from, to - from, s.d, a.t.key_rows, visit);
  if (meets_values()) value_dots(block, from, to, row_scores);
}

/// Adds the products with the values to the scores of keys [from, to) of a block.
void RowPass::value_dots(const tile::Range& block, int64_t from, int64_t to, float* row_scores) const {
  const Staging& s = a.s;
  float* products = a.t.scores + 2 * kRowPathRows * kBlockKeys;
  values.for_each_part(from, to - from, s.d_v, a.t.value_rows,
                       [&](int64_t x, const MatrixView& run, int64_t n) {
                         s.ops->row_dots(queries.qv, queries.ld_qv, rows(), run.data, s.key_type, run.stride,
                                         n, s.d_v, products + x, kBlockKeys, {});
                       });
  add_value_products(a, to - from, row_scores + (from - block.begin), products);
}

/// Adds the values of `count` keys from `from` on; prefetches as many rows of K from `ahead` on.
void RowPass::sums(int64_t from, int64_t count, const float* weights, int64_t ahead) const {
  const Staging& s = a.s;
  values.for_each_part(from, count, s.d_v, a.t.value_rows, [&](int64_t x, const MatrixView& run, int64_t n) {
    const int64_t left = std::clamp<int64_t>(seen.end - ahead - x, 0, n);
    Ahead next;
    if (left > 0) {
      next = {keys.row(ahead + x), keys.stride() * bytes(), keys.run(ahead + x, left), s.d * bytes()};
    }
    s.ops->row_sums(weights + x, kBlockKeys, rows(), run.data, s.key_type, run.stride, n, s.d_v, a.o, a.ld_o,
                    next);
  });
}

/// Turns the scores of a block into weights. True where its values are added, too: one by one, as some are not finite and some
/// weights may be 0.
bool RowPass::weigh(const RowBlock& block, float* row_scores) const {
  const bool masked = weigh_rows(a, block, row_scores);
  if (!masked || all_finite(values, block.keys, a.s)) return false;
  values.for_each_run(block.keys.begin, block.keys.size(),
                      [&](int64_t x, const MatrixView& run, int64_t count) {
                        add_rows_exactly(a, run, a.s.key_type, count, row_scores + x);
                      });
  return true;
}

}  // namespace

void rows_forward(const Staging& s, const Group& group, const ScoreTerms& terms, SeenBlocks& blocks,
                  const Lanes& lanes, int64_t first_key, int64_t last_key, float* partials,
                  const ThreadScratch& t) {
  const Partial out(partials, s);
  out.reset(s);
  const int64_t rows = lanes.count, ld_o = s.padded_dv;
  float* o = t.rows + rows * RowQueries::size(s);
  std::fill_n(o, rows * ld_o, 0.0f);
  const RowQueries queries(s, group, lanes, t.rows);
  const RowProblem a{s, group, terms, lanes, out, t, o, ld_o};
  const RowPass pass{a,
                     queries,
                     blocks,
                     group.key_rows(Role::kK),
                     group.key_rows(Role::kV),
                     {std::max(first_key, lanes.any.begin), std::min(last_key, lanes.any.end)}};
  float* row_scores = t.scores;
  float* next_scores = t.scores + kRowPathRows * kBlockKeys;
  RowBlock block = pass.block_from(pass.seen.begin);
  pass.dots(block.keys, block.keys.begin, block.keys.end, row_scores);
  while (!block.keys.empty()) {
    const int64_t n = block.keys.size();
    const bool added = pass.weigh(block, row_scores);
    // Alternates the values of this block with the keys of the next: two streams keep memory busier than one
    // after the other (41 against 35 GB/s on one core). Where queries meet values, those of this block lie in the second-level
    // cache since its scores.
    const RowBlock next = pass.block_from(block.keys.end);
    for (int64_t x = 0; x < kBlockKeys; x += kTurnKeys) {
      if (!added && x < n) {
        pass.sums(block.keys.begin + x, std::min(kTurnKeys, n - x), row_scores + x,
                  next.keys.begin + x + kTurnKeys);
      }
      pass.dots(next.keys, next.keys.begin + x, std::min(next.keys.begin + x + kTurnKeys, next.keys.end),
                next_scores);
    }
    std::swap(row_scores, next_scores);
    block = next;
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < s.d_v; ++c) out.o[c * kPanel + r] = o[r * ld_o + c];
  }
}

}  // namespace fovea::cpu::forward_pass
