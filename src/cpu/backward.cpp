// The tiled backward with recomputed weights (Dao 2023, "FlashAttention-2", algorithm 2), in the transposed
// form of forward.cpp. For a block of keys and a tile of query rows:
//
//   S^T  = K Q^T,  P^T = exp2(factor * S^T - log2(e) * lse)
//   dP^T = V dO^T, dS^T = P^T * (dP^T - delta),           delta = rowsum(dO * O) - dlse
//   dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T        (dK and dQ times scale at the end)
//
// A work item is one key head with a range of its keys: dK and dV belong to it alone; dQ is kept per range of
// keys in float32 and summed in a fixed order afterwards. So the result is the same bits every time, for any
// number of threads, and nothing is added atomically.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/forward.hpp"
#include "cpu/panel.hpp"
#include "cpu/parallel.hpp"

namespace fovea::cpu {
namespace {

// Two score tiles (S and dP, 24 KB each at 128 keys) pass through the first-level cache once.
constexpr int64_t kBlockKeys = 128;
// Rows of a tile: 192, so that dV and dK are read and written once for a reduction of 192.
constexpr int64_t kPanels = 4;
// Keys that stay staged while the queries stream past: what packing Q and dO costs is spread over them; their
// accumulators (512 KB at head size 128) still fit in a second-level cache.
constexpr int64_t kStagedKeys = 512;
// Ranges of keys a head is divided into, so that 16 and more cores have work; each range costs a copy of dQ.
constexpr int64_t kWantedItems = 32;
constexpr int64_t kMaxQueryGradientBytes = int64_t{1} << 30;
constexpr double kMinFlopsPerThread = 1e6;

struct Schedule {
  int64_t groups, panels;      ///< panels of the longest sequence of one key head
  int64_t ranges, range_keys;  ///< keys a work item, a multiple of kBlockKeys
  int64_t staged_keys;
  int64_t dq_panel;  ///< floats of one panel of dQ^T

  Schedule(const AttentionProblem& p, const Staging& s) {
    groups = p.batch * p.heads_kv;
    panels = ceil_div(p.seqlen_q * p.group(), kPanel);
    dq_panel = round_up(s.d, 16) * kPanel;
    const int64_t blocks = std::max<int64_t>(1, ceil_div(p.seqlen_k, kBlockKeys));
    const int64_t dq_bytes = std::max<int64_t>(1, groups * panels * dq_panel * 4);
    ranges = std::clamp<int64_t>(ceil_div(kWantedItems, std::max<int64_t>(1, groups)), 1,
                                 std::max<int64_t>(1, kMaxQueryGradientBytes / dq_bytes));
    range_keys = ceil_div(blocks, std::min(ranges, blocks)) * kBlockKeys;
    ranges = std::max<int64_t>(1, ceil_div(p.seqlen_k, range_keys));
    staged_keys = std::min(range_keys, kStagedKeys);
  }
  int64_t dq_size() const { return groups * ranges * panels * dq_panel; }
  int64_t row_stats() const { return groups * panels * kPanel; }
};

/// Elements that a tensor of pairs holds along each dimension: 1 where it broadcasts.
std::array<int64_t, 4> extents(const TensorDesc& t) {
  std::array<int64_t, 4> held{};
  for (size_t i = 0; i < 4; ++i) held[i] = t.stride[i] == 0 ? 1 : t.shape[i];
  return held;
}

int64_t count(const std::array<int64_t, 4>& held) {
  return held[0] * held[1] * held[2] * held[3];
}

/// Arrays that all threads share: dQ^T by (group, range, panel), and lse2 and delta by (group, row).
struct Shared {
  float *dq, *lse2, *delta, *dbias;
  const Schedule* schedule;

  Shared(Scratch& memory, const Schedule& plan, const AttentionProblem& p) : schedule(&plan) {
    dq = memory.take<float>(plan.dq_size());
    lse2 = memory.take<float>(plan.row_stats());
    delta = memory.take<float>(plan.row_stats());
    const TensorDesc& bias = p[Role::kDBias];
    dbias = bias.present ? memory.take<float>(count(extents(bias))) : nullptr;
  }
  float* dq_of(int64_t group, int64_t range, int64_t panel) const {
    return dq + ((group * schedule->ranges + range) * schedule->panels + panel) * schedule->dq_panel;
  }
  int64_t stats_of(int64_t group, int64_t panel) const { return (group * schedule->panels + panel) * kPanel; }
};

/// What one thread works in.
struct ThreadScratch {
  // Keys of the staged range.
  float *keys, *values, *key_columns, *dk, *dv;
  int64_t columns_block;  ///< words of key_columns a block
  // Rows of the tile.
  float *queries, *d_outputs, *query_rows, *d_output_rows;
  // One block.
  float *scores, *dp, *derivative, *keep, *p, *ds, *ds_pairs, *temp;
  int64_t ld;  ///< row stride of p and ds in words

