// A range of keys of one head against the queries that see it:
// the products of the backward (backward.cpp has the equations).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "cpu/backward_work.hpp"
#include "cpu/subnormals.hpp"

namespace fovea::cpu::backward_pass {

namespace {

void add_tensor_gradients(const Problem& a, const Lanes& lanes, KeyPositions positions, int64_t n) {
  ProgramInputs in = a.terms.inputs_of(a.group, lanes, positions, n);
  in.tiles = {a.t.pairs.before, nullptr, a.t.dp};
  in.scratch = a.t.pairs.registers;
  in.gradients = a.gradients;
  a.s.ops->run_program(a.terms.programs.gradients, in);
}

/// Those of the gradient's rows of a panel from key j0 on.
struct GradientRows {
  void* rows[kPanel];

  GradientRows(const Problem& a, const Lanes& lanes, int64_t j0) {
    for (int64_t x = 0; x < lanes.count; ++x)
      rows[x] = a.row_gradient->at(a.group, lanes.head[x], lanes.query[x], j0);
  }
};

/// Of pairs that are not seen.
void clear_row_gradient(const Problem& a, int64_t first_row, int64_t end_row, int64_t j0, int64_t j1) {
  if (a.row_gradient == nullptr || j0 == j1) return;
  for (int64_t row = first_row; row < std::min(end_row, a.group.rows()); ++row)
    std::memset(a.row_gradient->at(a.group, a.group.head(row), a.group.query(row), j0), 0,
                static_cast<size_t>((j1 - j0) * size_of(a.row_gradient->elements.dtype)));
}

/// Whether P and dS need no form of their own between the scores and what products read.
bool stores_at_once(const Problem& a) {
  const PairPrograms& programs = a.terms.programs;
  const bool as_pairs = a.row_gradient == nullptr || a.s.ops->word_elements == 1 ||
                        a.row_gradient->elements.dtype == DType::kBF16;
  return !a.terms.dropout && !programs.has_slope && programs.gradients.empty() && as_pairs;
}

}  // namespace

void weights_and_gradients(const Problem& a, const Lanes& lanes, const KeyBlock& block, Seen seen, int64_t n,
                           int64_t x, const float* lse2, const float* delta, const FetchRows& ahead) {
  const Ops& ops = *a.s.ops;
  const ThreadScratch& t = a.t;
  panel_scores(ops, a.group, lanes, a.terms, seen,
               a.s.score_operands(block.keys, t.queries + x * a.s.words_d * kPanel),
               round_up(n, ops.row_multiple), n, block.positions(), t.scores, nullptr, t.pairs);
  const int64_t rows = round_up(n, ops.row_multiple);
  const LaneEnds ends = ends_of(lanes, block.positions(), rows);
  ops.scores(block.values, t.d_outputs + x * a.s.words_dv * kPanel, rows, a.s.words_dv, t.dp, nullptr, &ends);
  if (a.terms.dropout) {
    dropout_bits(ops, a.group, lanes, a.terms, n, block.positions(), t.kept);
    ops.multiply_kept(t.dp, t.kept, a.terms.stream.keep_scale, n);
  }
  ops.gradients_float(t.scores, t.dp, n, a.terms.factor, lse2, delta, ahead);
  const PairPrograms& programs = a.terms.programs;
  if (!programs.gradients.empty()) add_tensor_gradients(a, lanes, block.positions(), n);
  if (a.row_gradient != nullptr) {
    const GradientRows to(a, lanes, block.j0);
    ops.store_key_elements(t.dp, kPanel, lanes.count, n, a.row_gradient->elements.dtype, to.rows,
                           a.row_gradient->streams);
  }
  if (programs.has_slope) ops.multiply_gradients(t.dp, t.pairs.slope, n * kPanel);
  if (a.terms.dropout) ops.multiply_kept(t.scores, t.kept, a.terms.stream.keep_scale, n);
}

void stage_right(const Staging& s, const Group& group, const Lanes& lanes, Role role, int64_t size,
                 int64_t padded, float* dst) {
  const int64_t pair = s.ops->word_elements;
  for (int64_t x = 0; x < kPanel; x += pair) {
    float* out = dst + x / pair * padded;
    if (x >= lanes.count) {
      std::fill_n(out, padded, 0.0f);
      continue;
    }
    const char* low = group.row_data(role, lanes.first_row + x);
    if (pair == 1) {
      s.load_row(low, size, padded, out);
    } else {
      const char* high = x + 1 < lanes.count ? group.row_data(role, lanes.first_row + x + 1) : nullptr;
      s.ops->interleave(reinterpret_cast<const uint16_t*>(low), reinterpret_cast<const uint16_t*>(high), size,
                        reinterpret_cast<uint32_t*>(out));
      std::fill(out + size, out + padded, 0.0f);
    }
  }
}

bool panel_finite(const Staging& s, const Group& group, const Lanes& lanes) {
  for (int x = 0; x < lanes.count; ++x) {
    if (!all_finite(*s.ops, {group.row_data(Role::kQ, lanes.first_row + x)}, s.type, 1, s.d) ||
        !all_finite(*s.ops, {group.row_data(Role::kDO, lanes.first_row + x)}, s.type, 1, s.d_v)) {
      return false;
    }
  }
  return true;
}

namespace {

/// Adds dQ, dK and dV of one panel and block, pair by pair, and skips pairs whose weight is 0, so that NaN
/// and Inf of a masked key or query do not spread.
void multiply_exactly(const Problem& a, const Lanes& lanes, const KeyBlock& block, int64_t n, float* dq) {
  const Staging& s = a.s;
  for (int64_t j = 0; j < n; ++j) {
    const char* key = block.key_rows.data + j * block.key_rows.stride * size_of(s.type);
    for (int x = 0; x < lanes.count; ++x) {
      const float weight = a.t.scores[j * kPanel + x], gradient = a.t.dp[j * kPanel + x];
      if (weight != 0) {
        const char* d_out = a.group.row_data(Role::kDO, lanes.first_row + x);
        for (int64_t c = 0; c < s.d_v; ++c)
          block.dv[j * s.padded_dv + c] += weight * load_element(d_out, s.type, c);
      }
      if (gradient != 0) {
        const char* query = a.group.row_data(Role::kQ, lanes.first_row + x);
        for (int64_t c = 0; c < s.d; ++c) {
          block.dk[j * s.padded_d + c] += gradient * load_element(query, s.type, c);
          dq[c * kPanel + x] += gradient * load_element(key, s.type, c);
        }
      }
    }
  }
}

/// Zeroes rows [from, to) of one panel's part of p and ds.
void clear_panel_rows(const ThreadScratch& t, int64_t x, int64_t panel_words, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) {
    std::fill_n(t.p + j * t.ld + x * panel_words, panel_words, 0.0f);
    std::fill_n(t.ds + j * t.ld + x * panel_words, panel_words, 0.0f);
  }
}

/// From the forms that products read.
void store_row_gradient(const Problem& a, const PanelStep& step, int64_t j0, const float* ds,
                        const uint32_t* ds_pairs) {
  const Ops& ops = *a.s.ops;
  const RowGradient& to = *a.row_gradient;
  const GradientRows rows(a, step.lanes, j0);
  if (ops.word_elements == 2)
    return ops.store_key_pairs(ds_pairs, step.lanes.count, step.n, rows.rows, to.streams);
  ops.store_key_elements(ds, a.t.ld, step.lanes.count, step.n, to.elements.dtype, rows.rows, to.streams);
}

}  // namespace

