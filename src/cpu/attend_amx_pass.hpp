// A pass of attend_amx.cpp: what it keeps, and the terms of the scores of a strip.
#pragma once

#include "cpu/program.hpp"  // before a constant of the name of one of its enumerators

#include "cpu/attend_amx_steps.hpp"
#include "cpu/scratch.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace fovea::cpu::amx {

inline constexpr int64_t kMostTurn = kAttendKeys;
// Scores of 9 / log2(e) = 6 above m, or as much of many smaller ones: weights keep their precision at any size, and the
// sums of float32 have room for 2^100 more.
inline constexpr float kLargestSum = 512.0f;
// Rows of elements are fetched so far ahead: memory takes as long as half a strip, under load as two.
inline constexpr int64_t kFetchedStrips = 4;
// Where so much more is added to a strip, in units of log2, weights would rise too far on the way to it.
inline constexpr float kSteep = 4.0f;
// Neighbours of a bias differ by as much by chance, and those of a strip far ahead have to be fetched.
inline constexpr float kSteepElements = 8.0f;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

static_assert(kAttendScratch == (3 * kStrip + kMostTurn / 2 * kAttendParts) * kWidth + 3 * kTile);
static_assert(kMostTurn <= kMostTurn / 2 * kAttendParts);
static_assert(kSeenKeys == kStrip);

/// 16 queries of a panel.
struct Column {
  const float* queries;  ///< words at row stride kPanel
  float *row_max, *row_sum;
  float* o;  ///< of rows: null where nobody asks
  int64_t o_stride;
  const int32_t *begin, *end;
  tile::Range any, all;
  const uint8_t* kept;
  const int32_t *query, *head;
  const float* distance;
  int64_t step;
  const void* const* elements;
  const float* factors;
  DType dtype;
  const uint32_t* seen;  ///< at row stride kPanel
  const uint32_t* strips;
  int strips_bit;  ///< the first of this column
  const char* const* rows;
  bool fresh;  ///< O is not there yet; of lanes
};
using Columns = std::array<Column, 2>;

/// As many strips as O has blocks of rows, so that each goes beside one of them; P of two turns has to stay in the first-level cache.
constexpr int64_t turn_of(int64_t columns, int parts) {
  return columns > 3 * kStrip && parts == 1 ? kMostTurn : kMostTurn / 2;
}

/// What the words of a strip sum up to, by `sees`: bit 0, some row sees a key of it, kSeenAll, all see all of it. Words are known of the keys that
/// some row sees, and between them.
inline uint32_t strip_of(const AttendKeys& keys, const Column& column, int64_t key) {
  if (column.seen == nullptr) return 1 | uint32_t{1} << kSeenAll;
  if (key + kStrip <= column.any.begin || column.any.end <= key) return 0;
  const int64_t at = key - keys.first;
  return column.strips[at / kAttendKeys] >> (column.strips_bit + at / kStrip % (kAttendKeys / kStrip));
}

/// Which keys of a strip the rows of a column see by `sees`, a bit for each.
FOVEA_AMX_INLINE __m512i words_of_strip(const AttendKeys& keys, const Column& column, int64_t key) {
  const uint32_t strip = strip_of(keys, column, key);
  if ((strip & 1) == 0) return _mm512_setzero_si512();
  if ((strip >> kSeenAll & 1) != 0) return _mm512_set1_epi32(-1);
  return _mm512_loadu_si512(column.seen + (key - keys.first) / kSeenKeys * kPanel);
}

/// Whether a row of either column sees a key of the strip.
inline bool sees_some(const AttendKeys& keys, const Columns& columns, int64_t key) {
  return ((strip_of(keys, columns[0], key) | strip_of(keys, columns[1], key)) & 1) != 0;
}

/// Calls visit(range) for neighbouring strips of a run. Those that neither column sees are left out, but for those inside of a turn, whose weights
/// are added up together: what a row adds up must not depend on its neighbours.
template <class Visit>
FOVEA_AMX inline void for_each_range(const AttendKeys& keys, const Columns& columns, int64_t turn,
                                     const Visit& visit) {
  const bool masked = columns[0].seen != nullptr || columns[1].seen != nullptr;
  const auto sees = [&](int64_t at) { return !masked || sees_some(keys, columns, at); };
  const int64_t end = std::min(keys.end, std::max(columns[0].any.end, columns[1].any.end));
  int64_t key = std::max(keys.first, std::min(columns[0].any.begin, columns[1].any.begin)) & -kStrip;
  while (key < end) {
    if (!sees(key)) {
      key += kStrip;
      continue;
    }
    // A strip without a key that is seen takes less time than to end and begin again.
    int64_t last = key + kStrip, skipped = 0;
    for (; last < end && (skipped < 2 || last % turn != 0); last += kStrip)
      skipped = sees(last) ? 0 : skipped + 1;
    visit(tile::Range{key, std::min(end, last - skipped * kStrip)});
    key = last;
  }
}

