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
// takes the maximum of the turn, and the turn is weighed again.
#include "cpu/attend_amx_steps.hpp"
#include "cpu/scratch.hpp"

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
constexpr float kInfinity = std::numeric_limits<float>::infinity();

static_assert(kAttendScratch == (2 * kStrip + kMostTurn) * kWidth + 3 * kTile);

/// 16 queries of a panel.
struct Column {
  const float* queries;  ///< words at row stride kPanel
  float *row_max, *row_sum;
  float* o;
  int64_t o_stride;
  const int32_t *begin, *end;
  tile::Range any, all;
  const uint8_t* kept;
};
using Columns = std::array<Column, 2>;

/// As many strips as O has blocks of rows, so that each goes beside one of them; P of two turns has to stay in the first-level cache.
constexpr int64_t turn_of(int64_t columns) {
  return columns > 3 * kStrip ? kMostTurn : kMostTurn / 2;
}

/// Two columns against the keys [first, end) of a run.
///
/// Weights stay in registers as long as their address is known to no function that is called: those that are not inlined get copies.
class Pass {
 public:
  FOVEA_AMX Pass(const AttendKeys& keys, Columns& columns, float* scratch)
      : keys_(keys),
        columns_(columns),
        scores_(scratch),
        pairs_(reinterpret_cast<uint32_t*>(scratch + 2 * kStrip * kWidth)),
        turn_(turn_of(keys.columns)),
        first_(std::max(keys.first, std::min(columns[0].any.begin, columns[1].any.begin)) & -turn_),
        end_(std::min(keys.end, std::max(columns[0].any.end, columns[1].any.end))) {
    for (size_t x = 0; x < 2; ++x) total_[x] = _mm512_loadu_ps(columns[x].row_sum);
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
            keys_.words};
  }
  FOVEA_AMX Product values_of(int64_t turn) const {
    const Operand& values = keys_.blocks[(turn - keys_.first) / kAttendKeys].values;
    const auto* pairs = reinterpret_cast<const float*>(pairs_of(turn));
    return {values.data + (turn - keys_.first) % kAttendKeys / 2,
            values.row_stride,
            {pairs, pairs + kTile},
            kWidth,
            strips_of(turn) * kPairsOfStrip};
  }
  /// The weights of key and those behind it.
  uint32_t* pairs_of(int64_t key) const { return pairs_ + (key & (2 * turn_ - 1)) / 2 * kWidth; }
  int64_t strips_of(int64_t turn) const { return ceil_div(std::min(turn_, end_ - turn), kStrip); }
  static Accumulators scores_at(float* scores) { return {{scores, scores + kTile}, {kWidth, kWidth}}; }

  FOVEA_AMX void set_offsets();
  FOVEA_AMX void mask(int64_t key, float* scores) const;
  FOVEA_AMX __m512 largest(const float* scores, size_t x) const;
  FOVEA_AMX void refer(const float* scores);
  FOVEA_AMX void drop(int64_t key) const;
  FOVEA_AMX bool rose_too_far(const Weights& w) const;
  FOVEA_AMX float* score_again(int64_t key, float* scores) const;
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
  uint32_t* pairs_;
  int64_t turn_;  ///< keys whose weights meet V at once, a power of two
  int64_t first_, end_;
  __m512 offset_[2];    ///< 1/2 - m
  __m512 total_[2];     ///< of the weights of whole turns
  bool fresh_ = false;  ///< some row has seen no key yet
  Accumulators pending_;
  bool in_tiles_ = false;  ///< the accumulators of pending_ are still in the tiles
};

