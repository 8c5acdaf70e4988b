// The step of attend_amx.cpp with queries as rows, where elements of bfloat16 are added to scores: rows of them lie as rows of scores do
// then, and nothing is transposed for each pair, nor are queries and results.
//
//   S = Q K^T,  P = exp2(factor * S + elements - m),  O += P V        beside each other, as in a Pass
//
// Q and P are the left operands, rows of tiles; columns of K and pairs of rows of V the right ones (AttendKeys::by_rows). O of a run begins from
// zero and is added to the panel's at its end.
//
// The reference m of a row is an earlier maximum, or that of the first strip of which it sees a key. Where the sum of the weights of a run comes to
// 2^60, its rows take their true maximum, and the run is done again: numbers of float32 and bfloat16 have room until then.
#pragma once

#include "cpu/attend_amx_pass.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

namespace fovea::cpu::amx {

inline constexpr float kLargestRowSum = 0x1p60f;

/// Number i is what `op` makes of the 16 lanes of r[i].
template <class Op>
FOVEA_AMX_INLINE __m512 of_lanes(const __m512* r, Op op) {
  __m512 fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 *row = r + 4 * i,
                 a = op(_mm512_unpacklo_ps(row[0], row[1]), _mm512_unpackhi_ps(row[0], row[1])),
                 b = op(_mm512_unpacklo_ps(row[2], row[3]), _mm512_unpackhi_ps(row[2], row[3]));
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    fours[i] = op(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const auto quarters = [&](__m512 a, __m512 b) __attribute__((always_inline)) FOVEA_AMX {
    return op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return quarters(quarters(fours[0], fours[1]), quarters(fours[2], fours[3]));
}

/// Two columns of 16 queries against the strips of a run of which they see some.
class RowPass {
 public:
  FOVEA_AMX RowPass(const AttendKeys& keys, Columns& columns);
  FOVEA_AMX void attend();

 private:
  static constexpr int64_t kMostWords = kAttendRowSize / 2;
  static constexpr int64_t kMostTurnWords = kMostTurn / 2;

  FOVEA_AMX void attend_ranges();
  template <int kPairs>
  FOVEA_AMX void run(const tile::Range& keys);
  FOVEA_AMX void clear();
  uint32_t rows_without_reference() const;
  FOVEA_AMX Product scores_of(int64_t key) const;
  FOVEA_AMX Product values_of(int64_t turn);
  FOVEA_AMX bool begin_strip(int64_t key, RowWeights& w);
  FOVEA_AMX __m512i keys_seen(const Column& column, int64_t key) const;
  FOVEA_AMX bool look(int64_t key);
  template <int kPairs, int kForm>
  FOVEA_AMX void add_values(int64_t turn, int64_t part, int64_t parts, RowWeights& w);
  template <int kPairs, int kForm>
  FOVEA_AMX void weigh_strip(int64_t key, RowWeights& w);
  template <int kForm>
  FOVEA_AMX __m512 largest(const RowWeights& w, int64_t first_row) const;
  FOVEA_AMX void raise(const RowWeights& w, bool masked);
  FOVEA_AMX bool rose_too_far();
  FOVEA_AMX void raise_to_largest(const tile::Range& keys);
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
  int64_t turn_, first_ = 0, end_ = 0;
  bool in_tiles_ = false;
  Accumulators pending_;
  uint32_t rising_ = 0;  ///< rows that take the largest score of a strip as their reference, if it is larger
  WeightRow rows_[kWidth];
  alignas(64) float queries_[kWidth * kMostWords];
  alignas(64) float o_[kWidth * kAttendRowSize];
  alignas(64) float scores_[2 * kWidth * kWidth];
  alignas(64) uint32_t pairs_[2 * kWidth * kMostTurnWords];
};

FOVEA_AMX inline RowPass::RowPass(const AttendKeys& keys, Columns& columns)
    : keys_(keys), columns_(columns), turn_(turn_of(keys.columns, 1)) {
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

/// Which keys of a strip rows of a column see, a bit for each.
FOVEA_AMX_INLINE __m512i RowPass::keys_seen(const Column& column, int64_t key) const {
  const __m512i all = _mm512_set1_epi32(-1);
  const __m512i seen = words_of_strip(keys_, column, key);
  if (column.all.begin <= key && key + kStrip <= column.all.end) return seen;
  // Shifts by 32 and more leave nothing.
  const auto from = [&](const int32_t* position) __attribute__((always_inline)) FOVEA_AMX {
    const __m512i at =
        _mm512_sub_epi32(_mm512_loadu_si512(position), _mm512_set1_epi32(static_cast<int>(key)));
    return _mm512_sllv_epi32(all, _mm512_max_epi32(at, _mm512_setzero_si512()));
  };
  return _mm512_and_si512(seen, _mm512_andnot_si512(from(column.end), from(column.begin)));
}

/// Finds out what rows see of a strip. False where that is all of it.
FOVEA_AMX_INLINE bool RowPass::look(int64_t key) {
  const __m512i upper = keys_seen(columns_[0], key), lower = keys_seen(columns_[1], key);
  const __m512i all = _mm512_set1_epi32(-1);
  if (_mm512_cmpneq_epi32_mask(_mm512_and_si512(upper, lower), all) == 0) return false;
  alignas(64) uint32_t keys[kWidth];
  _mm512_store_si512(keys, upper);
  _mm512_store_si512(keys + kTile, lower);
  const __m512i even = _mm512_sllv_epi32(
      _mm512_set1_epi32(1), _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
  const __m512i odd = _mm512_slli_epi32(even, 1);
  for (int64_t row = 0; row < kWidth; ++row) {
    const __m512i bits = _mm512_set1_epi32(static_cast<int>(keys[row]));
    rows_[row].seen = {keys[row], _mm512_test_epi32_mask(bits, even), _mm512_test_epi32_mask(bits, odd)};
  }
  return true;
}

/// The largest scores of 16 rows from `first_row` on in a strip, in units of log2.
template <int kForm>
FOVEA_AMX_INLINE __m512 RowPass::largest(const RowWeights& w, int64_t first_row) const {
  const __m512 lowest = _mm512_set1_ps(-kInfinity), zero = _mm512_setzero_ps();
  __m512 top[kTile];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kTile; ++i) {
    const WeightRow& row = rows_[first_row + i];
    Two t = logarithms_of<kForm>(w, row, w.scores + (first_row + i) * kWidth, zero);
    if constexpr ((kForm & kMasked) != 0) {
      t.even = _mm512_mask_mov_ps(lowest, row.seen.even, t.even);
      t.odd = _mm512_mask_mov_ps(lowest, row.seen.odd, t.odd);
    }
    top[i] = _mm512_max_ps(t.even, t.odd);
  }
  return of_lanes(
      top, [](__m512 a, __m512 b) __attribute__((always_inline)) FOVEA_AMX { return _mm512_max_ps(a, b); });
}

/// Rows that rise take the largest score of the strip as their reference, if it is larger.
FOVEA_AMX inline __attribute__((noinline)) void RowPass::raise(const RowWeights& w, bool masked) {
  for (int64_t first = 0; first < kWidth; first += kTile) {
    if ((rising_ >> first & 0xffff) == 0) continue;
    alignas(64) float top[kTile];
    _mm512_store_ps(top, masked ? largest<kMasked>(w, first) : largest<kPlain>(w, first));
    for (int64_t i = 0; i < kTile; ++i) {
      if ((rising_ >> (first + i) & 1) == 0) continue;
      WeightRow& row = rows_[first + i];
      row.reference = std::max(row.reference, top[i]);
      set_offset(row);
    }
  }
}

/// Brings the scores of a strip from the tiles to the weights. Whether some are masked.
FOVEA_AMX_INLINE bool RowPass::begin_strip(int64_t key, RowWeights& w) {
  w.scores = scores_of_strip(key);
  w.pairs = pairs_of(key);
  w.left = kPairsOfStrip;
  w.row = rows_;
  // Rows a page apart meet in one set of the first-level cache, so lines come to the second.
  const int64_t at = 2 * (key - keys_.first), to = at + 2 * kFetchedStrips * kStrip,
                all = 2 * (keys_.end - keys_.first);
  const int64_t next_rows = rows_[1].elements - rows_[0].elements;
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

FOVEA_AMX inline void RowPass::clear() {
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
FOVEA_AMX void RowPass::run(const tile::Range& keys) {
  first_ = keys.begin;
  end_ = keys.end;
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
FOVEA_AMX inline bool RowPass::rose_too_far() {
  rising_ = 0;
  for (int64_t row = 0; row < kWidth; ++row) {
    const __m512 sum = _mm512_load_ps(rows_[row].sum);
    if (_mm512_cmp_ps_mask(sum, _mm512_set1_ps(kLargestRowSum), _CMP_GT_OQ) != 0)
      rising_ |= uint32_t{1} << row;
  }
  return rising_ != 0;
}

/// The references of those rows become their largest scores.
FOVEA_AMX inline void RowPass::raise_to_largest(const tile::Range& keys) {
  RowWeights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  for (int64_t key = keys.begin; key < keys.end; key += kStrip) {
    multiply<0, kPlain, 1, Of::kScores>(scores_of(key), nullptr, nullptr, w);
    store(scores_at(key));
    w.scores = scores_of_strip(key);
    w.at = 2 * (key - keys_.first);
    raise(w, look(key));
  }
}

/// Adds the run to the panel's rows.
FOVEA_AMX inline void RowPass::finish() {
  const __m512 half = _mm512_set1_ps(0.5f);
  for (int64_t x = 0; x < 2; ++x) {
    const Column& column = columns_[static_cast<size_t>(x)];
    if (column.o == nullptr) continue;
    alignas(64) float references[kTile], alphas[kTile];
    __m512 sums[kTile];
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < kTile; ++lane) {
      const WeightRow& row = rows_[x * kTile + lane];
      references[lane] = row.reference;
      sums[lane] = _mm512_load_ps(row.sum);
    }
    const __m512 before = _mm512_loadu_ps(column.row_max), now = _mm512_load_ps(references);
    // Rows that had seen no key have nothing to bring along.
    const __mmask16 old = _mm512_cmp_ps_mask(before, _mm512_set1_ps(-kInfinity), _CMP_NEQ_UQ);
    const __mmask16 raised = _mm512_mask_cmp_ps_mask(old, before, now, _CMP_NEQ_UQ);
    const __m512 alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), raised,
                                            exp2_of<1>(_mm512_add_ps(_mm512_sub_ps(before, now), half)));
    const __m512 sum = of_lanes(
        sums,
        [](__m512 a, __m512 b) __attribute__((always_inline)) FOVEA_AMX { return _mm512_add_ps(a, b); });
    _mm512_storeu_ps(column.row_max, now);
    _mm512_storeu_ps(column.row_sum, _mm512_fmadd_ps(_mm512_loadu_ps(column.row_sum), alpha, sum));
    _mm512_store_ps(alphas, alpha);
    for (int64_t lane = 0; lane < kTile; ++lane) {
      const __mmask16 brings = (old >> lane & 1) != 0 ? 0xffff : 0;
      const __m512 factor = _mm512_set1_ps(alphas[lane]);
      const float* from = o_ + (x * kTile + lane) * keys_.columns;
      float* to = column.o + lane * column.o_stride;
      for (int64_t c = 0; c < column.o_stride; c += kTile)
        _mm512_storeu_ps(to + c, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(brings, to + c), factor,
                                                 _mm512_loadu_ps(from + c)));
    }
  }
}

FOVEA_AMX inline void RowPass::attend_ranges() {
  // Steps of tiles beside which the weights of a strip are made, as in attend_strips().
  const bool many = keys_.words / kTile + keys_.columns / kStrip >= kPairsOfStrip / 2;
  for_each_range(keys_, columns_, turn_,
                 [&](const tile::Range& range) { many ? run<2>(range) : run<4>(range); });
}

FOVEA_AMX inline void RowPass::attend() {
  clear();
  attend_ranges();
  if (rose_too_far()) {
    for_each_range(keys_, columns_, turn_, [&](const tile::Range& range) { raise_to_largest(range); });
    clear();
    attend_ranges();
  }
  finish();
}

}  // namespace fovea::cpu::amx

#endif