/// Two columns against neighbouring strips of a run, all of whose keys are in the range.
///
/// Weights stay in registers as long as their address is known to no function that is called: those that are not inlined get copies.
template <int kForm, int kParts>
class Pass {
 public:
  FOVEA_AMX Pass(const AttendKeys& keys, Columns& columns, float* scratch, tile::Range range)
      : keys_(keys),
        columns_(columns),
        scores_(scratch),
        added_(scratch + 2 * kStrip * kWidth),
        pairs_(reinterpret_cast<uint32_t*>(added_ + kStrip * kWidth)),
        turn_(turn_of(keys.columns, kParts)),
        first_(range.begin),
        end_(range.end),
        has_o_(!columns[0].fresh) {
    for (size_t x = 0; x < 2; ++x) {
      total_[x] = _mm512_loadu_ps(columns[x].row_sum);
      if constexpr ((kForm & kFetched) != 0) {
        std::copy_n(columns[x].elements, kTile, elements_ + x * kTile);
        std::copy_n(columns[x].factors, kTile, factors_ + x * kTile);
      }
    }
    set_offsets();
  }

  template <int kPairs>
  FOVEA_AMX void run();
  FOVEA_AMX void look_ahead(const std::array<bool, 2>& takes);

 private:
  FOVEA_AMX Product scores_of(int64_t key) const {
    const Operand& rows = keys_.blocks[(key - keys_.first) / kAttendKeys].keys;
    return {rows.data + (key - keys_.first) % kAttendKeys * rows.row_stride,
            rows.row_stride,
            {columns_[0].queries, columns_[1].queries},
            kPanel,
            keys_.words,
            keys_.key_part,
            keys_.query_part};
  }
  FOVEA_AMX Product values_of(int64_t turn) const {
    const int64_t begin = begin_of(turn);
    const Operand& values = keys_.blocks[(begin - keys_.first) / kAttendKeys].values;
    const auto* pairs = reinterpret_cast<const float*>(pairs_of(begin));
    return {values.data + (begin - keys_.first) % kAttendKeys / 2,
            values.row_stride,
            {pairs, pairs + kTile},
            kWidth,
            strips_of(turn) * kPairsOfStrip,
            keys_.value_part,
            turn_ * kWidth};
  }
  /// The weights of key and those behind it.
  uint32_t* pairs_of(int64_t key) const { return pairs_ + (key & (2 * turn_ - 1)) / 2 * kWidth; }
  /// Turns begin at multiples of their keys; the first may lack some.
  int64_t begin_of(int64_t turn) const { return std::max(turn, first_); }
  int64_t strips_of(int64_t turn) const {
    return ceil_div(std::min(turn + turn_, end_) - begin_of(turn), kStrip);
  }
  float* scores_of_strip(int64_t key) const { return scores_ + (key / kStrip & 1) * kStrip * kWidth; }
  static Accumulators scores_at(float* scores) { return {{scores, scores + kTile}, {kWidth, kWidth}}; }
  /// What the scores of a strip begin with.
  FOVEA_AMX Accumulators added_at(int64_t key) const {
    if constexpr ((kForm & kFetched) != 0) return scores_at(added_);
    Accumulators added;
    for (size_t x = 0; x < 2; ++x) {
      added.column[x] = const_cast<float*>(columns_[x].distance) - (key - keys_.first) * columns_[x].step;
      added.stride[x] = -columns_[x].step;
    }
    return added;
  }
  /// Scores of a strip, of which add_elements() knows, and kPairs pairs of weights beside each step.
  template <int kPairs, int kBeside>
  FOVEA_AMX_INLINE void score(int64_t key, const Accumulators* before, Weights& w) {
    if constexpr ((kForm & kAdded) != 0) {
      const Accumulators added = added_at(key);
      multiply<kPairs, kBeside, kParts, Of::kScores>(scores_of(key), before, &added, w);
    } else {
      multiply<kPairs, kBeside, kParts, Of::kScores>(scores_of(key), before, nullptr, w);
    }
  }

