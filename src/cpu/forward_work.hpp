// What forward.cpp, forward_tiles.cpp and forward_rows.cpp (few rows) share: the schedule, partial results, and the scratch of a
// thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <thread>

#include "core/backend.hpp"
#include "cpu/forward_seen.hpp"
#include "cpu/panel.hpp"
#include "cpu/tile_order.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cpu::forward_pass {

// Blocks that panels attend to in one step, where the table has one: Q, O and what else a panel has change places in the first-level
// cache once a run, and K and V of a run (512 KB at head sizes of 64 and 128) stay in a second-level cache of 2 MB for all panels of a tile.
inline constexpr int64_t kRunBlocks = 16;
inline constexpr int64_t kLargeRunBlocks = 8;  // of head sizes above 64
// Of blocks of parts: 0.8 MB of float32 at head size 128.
inline constexpr int64_t kRunPartBlocks = 4;
// Of blocks of pairs, which panels take one after the other: 128 KB at head size 128, for a second-level cache of 1 MB or less.
inline constexpr int64_t kRunPairBlocks = 4;
// Keys are split until there are this many work items, where tiles alone would leave cores idle. The number
// does not depend on the thread count, so results do not either.
inline constexpr int64_t kWantedItems = 64;
// A step of tables that attend in one (AMX) takes 32 queries, of which two panels leave none over, and reads shared blocks from a
// last-level cache; others take a panel, and copy K and V for each tile. Both were fitted along with the rule of panels_of_tiles().
inline constexpr TileCost kAttendCost = {32, 16, 2}, kPanelCost = {kPanel, 12};
inline constexpr int64_t kMinSplitKeys = 1024;
// Results of splits that are kept at a time: 25 KB each at head size 128. Where there would be more, a tile goes through its splits
// itself.
inline constexpr int64_t kMostSplitResults = 1024;
// Programs of expressions hold four rows of a block.
inline constexpr int64_t kProgramRows = 4;
// More than 16 rows are put in order for so many keys at least: a panel is ready in a microsecond less, and a key takes 20 to 90 ns more.
inline constexpr int64_t kShortRows = 16;
inline constexpr int64_t kLongKeys = 256;
static_assert(kMostLaneRows <=
              kPanel);  // results of few rows have as many maxima and sums as those of a panel
// A step of few rows reads so many bytes of K and as many of V: with the next step's, on their way, they fit a first-level cache of
// 48 KB, and the step's other costs are spread over 32 keys or more.
inline constexpr int64_t kRowStepBytes = 16 << 10;
inline constexpr int64_t kLeastRowStepKeys = 32;
// Few rows of so many key heads at most go through the keys together: each has 30 KB of queries and results.
inline constexpr int64_t kMostRowHeads = 16;
// Where `sees` leaves a part of a block, its ends are left out in steps of whole reduction steps of AMX.
inline constexpr int64_t kSeenStep = 32;

/// Splits of the keys: those that are asked for, else as many as keep cores busy.
inline int64_t splits_of(const AttentionProblem& p, int64_t panels_of_head, const KeySplits& asked) {
  if (asked.most > 0) return asked.most;
  const int64_t tiles = (asked.batch_invariant ? 1 : p.batch) * p.heads_kv * panels_of_head;
  if (tiles <= 0 || tiles >= kWantedItems) return 1;
  return std::clamp<int64_t>(ceil_div(kWantedItems, tiles), 1,
                             std::max<int64_t>(1, p.seqlen_k / kMinSplitKeys));
}

/// Keys of a step of few rows: a power of two, so that steps divide blocks.
inline int64_t row_step_keys(const AttentionProblem& p) {
  int64_t keys = kBlockKeys;
  while (keys > kLeastRowStepKeys && keys * p.head_dim * size_of(p[Role::kK].dtype) > kRowStepBytes)
    keys /= 2;
  return keys;
}