bool panel_step(const Problem& a, const KeyBlock& block, const PanelStep& step) {
  const Staging& s = a.s;
  const Ops& ops = *s.ops;
  const ThreadScratch& t = a.t;
  const int64_t pair = ops.word_elements, panel_words = kPanel / pair, n = step.n, x = step.x;
  const bool zeros = step.masked || a.terms.any || a.terms.dropout;
  float* p = t.p + x * panel_words;
  float* ds = t.ds + x * panel_words;
  auto* ds_pairs = reinterpret_cast<uint32_t*>(t.ds_pairs);
  if (zeros && !(block.keys_finite && step.rows_finite)) {
    weights_and_gradients(a, step.lanes, block, step.seen, n, x, step.lse2, step.delta, step.ahead);
    multiply_exactly(a, step.lanes, block, n, step.dq);
    return false;
  }
  if (!stores_at_once(a)) {
    weights_and_gradients(a, step.lanes, block, step.seen, n, x, step.lse2, step.delta, step.ahead);
    ops.store_gradients(t.scores, t.dp, n, p, ds, t.ld, ds_pairs);
  } else {
    const int64_t rows = round_up(n, ops.row_multiple);
    panel_scores(ops, a.group, step.lanes, a.terms, step.seen,
                 s.score_operands(block.keys, t.queries + x * s.words_d * kPanel), rows, n, block.positions(),
                 t.scores, nullptr, t.pairs);
    const LaneEnds ends = ends_of(step.lanes, block.positions(), rows);
    ops.scores(block.values, t.d_outputs + x * s.words_dv * kPanel, rows, s.words_dv, t.dp, nullptr, &ends);
    ops.gradients(t.scores, t.dp, n, a.terms.factor, step.lse2, step.delta, p, ds, t.ld, ds_pairs,
                  step.ahead);
    if (a.row_gradient != nullptr) store_row_gradient(a, step, block.j0, ds, ds_pairs);
  }
  clear_panel_rows(t, x, panel_words, n, block.rows);
  const WithoutSubnormals mode;
  const float* right = pair == 2 ? t.ds_pairs : ds;
  const int64_t words = s.words_of(n);
  const LaneEnds ends = ends_of(step.lanes, block.positions(), n, pair);
  if (pair == 2) {
    std::fill(t.ds_pairs + ceil_div(n, 2) * kPanel, t.ds_pairs + words * kPanel, 0.0f);
    ops.accumulate(block.columns, right, round_up(s.d, ops.row_multiple), words, step.dq, nullptr, &ends);
  } else {
    ops.accumulate_strided(block.columns, right, t.ld, s.d, words, step.dq, &ends);
  }
  return true;
}

