// The forward step on AMX tiles: panels of queries against a run of neighbouring blocks of keys.
//
//   for each 32 queries, for each strip of 32 keys          beside each other:
//     tiles    O^T += V^T P^T   a part of the strips before
//     tiles    S^T = K Q^T      of the next strip
//     vectors  P^T = exp2(factor * S^T - m)   of this strip
//
// After each product of tiles stand a few vectors of the softmax. A product takes 16 cycles, in which 16 multiply-adds of 512 bits
// start (one port of two, while tiles work): neither waits for the other as long as both stand within the reach of the
// out-of-order window.
//
// 32 queries are two columns of tiles: scores of a strip (4 KB), weights of two turns of keys (8 or 16 KB), and Q and O (24 KB at
// head size 128) stay in a first-level cache of 48 KB. K and V come from the second-level cache by loads that do not take their place
// (TILELOADDT1). The accumulators of a block of products are stored one by one where the next block begins with them, not all at its end:
// a store takes 16 cycles, too.
//
// The reference m is an earlier maximum of the row, not the present one: the scores need no pass of their own to find it,
// and O is not rescaled. Weights are then above 1 where scores rise; where their sum over a turn says that they rise too far, the row
// takes the maximum of the turn, and the turn is weighed again. Where terms of the distance (ALiBi) make scores rise strip by strip, rows
// look at the strip to which the most is added before they begin.
//
// Terms of the score: what is added to it and whether a key is seen come beside the softmax, a load and an addition, and a bit that is
// tested. Strips that none of the 32 queries sees are left out. Programs of expressions run over a strip between tiles and softmax.
#include "cpu/program.hpp"  // before a constant of the name of one of its enumerators

#include "cpu/attend_amx_steps.hpp"
#include "cpu/scratch.hpp"
#include "tile/log2.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>

