// The step of attend_amx.cpp with queries as rows, where elements of bfloat16 are added to scores: rows of them lie as rows of scores do then,
// and nothing is transposed for each pair.
//
//   S = Q K^T,  P = exp2(factor * S + elements - m),  O += P V        beside each other, as in a Pass
//
// Q and P are the left operands, rows of tiles; columns of K and pairs of rows of V the right ones (AttendKeys::by_rows). O of a run begins from
// zero and is added to the panel's, transposed, at its end: 512 shuffles at head size 64, beside 32 strips of 1,000 operations.
//
// The reference m of a row is an earlier maximum, or that of the first strip of which it sees a key. Where the sum of the weights of a run comes to
// 2^60, its rows take their true maximum, and the run is done again: numbers of float32 and bfloat16 have room until then.
#pragma once

#include "cpu/attend_amx_pass.hpp"
#include "cpu/transpose_words.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

namespace fovea::cpu::amx {

inline constexpr float kLargestRowSum = 0x1p60f;

/// Two columns of 16 queries against neighbouring strips of a run.
class RowPass {
 public:
  FOVEA_AMX RowPass(const AttendKeys& keys, Columns& columns, tile::Range range);
  FOVEA_AMX void attend();

 private:
  static constexpr int64_t kMostWords = kAttendRowSize / 2;
  static constexpr int64_t kMostTurnWords = kMostTurn / 2;

  template <int kPairs>
  FOVEA_AMX void run();
  FOVEA_AMX void clear();
  uint32_t rows_without_reference() const;
  FOVEA_AMX Product scores_of(int64_t key) const;
  FOVEA_AMX Product values_of(int64_t turn);
  FOVEA_AMX bool begin_strip(int64_t key, RowWeights& w);
  FOVEA_AMX bool look(int64_t key);
  template <int kPairs, int kForm>
  FOVEA_AMX void add_values(int64_t turn, int64_t part, int64_t parts, RowWeights& w);
  template <int kPairs, int kForm>
  FOVEA_AMX void weigh_strip(int64_t key, RowWeights& w);
  FOVEA_AMX void raise(const RowWeights& w, bool masked);
  FOVEA_AMX bool rose_too_far();
  FOVEA_AMX void raise_to_largest();
  FOVEA_AMX void finish();
  FOVEA_AMX void store_pending() {
    if (in_tiles_) store(pending_);
    in_tiles_ = false;
  }
  int64_t begin_of(int64_t turn) const { return std::max(turn, first_); }
  int64_t turn_words() const { return turn_ / 2; }
  uint32_t* pairs_of(int64_t key) {
    return pairs_ + (key & turn_) / turn_ * kWidth * turn_words() + (key & (turn_ - 1)) / 2;
  }
  float* scores_of_strip(int64_t key) { return scores_ + (key / kStrip & 1) * kWidth * kWidth; }
  Accumulators scores_at(int64_t key) {
    float* scores = scores_of_strip(key);
    return {{scores, scores + kTile}, {kWidth, kWidth}};
  }
  static void set_offset(WeightRow& row) {
    row.offset = row.reference == -kInfinity ? 0.5f : 0.5f - row.reference;
  }