  ThreadScratch(Scratch& memory, const Staging& s, const Schedule& plan) {
    const int64_t n = round_up(plan.staged_keys, 32), rows = kPanels * kPanel, pair = s.ops->word_elements;
    keys = memory.take<float>(s.rows_size(n, s.words_d));
    values = memory.take<float>(s.rows_size(n, s.words_dv));
    columns_block = round_up(s.columns_size(kBlockKeys, s.d), 16);
    key_columns = memory.take<float>(columns_block * ceil_div(n, kBlockKeys));
    dk = memory.take<float>(n * s.padded_d);
    dv = memory.take<float>(n * s.padded_dv);
    queries = memory.take<float>(kPanels * s.words_d * kPanel);
    d_outputs = memory.take<float>(kPanels * s.words_dv * kPanel);
    query_rows = memory.take<float>(rows / pair * s.padded_d);
    d_output_rows = memory.take<float>(rows / pair * s.padded_dv);
    ld = rows / pair;
    scores = memory.take<float>(kBlockKeys * kPanel);
    dp = memory.take<float>(kBlockKeys * kPanel);
    derivative = memory.take<float>(kBlockKeys * kPanel);
    keep = memory.take<float>(kBlockKeys * kPanel);
    p = memory.take<float>(kBlockKeys * ld);
    ds = memory.take<float>(kBlockKeys * ld);
    ds_pairs = memory.take<float>(kBlockKeys * kPanel / 2);
    temp = memory.take<float>(
        std::max(kPanel * std::max(s.padded_d, s.padded_dv), 4 * (std::max(s.words_d, s.words_dv) + 16)));
  }
};

/// A block of keys of the staged range.
struct KeyBlock {
  int64_t j0, n, rows;  ///< first key, keys, rows padded for the products
  Operand keys, values, columns;
  float *dk, *dv;
  bool keys_finite;
};

/// A tile of query rows.
struct RowTile {
  Lanes lanes[kPanels];
  bool finite[kPanels];  ///< Q and dO of the panel
  int64_t panels = 0, first_panel = 0;
};

struct Problem {
  const Staging& s;
  const Group& group;
  const ScoreTerms& terms;
  const Shared& shared;
  const ThreadScratch& t;
  int64_t group_index, range;
};

/// Right operand of update(): the rows on the lanes of a panel, as float32 rows or as bfloat16 pairs of rows.
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
    if (!all_finite({group.row_data(Role::kQ, lanes.first_row + x)}, s.type, 1, s.d) ||
        !all_finite({group.row_data(Role::kDO, lanes.first_row + x)}, s.type, 1, s.d_v)) {
      return false;
    }
  }
  return true;
}

/// Fills scores with P and dp with dS, float32, with every term.
void weights_and_gradients(const Problem& a, const Lanes& lanes, const KeyBlock& block, int64_t n, int64_t x,
                           const float* lse2, const float* delta, float* dbias_tile) {
  const Ops& ops = *a.s.ops;
  const ThreadScratch& t = a.t;
  panel_scores(ops, a.group, lanes, a.terms, block.keys, t.queries + x * a.s.words_d * kPanel,
               round_up(n, ops.row_multiple), n, a.s.words_d, block.j0, t.scores, nullptr,
               a.terms.any ? t.derivative : nullptr);
  ops.scores(block.values, t.d_outputs + x * a.s.words_dv * kPanel, round_up(n, ops.row_multiple),
             a.s.words_dv, t.dp, nullptr);
  if (a.terms.dropout) {
    std::fill_n(t.keep, n * kPanel, 0.0f);
    dropout_factors(a.group, lanes, a.terms, n, block.j0, t.keep);
    for (int64_t i = 0; i < n * kPanel; ++i) t.dp[i] = t.keep[i] == 0 ? 0.0f : t.dp[i] * t.keep[i];
  }
  ops.gradients_float(t.scores, t.dp, n, a.terms.factor, lse2, delta);
  if (dbias_tile != nullptr) std::copy_n(t.dp, n * kPanel, dbias_tile);
  if (a.terms.dropout) {
    for (int64_t i = 0; i < n * kPanel; ++i) t.scores[i] = t.keep[i] == 0 ? 0.0f : t.scores[i] * t.keep[i];
  }
  if (a.terms.any) {
    for (int64_t i = 0; i < n * kPanel; ++i) t.dp[i] = t.dp[i] == 0 ? 0.0f : t.dp[i] * t.derivative[i];
  }
}