struct Schedule {
  int64_t rows;        ///< of the longest sequence of one key head
  int64_t panels;      ///< of the highest tiles
  int64_t tiles;       ///< tiles of the longest sequence of one key head
  int64_t splits;      ///< splits of the keys
  int64_t split_keys;  ///< keys a split, a multiple of kBlockKeys
  int64_t groups;      ///< batch * heads_kv
  bool in_turn;        ///< a tile goes through its splits itself, one after the other; the bits are the same
  bool row_path;
  int64_t heads = 1;  ///< key heads of an item of few rows, a divisor of heads_kv
  /// Items of few rows for the same keys that come one after the other. Where rows of several heads lie side by side, threads read them at
  /// about the same time then.
  int64_t heads_in_turn = 1;
  /// Splits that are work items of their own.
  int64_t splits_apart() const { return in_turn ? 1 : splits; }
  /// Rows of a result, where they are few; else 0.
  int64_t few_rows() const { return row_path ? rows : 0; }
  int64_t items() const { return groups / heads * tiles * splits_apart(); }
  /// The first group and the split of an item of few rows.
  struct RowItem {
    int64_t first_group, split;
  };
  RowItem row_item(int64_t item) const {
    const int64_t of_turn = heads_in_turn * splits_apart(), at = item % of_turn;
    return {(item / of_turn * heads_in_turn + at % heads_in_turn) * heads, at / heads_in_turn};
  }
  /// Those of a sequence that have keys, at least one.
  int64_t splits_with_keys(int64_t used_k) const {
    return std::clamp<int64_t>(ceil_div(used_k, split_keys), 1, splits);
  }

  Schedule(const AttentionProblem& p, const Ops& ops, const PrepareOptions& options) {
    groups = p.batch * p.heads_kv;
    rows = p.seqlen_q * p.group();
    const int64_t all_panels = ceil_div(rows, kPanel), full_tiles = groups * all_panels;
    const int64_t wanted = std::min(splits_of(p, all_panels, options.splits),
                                    std::max<int64_t>(1, ceil_div(p.seqlen_k, kBlockKeys)));
    split_keys = round_up(std::max<int64_t>(1, ceil_div(p.seqlen_k, wanted)), kBlockKeys);
    splits = std::max<int64_t>(1, ceil_div(p.seqlen_k, split_keys));
    in_turn = splits > 1 && (full_tiles >= kWantedItems || full_tiles * splits > kMostSplitResults);
    const int64_t threads = std::max(1, options.num_threads);
    const TileCost cost = ops.attend != nullptr ? kAttendCost : kPanelCost;
    panels = panels_of_tiles({p, groups, splits_apart(), split_keys, cost}, ops.max_panels, threads);
    tiles = std::max<int64_t>(1, ceil_div(all_panels, panels));  // tile 0 also clears unused rows
    const bool scales = p.expressions && p.expressions->score;
    const int64_t few = p.seqlen_k < kLongKeys ? std::min(kShortRows, ops.few_rows) : ops.few_rows;
    row_path = rows <= (p.expressions ? kProgramRows : few) && (p.scale > 0 || scales) && p.dropout == 0;
    if (row_path) heads = heads_together(p, options.num_threads);
    if (row_path && heads_between(p)) heads_in_turn = p.heads_kv / heads;
  }

 private:
  /// Whether rows of other heads lie between those of one.
  static bool heads_between(const AttentionProblem& p) {
    return p[Role::kK].stride[2] < p[Role::kK].stride[1];
  }
  /// Where rows of several heads lie between those of one, the heads go through the keys together, so that memory is read in its order;
  /// as long as there are items enough for all threads. No result depends on it.
  int64_t heads_together(const AttentionProblem& p, int num_threads) const {
    constexpr int64_t kItemsOfThread = 4;
    if (!heads_between(p)) return 1;
    for (int64_t together = std::min(kMostRowHeads, p.heads_kv); together > 1; --together) {
      if (p.heads_kv % together == 0 &&
          groups / together * splits_apart() >= kItemsOfThread * std::max(1, num_threads)) {
        return together;
      }
    }
    return 1;
  }
};

/// Unnormalised result of one panel over some of the keys, or of a few rows.
struct Partial {
  float* row_max;  ///< [kPanel], log2 units
  float* row_sum;  ///< [kPanel]
  float* o;        ///< [padded_dv][kPanel], or [rows][padded_dv]
  int64_t rows;    ///< of o; 0: o lies in lanes

