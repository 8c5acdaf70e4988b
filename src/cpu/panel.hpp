// What forward and backward share: which query rows lie on the lanes of a panel (Group, Lanes), the terms of
// the score (ScoreTerms), and how K, V and Q are staged for the products (Staging).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/backend.hpp"
#include "cpu/ops.hpp"
#include "cpu/pair_programs.hpp"
#include "cpu/scratch.hpp"
#include "cpu/sequence.hpp"
#include "tile/log2.hpp"
#include "tile/philox.hpp"

namespace fovea::cpu {

using tile::kLn2, tile::kLog2e;

/// One (sequence, key head): the query heads of its group share its keys, so they share its tiles. Row r of
/// the group is query r / group of head r % group: neighbouring lanes see nearly the same keys.
struct Group {
  const AttentionProblem* problem;
  const Buffers* buffers;
  int64_t batch, head_kv;
  SequenceSpan span;
  tile::Window window;
  float value_scale;    ///< of the elements of v
  float product_scale;  ///< of the products of a score
  float key_share;      ///< of those with k beside those of qv with v, before product_scale

  Group(const AttentionProblem& p, const Buffers& b, int64_t batch_index, int64_t head)
      : problem(&p),
        buffers(&b),
        batch(batch_index),
        head_kv(head),
        span(sequence_span(p, b, batch_index)),
        window(window_of(p, span)),
        value_scale(descale_of(p, b, Role::kVDescale, batch_index, head)),
        product_scale(descale_of(p, b, Role::kQDescale, batch_index, head) *
                      descale_of(p, b, Role::kKDescale, batch_index, head)),
        key_share(1) {
    if (!p.has(Role::kQV)) return;
    // 0 times infinity is NaN.
    key_share = std::min(product_scale / value_scale, std::numeric_limits<float>::max());
    product_scale = value_scale;
  }

  int64_t size() const { return problem->group(); }
  int64_t index() const { return batch * problem->heads_kv + head_kv; }
  int64_t rows() const { return span.used_q * size(); }
  int64_t query(int64_t row) const { return row / size(); }
  int64_t head(int64_t row) const { return head_kv * size() + row % size(); }
  char* row_data(Role role, int64_t row) const {
    return rows_of(*problem, *buffers, role, batch, head(row), span.row_q + query(row)).data;
  }
  HeadRows head_rows(Role role) const { return {*problem, *buffers, role, batch, span.row_q}; }
  /// Of the backward, which has no caches.
  MatrixView keys(Role role) const { return rows_of(*problem, *buffers, role, batch, head_kv, span.row_k); }
  KeyRows key_rows(Role role) const { return {*problem, *buffers, role, batch, head_kv, span.row_k}; }
  float* stat(Role role, int64_t row) const {
    return reinterpret_cast<float*>(
        stats_of(*problem, *buffers, role, batch, head(row), span.row_q + query(row)).data);
  }
};

/// The rows on the lanes of one panel. Lanes past the last row repeat it: they compute, where they are wanted, and are never stored.
struct Lanes {
  int64_t first_row = 0;
  int count = 0;                      ///< rows that exist
  int wanted = 0;                     ///< lanes whose products are: `count` or more
  tile::Range any, all;               ///< keys that some, that all lanes see
  alignas(64) int32_t begin[kPanel];  ///< keys that the lane sees
  alignas(64) int32_t end[kPanel];
  alignas(64) int32_t query[kPanel];  ///< position in the sequence
  alignas(64) int32_t head[kPanel];

  Lanes() = default;
  Lanes(const Group& group, int64_t row) : Lanes(group, row, group.rows()) {}
  /// Of rows [row, end_row) at most.
  Lanes(const Group& group, int64_t row, int64_t end_row);
};

/// The positions of the keys of a tile: neighbours from `first` on, or those of a list.
struct KeyPositions {
  int64_t first = 0;
  const int32_t* list = nullptr;

  KeyPositions(int64_t j0) : first(j0) {}
  explicit KeyPositions(const int32_t* positions) : list(positions) {}
  int64_t operator[](int64_t j) const { return list == nullptr ? first + j : list[j]; }
};

/// What makes scores and weights of products, beside the band (causal and window): scale, expressions, dropout.
struct ScoreTerms {
  bool any;  ///< an expression makes the scores, in natural units; else they are products
  bool dropout;
  float factor;  ///< stored score times factor is in units of log2, where q, k and v have no factors
  tile::Dropout stream;
  const PairPrograms& programs;
  std::array<const char*, kMaxTermTensors> tensors{};  ///< those that the programs read