/// dQ, dK and dV of one panel and block, pair by pair, leaving out pairs whose weight is 0: masked pairs must
/// not meet the NaN and Inf of operands that they do not see.
void multiply_exactly(const Problem& a, const Lanes& lanes, const KeyBlock& block, int64_t n, float* dq) {
  const Staging& s = a.s;
  const MatrixView keys = a.group.keys(Role::kK);
  for (int64_t j = 0; j < n; ++j) {
    const char* key = keys.data + (block.j0 + j) * keys.stride * size_of(s.type);
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

/// One block of keys against one tile of rows.
void block_step(const Problem& a, const RowTile& tile, const KeyBlock& block) {
  const Staging& s = a.s;
  const Ops& ops = *s.ops;
  const ThreadScratch& t = a.t;
  const int64_t pair = ops.word_elements, panel_words = kPanel / pair;
  const int64_t key_step = ops.k_multiple * pair;
  int64_t first = tile.panels, last = 0;  // panels whose p and ds are to be multiplied
  bool skipped[kPanels] = {};             // those among them that multiply_exactly() has done
  int64_t used_keys[kPanels] = {};        // keys of the block up to the last one that the panel sees
  for (int64_t x = 0; x < tile.panels; ++x) {
    const Lanes& lanes = tile.lanes[x];
    skipped[x] = true;
    if (lanes.any.end <= block.j0 || block.j0 + block.n <= lanes.any.begin) continue;
    skipped[x] = false;
    first = std::min(first, x);
    last = x + 1;
    const int64_t n = std::min(block.n, round_up(lanes.any.end - block.j0, key_step));
    used_keys[x] = n;
    const int64_t stats = a.shared.stats_of(a.group_index, tile.first_panel + x);
    const float *lse2 = a.shared.lse2 + stats, *delta = a.shared.delta + stats;
    float* dq = a.shared.dq_of(a.group_index, a.range, tile.first_panel + x);
    const bool inside = lanes.all.begin <= block.j0 && block.j0 + n <= lanes.all.end;
    const bool zeros = !inside || a.terms.any || a.terms.dropout;
    float* p = t.p + x * panel_words;
    float* ds = t.ds + x * panel_words;
    auto* ds_pairs = reinterpret_cast<uint32_t*>(t.ds_pairs);
    if (zeros && !(block.keys_finite && tile.finite[x])) {
      weights_and_gradients(a, lanes, block, n, x, lse2, delta, nullptr);
      multiply_exactly(a, lanes, block, n, dq);
      skipped[x] = true;
      continue;
    }
    if (a.terms.any || a.terms.dropout) {
      weights_and_gradients(a, lanes, block, n, x, lse2, delta, nullptr);
      ops.store_gradients(t.scores, t.dp, n, p, ds, t.ld, ds_pairs);
    } else {
      const int64_t rows = round_up(n, ops.row_multiple);
      panel_scores(ops, a.group, lanes, a.terms, block.keys, t.queries + x * s.words_d * kPanel, rows, n,
                   s.words_d, block.j0, t.scores, nullptr, nullptr);
      ops.scores(block.values, t.d_outputs + x * s.words_dv * kPanel, rows, s.words_dv, t.dp, nullptr);
      ops.gradients(t.scores, t.dp, n, a.terms.factor, lse2, delta, p, ds, t.ld, ds_pairs);
    }
    clear_panel_rows(t, x, panel_words, n, block.rows);
    const float* right = pair == 2 ? t.ds_pairs : ds;
    const int64_t words = s.words_of(n);
    if (pair == 2) {
      std::fill(t.ds_pairs + ceil_div(n, 2) * kPanel, t.ds_pairs + words * kPanel, 0.0f);
      ops.accumulate(block.columns, right, round_up(s.d, ops.row_multiple), words, dq, nullptr);
    } else {
      ops.accumulate_strided(block.columns, right, t.ld, s.d, words, dq);
    }
  }
  // Keys in steps of 32 rows: under a causal mask each step meets only the panels that see it.
  constexpr int64_t kStep = 32;
  for (int64_t r = 0; r < block.rows; r += kStep) {
    const int64_t rows = std::min(kStep, block.rows - r);
    for (int64_t x = first; x < last;) {
      if (skipped[x] || used_keys[x] <= r) {
        ++x;
        continue;
      }
      int64_t end = x + 1;
      while (end < last && !skipped[end] && used_keys[end] > r) ++end;
      const int64_t k = (end - x) * panel_words;
      ops.update({t.p + r * t.ld + x * panel_words, t.ld, 1}, t.d_output_rows + x * panel_words * s.padded_dv,
                 s.padded_dv, rows, s.padded_dv, k, block.dv + r * s.padded_dv, s.padded_dv);
      ops.update({t.ds + r * t.ld + x * panel_words, t.ld, 1}, t.query_rows + x * panel_words * s.padded_d,
                 s.padded_d, rows, s.padded_d, k, block.dk + r * s.padded_d, s.padded_d);
      x = end;
    }
  }
}

void stage_tile(const Problem& a, int64_t first_panel, int64_t panels, bool exact_checks, RowTile& tile) {
  tile.first_panel = first_panel;
  tile.panels = panels;
  const Staging& s = a.s;
  const int64_t panel_words = kPanel / s.ops->word_elements;
  for (int64_t x = 0; x < panels; ++x) {
    Lanes& lanes = tile.lanes[x];
    lanes = Lanes(a.group, (first_panel + x) * kPanel);
    s.stage_panel(a.group, lanes, Role::kQ, s.d, s.words_d, a.t.queries + x * s.words_d * kPanel, a.t.temp);
    s.stage_panel(a.group, lanes, Role::kDO, s.d_v, s.words_dv, a.t.d_outputs + x * s.words_dv * kPanel,
                  a.t.temp);
    stage_right(s, a.group, lanes, Role::kQ, s.d, s.padded_d, a.t.query_rows + x * panel_words * s.padded_d);
    stage_right(s, a.group, lanes, Role::kDO, s.d_v, s.padded_dv,
                a.t.d_output_rows + x * panel_words * s.padded_dv);
    tile.finite[x] = !exact_checks || panel_finite(s, a.group, lanes);
    // A row whose lse is NaN would make its masked weights NaN, too; only gradients_float() tells them apart.
    const float* lse2 = a.shared.lse2 + a.shared.stats_of(a.group_index, first_panel + x);
    for (int lane = 0; exact_checks && lane < lanes.count; ++lane) {
      if (std::isnan(lse2[lane])) tile.finite[x] = false;
    }
  }
}

/// Stages keys [begin, end) and clears their accumulators; returns the number of blocks.
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
    block.keys_finite = all_finite(key_rows, s.type, block.n, s.d);
  }
  return count;
}