  static int64_t o_size(const Staging& s, int64_t rows) { return s.padded_dv * (rows > 0 ? rows : kPanel); }
  static int64_t size(const Staging& s, int64_t rows) { return 2 * kPanel + o_size(s, rows); }
  Partial(float* base, int64_t rows_of_o)
      : row_max(base), row_sum(base + kPanel), o(base + 2 * kPanel), rows(rows_of_o) {}
  void reset_sums() const {
    std::fill_n(row_max, kPanel, -std::numeric_limits<float>::infinity());
    std::fill_n(row_sum, kPanel, 0.0f);
  }
  void clear(const Staging& s) const { std::fill_n(o, o_size(s, rows), 0.0f); }
  void reset(const Staging& s) const {
    clear(s);
    reset_sums();
  }
};

/// Floats of the queries of few rows.
inline int64_t row_query_floats(const Staging& s, int64_t rows) {
  const int64_t values = s.has_qv() ? s.padded_dv : 0;
  const bool on_lanes = s.ops->row_lanes != nullptr && rows >= kLeastLaneRows;
  const int64_t lanes = on_lanes ? ceil_div(rows, 16) * (lane_floats(s.d) + lane_floats(values)) : 0;
  return rows * (s.padded_d + values) + lanes;
}

/// Floats of one key head of a few rows: queries, also as tiles, and results.
inline int64_t row_head_size(const Staging& s, int64_t rows) {
  const bool on_tiles = s.ops->tile_queries != nullptr;
  const int64_t tiles = on_tiles ? tile_query_words(s.d) + tile_query_words(s.has_qv() ? s.d_v : 0) : 0;
  const int64_t most = std::min(s.ops->few_rows, rows);
  const int64_t results = on_tiles ? kTileQueries * tile_row_size(s.d_v) : most * s.padded_dv;
  return row_query_floats(s, most) + results + tiles;
}

/// Blocks of keys and values as bfloat16 parts, where a table attends to such.
struct PartBlocks {
  int parts = 0;           ///< 0: it does not
  int64_t words = 0;       ///< of a row of a part of Q or K
  int64_t columns = 0;     ///< of V
  int64_t value_size = 0;  ///< elements of a row of V on its way

  explicit PartBlocks(const Staging& s) {
    if (s.ops->attend == nullptr || s.ops->attend_parts == 1) return;
    parts = s.ops->attend_parts;
    words = round_up(ceil_div(s.d, 2), 16);
    columns = s.padded_dv;
    value_size = round_up(s.d_v, 32);
  }
  int64_t query_part() const { return words * kPanel; }
  int64_t key_part() const { return words * kBlockKeys; }
  int64_t value_part() const { return columns * kBlockKeys / 2; }
  int64_t block_words() const { return parts * (key_part() + value_part()); }
  int64_t row_words() const { return parts * kBlockKeys * value_size / 2; }
  AttendBlock at(const float* block) const {
    return {{block, words, 1}, {block + parts * key_part(), kBlockKeys / 2, 1}};
  }
  /// False where some element is not finite. `rows` holds row_words().
  bool stage(const Staging& s, const MatrixView& keys, const MatrixView& values, int64_t n, float* block,
             float* rows) const {
    const auto part_rows = [&](const MatrixView& view, int64_t size) {
      return PartRows{view.data, view.stride * size_of(s.row_type), n, size, s.row_type};
    };
    auto* key_rows = reinterpret_cast<uint16_t*>(block);
    auto* value_rows = reinterpret_cast<uint16_t*>(rows);
    const int64_t value_rows_part = kBlockKeys * value_size;
    const bool finite_keys =
        s.ops->split_rows(part_rows(keys, s.d), parts, key_rows, 2 * words, 2 * key_part());
    const bool finite_values =
        s.ops->split_rows(part_rows(values, s.d_v), parts, value_rows, value_size, value_rows_part);
    for (int64_t part = 0; part < parts; ++part) {
      float* end = block + part * key_part() + n * words;
      std::fill_n(end, (round_up(n, kAttendStrip) - n) * words, 0.0f);
      s.ops->pair_columns(value_rows + part * value_rows_part, value_size, n, s.d_v, kBlockKeys / 2,
                          reinterpret_cast<uint32_t*>(block + parts * key_part() + part * value_part()));
    }
    return finite_keys && finite_values;
  }
};

/// Blocks of keys and values as a step reads them whose queries are rows: where elements of bfloat16 are added to scores, and nothing else is.
struct RowBlocks {
  bool present = false;
  int64_t words = 0;    ///< of a row of K
  int64_t columns = 0;  ///< of V