  ScoreTerms(const AttentionProblem& p, const Buffers& b, const PairPrograms& pair_programs);

  /// The same for the keys of a group.
  float factor_of(const Group& group) const { return any ? factor : factor * group.product_scale; }

  /// The pairs of all rows of a panel with n keys, for a program; tiles are left out.
  ProgramInputs inputs_of(const Group& group, const Lanes& lanes, KeyPositions positions, int64_t n) const;
  /// The same without their numbers.
  ProgramInputs inputs_of(const Group& group, const int32_t* query, const int32_t* head,
                          KeyPositions positions) const;
};

/// Values of f of a score's form: of row r and key j at data[r - j * group size].
struct DistanceValues {
  const float* data = nullptr;

  const float* of(int64_t row, int64_t key, int64_t group_size) const {
    return data + row - key * group_size;
  }
  /// Floats of those of so many rows and keys.
  static int64_t size(const AttentionProblem& p, int64_t rows, int64_t keys) {
    return (rows / p.group() + 2 + keys) * p.group() + 2 * kPanel;
  }
};

/// What the programs of expressions need of a thread, by tile.
struct PairScratch {
  char* registers = nullptr;
  float* distances = nullptr;  ///< of the rows of a panel and the keys of a block
  uint32_t* seen_pairs = nullptr;
  bool elements_fetched = false;  ///< those of a score's form are in a cache when scores need them
  float* slope = nullptr;         ///< out: d score / d the score before the expression, where that is not 1
  float* before = nullptr;        ///< out: the tile before the expression, where gradients read it
  SeenBlocks::Memory seen;

  PairScratch() = default;
  /// `heads`: how many of them may ask for the same blocks.
  PairScratch(Scratch& memory, const AttentionProblem& p, const PairPrograms& programs, int64_t tile_size,
              int64_t heads);
};

/// f of a score's form for rows [first_row, first_row + rows) and n keys from j0 on, times `factor`, into
/// DistanceValues::size() floats.
DistanceValues distance_values(const Ops& ops, const Group& group, const ScoreTerms& terms, int64_t first_row,
                               int64_t rows, int64_t j0, int64_t n, float factor, char* registers,
                               float* memory);
/// Elements of key j0 by lane.
void element_rows(const Group& group, const Lanes& lanes, const ScoreTerms& terms,
                  const KeyElements& elements, int64_t j0, const void** rows);
/// What elements of a score's form are multiplied by, by lane, times `unit`.
void element_factors(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms,
                     float unit, char* registers, float* factors);
/// Which pairs of a panel with n keys from j0 on are seen, by the elements that say so.
void seen_by_elements(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms,
                      int64_t j0, int64_t n, uint32_t* seen);
/// How much of n keys their words leave.
Seen seen_of_words(const uint32_t* words, int64_t n);
/// What those of a block sum up to (kSeenAll).
uint32_t strips_of_words(const uint32_t* words);

/// Multiplies the products of an expression's program, which knows p.scale alone, by the factors of q, k and v.
void scale_products(const Group& group, float* s, int64_t count);

/// The operands of the products of a panel: rows of `words` words. The last `value_words` of them are of v and qv.
struct ScoreOperands {
  Operand keys;
  const float* queries;
  int64_t words, value_words = 0;
};

/// How many of n keys lanes see at most, in words of `pair` keys.
LaneEnds ends_of(const Lanes& lanes, KeyPositions positions, int64_t n, int64_t pair = 1);

/// Computes the masked scores of one panel against n keys, of which `seen` are seen, and raises `maxima`, when given, to
/// their column maxima. `operands.keys` points at the first of the n keys; those of a list lie in the band of the rows. Returns true
/// when the band or `sees` masks some of the n x lanes pairs.
bool panel_scores(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms, Seen seen,
                  const ScoreOperands& operands, int64_t key_rows, int64_t n, KeyPositions positions,
                  float* s, float* maxima, const PairScratch& scratch);

/// How much of the pairs of `count` rows from first_row on with keys [j0, j0 + n) the expression `sees` leaves.
Seen seen_of(const Group& group, int64_t first_row, int64_t count, int64_t j0, int64_t n, SeenBlocks& blocks);
/// The same for each panel of a tile. False when none of them sees a key.
bool panels_seen(const Group& group, int64_t first_row, int64_t panels, int64_t j0, int64_t n,
                 SeenBlocks& blocks, Seen* seen);

/// Which weights of n keys dropout keeps (Ops::dropout_bits), into kept_bytes(n). A position that is no list's is even.
void dropout_bits(const Ops& ops, const Group& group, const Lanes& lanes, const ScoreTerms& terms, int64_t n,
                  KeyPositions positions, uint8_t* kept);
/// 1 / (1 - p) for those that are kept; 1 without dropout.
float keep_scale(const AttentionProblem& p);

/// Element (row, c) of a 16- or 32-bit matrix as float.
float load_element(const char* row, DType type, int64_t c);

/// True when all elements of rows [0, n) are finite.
bool all_finite(const Ops& ops, const MatrixView& rows, DType type, int64_t n, int64_t d);

/// Copies operands of one problem into the layouts that the products read.
struct Staging {
  const Ops* ops;
  DType type;        ///< of Q, K and V as they are staged
  DType query_type;  ///< of q
  DType key_type;    ///< of k and v
  DType row_type;    ///< that k and v are staged from: key_type where products take float32, else type
  int64_t d, d_v;
  int64_t words_d, words_dv;    ///< reduction words of a row of Q or K, of V or dO, padded to k_multiple
  int64_t words_qv;             ///< of a row of QV: words_dv, or 0 where the problem has none
  int64_t padded_d, padded_dv;  ///< columns of staged right operands and of accumulators