void write_rows(const Staging& s, const float* src, int64_t ld, int64_t n, int64_t size, float factor,
                const MatrixView& out, int64_t first_row, float* temp) {
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t c = 0; c < size; ++c) temp[c] = src[j * ld + c] * factor;
    s.ops->from_float(temp, size, s.type, out.data + (first_row + j) * out.stride * size_of(s.type));
  }
}

void clear_rows(const Staging& s, const MatrixView& out, int64_t begin, int64_t end, int64_t size) {
  for (int64_t j = begin; j < end; ++j) {
    std::memset(out.data + j * out.stride * size_of(s.type), 0, static_cast<size_t>(size * size_of(s.type)));
  }
}

/// dK and dV of keys [begin, end) of one key head, and their part of dQ.
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
    const int64_t count = stage_keys(s, a.group, a.t, j0, j1, blocks);
    const tile::Range queries = a.group.window.queries_of_any(j0, j1);
    if (!queries.empty()) {
      const int64_t first_panel = queries.begin * a.group.size() / kPanel;
      const int64_t last_panel = ceil_div(queries.end * a.group.size(), kPanel);
      for (int64_t x = first_panel; x < last_panel; x += kPanels) {
        stage_tile(a, x, std::min(kPanels, last_panel - x), exact_checks, tile);
        for (int64_t b = 0; b < count; ++b) block_step(a, tile, blocks[b]);
      }
    }
    const auto scale = static_cast<float>(a.group.problem->scale);
    write_rows(s, a.t.dk, s.padded_d, j1 - j0, s.d, scale, a.group.keys(Role::kDK), j0, a.t.temp);
    write_rows(s, a.t.dv, s.padded_dv, j1 - j0, s.d_v, 1.0f, a.group.keys(Role::kDV), j0, a.t.temp);
  }
}