  RowBlocks(const Staging& s, const PairPrograms& programs, bool dropout) {
    present = s.ops->key_columns != nullptr && programs.has_form && programs.elements &&
              programs.elements->dtype == DType::kBF16 && programs.of_distance.empty() && !dropout &&
              s.query_type == s.type && !s.has_qv() && std::max(s.d, s.d_v) <= kAttendRowSize;
    words = present ? s.words_d : 0;
    columns = present ? round_up(s.d_v, kAttendStrip) : 0;
  }
  int64_t block_words() const { return words * kBlockKeys + columns * kBlockKeys / 2; }
  AttendBlock at(const float* block) const {
    return {{block, words, 1}, {block + words * kBlockKeys, columns, 1}};
  }
  void stage(const Staging& s, const MatrixView& keys, const MatrixView& values, int64_t n,
             float* block) const {
    auto* to = reinterpret_cast<uint32_t*>(block);
    s.ops->key_columns(keys.row<const uint16_t>(0), keys.stride, n, s.d, words, to);
    s.ops->value_pairs(values.row<const uint16_t>(0), values.stride, n, s.d_v, columns,
                       to + words * kBlockKeys);
  }
};

/// What one thread works in.
struct ThreadScratch {
  float *queries, *partials, *scores, *weights, *keys, *values, *alpha, *maxima, *rows;
  float* row_heads;      ///< of few rows: queries and results of each key head
  float* next_partials;  ///< of a further split, where a tile goes through its splits itself
  uint8_t* kept;         ///< by dropout
  float* distances;      ///< f of a score's form, of a tile and a run of blocks
  uint32_t* seen_pairs;  ///< by panel, of a run of blocks; null where no words are wanted
  float *part_queries, *part_block,
      *part_rows;               ///< of parts: of each panel, of a block, and rows of V on their way
  float* row_block;             ///< of a step whose queries are rows
  char *key_rows, *value_rows;  ///< of a block whose rows lie in several pages, or have a type of their own
  char *step_keys[2], *step_values[2];  ///< of this step of few rows on tiles and of the next one, the same
  PairScratch pairs;

  ThreadScratch(Scratch& memory, const AttentionProblem& p, const Staging& s, const Schedule& schedule,
                const PairPrograms& programs) {
    const int64_t block = round_up(kBlockKeys, 32);
    queries = memory.take<float>(schedule.panels * s.score_words() * kPanel);
    const int64_t results = schedule.panels * schedule.heads * Partial::size(s, schedule.few_rows());
    partials = memory.take<float>(results);
    next_partials = memory.take<float>(schedule.in_turn ? results : 0);
    // Of few rows: products with k, products with v, and at last those that tiles leave.
    const int64_t score_rows = std::max<int64_t>(kPanel, 2 * std::min(schedule.few_rows(), kMostLaneRows));
    scores = memory.take<float>(std::max<int64_t>(block * score_rows, kAttendScratch));
    weights = memory.take<float>(block * kPanel / 2);
    keys = memory.take<float>(s.rows_size(block, s.score_words()));
    values = memory.take<float>(s.columns_size(block, s.d_v));
    alpha = memory.take<float>(kPanel);
    maxima = memory.take<float>(kPanel);
    kept = memory.take<uint8_t>(kept_bytes(block) *
                                (s.ops->attend == nullptr ? 1 : kRunBlocks * schedule.panels));
    const bool attends = s.ops->attend != nullptr;
    distances =
        memory.take<float>(attends && !programs.of_distance.empty()
                               ? DistanceValues::size(p, schedule.panels * kPanel, kRunBlocks * kBlockKeys) +
                                     kAttendStrip * p.group()
                               : 0);
    const bool by_words = programs.mask || (attends && programs.has_sees);
    seen_pairs = by_words ? memory.take<uint32_t>(schedule.panels * kRunBlocks * kBlockWords) : nullptr;
    const PartBlocks parts(s);
    part_queries = memory.take<float>(schedule.panels * parts.parts * parts.query_part());
    part_block = memory.take<float>(parts.block_words());
    part_rows = memory.take<float>(parts.row_words());
    row_block = memory.take<float>(RowBlocks(s, programs, p.dropout > 0).block_words());
    const bool copied = p.has(Role::kPageTable) || s.key_type != s.row_type;
    const int64_t gathered = copied ? kBlockKeys * size_of(s.row_type) : 0;
    key_rows = memory.take<char>(gathered * s.d);
    value_rows = memory.take<char>(gathered * s.d_v);
    const bool paged_rows = schedule.row_path && s.ops->tile_dots != nullptr && p.has(Role::kPageTable);
    const int64_t step = paged_rows ? row_step_keys(p) * size_of(s.key_type) : 0;
    for (char*& keys_of_step : step_keys) keys_of_step = memory.take<char>(step * s.d);
    for (char*& values_of_step : step_values) values_of_step = memory.take<char>(step * s.d_v);
    // Rows on their way into a panel or out of one.
    rows = memory.take<float>(std::max({kPanel * s.padded_dv, 4 * (s.words_d + 16), 4 * s.words_qv}));
    row_heads = memory.take<float>(schedule.row_path ? schedule.heads * row_head_size(s, schedule.rows) : 0);
    pairs = PairScratch(memory, p, programs, block * kPanel, schedule.row_path ? 1 : p.heads_kv);
  }
};