/// Rows that have seen no key yet have a reference of 0: their scores are all -inf.
FOVEA_AMX void Pass::set_offsets() {
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
FOVEA_AMX void Pass::mask(int64_t key, float* scores) const {
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

/// The largest score of a strip, in units of log2, by row.
FOVEA_AMX __m512 Pass::largest(const float* scores, size_t x) const {
  const __m512 factor = _mm512_set1_ps(keys_.factor);
  __m512 top = _mm512_set1_ps(-kInfinity);
  for (int64_t j = 0; j < kStrip; ++j)
    top = _mm512_max_ps(
        top, _mm512_mul_ps(_mm512_loadu_ps(scores + j * kWidth + static_cast<int64_t>(x) * kTile), factor));
  return top;
}

/// Rows that have seen no key yet take the largest score of the strip as their reference.
FOVEA_AMX void Pass::refer(const float* scores) {
  for (size_t x = 0; x < 2; ++x) {
    float* row_max = columns_[x].row_max;
    const __m512 reference = _mm512_loadu_ps(row_max);
    const __mmask16 unseen = _mm512_cmp_ps_mask(reference, _mm512_set1_ps(-kInfinity), _CMP_EQ_OQ);
    _mm512_storeu_ps(row_max, _mm512_mask_mov_ps(reference, unseen, largest(scores, x)));
  }
  set_offsets();
}

/// Clears the weights of a strip that dropout leaves out.
FOVEA_AMX void Pass::drop(int64_t key) const {
  for (size_t x = 0; x < 2; ++x) {
    if (columns_[x].kept == nullptr) continue;
    uint32_t* pairs = pairs_of(key) + static_cast<int64_t>(x) * kTile;
    const uint8_t* kept = columns_[x].kept + (key - keys_.first) / 2 * kKeptBytes;
    for (int64_t j = 0; j < kPairsOfStrip; ++j, pairs += kWidth, kept += kKeptBytes) {
      __mmask32 keeps;
      std::memcpy(&keeps, kept, sizeof keeps);
      _mm512_storeu_si512(pairs, _mm512_maskz_mov_epi16(keeps, _mm512_loadu_si512(pairs)));
    }
  }
}

/// Scores of a strip once more.
FOVEA_AMX float* Pass::score_again(int64_t key, float* scores) const {
  Weights none{};
  multiply<0>(scores_of(key), nullptr, nullptr, none);
  store({{scores, scores + kTile}, {kWidth, kWidth}});
  mask(key, scores);
  return scores;
}

/// Rows whose weights rose too far take the largest score of the turn as their reference; then the turn is weighed again, into
/// `sum`. `scores`: memory of a strip.
FOVEA_AMX void Pass::weigh_again(int64_t turn, float* scores, __m512* sum) {
  const int64_t end = turn + strips_of(turn) * kStrip;
  __m512 top[2] = {_mm512_set1_ps(-kInfinity), _mm512_set1_ps(-kInfinity)};
  for (int64_t key = turn; key < end; key += kStrip) {
    score_again(key, scores);
    for (size_t x = 0; x < 2; ++x) top[x] = _mm512_max_ps(top[x], largest(scores, x));
  }
  for (size_t x = 0; x < 2; ++x) {
    const Column& column = columns_[x];
    const __mmask16 rose = _mm512_cmp_ps_mask(sum[x], _mm512_set1_ps(kLargestSum), _CMP_GT_OQ);
    const __m512 before = _mm512_loadu_ps(column.row_max);
    const __m512 reference = _mm512_mask_mov_ps(before, rose, top[x]);
    _mm512_storeu_ps(column.row_max, reference);
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m512 alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), rose,
                                            exp2_of(_mm512_add_ps(_mm512_sub_ps(before, reference), half)));
    total_[x] = _mm512_mul_ps(total_[x], alpha);
    for (int64_t row = 0; row < keys_.columns; ++row) {
      float* o = column.o + row * column.o_stride;
      _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), alpha));
    }
  }
  set_offsets();
  Weights w{scores,
            nullptr,
            0,
            _mm512_set1_ps(keys_.factor),
            {offset_[0], offset_[1]},
            {_mm512_setzero_ps(), _mm512_setzero_ps()}};
  for (int64_t key = turn; key < end; key += kStrip) {
    w.scores = score_again(key, scores);
    w.pairs = pairs_of(key);
    w.left = kPairsOfStrip;
    weigh_rest(w);
    drop(key);
  }
  std::copy_n(w.sum, 2, sum);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