/// lse in units of log2 and delta for one panel. Lanes without a row, and rows without a key, get lse2 =
/// +inf, which makes all their weights 0.
void row_statistics(const Staging& s, const Group& group, const Lanes& lanes, float* lse2, float* delta) {
  const AttentionProblem& p = *group.problem;
  const DType o_type = p[Role::kO].dtype;
  for (int x = 0; x < kPanel; ++x) {
    lse2[x] = std::numeric_limits<float>::infinity();
    delta[x] = 0;
    if (x >= lanes.count) continue;
    const int64_t row = lanes.first_row + x;
    const float lse = *group.stat(Role::kLse, row);
    if (lse == -std::numeric_limits<float>::infinity()) continue;
    lse2[x] = lse * kLog2e;
    const char* o = group.row_data(Role::kO, row);
    const char* d_o = group.row_data(Role::kDO, row);
    float sum = 0;
    for (int64_t c = 0; c < s.d_v; ++c) sum += load_element(o, o_type, c) * load_element(d_o, s.type, c);
    delta[x] = p.has(Role::kDLse) ? sum - *group.stat(Role::kDLse, row) : sum;
  }
}

void write_query_gradients(const Problem& a, int64_t panel) {
  const Staging& s = a.s;
  const Lanes lanes(a.group, panel * kPanel);
  float* sum = a.shared.dq_of(a.group_index, 0, panel);
  for (int64_t range = 1; range < a.shared.schedule->ranges; ++range) {
    if (range * a.shared.schedule->range_keys >= a.group.span.used_k) break;  // no item wrote there
    const float* part = a.shared.dq_of(a.group_index, range, panel);
    for (int64_t i = 0; i < s.d * kPanel; ++i) sum[i] += part[i];
  }
  s.ops->transpose(sum, kPanel, s.d, kPanel, a.t.temp, s.padded_d);
  const auto scale = static_cast<float>(a.group.problem->scale);
  for (int x = 0; x < lanes.count; ++x) {
    float* row = a.t.temp + x * s.padded_d;
    for (int64_t c = 0; c < s.d; ++c) row[c] *= scale;
    s.ops->from_float(row, s.d, s.type, a.group.row_data(Role::kDQ, lanes.first_row + x));
  }
}

/// The bias gradient of one (batch, head, key block) of dbias: dS summed over what it broadcasts to. A pass
/// of its own, so that each element has one owner and one order of additions.
void bias_gradient(const Staging& s, const Buffers& buffers, const AttentionProblem& p,
                   const ScoreTerms& terms, const Shared& shared, const ThreadScratch& t, int64_t bias_batch,
                   int64_t bias_head, int64_t first_key, int64_t last_key, RowTile& tile,
                   float* scores_gradient) {
  const auto held = extents(p[Role::kDBias]);
  const int64_t bias_rows = held[2], bias_cols = held[3];
  const bool all_batches = held[0] == 1, all_heads = held[1] == 1;
  float* out = shared.dbias + (bias_batch * held[1] + bias_head) * bias_rows * bias_cols;
  for (int64_t b = bias_batch; b < (all_batches ? p.batch : bias_batch + 1); ++b) {
    for (int64_t kv = 0; kv < p.heads_kv; ++kv) {
      if (!all_heads && kv != bias_head / p.group()) continue;
      const Group group(p, buffers, b, kv);
      const Problem a{s, group, terms, shared, t, b * p.heads_kv + kv, 0};
      const int64_t end = std::min(last_key, group.span.used_k);
      KeyBlock block;
      for (int64_t j0 = first_key; j0 < end; j0 += kBlockKeys) {
        stage_keys(s, group, t, j0, std::min(end, j0 + kBlockKeys), &block);
        const int64_t panels = ceil_div(group.rows(), kPanel);
        for (int64_t panel = 0; panel < panels; ++panel) {
          stage_tile(a, panel, 1, false, tile);
          const Lanes& lanes = tile.lanes[0];
          if (lanes.any.end <= block.j0 || block.j0 + block.n <= lanes.any.begin) continue;
          const int64_t stats = shared.stats_of(a.group_index, panel);
          weights_and_gradients(a, lanes, block, block.n, 0, shared.lse2 + stats, shared.delta + stats,
                                scores_gradient);
          for (int x = 0; x < lanes.count; ++x) {
            const int64_t row = lanes.first_row + x;
            if (!all_heads && group.head(row) != bias_head) continue;
            float* line = out + (bias_rows == 1 ? 0 : group.query(row)) * bias_cols;
            for (int64_t j = 0; j < block.n; ++j) {
              line[bias_cols == 1 ? 0 : block.j0 + j] += scores_gradient[j * kPanel + x];
            }
          }
        }
      }
    }
  }
}