void add_key_gradients(const Problem& a, const KeyBlock& block, const int64_t* used_keys, int64_t panels,
                       int64_t last_rows) {
  const Staging& s = a.s;
  const Ops& ops = *s.ops;
  const ThreadScratch& t = a.t;
  const WithoutSubnormals mode;
  const int64_t panel_words = kPanel / ops.word_elements;
  const int64_t last_words = std::min(panel_words, s.words_of(last_rows));
  // Keys in steps of 32 rows: under a causal mask each step meets only the panels that see it.
  constexpr int64_t kStep = 32;
  for (int64_t r = 0; r < block.rows; r += kStep) {
    const int64_t rows = std::min(kStep, block.rows - r);
    for (int64_t x = 0; x < panels;) {
      if (used_keys[x] <= r) {
        ++x;
        continue;
      }
      int64_t end = x + 1;
      while (end < panels && used_keys[end] > r) ++end;
      const int64_t k = (end - x) * panel_words - (end == panels ? panel_words - last_words : 0);
      ops.update({t.p + r * t.ld + x * panel_words, t.ld, 1}, t.d_output_rows + x * panel_words * s.padded_dv,
                 s.padded_dv, rows, s.padded_dv, k, block.dv + r * s.padded_dv, s.padded_dv);
      ops.update({t.ds + r * t.ld + x * panel_words, t.ld, 1}, t.query_rows + x * panel_words * s.padded_d,
                 s.padded_d, rows, s.padded_d, k, block.dk + r * s.padded_d, s.padded_d);
      x = end;
    }
  }
}