  const AttendKeys& keys_;
  Columns& columns_;
  int64_t turn_, first_, end_;
  bool in_tiles_ = false;
  Accumulators pending_;
  uint32_t rising_ = 0;  ///< rows that take the largest score of a strip as their reference, if it is larger
  WeightRow rows_[kWidth];
  alignas(64) float queries_[kWidth * kMostWords];
  alignas(64) float o_[kWidth * kAttendRowSize];
  alignas(64) float scores_[2 * kWidth * kWidth];
  alignas(64) uint32_t pairs_[2 * kWidth * kMostTurnWords];
};

FOVEA_AMX inline RowPass::RowPass(const AttendKeys& keys, Columns& columns, tile::Range range)
    : keys_(keys), columns_(columns), turn_(turn_of(keys.columns, 1)), first_(range.begin), end_(range.end) {
  for (int64_t row = 0; row < kWidth; ++row) {
    const Column& column = columns[static_cast<size_t>(row / kTile)];
    const int64_t lane = row % kTile;
    rows_[row].reference = column.row_max[lane];
    rows_[row].elements = static_cast<const char*>(column.elements[lane]);
    rows_[row].element_factor = column.factors[lane] * keys.factor;
    float* query = queries_ + row * keys.words;
    for (int64_t word = 0; word < keys.words; word += kTile) {
      const int64_t left = std::clamp<int64_t>(keys.size - 2 * word, 0, 2 * kTile);
      const auto mask = static_cast<__mmask32>((uint64_t{1} << left) - 1);
      _mm512_store_si512(query + word, _mm512_maskz_loadu_epi16(mask, column.rows[lane] + 4 * word));
    }
  }
}

inline FOVEA_AMX Product RowPass::scores_of(int64_t key) const {
  const float* block = keys_.blocks[(key - keys_.first) / kAttendKeys].keys.data;
  const float* strip = block + (key - keys_.first) % kAttendKeys * keys_.words;
  return {queries_, keys_.words, {strip, strip + kTile}, kWidth, keys_.words, 0, 0};
}

inline FOVEA_AMX Product RowPass::values_of(int64_t turn) {
  const int64_t begin = begin_of(turn);
  const float* block = keys_.blocks[(begin - keys_.first) / kAttendKeys].values.data;
  const float* rows = block + (begin - keys_.first) % kAttendKeys / 2 * keys_.columns;
  const auto* pairs = reinterpret_cast<const float*>(pairs_of(begin));
  const int64_t strips = ceil_div(std::min(turn + turn_, end_) - begin, kStrip);
  return {pairs, turn_words(), {rows, rows + kTile}, keys_.columns, strips * kPairsOfStrip, 0, 0};
}

/// Finds out what rows see of a strip. False where that is all of it.
inline FOVEA_AMX bool RowPass::look(int64_t key) {
  bool all = true;
  for (const Column& column : columns_)
    all = all && column.seen == nullptr && column.all.begin <= key && key + kStrip <= column.all.end;
  if (all) return false;
  const auto below = [&](int64_t end) {
    return static_cast<uint32_t>((uint64_t{1} << std::clamp<int64_t>(end - key, 0, kStrip)) - 1);
  };
  const int64_t word = (key - keys_.first) / kSeenKeys * kPanel;
  const __m512i even = _mm512_sllv_epi32(
      _mm512_set1_epi32(1), _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
  const __m512i odd = _mm512_slli_epi32(even, 1);
  for (int64_t row = 0; row < kWidth; ++row) {
    const Column& column = columns_[static_cast<size_t>(row / kTile)];
    const int64_t lane = row % kTile;
    uint32_t keys = below(column.end[lane]) & ~below(column.begin[lane]);
    if (column.seen != nullptr) keys &= column.seen[word + lane];
    const __m512i bits = _mm512_set1_epi32(static_cast<int>(keys));
    rows_[row].seen = {keys, _mm512_test_epi32_mask(bits, even), _mm512_test_epi32_mask(bits, odd)};
  }
  return true;
}

/// Rows that rise take the largest score of the strip as their reference, if it is larger.
inline FOVEA_AMX __attribute__((noinline)) void RowPass::raise(const RowWeights& w, bool masked) {
  const __m512 lowest = _mm512_set1_ps(-kInfinity), zero = _mm512_setzero_ps();
  for (int64_t i = 0; i < kWidth; ++i) {
    if ((rising_ >> i & 1) == 0) continue;
    WeightRow& row = rows_[i];
    const float* scores = w.scores + i * kWidth;
    Two t =
        masked ? logarithms_of<kMasked>(w, row, scores, zero) : logarithms_of<kPlain>(w, row, scores, zero);
    if (masked) {
      t.even = _mm512_mask_mov_ps(lowest, row.seen.even, t.even);
      t.odd = _mm512_mask_mov_ps(lowest, row.seen.odd, t.odd);
    }
    row.reference = std::max(row.reference, _mm512_reduce_max_ps(_mm512_max_ps(t.even, t.odd)));
    set_offset(row);
  }
}

/// Brings the scores of a strip from the tiles to the weights. Whether some are masked.
FOVEA_AMX_INLINE bool RowPass::begin_strip(int64_t key, RowWeights& w) {
  // Rows a page apart meet in one set of the first-level cache, so lines come to the second.
  const int64_t at = 2 * (key - keys_.first), to = at + 2 * kFetchedStrips * kStrip,
                all = 2 * (keys_.end - keys_.first);
  const int64_t next_rows = rows_[1].elements - rows_[0].elements;
  w.scores = scores_of_strip(key);
  w.pairs = pairs_of(key);
  w.left = kPairsOfStrip;
  w.row = rows_;
  w.at = at;
  w.ahead = to < all ? to : to - all + kWidth * next_rows;
  const bool masked = look(key);
  if (rising_ != 0) {
    const RowWeights copy = w;  // its address is known to no function, so that it stays in registers
    raise(copy, masked);
    rising_ = rows_without_reference();
  }
  return masked;
}

/// Part `part` of `parts` of the columns of O, against the values of a turn.
template <int kPairs, int kForm>
FOVEA_AMX_INLINE void RowPass::add_values(int64_t turn, int64_t part, int64_t parts, RowWeights& w) {
  const int64_t blocks = keys_.columns / kStrip;
  Product product = values_of(turn);
  const float* values = product.right[0];
  for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
    float* at = o_ + block * kStrip;
    const Accumulators o{{at, at + kTile}, {keys_.columns, keys_.columns}};
    product.right = {values + block * kStrip, values + block * kStrip + kTile};
    multiply<kPairs, kForm, 1, Of::kValues>(product, in_tiles_ ? &pending_ : nullptr, &o, w);
    pending_ = o;
    in_tiles_ = true;
  }
}

inline uint32_t RowPass::rows_without_reference() const {
  uint32_t rows = 0, bit = 1;
  for (const WeightRow& row : rows_) {
    rows |= row.reference == -kInfinity ? bit : 0;
    bit <<= 1;
  }
  return rows;
}

inline FOVEA_AMX void RowPass::clear() {
  std::fill_n(o_, kWidth * keys_.columns, 0.0f);
  for (WeightRow& row : rows_) {
    std::fill_n(row.sum, kTile, 0.0f);
    set_offset(row);
  }
  rising_ = rows_without_reference();
  // GCC does not know that a tile load reads memory: queries and zeros are there for those that come.
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

/// The weights of a strip, beside the scores of the next strip and the values of the turn before.
template <int kPairs, int kForm>
FOVEA_AMX_INLINE void RowPass::weigh_strip(int64_t key, RowWeights& w) {
  const int64_t turn = key & -turn_, next = key + kStrip;
  if (next < end_) {
    multiply<kPairs, kForm, 1, Of::kScores>(scores_of(next), in_tiles_ ? &pending_ : nullptr, nullptr, w);
    pending_ = scores_at(next);
    in_tiles_ = true;
  }
  if (turn > first_) {
    const int64_t strips = ceil_div(std::min(turn + turn_, end_) - begin_of(turn), kStrip);
    add_values<kPairs, kForm>(turn - turn_, (key - begin_of(turn)) / kStrip, strips, w);
  }
  if (pending_.column[0] == scores_of_strip(next)) store_pending();
  weigh_rest<kForm, 1>(w);
}

template <int kPairs>
FOVEA_AMX void RowPass::run() {
  clear();
  RowWeights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  w.pairs_stride = turn_words();
  multiply<0, kPlain, 1, Of::kScores>(scores_of(first_), nullptr, nullptr, w);
  store(scores_at(first_));
  for (int64_t key = first_; key < end_; key += kStrip) {
    if (begin_strip(key, w)) {
      weigh_strip<kPairs, kMasked>(key, w);
    } else {
      weigh_strip<kPairs, kPlain>(key, w);
    }
    // GCC does not know that a tile load reads memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  add_values<kPairs, kPlain>((end_ - 1) & -turn_, 0, 1, w);
  store_pending();
}

/// Whether the sums of some rows leave no room; those rise.
inline FOVEA_AMX bool RowPass::rose_too_far() {
  rising_ = 0;
  for (int64_t row = 0; row < kWidth; ++row) {
    const __m512 sum = _mm512_load_ps(rows_[row].sum);
    if (_mm512_cmp_ps_mask(sum, _mm512_set1_ps(kLargestRowSum), _CMP_GT_OQ) != 0)
      rising_ |= uint32_t{1} << row;
  }
  return rising_ != 0;
}

/// The references of those rows become their largest scores.
inline FOVEA_AMX void RowPass::raise_to_largest() {
  RowWeights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  for (int64_t key = first_; key < end_; key += kStrip) {
    multiply<0, kPlain, 1, Of::kScores>(scores_of(key), nullptr, nullptr, w);
    store(scores_at(key));
    w.scores = scores_of_strip(key);
    w.at = 2 * (key - keys_.first);
    raise(w, look(key));
  }
}

/// Adds the run to the panel's rows.
inline FOVEA_AMX void RowPass::finish() {
  const __m512 half = _mm512_set1_ps(0.5f);
  for (int64_t x = 0; x < 2; ++x) {
    const Column& column = columns_[static_cast<size_t>(x)];
    alignas(64) float references[kTile];
    for (int64_t lane = 0; lane < kTile; ++lane) references[lane] = rows_[x * kTile + lane].reference;
    const __m512 before = _mm512_loadu_ps(column.row_max), now = _mm512_load_ps(references);
    // Rows that had seen no key have nothing to bring along.
    const __mmask16 old = _mm512_cmp_ps_mask(before, _mm512_set1_ps(-kInfinity), _CMP_NEQ_UQ);
    const __mmask16 raised = _mm512_mask_cmp_ps_mask(old, before, now, _CMP_NEQ_UQ);
    const __m512 alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), raised,
                                            exp2_of<1>(_mm512_add_ps(_mm512_sub_ps(before, now), half)));
    _mm512_storeu_ps(column.row_max, now);
    __m512i r[kTile];
    const auto transposed = [&](const float* from, int64_t stride) __attribute__((always_inline)) FOVEA_AMX {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTile; ++i) r[i] = _mm512_loadu_si512(from + i * stride);
      transpose_words(r);
    };
    transposed(rows_[x * kTile].sum, sizeof(WeightRow) / sizeof(float));
    __m512 sum = _mm512_setzero_ps();
    for (const __m512i& lane : r) sum = _mm512_add_ps(sum, _mm512_castsi512_ps(lane));
    _mm512_storeu_ps(column.row_sum, _mm512_fmadd_ps(_mm512_loadu_ps(column.row_sum), alpha, sum));
    for (int64_t c = 0; c < keys_.columns; c += kTile) {
      transposed(o_ + x * kTile * keys_.columns + c, keys_.columns);
      const int64_t count = std::min(kTile, keys_.columns_of_o - c);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kTile; ++i) {
        if (i >= count) break;
        float* o = column.o + (c + i) * column.o_stride;
        _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_loadu_ps(o), alpha, _mm512_castsi512_ps(r[i])));
      }
    }
  }
}

inline FOVEA_AMX void RowPass::attend() {
  // Steps of tiles beside which the weights of a strip are made, as in attend_strips().
  const bool many = keys_.words / kTile + keys_.columns / kStrip >= kPairsOfStrip / 2;
  many ? run<2>() : run<4>();
  if (rose_too_far()) {
    raise_to_largest();
    many ? run<2>() : run<4>();
  }
  finish();
}

}  // namespace fovea::cpu::amx

#endif