void write_bias_gradient(const Ops& ops, const AttentionProblem& p, const Buffers& buffers,
                         const Shared& shared) {
  const TensorDesc& t = p[Role::kDBias];
  const auto held = extents(t);
  const float* from = shared.dbias;
  for (int64_t b = 0; b < held[0]; ++b) {
    for (int64_t h = 0; h < held[1]; ++h) {
      for (int64_t i = 0; i < held[2]; ++i) {
        for (int64_t j = 0; j < held[3]; ++j, ++from) {
          const int64_t at = b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + j * t.stride[3];
          ops.from_float(from, 1, t.dtype, buffers.get<char>(Role::kDBias) + at * size_of(t.dtype));
        }
      }
    }
  }
}

/// dsink_h = - sum over rows of exp(sink - lse) * delta.
void sink_gradient(const AttentionProblem& p, const Buffers& buffers, const Shared& shared, int64_t head) {
  const float sink2 = buffers.get<const float>(Role::kSink)[head * p[Role::kSink].stride[0]] * kLog2e;
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Group group(p, buffers, b, head / p.group());
    const int64_t stats = shared.stats_of(b * p.heads_kv + head / p.group(), 0);
    for (int64_t row = head % p.group(); row < group.rows(); row += p.group()) {
      const float weight = std::exp2(sink2 - shared.lse2[stats + row]);
      if (weight != 0) sum -= static_cast<double>(weight) * shared.delta[stats + row];
    }
  }
  buffers.get<float>(Role::kDSink)[head * p[Role::kDSink].stride[0]] = static_cast<float>(sum);
}

int64_t thread_bytes(const Staging& s, const Schedule& schedule) {
  Scratch count(nullptr);
  ThreadScratch(count, s, schedule);
  return count.used();
}

int64_t shared_bytes(const Schedule& schedule, const AttentionProblem& p) {
  Scratch count(nullptr);
  Shared(count, schedule, p);
  return count.used();
}

}  // namespace

size_t backward_workspace(const AttentionProblem& p, const Ops& ops, int num_threads) {
  const Staging staging(p, ops);
  const Schedule schedule(p, staging);
  return static_cast<size_t>(shared_bytes(schedule, p) + num_threads * thread_bytes(staging, schedule));
}