  FOVEA_AMX void set_offsets();
  FOVEA_AMX void mask(int64_t key, float* scores) const;
  FOVEA_AMX void run_program(int64_t key, float* scores) const;
  FOVEA_AMX void add_elements(int64_t key) const;
  FOVEA_AMX void set_terms(int64_t key, float* scores, Weights& w) const;
  FOVEA_AMX __m512 largest(const Weights& w, int x) const;
  FOVEA_AMX void refer(const Weights& w);
  FOVEA_AMX void raise(const __m512* top, const __mmask16* rose);
  FOVEA_AMX void drop(int64_t key) const;
  FOVEA_AMX bool rose_too_far(const Weights& w) const;
  /// Of a strip whose terms are set.
  FOVEA_AMX bool sees_all(const Weights& w) const {
    const __m512i both = _mm512_and_si512(w.seen[0], w.seen[1]);
    return _mm512_cmpneq_epi32_mask(both, _mm512_set1_epi32(-1)) == 0;
  }
  FOVEA_AMX void score_again(int64_t key, float* scores, Weights& w);
  FOVEA_AMX void weigh_again(int64_t turn, float* scores, __m512* sum);
  FOVEA_AMX void begin_strip(int64_t key, Weights& w);
  template <int kPairs, int kBeside>
  FOVEA_AMX void add_values(int64_t turn, int64_t part, int64_t parts, Weights& w);
  template <int kPairs, int kBeside>
  FOVEA_AMX void weigh_strip(int64_t key, Weights& w);
  FOVEA_AMX void end_turn(int64_t turn, float* last_scores, Weights& w);
  FOVEA_AMX void store_pending() {
    if (in_tiles_) store(pending_);
    in_tiles_ = false;
  }

  const AttendKeys& keys_;
  Columns& columns_;
  float* scores_;
  float* added_;  ///< [keys of a strip][kWidth], where what scores begin with is not read as it lies
  uint32_t* pairs_;
  int64_t turn_;  ///< keys whose weights meet V at once, a power of two
  int64_t first_, end_;
  __m512 offset_[2];    ///< 1/2 - m
  __m512 total_[2];     ///< of the weights of whole turns
  bool fresh_ = false;  ///< some row has seen no key yet
  bool has_o_;  ///< O is there: not before the values of a turn are added to one that begins from zero
  Accumulators pending_;
  bool in_tiles_ = false;  ///< the accumulators of pending_ are still in the tiles
  const void* elements_[kWidth];
  float factors_[kWidth];
};

/// Rows that have seen no key yet have a reference of 0: their scores are all -inf.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::set_offsets() {
  fresh_ = false;
  for (size_t x = 0; x < 2; ++x) {
    const __m512 reference = _mm512_loadu_ps(columns_[x].row_max);
    const __mmask16 unseen = _mm512_cmp_ps_mask(reference, _mm512_set1_ps(-kInfinity), _CMP_EQ_OQ);
    fresh_ = fresh_ || unseen != 0;
    offset_[x] =
        _mm512_mask_mov_ps(_mm512_sub_ps(_mm512_set1_ps(0.5f), reference), unseen, _mm512_set1_ps(0.5f));
  }
}

/// The scores of keys that a row does not see become -inf.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::mask(int64_t key, float* scores) const {
  for (size_t x = 0; x < 2; ++x) {
    const Column& column = columns_[x];
    if (column.all.begin <= key && key + kStrip <= column.all.end) continue;
    const __m512i begin = _mm512_loadu_si512(column.begin), end = _mm512_loadu_si512(column.end);
    for (int64_t j = 0; j < kStrip; ++j) {
      const __m512i position = _mm512_set1_epi32(static_cast<int>(key + j));
      const __mmask16 sees =
          _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(begin, position), position, end);
      float* row = scores + j * kWidth + static_cast<int64_t>(x) * kTile;
      _mm512_storeu_ps(row, _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), sees, _mm512_loadu_ps(row)));
    }
  }
}

/// Makes scores of the products of a strip.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::run_program(int64_t key, float* scores) const {
  const AttendProgram& program = *keys_.program;
  if (program.product_scale != 1.0f) {
    for (int64_t i = 0; i < kStrip * kWidth; ++i) scores[i] *= program.product_scale;
  }
  alignas(64) int32_t query[kWidth], head[kWidth];
  for (size_t x = 0; x < 2; ++x) {
    std::copy_n(columns_[x].query, kTile, query + x * kTile);
    std::copy_n(columns_[x].head, kTile, head + x * kTile);
  }
  ProgramInputs inputs = *program.inputs;
  inputs.query = query;
  inputs.head = head;
  inputs.lanes = kWidth;
  inputs.first_key = key;
  inputs.keys = std::min(kStrip, keys_.end - key);
  inputs.tiles[kScoreTile] = scores;
  program.run(*program.program, inputs);
}