/// Staged keys and values: [j0, j0 + n), or n of a list.
struct KeyBlock {
  Operand keys, values;
  MatrixView rows;  ///< of the values, where they lie; null where nothing reads them
  int64_t j0, n;
  const int32_t* list = nullptr;

  KeyPositions positions() const { return list == nullptr ? KeyPositions(j0) : KeyPositions(list); }

  /// Those of keys [begin, end) of the block; `begin` is a multiple of kSeenStep.
  KeyBlock part(const Staging& s, int64_t begin, int64_t end) const {
    KeyBlock block = *this;
    block.keys.data += begin * keys.row_stride;
    block.values.data += begin / s.ops->word_elements * values.k_stride;
    if (rows.data != nullptr) block.rows.data += begin * rows.stride * size_of(s.row_type);
    block.j0 += begin;
    block.n = end - begin;
    return block;
  }
};

/// K and V of all key heads as the products read them, staged once for all tiles; empty where each tile stages blocks for itself.
/// Worth it where staging for each tile shows: beside products as fast as those of AMX, and of pairs of what has 8 bits.
/// And as long as rows of other heads stay in a last-level cache until their turn comes. K is not copied where its rows
/// lie one behind the other and on lines of a cache, as staged ones do.
class SharedBlocks {
 public:
  static constexpr int64_t kMostBytes = 128 << 20;

  SharedBlocks(const AttentionProblem& p, const Staging& s, const Schedule& schedule,
               const PairPrograms& programs)
      : parts_(s),
        rows_(s, programs, p.dropout > 0),
        blocks_(ceil_div(p.seqlen_k, kBlockKeys)),
        key_words_(parts_.parts > 0 ? parts_.block_words()
                   : rows_.present  ? rows_.block_words()
                                    : round_up(s.rows_size(kBlockKeys, s.score_words()), kLine)),
        value_words_(parts_.parts > 0 || rows_.present ? 0
                                                       : round_up(s.columns_size(kBlockKeys, s.d_v), kLine)) {
    const int64_t bytes = schedule.groups * blocks_ * (key_words_ + value_words_) * 4;
    // Rows look ahead as far as a run goes, which must not depend on the number of tiles.
    const bool looks_ahead = p.expressions && p.expressions->score;
    const bool pays = schedule.tiles > 1 || looks_ahead;
    const bool slow = s.ops->attend != nullptr || (s.ops->word_elements == 2 && s.key_type != s.type);
    if (!slow || schedule.row_path || !pays || bytes > kMostBytes) return;
    bytes_ = bytes;
    heads_ = schedule.groups;
    gathered_ = p.has(Role::kPageTable) || s.key_type != s.row_type;
    looks_ = parts_.parts > 0 || p.dropout > 0 || p.expressions || p.window_left >= 0 ||
             p.window_right >= 0 || gathered_;
    const TensorDesc& k = p[Role::kK];
    rows_of_keys_ = s.ops->attend != nullptr && parts_.parts == 0 && !rows_.present && !p.packed &&
                    !p.has(Role::kSeqUsedK) && !p.has(Role::kLeftPadK) && !p.has(Role::kPageTable) &&
                    s.key_type == s.type && !s.has_qv() && p.seqlen_k % kAttendStrip == 0 &&
                    s.d == s.words_d * s.ops->word_elements && k.stride[1] == s.d &&
                    k.stride[0] % kLineElements == 0 && k.stride[2] % kLineElements == 0;
  }
  /// Of memory; 0 where there are no shared blocks.
  int64_t bytes() const { return bytes_ + blocks() * static_cast<int64_t>(sizeof(int32_t)); }
  void set_memory(const Buffers& buffers, void* memory) {
    keys_in_place_ =
        rows_of_keys_ && reinterpret_cast<uintptr_t>(buffers.get<const char>(Role::kK)) % 64 == 0;
    base_ = static_cast<float*>(memory);
    states_ = reinterpret_cast<int32_t*>(static_cast<char*>(memory) + bytes_);
    std::fill_n(states_, blocks(), kUntouched);
  }