namespace {

/// The elements that are added to scores of a panel with n keys from j0 on.
FetchRows elements_of(const Problem& a, const Lanes& lanes, int64_t j0, int64_t n, const void** rows) {
  const std::optional<KeyElements>& elements = a.terms.programs.elements;
  if (!elements) return {};
  element_rows(a.group, lanes, a.terms, *elements, j0, rows);
  return {reinterpret_cast<const char* const*>(rows), lanes.count, n * size_of(elements->dtype)};
}

/// One block of keys against one tile of rows. `next`: the block behind it, or null.
void block_step(const Problem& a, const RowTile& tile, const KeyBlock& block, const Seen* seen,
                const KeyBlock* next) {
  const Ops& ops = *a.s.ops;
  const int64_t key_step = ops.k_multiple * ops.word_elements;
  int64_t used_keys[kPanels] = {};  // keys of the block up to the last one that the panel sees
  for (int64_t x = 0; x < tile.panels; ++x) {
    const Lanes& lanes = tile.lanes[x];
    const bool unseen =
        lanes.any.end <= block.j0 || block.j0 + block.n <= lanes.any.begin || seen[x] == Seen::kNone;
    const int64_t n = unseen ? 0 : std::min(block.n, round_up(lanes.any.end - block.j0, key_step));
    clear_row_gradient(a, lanes.first_row, lanes.first_row + lanes.count, block.j0 + n, block.j0 + block.n);
    if (unseen) continue;
    used_keys[x] = n;
    const int64_t stats = a.shared.stats_of(a.group_index, tile.first_panel + x);
    const bool inside = lanes.all.begin <= block.j0 && block.j0 + n <= lanes.all.end;
    const KeyBlock* fetched = x + 1 < tile.panels ? &block : next;
    const void* rows[kPanel];
    FetchRows ahead;
    if (fetched != nullptr)
      ahead = elements_of(a, tile.lanes[(x + 1) % tile.panels], fetched->j0, fetched->n, rows);
    const PanelStep step{lanes,
                         seen[x],
                         n,
                         x,
                         !inside || seen[x] == Seen::kSome,
                         tile.finite[x],
                         a.shared.lse2 + stats,
                         a.shared.delta + stats,
                         a.shared.dq_of(a.group_index, a.range, tile.first_panel + x),
                         ahead};
    if (!panel_step(a, block, step)) used_keys[x] = 0;
  }
  add_key_gradients(a, block, used_keys, tile.panels, tile.lanes[tile.panels - 1].count);
}
/// Rows of dk or dv of a group, from `first_row` on, in the tensor's type.
void write_rows(const Ops& ops, const float* src, int64_t ld, int64_t n, int64_t size, float factor,
                const Group& group, Role role, int64_t first_row, float* temp) {
  const MatrixView out = group.keys(role);
  const DType type = (*group.problem)[role].dtype;
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t c = 0; c < size; ++c) temp[c] = src[j * ld + c] * factor;
    ops.from_float(temp, size, type, out.data + (first_row + j) * out.stride * size_of(type));
  }
}

/// The staged keys against one tile of rows, which is not staged where no pair is seen.
void tile_step(const Problem& a, int64_t first_panel, int64_t panels, bool exact_checks, RowTile& tile,
               std::span<const KeyBlock> blocks) {
  Seen seen[kStagedKeys / kBlockKeys][kPanels];
  bool block_seen[kStagedKeys / kBlockKeys], any = false;
  for (size_t b = 0; b < blocks.size(); ++b) {
    block_seen[b] =
        panels_seen(a.group, first_panel * kPanel, panels, blocks[b].j0, blocks[b].n, a.blocks, seen[b]);
    any = any || block_seen[b];
  }
  if (any) stage_tile(a, first_panel, panels, exact_checks, tile);
  for (size_t b = 0; b < blocks.size(); ++b) {
    if (block_seen[b]) {
      block_step(a, tile, blocks[b], seen[b], b + 1 < blocks.size() ? &blocks[b + 1] : nullptr);
    } else {
      clear_row_gradient(a, first_panel * kPanel, (first_panel + panels) * kPanel, blocks[b].j0,
                         blocks[b].j0 + blocks[b].n);
    }
  }
}

}  // namespace

void stage_panel(const Problem& a, const Lanes& lanes, int64_t x) {
  const Staging& s = a.s;
  const int64_t panel_words = kPanel / s.ops->word_elements;
  s.stage_panel(a.group, lanes, Role::kQ, s.d, s.words_d, a.t.queries + x * s.words_d * kPanel, a.t.temp);
  s.stage_panel(a.group, lanes, Role::kDO, s.d_v, s.words_dv, a.t.d_outputs + x * s.words_dv * kPanel,
                a.t.temp);
  stage_right(s, a.group, lanes, Role::kQ, s.d, s.padded_d, a.t.query_rows + x * panel_words * s.padded_d);
  stage_right(s, a.group, lanes, Role::kDO, s.d_v, s.padded_dv,
              a.t.d_output_rows + x * panel_words * s.padded_dv);
}

void want_lanes(const Problem& a, Lanes& lanes) {
  if (!a.terms.programs.gradients.empty()) lanes.wanted = kPanel;
}