/// What elements and distances add to a strip. Keys that do not exist have 0.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::add_elements(int64_t key) const {
  const int64_t n = std::min(kStrip, keys_.end - key), bytes = size_of(columns_[0].dtype);
  const int64_t offset = (key - keys_.first) * bytes;
  const void* rows[kWidth];
  for (int64_t x = 0; x < kWidth; ++x) rows[x] = static_cast<const char*>(elements_[x]) + offset;
  keys_.key_elements(rows, columns_[0].dtype, kWidth, n, factors_, added_, kWidth);
  std::fill(added_ + n * kWidth, added_ + kStrip * kWidth, 0.0f);
  for (size_t x = 0; x < 2; ++x) {
    const Column& column = columns_[x];
    if (column.distance == nullptr) continue;
    for (int64_t j = 0; j < n; ++j) {
      float* to = added_ + j * kWidth + static_cast<int64_t>(x) * kTile;
      const float* from = column.distance - (key - keys_.first + j) * column.step;
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_loadu_ps(from)));
    }
  }
}

/// Terms of the scores of a strip: those in memory, and those that come beside the softmax.
template <int kForm, int kParts>
FOVEA_AMX_INLINE void Pass<kForm, kParts>::set_terms(int64_t key, float* scores, Weights& w) const {
  if (keys_.program != nullptr) run_program(key, scores);
  mask(key, scores);
  w.scores = scores;
  w.pairs = pairs_of(key);
  w.part = turn_ * kWidth;
  w.left = kPairsOfStrip;
  [[maybe_unused]] const int64_t at = key - keys_.first;
  if constexpr ((kForm & kFetched) != 0) {
    // No prefetcher follows so many rows, and all lines at once would wait for the 16 buffers of a core. Rows a page apart meet in one
    // set of the first-level cache, so they come to the second. Behind the last strip the next queries begin, if rows lie side by side.
    const int64_t bytes = size_of(columns_[0].dtype), to = at + kFetchedStrips * kStrip,
                  all = keys_.end - keys_.first;
    const int64_t next_rows = static_cast<const char*>(elements_[1]) - static_cast<const char*>(elements_[0]);
    w.ahead = elements_;
    w.ahead_bytes = to < all ? to * bytes : (to - all) * bytes + kWidth * next_rows;
    w.next_line = kStrip * bytes - 64;
  }
  if constexpr ((kForm & kMasked) != 0) {
    w.bit = kBits.bit;
    for (size_t x = 0; x < 2; ++x) w.seen[x] = words_of_strip(keys_, columns_[x], key);
  }
}

/// The largest score of a strip, in units of log2, by row.
template <int kForm, int kParts>
FOVEA_AMX __m512 Pass<kForm, kParts>::largest(const Weights& w, int x) const {
  const __m512 lowest = _mm512_set1_ps(-kInfinity);
  __m512 top = lowest;
  for (int64_t j = 0; j < kStrip; ++j) {
    __m512 score = _mm512_mul_ps(_mm512_loadu_ps(w.scores + j * kWidth + x * kTile), w.factor);
    if constexpr ((kForm & kMasked) != 0)
      score =
          _mm512_mask_mov_ps(lowest, _mm512_test_epi32_mask(w.seen[x], _mm512_set1_epi32(w.bit[j])), score);
    top = _mm512_max_ps(top, score);
  }
  // 1/2 - m is exact then, so that every weight has the same reference.
  if constexpr (kParts > 1) top = _mm512_roundscale_ps(top, 8 << 4);
  return top;
}

/// Rows that have seen no key yet take the largest score of the strip as their reference.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::refer(const Weights& w) {
  for (size_t x = 0; x < 2; ++x) {
    float* row_max = columns_[x].row_max;
    const __m512 reference = _mm512_loadu_ps(row_max);
    const __mmask16 unseen = _mm512_cmp_ps_mask(reference, _mm512_set1_ps(-kInfinity), _CMP_EQ_OQ);
    _mm512_storeu_ps(row_max, _mm512_mask_mov_ps(reference, unseen, largest(w, static_cast<int>(x))));
  }
  set_offsets();
}

/// Clears the weights of a strip that dropout leaves out.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::drop(int64_t key) const {
  for (size_t x = 0; x < 2; ++x) {
    if (columns_[x].kept == nullptr) continue;
    for (int part = 0; part < kParts; ++part) {
      uint32_t* pairs = pairs_of(key) + part * turn_ * kWidth + static_cast<int64_t>(x) * kTile;
      const uint8_t* kept = columns_[x].kept + (key - keys_.first) / 2 * kKeptBytes;
      for (int64_t j = 0; j < kPairsOfStrip; ++j, pairs += kWidth, kept += kKeptBytes) {
        __mmask32 keeps;
        std::memcpy(&keeps, kept, sizeof keeps);
        _mm512_storeu_si512(pairs, _mm512_maskz_mov_epi16(keeps, _mm512_loadu_si512(pairs)));
      }
    }
  }
}

}  // namespace fovea::cpu::amx

#endif