  /// Makes sure of `count` blocks from key j0 on, those that are wanted: stages those that nobody has begun with, first the ones from `start` on,
  /// so that tiles of a head share the work. What a thread stages stays in its own caches for the tile that it is at.
  void stage(const Staging& s, const Group& group, int64_t j0, int64_t count, int64_t start,
             const bool* wanted, const ThreadScratch& t) const {
    if (bytes_ == 0) return;
    int32_t* states = &states_[group.index() * blocks_ + j0 / kBlockKeys];
    for (int64_t x = 0; x < count; ++x) {
      const int64_t i = (start + x) % count;
      int32_t expected = kUntouched;
      const std::atomic_ref state(states[i]);
      if (!wanted[i] || state.load(std::memory_order_relaxed) != kUntouched ||
          !state.compare_exchange_strong(expected, kBegun, std::memory_order_relaxed))
        continue;
      const bool finite = stage(s, group, j0 + i * kBlockKeys, t);
      // What is written above is there for a thread that reads the new state.
      state.store(finite ? kFinite : kStaged, std::memory_order_release);
    }
    // Those that are not staged yet are in the hands of threads that run.
    for (int64_t i = 0; i < count; ++i) {
      const std::atomic_ref state(states[i]);
      while (wanted[i] && state.load(std::memory_order_acquire) < kStaged) std::this_thread::yield();
    }
  }
  /// Whether the values of a block are finite, of parts the keys as well. Nobody has looked where no weight may be 0.
  bool finite(const Group& group, int64_t j0) const {
    return states_[group.index() * blocks_ + j0 / kBlockKeys] == kFinite;
  }
  bool looks() const { return bytes_ > 0 && looks_; }
  /// Whether rows that are read elsewhere have to be gathered first.
  bool gathered() const { return bytes_ > 0 && gathered_; }
  Operand keys(const Staging& s, const Group& group, int64_t j0) const {
    if (keys_in_place_)
      return {reinterpret_cast<const float*>(group.key_rows(Role::kK).row(j0)), s.score_words(), 1};
    return {at(group, j0), s.score_words(), 1};
  }
  AttendBlock parts(const Group& group, int64_t j0) const { return parts_.at(at(group, j0)); }
  AttendBlock rows(const Group& group, int64_t j0) const { return rows_.at(at(group, j0)); }
  Operand values(const Staging& s, const Group& group, int64_t j0) const {
    return s.copied_columns(at(group, j0) + key_words_, std::min(kBlockKeys, group.span.used_k - j0), s.d_v);
  }

 private:
  static constexpr int64_t kLine = 16;  // words
  static constexpr int64_t kLineElements = 2 * kLine;
  enum State : int32_t { kUntouched, kBegun, kStaged, kFinite };  // of a block
  int64_t blocks() const { return heads_ * blocks_; }
  /// Whether the values, of parts the keys as well, are known to be finite.
  bool stage(const Staging& s, const Group& group, int64_t j0, const ThreadScratch& t) const {
    const int64_t n = std::min(kBlockKeys, group.span.used_k - j0);
    const MatrixView values = s.block(group.key_rows(Role::kV), j0, n, s.d_v, t.value_rows);
    if (parts_.parts > 0) {
      const MatrixView keys = s.block(group.key_rows(Role::kK), j0, n, s.d, t.key_rows);
      return parts_.stage(s, keys, values, n, at(group, j0), t.part_rows);
    }
    const bool finite = looks_ && all_finite(*s.ops, values, s.row_type, n, s.d_v);
    if (rows_.present) {
      const MatrixView keys = s.block(group.key_rows(Role::kK), j0, n, s.d, t.key_rows);
      rows_.stage(s, keys, values, n, at(group, j0));
      return finite;
    }
    if (!keys_in_place_) {
      const MatrixView keys = s.block(group.key_rows(Role::kK), j0, n, s.d, t.key_rows);
      s.copy_keys(keys, values, n, at(group, j0));
    }
    s.copy_columns(values, n, s.d_v, at(group, j0) + key_words_);
    return finite;
  }
  float* at(const Group& group, int64_t j0) const {
    return base_ + (group.index() * blocks_ + j0 / kBlockKeys) * (key_words_ + value_words_);
  }

