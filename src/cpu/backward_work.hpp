// What backward.cpp (divides the work) and backward_range.cpp (computes one range of keys) share: the
// schedule, the shared arrays, and the scratch of a thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/panel.hpp"
#include "cpu/tensor_gradients.hpp"

namespace fovea::cpu::backward_pass {

// Two score tiles (S and dP, 24 KB each at 128 keys) pass through the first-level cache once.
inline constexpr int64_t kBlockKeys = 128;
// A tile has 192 rows: dV and dK are read and written once per reduction over 192 rows.
inline constexpr int64_t kPanels = 4;
// Keys that stay staged while the tile goes through all queries. The cost of packing Q and dO is spread over
// them; their accumulators (512 KB at head size 128) still fit in a second-level cache.
inline constexpr int64_t kStagedKeys = 512;
// Work items wanted, so that 16 and more cores have work. Heads are divided into ranges of keys until there
// are that many; each range costs a copy of dQ. A part of a problem over ranks has as many as its own threads want.
inline constexpr int64_t kWantedItems = 32, kWantedItemsPerThread = 4;
constexpr int64_t wanted_items(int threads, bool is_part) {
  if (!is_part) return kWantedItems;
  return threads <= 1 ? 1 : std::min(kWantedItems, threads * kWantedItemsPerThread);
}
inline constexpr int64_t kMaxQueryGradientBytes = int64_t{1} << 30;

struct Schedule {
  int64_t groups, panels;      ///< panels of the longest sequence of one key head
  int64_t ranges, range_keys;  ///< keys a work item, a multiple of kBlockKeys
  int64_t staged_keys;
  int64_t dq_panel;  ///< floats of one panel of dQ^T

  /// `one_thread` groups of work items are done by one thread, one after the other.
  Schedule(const AttentionProblem& p, const Staging& s, int64_t wanted, int64_t one_thread = 1) {
    groups = p.batch * p.heads_kv;
    panels = ceil_div(p.seqlen_q * p.group(), kPanel);
    dq_panel = round_up(s.d, 16) * kPanel;
    const int64_t blocks = std::max<int64_t>(1, ceil_div(p.seqlen_k, kBlockKeys));
    const int64_t dq_bytes = std::max<int64_t>(1, groups * panels * dq_panel * 4);
    ranges = std::clamp<int64_t>(ceil_div(wanted, std::max<int64_t>(1, groups / one_thread)), 1,
                                 std::max<int64_t>(1, kMaxQueryGradientBytes / dq_bytes));
    range_keys = ceil_div(blocks, std::min(ranges, blocks)) * kBlockKeys;
    ranges = std::max<int64_t>(1, ceil_div(p.seqlen_k, range_keys));
    staged_keys = std::min(range_keys, kStagedKeys);
  }
  int64_t dq_size() const { return groups * ranges * panels * dq_panel; }
  int64_t row_stats() const { return groups * panels * kPanel; }
};

/// Arrays that all threads share: dQ^T by (group, range, panel), lse2 (log2 units) and delta by (group, row), sums of
/// gradients of named tensors.
struct Shared {
  float *dq, *lse2, *delta;
  double* sums;
  const Schedule* schedule;

  Shared(Scratch& memory, const Schedule& plan, const TensorGradients& gradients) : schedule(&plan) {
    dq = memory.take<float>(plan.dq_size());
    lse2 = memory.take<float>(plan.row_stats());
    delta = memory.take<float>(plan.row_stats());
    sums = memory.take<double>(gradients.sums());
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
  float *scores, *dp, *p, *ds, *ds_pairs, *temp;
  uint8_t* kept;  ///< by dropout
  int64_t ld;     ///< row stride of p and ds in words
  PairScratch pairs;

  ThreadScratch(Scratch& memory, const AttentionProblem& problem, const Staging& s, const Schedule& plan,
                const PairPrograms& programs) {
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
    kept = memory.take<uint8_t>(kept_bytes(kBlockKeys));
    p = memory.take<float>(kBlockKeys * ld);
    ds = memory.take<float>(kBlockKeys * ld);
    ds_pairs = memory.take<float>(kBlockKeys * kPanel / 2);
    temp = memory.take<float>(
        std::max(kPanel * std::max(s.padded_d, s.padded_dv), 4 * (std::max(s.words_d, s.words_dv) + 16)));
    pairs = PairScratch(memory, problem, programs, kBlockKeys * kPanel, problem.heads_kv);
    pairs.elements_fetched = true;
  }
};

/// A block of keys of the staged range, or of a list.
struct KeyBlock {
  int64_t j0, n, rows;  ///< first key, keys, rows padded for the products
  Operand keys, values, columns;
  float *dk, *dv;
  MatrixView key_rows;
  bool keys_finite;
  const int32_t* list = nullptr;