namespace fovea::cpu {

using namespace amx;

namespace {

constexpr int64_t kMostTurn = kAttendKeys;
// Scores of 9 / log2(e) = 6 above m, or as much of many smaller ones: weights keep their precision at any size, and the
// sums of float32 have room for 2^100 more.
constexpr float kLargestSum = 512.0f;
// Rows of elements are fetched so far ahead: memory takes as long as half a strip, under load as two.
constexpr int64_t kFetchedStrips = 4;
// Where so much more is added to a strip, in units of log2, weights would rise too far on the way to it.
constexpr float kSteep = 6.0f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

static_assert(kAttendScratch == (3 * kStrip + kMostTurn / 2 * kAttendParts) * kWidth + 3 * kTile);
static_assert(kMostTurn <= kMostTurn / 2 * kAttendParts);
static_assert(kSeenKeys == kStrip);

/// 16 queries of a panel.
struct Column {
  const float* queries;  ///< words at row stride kPanel
  float *row_max, *row_sum;
  float* o;
  int64_t o_stride;
  const int32_t *begin, *end;
  tile::Range any, all;
  const uint8_t* kept;
  const int32_t *query, *head;
  const float* distance;
  int64_t step;
  const void* const* elements;
  DType dtype;
  const uint32_t* seen;  ///< at row stride kPanel
};
using Columns = std::array<Column, 2>;

/// As many strips as O has blocks of rows, so that each goes beside one of them; P of two turns has to stay in the first-level cache.
constexpr int64_t turn_of(int64_t columns, int parts) {
  return columns > 3 * kStrip && parts == 1 ? kMostTurn : kMostTurn / 2;
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
        end_(range.end) {
    for (size_t x = 0; x < 2; ++x) {
      total_[x] = _mm512_loadu_ps(columns[x].row_sum);
      if constexpr ((kForm & kFetched) != 0) std::copy_n(columns[x].elements, kTile, elements_ + x * kTile);
    }
    set_offsets();
  }

  template <int kPairs>
  FOVEA_AMX void run();

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
  static Accumulators scores_at(float* scores) { return {{scores, scores + kTile}, {kWidth, kWidth}}; }

  FOVEA_AMX void set_offsets();
  FOVEA_AMX void mask(int64_t key, float* scores) const;
  FOVEA_AMX void run_program(int64_t key, float* scores) const;
  FOVEA_AMX void add_elements(int64_t key) const;
  FOVEA_AMX void add_where_seen(int64_t key, Weights& w) const;
  FOVEA_AMX void set_terms(int64_t key, float* scores, Weights& w) const;
  FOVEA_AMX __m512 largest(const Weights& w, int x) const;
  FOVEA_AMX void refer(const Weights& w);
  FOVEA_AMX int64_t steepest_strip() const;
  FOVEA_AMX void look_ahead();
  FOVEA_AMX void raise(const __m512* top, const __mmask16* rose);
  FOVEA_AMX void drop(int64_t key) const;
  FOVEA_AMX bool rose_too_far(const Weights& w) const;
  FOVEA_AMX void score_again(int64_t key, float* scores, Weights& w) const;
  FOVEA_AMX void weigh_again(int64_t turn, float* scores, __m512* sum);
  FOVEA_AMX void begin_strip(int64_t key, Weights& w);
  template <int kPairs>
  FOVEA_AMX void add_values(int64_t turn, int64_t part, int64_t parts, Weights& w);
  FOVEA_AMX void end_turn(int64_t turn, Weights& w);
  FOVEA_AMX void store_pending() {
    if (in_tiles_) store(pending_);
    in_tiles_ = false;
  }

  const AttendKeys& keys_;
  Columns& columns_;
  float* scores_;
  float* added_;  ///< [keys of a strip][kWidth], where they are not read as they lie
  uint32_t* pairs_;
  int64_t turn_;  ///< keys whose weights meet V at once, a power of two
  int64_t first_, end_;
  __m512 offset_[2];    ///< 1/2 - m
  __m512 total_[2];     ///< of the weights of whole turns
  bool fresh_ = false;  ///< some row has seen no key yet
  Accumulators pending_;
  bool in_tiles_ = false;  ///< the accumulators of pending_ are still in the tiles
  const void* elements_[kWidth];
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

/// What elements and distances add to a strip, in units of log2. Keys that do not exist have 0.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::add_elements(int64_t key) const {
  const int64_t n = std::min(kStrip, keys_.end - key), bytes = size_of(columns_[0].dtype);
  const int64_t offset = (key - keys_.first) * bytes;
  const void* rows[kWidth];
  for (int64_t x = 0; x < kWidth; ++x) rows[x] = static_cast<const char*>(elements_[x]) + offset;
  keys_.key_elements(rows, columns_[0].dtype, kWidth, n, tile::kLog2e, added_, kWidth);
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

/// Where a band hides keys, what is added to their scores is 0: -inf and +inf are no number.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::add_where_seen(int64_t key, Weights& w) const {
  for (size_t x = 0; x < 2; ++x) {
    const Column& column = columns_[x];
    const bool inside = column.all.begin <= key && key + kStrip <= column.all.end;
    const __m512i begin = _mm512_loadu_si512(column.begin), end = _mm512_loadu_si512(column.end);
    for (int64_t j = 0; j < kStrip; ++j) {
      const __m512i position = _mm512_set1_epi32(static_cast<int>(key + j));
      const __mmask16 sees =
          _mm512_mask_cmplt_epi32_mask(_mm512_cmple_epi32_mask(begin, position), position, end);
      const __m512 added = _mm512_loadu_ps(w.added[x] + j * w.step);
      _mm512_storeu_ps(added_ + j * kWidth + static_cast<int64_t>(x) * kTile,
                       inside ? added : _mm512_maskz_mov_ps(sees, added));
    }
    w.added[x] = added_ + x * kTile;
  }
  w.step = kWidth;
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
  const int64_t at = key - keys_.first;
  if constexpr ((kForm & kAdded) != 0) {
    if constexpr ((kForm & kFetched) != 0) {
      add_elements(key);
      for (size_t x = 0; x < 2; ++x) w.added[x] = added_ + x * kTile;
      w.step = kWidth;
      // No prefetcher follows so many rows, and all lines at once would wait for the 16 buffers of a core. Rows a page apart meet in one
      // set of the first-level cache, so they come to the second. Behind the last strip the next queries begin, if rows lie side by side.
      const int64_t bytes = size_of(columns_[0].dtype), to = at + kFetchedStrips * kStrip,
                    all = keys_.end - keys_.first;
      const int64_t next_rows =
          static_cast<const char*>(elements_[1]) - static_cast<const char*>(elements_[0]);
      w.ahead = elements_;
      w.ahead_bytes = to < all ? to * bytes : (to - all) * bytes + kWidth * next_rows;
      w.next_line = kStrip * bytes - 64;
    } else {
      for (size_t x = 0; x < 2; ++x) w.added[x] = columns_[x].distance - at * columns_[x].step;
      w.step = -columns_[0].step;
    }
    const auto inside = [&](const Column& column) {
      return column.all.begin <= key && key + kStrip <= column.all.end;
    };
    if (!inside(columns_[0]) || !inside(columns_[1])) add_where_seen(key, w);
  }
  if constexpr ((kForm & kMasked) != 0) {
    w.bit = kBits.bit;
    for (size_t x = 0; x < 2; ++x) {
      const uint32_t* seen = columns_[x].seen;
      w.seen[x] =
          seen == nullptr ? _mm512_set1_epi32(-1) : _mm512_loadu_si512(seen + at / kSeenKeys * kPanel);
    }
  }
}

/// The largest score of a strip, in units of log2, by row.
template <int kForm, int kParts>
FOVEA_AMX __m512 Pass<kForm, kParts>::largest(const Weights& w, int x) const {
  const __m512 lowest = _mm512_set1_ps(-kInfinity);
  __m512 top = lowest;
  for (int64_t j = 0; j < kStrip; ++j) {
    __m512 score = _mm512_mul_ps(_mm512_loadu_ps(w.scores + j * kWidth + x * kTile), w.factor);
    if constexpr ((kForm & kAdded) != 0)
      score = _mm512_add_ps(score, _mm512_loadu_ps(w.added[x] + j * w.step));
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

/// Scores of a strip once more.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::score_again(int64_t key, float* scores, Weights& w) const {
  Weights none{};
  multiply<0, kPlain, kParts, Of::kScores>(scores_of(key), nullptr, nullptr, none);
  store({{scores, scores + kTile}, {kWidth, kWidth}});
  set_terms(key, scores, w);
}

/// The strip to which the most is added, judged by a pair in its middle; -1 where that is not much more than what the first strip has.
template <int kForm, int kParts>
FOVEA_AMX int64_t Pass<kForm, kParts>::steepest_strip() const {
  int64_t best = -1;
  float least_rise = kSteep;
  for (const Column& column : columns_) {
    if (column.distance == nullptr) return -1;
    const auto added = [&](int64_t key) {
      return column.distance[kTile / 2 - (key - keys_.first + kStrip / 2) * column.step];
    };
    for (int64_t key = first_ + kStrip; key < end_; key += kStrip) {
      if (const float rise = added(key) - added(first_); rise > least_rise) {
        least_rise = rise;
        best = key;
      }
    }
  }
  return best;
}

/// Rows that will meet far larger scores take one of them as their reference.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::look_ahead() {
  const int64_t strip = steepest_strip();
  if (strip < 0) return;
  Weights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  score_again(strip, scores_, w);
  __m512 top[2];
  __mmask16 rose[2];
  for (size_t x = 0; x < 2; ++x) {
    top[x] = largest(w, static_cast<int>(x));
    const __m512 before = _mm512_loadu_ps(columns_[x].row_max);
    rose[x] = _mm512_cmp_ps_mask(top[x], _mm512_add_ps(before, _mm512_set1_ps(kSteep)), _CMP_GT_OQ);
  }
  if ((rose[0] | rose[1]) != 0) raise(top, rose);
}

/// Those rows of each column that rose take a new reference.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::raise(const __m512* top, const __mmask16* rose) {
  for (size_t x = 0; x < 2; ++x) {
    const Column& column = columns_[x];
    const __m512 before = _mm512_loadu_ps(column.row_max);
    const __m512 reference = _mm512_mask_mov_ps(before, rose[x], top[x]);
    _mm512_storeu_ps(column.row_max, reference);
    // Rows that have seen no key have nothing to bring along.
    const __mmask16 old = _mm512_mask_cmp_ps_mask(rose[x], before, _mm512_set1_ps(-kInfinity), _CMP_NEQ_UQ);
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m512 alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), old,
                                            exp2_of<kParts>(_mm512_add_ps(_mm512_sub_ps(before, reference), half)));
    total_[x] = _mm512_mul_ps(total_[x], alpha);
    for (int64_t row = 0; row < keys_.columns; ++row) {
      float* o = column.o + row * column.o_stride;
      _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), alpha));
    }
  }
  set_offsets();
}

