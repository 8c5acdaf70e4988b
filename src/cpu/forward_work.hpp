// What forward.cpp (tiles) and forward_rows.cpp (few rows) share: the schedule, partial results, and the scratch of a
// thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "cpu/panel.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu::forward_pass {

// Keys a block: the score tile (128 x 48 floats = 24 KB) stays in a 32 KB first-level cache while it is
// written, turned into weights and read again.
inline constexpr int64_t kBlockKeys = 128;
// Panels a tile: K and V are staged once for 192 queries; Q^T and O^T of four panels (192 KB at head size
// 128, fp32) leave room in a 1 MB second-level cache.
inline constexpr int64_t kMaxPanels = 4;
// Keys are split until there are this many work items, where tiles alone would leave cores idle. The number
// does not depend on the thread count, so results do not either.
inline constexpr int64_t kWantedItems = 64;
inline constexpr int64_t kMinSplitKeys = 1024;
// Up to this many rows, dot products along the head size read K at memory speed; with more, lanes along the
// queries are faster.
inline constexpr int64_t kRowPathRows = 4;
inline constexpr int64_t kTurnKeys = 32;
// Where `sees` leaves a part of a block, its ends are left out in steps of whole reduction steps of AMX.
inline constexpr int64_t kSeenStep = 32;

struct Schedule {
  int64_t panels;      ///< panels a tile
  int64_t tiles;       ///< tiles of the longest sequence of one key head
  int64_t splits;      ///< splits of the keys
  int64_t split_keys;  ///< keys a split, a multiple of kBlockKeys
  int64_t groups;      ///< batch * heads_kv
  bool row_path;
  int64_t items() const { return groups * tiles * splits; }

  Schedule(const AttentionProblem& p, int num_threads) {
    groups = p.batch * p.heads_kv;
    const int64_t rows = p.seqlen_q * p.group();
    const int64_t all_panels = ceil_div(rows, kPanel);
    splits = 1;
    const int64_t full_tiles = groups * ceil_div(all_panels, 1);
    if (full_tiles > 0 && full_tiles < kWantedItems) {
      splits = std::clamp<int64_t>(ceil_div(kWantedItems, full_tiles), 1,
                                   std::max<int64_t>(1, p.seqlen_k / kMinSplitKeys));
    }
    split_keys = round_up(std::max<int64_t>(1, ceil_div(p.seqlen_k, splits)), kBlockKeys);
    splits = std::max<int64_t>(1, ceil_div(p.seqlen_k, split_keys));
    panels =
        std::clamp<int64_t>(groups * all_panels * splits / (8 * std::max(1, num_threads)), 1, kMaxPanels);
    panels = std::min(panels, std::max<int64_t>(1, all_panels));
    tiles = std::max<int64_t>(1, ceil_div(all_panels, panels));  // tile 0 also clears unused rows
    const bool scales = p.expressions && p.expressions->score;
    row_path = rows <= kRowPathRows && (p.scale > 0 || scales) &&
               !(p.softcap > 0 || p.dropout > 0 || p.has(Role::kAlibi) || p.has(Role::kBias) ||
                 p.has(Role::kMask) || p.has(Role::kBlockMask));
  }
};

/// Unnormalised result of one panel over some of the keys.
struct Partial {
  float* o;        ///< [padded_dv][kPanel]
  float* row_max;  ///< [kPanel], log2 units
  float* row_sum;  ///< [kPanel]

  static int64_t size(const Staging& s) { return (s.padded_dv + 2) * kPanel; }
  Partial(float* base, const Staging& s)
      : o(base), row_max(base + s.padded_dv * kPanel), row_sum(base + (s.padded_dv + 1) * kPanel) {}
  void reset(const Staging& s) const {
    std::fill_n(o, s.padded_dv * kPanel, 0.0f);
    std::fill_n(row_max, kPanel, -std::numeric_limits<float>::infinity());
    std::fill_n(row_sum, kPanel, 0.0f);
  }
};

/// What one thread works in.
struct ThreadScratch {
  float *queries, *partials, *scores, *weights, *keys, *values, *alpha, *maxima, *keep, *rows;
  char *key_rows, *value_rows;  ///< of a block whose rows lie in several pages
  PairScratch pairs;