  PartBlocks parts_;
  RowBlocks rows_;
  int64_t blocks_ = 0;         ///< of a head
  bool rows_of_keys_ = false;  ///< K lies as staged rows do, if it begins at a line of a cache
  bool keys_in_place_ = false;
  int64_t key_words_ = 0, value_words_ = 0, bytes_ = 0, heads_ = 0;
  float* base_ = nullptr;
  int32_t* states_ = nullptr;  ///< of each block
  bool looks_ = false, gathered_ = false;
};

/// Whether the values of a block are finite, which the first panel that needs to know finds out.
struct FiniteValues {
  const KeyBlock* block = nullptr;
  std::optional<bool> known;

  bool all(const Staging& s) {
    if (!known) known = all_finite(*s.ops, block->rows, s.row_type, block->n, s.d_v);
    return *known;
  }
};

/// One panel against one block of keys.
void panel_step(const Staging& s, const Group& group, const Lanes& lanes, const ScoreTerms& terms, Seen seen,
                const KeyBlock& block, FiniteValues& finite, const float* queries, const Partial& out,
                const ThreadScratch& t);

/// What a tile of panels works on, with keys of one key head.
struct TileProblem {
  const Staging& s;
  const Group& group;
  const ScoreTerms& terms;
  const SharedBlocks& shared;
  const SharedSeen& shared_seen;
  SeenBlocks& blocks;
  const Lanes* lanes;
  int64_t panels;
  float* partials;
  const ThreadScratch& t;
};

/// A tile against the keys [first_key, last_key) that its panels see.
void tile_forward(const TileProblem& problem, int64_t first_key, int64_t last_key);

/// Normalises one panel, adds the sink, writes o and lse.
void write_panel(const Staging& s, const Group& group, const Lanes& lanes, const Partial& result,
                 float* rows);

/// What `fovea explain` says of a forward.
std::string summary_of(const PairPrograms& programs, const Schedule& schedule, const KeySplits& asked);

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
  int64_t second_row =
      0;  ///< how far behind each row of o another one belongs to its result; 0: there is none
};

/// Queries of a few rows in float32, side by side in rows of whole vectors, and on lanes where the table has such products.
struct RowQueries {
  FewRows q, qv;  ///< qv: without rows where queries meet no values

  /// Of the rows of `lanes`, in row_query_floats() from `memory` on. `met`: the type of the keys that row_dots() meets, none where that is
  /// left to tiles.
  RowQueries(const Staging& s, const Group& group, const Lanes& lanes, std::optional<DType> met,
             float* memory);
};

/// row_scores[r][j] = row_scores[r][j] * key_share + products[r][j] for n keys: products with k, and with v.
void add_value_products(const RowProblem& a, int64_t n, float* row_scores, const float* products);

/// Turns the scores of a block into weights, and rescales older sums. True when some weights may be 0. Between rows it calls
/// tile_awake() where tiles multiply them.
bool weigh_rows(const RowProblem& a, const RowBlock& block, float* row_scores, bool on_tiles = false);
/// O += P V of a block of elements of `type`, skipping zero weights.
void add_rows_exactly(const RowProblem& a, const MatrixView& values, DType type, int64_t n,
                      const float* row_scores);

/// Few rows of one key head, and where their result goes.
struct RowHead {
  Group group;
  Lanes lanes;
  Partial out;
};
using RowHeads = std::span<const std::optional<RowHead>>;

/// A few rows of some key heads against keys [first_key, last_key). Reads K and V once, at the speed of memory.
void rows_forward(const Staging& s, const ScoreTerms& terms, SeenBlocks& blocks, RowHeads heads,
                  int64_t first_key, int64_t last_key, const ThreadScratch& t);

/// Whether tiles multiply the few rows of a problem, whatever its type.
bool tiles_take_rows(const AttentionProblem& p, const Ops& ops);

}  // namespace fovea::cpu::forward_pass