/// Rows whose weights rose too far take the largest score of the turn as their reference; then the turn is weighed again, into
/// `sum`. `scores`: memory of a strip.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::weigh_again(int64_t turn, float* scores, __m512* sum) {
  const int64_t begin = begin_of(turn), end = begin + strips_of(turn) * kStrip;
  __m512 top[2] = {_mm512_set1_ps(-kInfinity), _mm512_set1_ps(-kInfinity)};
  Weights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  for (int64_t key = begin; key < end; key += kStrip) {
    score_again(key, scores, w);
    for (int x = 0; x < 2; ++x) top[x] = _mm512_max_ps(top[x], largest(w, x));
  }
  __mmask16 rose[2];
  for (size_t x = 0; x < 2; ++x)
    rose[x] = _mm512_cmp_ps_mask(sum[x], _mm512_set1_ps(kLargestSum), _CMP_GT_OQ);
  raise(top, rose);
  std::copy_n(offset_, 2, w.offset);
  for (int64_t key = begin; key < end; key += kStrip) {
    score_again(key, scores, w);
    weigh_rest<kForm, kParts>(w);
    drop(key);
  }
  std::copy_n(w.sum, 2, sum);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

/// Brings the scores of a strip from the tiles to the weights.
template <int kForm, int kParts>
FOVEA_AMX_INLINE void Pass<kForm, kParts>::begin_strip(int64_t key, Weights& w) {
  store_pending();
  set_terms(key, pending_.column[0], w);
  if (fresh_) refer(w);
  std::copy_n(offset_, 2, w.offset);
}