  Staging(const AttentionProblem& p, const Ops& table);

  bool has_qv() const { return words_qv > 0; }
  /// Reduction words of a score: of a row [Q | QV] or [K | V].
  int64_t score_words() const { return words_d + words_qv; }
  ScoreOperands score_operands(Operand keys, const float* queries) const {
    return {keys, queries, score_words(), words_qv};
  }
  /// Words of n keys staged as left operand of scores().
  int64_t rows_size(int64_t n, int64_t words) const { return round_up(n, ops->row_multiple) * words; }
  /// Reduction words over n keys or queries.
  int64_t words_of(int64_t n) const { return round_up(ceil_div(n, ops->word_elements), ops->k_multiple); }

  /// Copies a row of elements of `from_type` as those of `row_type`, which has all of their values.
  void copy_row(const char* from, DType from_type, int64_t size, char* to) const;
  /// Keys [j, j + n) of `size` elements: in place, or copied to `buffer` (KeyRows::block).
  MatrixView block(const KeyRows& rows, int64_t j, int64_t n, int64_t size, char* buffer) const {
    return rows.block(j, n, size, row_type, buffer,
                      [&](const char* from, char* to) { copy_row(from, rows.type(), size, to); });
  }
  /// Rows [0, n) as left operand of scores(): in place when the layout allows it, else copied to `buffer`.
  Operand stage_rows(const MatrixView& rows, int64_t n, int64_t size, int64_t words, float* buffer) const;
  void copy_rows(const MatrixView& rows, int64_t n, int64_t size, int64_t words, float* buffer) const;
  /// Keys [0, n) as left operand of the scores: rows of K, or [K | V] where queries meet values.
  Operand stage_keys(const MatrixView& keys, const MatrixView& values, int64_t n, float* buffer) const;
  void copy_keys(const MatrixView& keys, const MatrixView& values, int64_t n, float* buffer) const;
  /// The queries on the lanes of a panel as right operand of the scores: Q, or [Q | QV].
  void stage_queries(const Group& group, const Lanes& lanes, float* dst, float* temp) const;
  /// Rows [0, n) as the left operand of accumulate(): element (c, j) = rows[j][c].
  /// `buffer` holds columns_size(n, size) words.
  Operand stage_columns(const MatrixView& rows, int64_t n, int64_t size, float* buffer) const;
  void copy_columns(const MatrixView& rows, int64_t n, int64_t size, float* buffer) const;
  /// What copy_columns() has left in `buffer`.
  Operand copied_columns(const float* buffer, int64_t n, int64_t size) const;
  int64_t columns_size(int64_t n, int64_t size) const { return words_of(n) * round_up(size, 16) + 64; }
  /// The rows on the lanes of a panel, transposed: words [words][kPanel]. `temp` holds 4 * (words + 16) floats.
  void stage_panel(const Group& group, const Lanes& lanes, Role role, int64_t size, int64_t words, float* dst,
                   float* temp) const;
  /// One row of elements of `from` converted to words of the product type, `words` of them, zero-filled.
  void load_row(const char* row, DType from, int64_t size, int64_t words, float* dst) const;
  void load_row(const char* row, int64_t size, int64_t words, float* dst) const {
    load_row(row, row_type, size, words, dst);
  }

 private:
  /// Whether products may read rows where they are.
  bool lie_well(int64_t stride, int64_t size) const;
};

}  // namespace fovea::cpu