void backward(const Plan& plan, const Buffers& buffers, const Ops& ops) {
  const AttentionProblem& p = plan.problem;
  const Staging staging(p, ops);
  const Schedule schedule(p, staging);
  const ScoreTerms terms(p, buffers);
  char* workspace = static_cast<char*>(buffers.workspace);
  Scratch common(workspace);
  const Shared shared(common, schedule, p);
  const int64_t per_thread = thread_bytes(staging, schedule);
  const auto scratch_of = [&](int thread) {
    Scratch memory(workspace + common.used() + thread * per_thread);
    return ThreadScratch(memory, staging, schedule);
  };
  if (p.batch == 0 && p.packed) {
    // Rows without any sequence.
    for (int64_t head = 0; head < p.heads_q; ++head) {
      clear_rows(staging, rows_of(p, buffers, Role::kDQ, 0, head, 0), 0, p.total_q, p.head_dim);
    }
    for (int64_t head = 0; head < p.heads_kv; ++head) {
      clear_rows(staging, rows_of(p, buffers, Role::kDK, 0, head, 0), 0, p.total_k, p.head_dim);
      clear_rows(staging, rows_of(p, buffers, Role::kDV, 0, head, 0), 0, p.total_k, p.head_dim_v);
    }
  }
  const bool banded = p.window_left >= 0 || p.window_right >= 0;
  const bool exact_checks = banded || terms.any || terms.dropout;
  const int64_t items = schedule.groups * schedule.ranges;
  const int num_threads = static_cast<int>(
      std::clamp<int64_t>(std::min<int64_t>(static_cast<int64_t>(plan.flops / kMinFlopsPerThread),
                                            std::max(items, schedule.groups)),
                          1, std::max(1, plan.num_threads)));
  const int64_t all_panels = schedule.groups * schedule.panels;

  WorkQueue statistics(all_panels), ranges(items), queries(all_panels);
  run_threads(num_threads, [&](int) {
    for (int64_t item; (item = statistics.next()) >= 0;) {
      const int64_t group_index = item / schedule.panels, panel = item % schedule.panels;
      const Group group(p, buffers, group_index / p.heads_kv, group_index % p.heads_kv);
      if (panel * kPanel >= group.rows()) continue;
      const int64_t stats = shared.stats_of(group_index, panel);
      row_statistics(staging, group, Lanes(group, panel * kPanel), shared.lse2 + stats, shared.delta + stats);
    }
  });
  run_threads(num_threads, [&](int thread) {
    const ThreadScratch t = scratch_of(thread);
    RowTile tile;
    for (int64_t item; (item = ranges.next()) >= 0;) {
      // Early keys first: under a causal mask most queries see them.
      const int64_t range = item / schedule.groups, group_index = item % schedule.groups;
      const Group group(p, buffers, group_index / p.heads_kv, group_index % p.heads_kv);
      if (range == 0) {
        for (int64_t row = group.rows(); row < group.span.length_q * group.size(); ++row) {
          clear_rows(staging, {group.row_data(Role::kDQ, row)}, 0, 1, p.head_dim);
        }
        clear_rows(staging, group.keys(Role::kDK), group.span.used_k, group.span.length_k, p.head_dim);
        clear_rows(staging, group.keys(Role::kDV), group.span.used_k, group.span.length_k, p.head_dim_v);
      }
      const int64_t begin = range * schedule.range_keys;
      const int64_t end = std::min(begin + schedule.range_keys, group.span.used_k);
      if (range > 0 && begin >= end) continue;
      range_backward({staging, group, terms, shared, t, group_index, range}, begin, end, exact_checks, tile);
    }
  });
  run_threads(num_threads, [&](int thread) {
    const ThreadScratch t = scratch_of(thread);
    for (int64_t item; (item = queries.next()) >= 0;) {
      const int64_t group_index = item / schedule.panels, panel = item % schedule.panels;
      const Group group(p, buffers, group_index / p.heads_kv, group_index % p.heads_kv);
      if (panel * kPanel < group.rows()) {
        write_query_gradients({staging, group, terms, shared, t, group_index, 0}, panel);
      }
    }
  });
  if (p.has(Role::kDSink)) {
    for (int64_t head = 0; head < p.heads_q; ++head) sink_gradient(p, buffers, shared, head);
  }
  if (p.has(Role::kDBias)) {
    const auto held = extents(p[Role::kDBias]);
    std::fill_n(shared.dbias, count(held), 0.0f);
    const int64_t key_blocks = held[3] == 1 ? 1 : std::max<int64_t>(1, ceil_div(p.seqlen_k, kBlockKeys));
    const int64_t block_keys = held[3] == 1 ? p.seqlen_k : kBlockKeys;
    WorkQueue owners(held[0] * held[1] * key_blocks);
    run_threads(num_threads, [&](int thread) {
      const ThreadScratch t = scratch_of(thread);
      RowTile tile;
      for (int64_t item; (item = owners.next()) >= 0;) {
        const int64_t key_block = item % key_blocks, owner = item / key_blocks;
        bias_gradient(staging, buffers, p, terms, shared, t, owner / held[1], owner % held[1],
                      key_block * block_keys, (key_block + 1) * block_keys, tile, t.p);
      }
    });
    write_bias_gradient(ops, p, buffers, shared);
  }
}

}  // namespace fovea::cpu