/// Part `part` of `parts` of the rows of O, against the values of a turn.
template <int kForm, int kParts>
template <int kPairs>
FOVEA_AMX_INLINE void Pass<kForm, kParts>::add_values(int64_t turn, int64_t part, int64_t parts, Weights& w) {
  const int64_t blocks = (keys_.columns + kStrip - 1) / kStrip;
  Product product = values_of(turn);
  const float* values = product.left;
  for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
    const int64_t row = block * kStrip;
    const Column &a = columns_[0], &b = columns_[1];
    const Accumulators o{{a.o + row * a.o_stride, b.o + row * b.o_stride}, {a.o_stride, b.o_stride}};
    product.left = values + row * product.left_stride;
    if (row + kTile < keys_.columns) {
      multiply<kPairs, kForm, kParts, Of::kValues>(product, in_tiles_ ? &pending_ : nullptr, &o, w);
      pending_ = o;
      in_tiles_ = true;
    } else {
      store_pending();
      multiply_last_rows<kParts>(product, o);
    }
  }
}

template <int kForm, int kParts>
FOVEA_AMX_INLINE bool Pass<kForm, kParts>::rose_too_far(const Weights& w) const {
  const __m512 most = _mm512_set1_ps(kLargestSum);
  return (_mm512_cmp_ps_mask(w.sum[0], most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(w.sum[1], most, _CMP_GT_OQ)) !=
         0;
}

/// Adds the sums of a turn to those of the rows; weighs it again where scores rose too far above the references.
template <int kForm, int kParts>
FOVEA_AMX_INLINE void Pass<kForm, kParts>::end_turn(int64_t turn, Weights& w) {
  if (rose_too_far(w)) {
    if (in_tiles_) {  // scores of the next strip
      pending_ = scores_at(scores_ + kStrip * kWidth);
      store_pending();
    }
    __m512 sum[2] = {w.sum[0], w.sum[1]};
    weigh_again(turn, scores_, sum);
    std::copy_n(sum, 2, w.sum);
  }
  for (size_t x = 0; x < 2; ++x) {
    total_[x] = _mm512_add_ps(total_[x], w.sum[x]);
    w.sum[x] = _mm512_setzero_ps();
  }
}

template <int kForm, int kParts>
template <int kPairs>
FOVEA_AMX void Pass<kForm, kParts>::run() {
  if constexpr ((kForm & kAdded) != 0) look_ahead();
  Weights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  multiply<0, kForm, kParts, Of::kScores>(scores_of(first_), nullptr, nullptr, w);
  pending_ = scores_at(scores_);
  in_tiles_ = true;
  for (int64_t key = first_; key < end_; key += kStrip) {
    const int64_t turn = key & -turn_, next = key + kStrip;
    begin_strip(key, w);
    if (turn > first_) add_values<kPairs>(turn - turn_, (key - begin_of(turn)) / kStrip, strips_of(turn), w);
    if (next < end_) {
      multiply<kPairs, kForm, kParts, Of::kScores>(scores_of(next), in_tiles_ ? &pending_ : nullptr, nullptr,
                                                   w);
      pending_ = scores_at(scores_);
      in_tiles_ = true;
    } else {
      store_pending();
    }
    weigh_rest<kForm, kParts>(w);
    drop(key);
    // GCC does not know that a tile load reads memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if ((next & (turn_ - 1)) == 0 || next >= end_) end_turn(turn, w);
  }
  add_values<kPairs>((end_ - 1) & -turn_, 0, 1, w);
  store_pending();
  for (size_t x = 0; x < 2; ++x) _mm512_storeu_ps(columns_[x].row_sum, total_[x]);
}

/// A column beside an odd one: it computes the same, and what it writes is forgotten.
Column shadow_of(const Column& column, float* scratch) {
  Column shadow = column;
  shadow.o = scratch;
  shadow.o_stride = 0;
  shadow.row_max = scratch + kTile;
  shadow.row_sum = scratch + 2 * kTile;
  std::fill_n(shadow.o, kTile, 0.0f);
  std::copy_n(column.row_max, kTile, shadow.row_max);
  std::copy_n(column.row_sum, kTile, shadow.row_sum);
  return shadow;
}

template <int kForm, int kParts>
FOVEA_AMX void attend_strips(const AttendKeys& keys, Columns& columns, float* scratch, tile::Range range) {
  // Steps of tiles beside which the weights of a strip are made: its scores, and half of the values of a turn.
  const int64_t steps = keys.words / kTile + keys.columns / kStrip;
  Pass<kForm, kParts> pass(keys, columns, scratch, range);
  if constexpr (kParts > 1) return pass.template run<1>();
  if (steps >= kPairsOfStrip) return pass.template run<1>();
  if (steps >= kPairsOfStrip / 2) return pass.template run<2>();
  if (steps >= kPairsOfStrip / 4) return pass.template run<4>();
  pass.template run<8>();
}

template <int kParts>
FOVEA_AMX void attend_form(int form, const AttendKeys& keys, Columns& columns, float* scratch,
                           tile::Range range) {
  switch (form) {
    case kAdded:
      return attend_strips<kAdded, kParts>(keys, columns, scratch, range);
    case kMasked:
      return attend_strips<kMasked, kParts>(keys, columns, scratch, range);
    case kAdded | kMasked:
      return attend_strips<kAdded | kMasked, kParts>(keys, columns, scratch, range);
    case kAdded | kFetched:
      return attend_strips<kAdded | kFetched, kParts>(keys, columns, scratch, range);
    case kAdded | kFetched | kMasked:
      return attend_strips<kAdded | kFetched | kMasked, kParts>(keys, columns, scratch, range);
    default:
      return attend_strips<kPlain, kParts>(keys, columns, scratch, range);
  }
}

/// Whether a row of either column sees a key of the strip.
FOVEA_AMX bool sees_some(const Columns& columns, int64_t strip) {
  __m512i any = _mm512_setzero_si512();
  for (const Column& column : columns) {
    if (column.seen == nullptr) return true;
    any = _mm512_or_si512(any, _mm512_loadu_si512(column.seen + strip * kPanel));
  }
  return _mm512_test_epi32_mask(any, any) != 0;
}

FOVEA_AMX void attend_columns(const AttendKeys& keys, Columns& columns, float* scratch) {
  using Attend = void (*)(int, const AttendKeys&, Columns&, float*, tile::Range);
  static constexpr Attend kAttend[] = {attend_form<1>, attend_form<2>, attend_form<3>};
  const bool masked = columns[0].seen != nullptr || columns[1].seen != nullptr;
  const int added = columns[0].elements != nullptr   ? kAdded | kFetched
                    : columns[0].distance != nullptr ? kAdded
                                                     : kPlain;
  const int form = added | (masked ? kMasked : kPlain);
  const Attend attend = kAttend[keys.parts - 1];
  const int64_t end = std::min(keys.end, std::max(columns[0].any.end, columns[1].any.end));
  int64_t key = std::max(keys.first, std::min(columns[0].any.begin, columns[1].any.begin)) & -kStrip;
  while (key < end) {
    const auto sees = [&](int64_t at) { return !masked || sees_some(columns, (at - keys.first) / kStrip); };
    if (!sees(key)) {
      key += kStrip;
      continue;
    }
    // A strip without a key that is seen takes less time than to end and begin again.
    int64_t last = key + kStrip, skipped = 0;
    for (; last < end && skipped < 2; last += kStrip) skipped = sees(last) ? 0 : skipped + 1;
    attend(form, keys, columns, scratch, {key, std::min(end, last - skipped * kStrip)});
    key = last;
  }
}

/// Results below 2^-126 are 0 while it lives: those that are subnormal take a hundred times as long, and steep terms make many.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero); }
  ~WithoutSubnormals() { _mm_setcsr(before_); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;
  WithoutSubnormals& operator=(const WithoutSubnormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  unsigned before_;
};

}  // namespace

FOVEA_AMX void attend_amx(const AttendKeys& keys, const AttendPanel* panels, int64_t count, float* scratch) {
  _tile_loadconfig(&kTileConfig);
  const WithoutSubnormals mode;
  Columns columns;
  size_t waiting = 0;
  for (int64_t x = 0; x < count; ++x) {
    const AttendPanel& panel = panels[x];
    for (int v = 0; v < panel.rows; v += kTile) {
      columns[waiting++] = {panel.queries + v,
                            panel.row_max + v,
                            panel.row_sum + v,
                            panel.o + v,
                            kPanel,
                            panel.begin + v,
                            panel.end + v,
                            panel.any,
                            panel.all,
                            panel.kept == nullptr ? nullptr : panel.kept + v / 4,
                            panel.query + v,
                            panel.head + v,
                            panel.distance == nullptr ? nullptr : panel.distance + v,
                            panel.step,
                            panel.elements == nullptr ? nullptr : panel.elements + v,
                            panel.dtype,
                            panel.seen == nullptr ? nullptr : panel.seen + v};
      if (waiting == 2) attend_columns(keys, columns, scratch);
      waiting %= 2;
    }
  }
  if (waiting == 1) {
    columns[1] = shadow_of(columns[0], scratch + kAttendScratch - 3 * kTile);
    attend_columns(keys, columns, scratch);
  }
  _tile_release();
}

}  // namespace fovea::cpu

#endif