  KeyPositions positions() const { return list == nullptr ? KeyPositions(j0) : KeyPositions(list); }
};

/// A tile of query rows.
struct RowTile {
  Lanes lanes[kPanels];
  bool finite[kPanels];  ///< Q and dO of the panel
  int64_t panels = 0, first_panel = 0;
};

/// The gradient of a bias that has an element for each pair, which is written row by row.
struct RowGradient {
  // What is larger leaves the caches before somebody reads it.
  static constexpr int64_t kStreamedBytes = 8 << 20;

  KeyElements elements;
  char* data;
  bool streams;

  char* at(const Group& group, int64_t head, int64_t query, int64_t key) const {
    return data + (elements.row(group.batch, head, group.head_kv, query) + key) * size_of(elements.dtype);
  }
};

struct Problem {
  const Staging& s;
  const Group& group;
  const ScoreTerms& terms;
  const Shared& shared;
  const ThreadScratch& t;
  SeenBlocks& blocks;
  int64_t group_index, range;
  const GradientTarget* gradients = nullptr;  ///< of named tensors
  const RowGradient* row_gradient = nullptr;
};

/// Fills scores with P and dp with dS, float32, with every term. Adds to the gradients of named tensors.
void weights_and_gradients(const Problem& a, const Lanes& lanes, const KeyBlock& block, Seen seen, int64_t n,
                           int64_t x, const float* lse2, const float* delta, const FetchRows& ahead = {});

/// One panel of a tile, the x-th, against the first n keys of a block.
struct PanelStep {
  const Lanes& lanes;
  Seen seen;
  int64_t n, x;
  bool masked;       ///< some pairs may not be seen
  bool rows_finite;  ///< Q and dO
  const float *lse2, *delta;
  float* dq;
  FetchRows ahead = {};  ///< elements that the next scores read
};

/// Adds to dQ of the panel, and leaves P and dS for add_key_gradients(). False where dK and dV are done already: pair by pair,
/// as something is not finite.
bool panel_step(const Problem& a, const KeyBlock& block, const PanelStep& step);

/// Adds to dK and dV of a block. `used_keys`: of each panel of the tile; 0 leaves it out. `last_rows`: of the last panel.
void add_key_gradients(const Problem& a, const KeyBlock& block, const int64_t* used_keys, int64_t panels,
                       int64_t last_rows);
/// Wants all lanes where a program of tensors' gradients reads them.
void want_lanes(const Problem& a, Lanes& lanes);

/// Right operand of update(): the rows on the lanes of a panel, as float32 rows or as bfloat16 pairs of rows.
void stage_right(const Staging& s, const Group& group, const Lanes& lanes, Role role, int64_t size,
                 int64_t padded, float* dst);

/// Whether Q and dO of the rows are finite.
bool panel_finite(const Staging& s, const Group& group, const Lanes& lanes);

/// Stages one panel of query rows as the x-th of a tile.
void stage_panel(const Problem& a, const Lanes& lanes, int64_t x);

/// lse in units of log2 and delta for one panel. Lanes without a row, and rows without a key, get lse2 = +inf, which makes
/// all their weights 0.
void row_statistics(const Staging& s, const Group& group, const Lanes& lanes, float* lse2, float* delta);

/// Writes dQ of the rows of a panel from dQ^T before scale.
void write_query_rows(const Staging& s, const Group& group, const Lanes& lanes, const float* dq, float* temp);

/// dsink_h = - sum over rows of exp(sink - lse) * delta.
void sink_gradient(const AttentionProblem& p, const Buffers& buffers, const Shared& shared, int64_t head);

/// Gradients of the rows of a packed batch without any sequence: 0.
void clear_rows_of_no_sequence(const AttentionProblem& p, const Buffers& buffers);

/// Gradients of rows that the tensors hold beyond those that take part: 0.
void clear_unused_rows(const Staging& s, const Group& group);

/// Stages `panels` panels of query rows. With exact_checks some rows may not see all keys, so the rows are
/// checked for NaN and Inf.
void stage_tile(const Problem& a, int64_t first_panel, int64_t panels, bool exact_checks, RowTile& tile);

/// Stages keys [begin, end) and clears their accumulators; returns the number of blocks.
int64_t stage_keys(const Staging& s, const Group& group, const ThreadScratch& t, int64_t begin, int64_t end,
                   KeyBlock* blocks);

/// dK and dV of keys [begin, end) of one key head, and their part of dQ.
void range_backward(const Problem& a, int64_t begin, int64_t end, bool exact_checks, RowTile& tile);

}  // namespace fovea::cpu::backward_pass