/// Brings the scores of a strip from the tiles to the weights.
FOVEA_AMX_INLINE void Pass::begin_strip(int64_t key, Weights& w) {
  store_pending();
  float* scores = pending_.column[0];
  mask(key, scores);
  if (fresh_) refer(scores);
  w.scores = scores;
  w.pairs = pairs_of(key);
  w.left = kPairsOfStrip;
  std::copy_n(offset_, 2, w.offset);
}

/// Part `part` of `parts` of the rows of O, against the values of a turn.
template <int kPairs>
FOVEA_AMX_INLINE void Pass::add_values(int64_t turn, int64_t part, int64_t parts, Weights& w) {
  const int64_t blocks = (keys_.columns + kStrip - 1) / kStrip;
  Product product = values_of(turn);
  const float* values = product.left;
  for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
    const int64_t row = block * kStrip;
    const Column &a = columns_[0], &b = columns_[1];
    const Accumulators o{{a.o + row * a.o_stride, b.o + row * b.o_stride}, {a.o_stride, b.o_stride}};
    product.left = values + row * product.left_stride;
    if (row + kTile < keys_.columns) {
      multiply<kPairs>(product, in_tiles_ ? &pending_ : nullptr, &o, w);
      pending_ = o;
      in_tiles_ = true;
    } else {
      store_pending();
      multiply_last_rows(product, o);
    }
  }
}

FOVEA_AMX_INLINE bool Pass::rose_too_far(const Weights& w) const {
  const __m512 most = _mm512_set1_ps(kLargestSum);
  return (_mm512_cmp_ps_mask(w.sum[0], most, _CMP_GT_OQ) | _mm512_cmp_ps_mask(w.sum[1], most, _CMP_GT_OQ)) !=
         0;
}

/// Adds the sums of a turn to those of the rows; weighs it again where scores rose too far above the references.
FOVEA_AMX_INLINE void Pass::end_turn(int64_t turn, Weights& w) {
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

template <int kPairs>
FOVEA_AMX void Pass::run() {
  if (first_ >= end_) return;
  Weights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  multiply<0>(scores_of(first_), nullptr, nullptr, w);
  pending_ = scores_at(scores_);
  in_tiles_ = true;
  for (int64_t key = first_; key < end_; key += kStrip) {
    const int64_t turn = key & -turn_, next = key + kStrip;
    begin_strip(key, w);
    if (turn > first_) add_values<kPairs>(turn - turn_, (key - turn) / kStrip, strips_of(turn), w);
    if (next < end_) {
      multiply<kPairs>(scores_of(next), in_tiles_ ? &pending_ : nullptr, nullptr, w);
      pending_ = scores_at(scores_);
      in_tiles_ = true;
    } else {
      store_pending();
    }
    weigh_rest(w);
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

FOVEA_AMX void attend_columns(const AttendKeys& keys, Columns& columns, float* scratch) {
  // Steps of tiles beside which the weights of a strip are made: its scores, and half of the values of a turn.
  const int64_t steps = keys.words / kTile + keys.columns / kStrip;
  Pass pass(keys, columns, scratch);
  if (steps >= kPairsOfStrip) return pass.run<1>();
  if (steps >= kPairsOfStrip / 2) return pass.run<2>();
  if (steps >= kPairsOfStrip / 4) return pass.run<4>();
  pass.run<8>();
}

}  // namespace

FOVEA_AMX void attend_amx(const AttendKeys& keys, const AttendPanel* panels, int64_t count, float* scratch) {
  _tile_loadconfig(&kTileConfig);
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
                            panel.kept == nullptr ? nullptr : panel.kept + v / 4};
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