void stage_tile(const Problem& a, int64_t first_panel, int64_t panels, bool exact_checks, RowTile& tile) {
  tile.first_panel = first_panel;
  tile.panels = panels;
  const Staging& s = a.s;
  for (int64_t x = 0; x < panels; ++x) {
    Lanes& lanes = tile.lanes[x];
    lanes = Lanes(a.group, (first_panel + x) * kPanel);
    want_lanes(a, lanes);
    stage_panel(a, lanes, x);
    tile.finite[x] = !exact_checks || panel_finite(s, a.group, lanes);
    // A row whose lse is NaN makes its masked weights NaN, too; only gradients_float() tells them apart.
    const float* lse2 = a.shared.lse2 + a.shared.stats_of(a.group_index, first_panel + x);
    for (int lane = 0; exact_checks && lane < lanes.count; ++lane) {
      if (std::isnan(lse2[lane])) tile.finite[x] = false;
    }
  }
}

int64_t stage_keys(const Staging& s, const Group& group, const ThreadScratch& t, int64_t begin, int64_t end,
                   KeyBlock* blocks) {
  const MatrixView keys = group.keys(Role::kK), values = group.keys(Role::kV);
  const int64_t bytes = size_of(s.type);
  int64_t count = 0;
  for (int64_t j0 = begin; j0 < end; j0 += kBlockKeys, ++count) {
    KeyBlock& block = blocks[count];
    const int64_t at = j0 - begin;
    block.j0 = j0;
    block.n = std::min(kBlockKeys, end - j0);
    block.rows = round_up(block.n, s.ops->row_multiple);
    const MatrixView key_rows{keys.data + j0 * keys.stride * bytes, keys.stride};
    const MatrixView value_rows{values.data + j0 * values.stride * bytes, values.stride};
    block.keys = s.stage_rows(key_rows, block.n, s.d, s.words_d, t.keys + at * s.words_d);
    block.values = s.stage_rows(value_rows, block.n, s.d_v, s.words_dv, t.values + at * s.words_dv);
    block.columns = s.ops->word_elements == 1
                        ? Operand{block.keys.data, 1, block.keys.row_stride}
                        : s.stage_columns(key_rows, block.n, s.d, t.key_columns + count * t.columns_block);
    block.dk = t.dk + at * s.padded_d;
    block.dv = t.dv + at * s.padded_dv;
    std::fill_n(block.dk, block.rows * s.padded_d, 0.0f);
    std::fill_n(block.dv, block.rows * s.padded_dv, 0.0f);
    block.key_rows = key_rows;
    block.keys_finite = all_finite(*s.ops, key_rows, s.type, block.n, s.d);
  }
  return count;
}

void range_backward(const Problem& a, int64_t begin, int64_t end, bool exact_checks, RowTile& tile) {
  const Staging& s = a.s;
  const int64_t panels = ceil_div(a.group.rows(), kPanel);
  if (panels > 0) {
    std::fill_n(a.shared.dq_of(a.group_index, a.range, 0), panels * a.shared.schedule->dq_panel, 0.0f);
  }
  KeyBlock blocks[kStagedKeys / kBlockKeys];
  const int64_t staged = a.shared.schedule->staged_keys;
  for (int64_t j0 = begin; j0 < end; j0 += staged) {
    const int64_t j1 = std::min(end, j0 + staged);
    const auto count = static_cast<size_t>(stage_keys(s, a.group, a.t, j0, j1, blocks));
    const tile::Range queries = a.group.window.queries_of_any(j0, j1);
    const int64_t first_panel = queries.empty() ? 0 : queries.begin * a.group.size() / kPanel;
    const int64_t last_panel = queries.empty() ? 0 : ceil_div(queries.end * a.group.size(), kPanel);
    clear_row_gradient(a, 0, first_panel * kPanel, j0, j1);
    for (int64_t x = first_panel; x < last_panel; x += kPanels)
      tile_step(a, x, std::min(kPanels, last_panel - x), exact_checks, tile, {blocks, count});
    clear_row_gradient(a, last_panel * kPanel, a.group.rows(), j0, j1);
    const auto scale = static_cast<float>(a.group.problem->scale);
    write_rows(*s.ops, a.t.dk, s.padded_d, j1 - j0, s.d, scale, a.group, Role::kDK, j0, a.t.temp);
    write_rows(*s.ops, a.t.dv, s.padded_dv, j1 - j0, s.d_v, 1.0f, a.group, Role::kDV, j0, a.t.temp);
  }
}

}  // namespace fovea::cpu::backward_pass