  ThreadScratch(Scratch& memory, const AttentionProblem& p, const Staging& s, const Schedule& schedule,
                const PairPrograms& programs) {
    const int64_t block = round_up(kBlockKeys, 32);
    queries = memory.take<float>(schedule.panels * s.words_d * kPanel);
    partials = memory.take<float>(schedule.panels * Partial::size(s));
    scores = memory.take<float>(block * kPanel);
    weights = memory.take<float>(block * kPanel / 2);
    keys = memory.take<float>(s.rows_size(block, s.words_d));
    values = memory.take<float>(s.columns_size(block, s.d_v));
    alpha = memory.take<float>(kPanel);
    maxima = memory.take<float>(kPanel);
    keep = memory.take<float>(block * kPanel);
    const int64_t gathered = p.has(Role::kPageTable) ? kBlockKeys * size_of(s.type) : 0;
    key_rows = memory.take<char>(gathered * s.d);
    value_rows = memory.take<char>(gathered * s.d_v);
    rows = memory.take<float>(std::max<int64_t>(
        kPanel * s.padded_dv, std::max(4 * (s.words_d + 16), kRowPathRows * (s.d + s.d_v + 32))));
    pairs = PairScratch(memory, p, programs, block * kPanel, schedule.row_path ? 1 : p.heads_kv);
  }
};

/// Staged keys and values: [j0, j0 + n), or n of a list.
struct KeyBlock {
  Operand keys, values;
  MatrixView rows;  ///< of the values, where they lie
  int64_t j0, n;
  const int32_t* list = nullptr;

  KeyPositions positions() const { return list == nullptr ? KeyPositions(j0) : KeyPositions(list); }

  /// Those of keys [begin, end) of the block; `begin` is a multiple of kSeenStep.
  KeyBlock part(const Staging& s, int64_t begin, int64_t end) const {
    KeyBlock block = *this;
    block.keys.data += begin * keys.row_stride;
    block.values.data += begin / s.ops->word_elements * values.k_stride;
    block.rows.data += begin * rows.stride * size_of(s.type);
    block.j0 += begin;
    block.n = end - begin;
    return block;
  }
};

/// Whether the values of a block are finite, which the first panel that needs to know finds out.
struct FiniteValues {
  const KeyBlock& block;
  std::optional<bool> known;

  bool all(const Staging& s) {
    if (!known) known = all_finite(block.rows, s.type, block.n, s.d_v);
    return *known;
  }
};

/// One panel against one block of keys.
void panel_step(const Staging& s, const Group& group, const Lanes& lanes, const ScoreTerms& terms, Seen seen,
                const KeyBlock& block, FiniteValues& finite, const float* queries, const Partial& out,
                const ThreadScratch& t);

/// Normalises one panel, adds the sink, writes o and lse.
void write_panel(const Staging& s, const Group& group, const Lanes& lanes, const Partial& result,
                 float* rows);

/// Clears the rows from seqused_q on: o = 0, lse = -inf.
void write_unused_rows(const Group& group);
/// Rows of a packed batch without any sequence: o = 0, lse = -inf.
void write_rows_of_no_sequence(const AttentionProblem& p, const Buffers& buffers);
void write_rng_state(const AttentionProblem& p, const Buffers& buffers);

/// A block of keys that a few rows see, and how much of it.
struct RowBlock {
  tile::Range keys;
  Seen seen = Seen::kAll;
  const int32_t* list = nullptr;  ///< keys counts its entries

  KeyPositions positions() const { return list == nullptr ? KeyPositions(keys.begin) : KeyPositions(list); }
};

/// What few rows work on.
struct RowProblem {
  const Staging& s;
  const Group& group;
  const ScoreTerms& terms;
  const Lanes& lanes;
  const Partial& out;
  const ThreadScratch& t;
  float* o;
  int64_t ld_o;
};

/// Turns the scores of a block into weights, and rescales older sums. True when some weights may be 0.
bool weigh_rows(const RowProblem& a, const RowBlock& block, float* row_scores);
/// O += P V of a block, skipping zero weights.
void add_rows_exactly(const RowProblem& a, const MatrixView& values, int64_t n, const float* row_scores);

/// A few rows against keys [first_key, last_key): dot products along the head size. Reads K and V once, at
/// the speed of memory.
void rows_forward(const Staging& s, const Group& group, const ScoreTerms& terms, SeenBlocks& blocks,
                  const Lanes& lanes, int64_t first_key, int64_t last_key, float* partials,
                  const ThreadScratch& t);

}  // namespace fovea::cpu::forward_pass
