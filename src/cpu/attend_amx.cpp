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
// Terms of the score: products begin with what is added to it, and whether a key is seen comes beside the softmax, a bit that is
// tested. Strips that none of the 32 queries sees are left out between turns. Programs of expressions run over a strip between tiles and softmax.
#include "cpu/attend_amx_pass.hpp"
#include "cpu/attend_amx_rows.hpp"
#include "cpu/subnormals.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <array>
#include <atomic>

namespace fovea::cpu {

namespace amx {

/// Scores of a strip once more.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::score_again(int64_t key, float* scores, Weights& w) {
  Weights none{};
  if constexpr ((kForm & kFetched) != 0) add_elements(key);
  score<0, kPlain>(key, nullptr, none);
  store({{scores, scores + kTile}, {kWidth, kWidth}});
  set_terms(key, scores, w);
}

/// Rows that will meet far larger scores take one of this strip as their reference: those of columns that `takes` names.
template <int kForm, int kParts>
FOVEA_AMX void Pass<kForm, kParts>::look_ahead(const std::array<bool, 2>& takes) {
  Weights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  score_again(first_, scores_, w);
  const __m512 top[2] = {largest(w, 0), largest(w, 1)};
  __mmask16 rose[2] = {};
  for (size_t x = 0; x < 2; ++x) {
    const __m512 high = _mm512_add_ps(_mm512_loadu_ps(columns_[x].row_max), _mm512_set1_ps(kSteep));
    if (takes[x]) rose[x] = _mm512_cmp_ps_mask(top[x], high, _CMP_GT_OQ);
  }
  if ((rose[0] | rose[1]) != 0) raise(top, rose);
  for (size_t i = 0; i < 2; ++i) _mm512_storeu_ps(columns_[i].row_sum, total_[i]);
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
    if (old == 0) continue;
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m512 alpha = _mm512_mask_mov_ps(
        _mm512_set1_ps(1.0f), old, exp2_of<kParts>(_mm512_add_ps(_mm512_sub_ps(before, reference), half)));
    total_[x] = _mm512_mul_ps(total_[x], alpha);
    for (int64_t row = 0; has_o_ && row < keys_.columns; ++row) {
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
  set_terms(key, scores_of_strip(key), w);
  if (fresh_) refer(w);
  std::copy_n(offset_, 2, w.offset);
}

/// Part `part` of `parts` of the rows of O, against the values of a turn.
template <int kForm, int kParts>
template <int kPairs, int kBeside>
FOVEA_AMX_INLINE void Pass<kForm, kParts>::add_values(int64_t turn, int64_t part, int64_t parts, Weights& w) {
  const int64_t blocks = (keys_.columns + kStrip - 1) / kStrip;
  const bool begins = columns_[0].fresh && begin_of(turn) == first_;
  Product product = values_of(turn);
  const float* values = product.left;
  for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block) {
    const int64_t row = block * kStrip;
    const Column &a = columns_[0], &b = columns_[1];
    const Accumulators o{{a.o + row * a.o_stride, b.o + row * b.o_stride}, {a.o_stride, b.o_stride}};
    product.left = values + row * product.left_stride;
    if (row + kTile < keys_.columns) {
      multiply<kPairs, kBeside, kParts, Of::kValues>(product, in_tiles_ ? &pending_ : nullptr,
                                                     begins ? nullptr : &o, w);
      pending_ = o;
      in_tiles_ = true;
    } else {
      store_pending();
      multiply_last_rows<kParts>(product, o, begins);
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
FOVEA_AMX_INLINE void Pass<kForm, kParts>::end_turn(int64_t turn, float* last_scores, Weights& w) {
  if (rose_too_far(w)) {
    store_pending();
    __m512 sum[2] = {w.sum[0], w.sum[1]};
    weigh_again(turn, last_scores, sum);
    std::copy_n(sum, 2, w.sum);
  }
  for (size_t x = 0; x < 2; ++x) {
    total_[x] = _mm512_add_ps(total_[x], w.sum[x]);
    w.sum[x] = _mm512_setzero_ps();
  }
}

/// The weights of a strip, beside the scores of the next strip and the values of the turn before.
template <int kForm, int kParts>
template <int kPairs, int kBeside>
FOVEA_AMX_INLINE void Pass<kForm, kParts>::weigh_strip(int64_t key, Weights& w) {
  const int64_t turn = key & -turn_, next = key + kStrip;
  // Scores come first: they are ready, and stored, before the next strip reads them.
  if (next < end_) {
    score<kPairs, kBeside>(next, in_tiles_ ? &pending_ : nullptr, w);
    pending_ = scores_at(scores_of_strip(next));
    in_tiles_ = true;
  }
  if (turn > first_) {
    add_values<kPairs, kBeside>(turn - turn_, (key - begin_of(turn)) / kStrip, strips_of(turn), w);
    has_o_ = true;
  }
  if (pending_.column[0] == scores_of_strip(next)) store_pending();
  weigh_rest<kBeside, kParts>(w);
}

template <int kForm, int kParts>
template <int kPairs>
FOVEA_AMX void Pass<kForm, kParts>::run() {
  Weights w{};
  w.factor = _mm512_set1_ps(keys_.factor);
  if constexpr ((kForm & kFetched) != 0) add_elements(first_);
  score<0, kForm>(first_, nullptr, w);
  store(scores_at(scores_of_strip(first_)));
  for (int64_t key = first_; key < end_; key += kStrip) {
    const int64_t next = key + kStrip;
    begin_strip(key, w);
    // Some time before tiles load them.
    if constexpr ((kForm & kFetched) != 0) {
      if (next < end_) add_elements(next);
    }
    // A test of a bit takes as long as an operation of the softmax: most strips of blocks that are seen in part need none.
    if ((kForm & kMasked) != 0 && sees_all(w)) {
      weigh_strip<kPairs, kForm & ~kMasked>(key, w);
    } else {
      weigh_strip<kPairs, kForm>(key, w);
    }
    drop(key);
    // GCC does not know that a tile load reads memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if ((next & (turn_ - 1)) == 0 || next >= end_) end_turn(key & -turn_, scores_of_strip(key), w);
  }
  add_values<kPairs, kForm>((end_ - 1) & -turn_, 0, 1, w);
  store_pending();
  for (size_t x = 0; x < 2; ++x) {
    _mm512_storeu_ps(columns_[x].row_sum, total_[x]);
    columns_[x].fresh = false;
  }
}

}  // namespace amx

using namespace amx;

namespace {

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

template <int kForm, int kParts>
FOVEA_AMX void look_ahead(const AttendKeys& keys, Columns& columns, float* scratch, int64_t strip,
                          const std::array<bool, 2>& takes) {
  Pass<kForm, kParts>(keys, columns, scratch, {strip, strip + kStrip}).look_ahead(takes);
}

/// What two columns do with strips.
struct Steps {
  void (*attend)(const AttendKeys&, Columns&, float*, tile::Range);
  void (*look_ahead)(const AttendKeys&, Columns&, float*, int64_t, const std::array<bool, 2>&);
};

template <int kForm, int kParts>
constexpr Steps kStepsOf{attend_strips<kForm, kParts>, look_ahead<kForm, kParts>};

template <int kParts>
const Steps& steps_of(bool masked, bool added, bool fetched) {
  static constexpr const Steps* kSteps[2][3] = {
      {&kStepsOf<kPlain, kParts>, &kStepsOf<kAdded, kParts>, &kStepsOf<kAdded | kFetched, kParts>},
      {&kStepsOf<kMasked, kParts>, &kStepsOf<kAdded | kMasked, kParts>,
       &kStepsOf<kAdded | kFetched | kMasked, kParts>}};
  return *kSteps[masked][fetched ? 2 : added ? 1 : 0];
}

/// What the element of the first row and key keys.first + at adds. That of the next queries is fetched, if rows lie side by side.
float element_of(const Column& column, int64_t at) {
  const void* row = column.elements[0];
  const int64_t next_rows = static_cast<const char*>(column.elements[1]) - static_cast<const char*>(row);
  __builtin_prefetch(static_cast<const char*>(row) + kWidth * next_rows + at * size_of(column.dtype));
  const float element = column.dtype == DType::kF16    ? to_float(static_cast<const F16*>(row)[at])
                        : column.dtype == DType::kBF16 ? to_float(static_cast<const Bf16*>(row)[at])
                                                       : static_cast<const float*>(row)[at];
  return element * column.factors[0];
}

/// The strip of a run to which the most is added, judged by the first row and a key that exists; -1 where that is not much more than what the first strip
/// has. It depends on no other column, so that results do not depend on the height of tiles.
int64_t steepest_strip(const AttendKeys& keys, const Column& column) {
  const int64_t first = std::max(keys.first, column.any.begin) & -kStrip,
                end = std::min(keys.end, column.any.end);
  if (first >= end) return -1;
  const bool by_distance = column.distance != nullptr;
  const auto added = [&](int64_t key) {
    const int64_t at = std::min(key + kStrip / 2, end - 1) - keys.first;
    return keys.factor * (by_distance ? column.distance[-at * column.step] : element_of(column, at));
  };
  const float at_first = added(first);
  float least = at_first + (by_distance ? kSteep : kSteepElements);
  // Elements of all strips are fetched where that of the last says that it may be worth it.
  if (const float last = by_distance ? kInfinity : added((end - 1) & -kStrip);
      last <= least && last != -kInfinity)
    return -1;
  int64_t best = -1;
  for (int64_t key = first + kStrip; key < end; key += kStrip) {
    if (const float here = added(key); here > least) {
      least = here;
      best = key;
    }
  }
  return best;
}

/// O of a column that is not there yet becomes 0.
FOVEA_AMX void clear(const AttendKeys& keys, Column& column) {
  for (int64_t row = 0; row < keys.columns; ++row)
    _mm512_storeu_ps(column.o + row * column.o_stride, _mm512_setzero_ps());
  column.fresh = false;
}

/// Two columns against a run.
FOVEA_AMX void attend_columns(const AttendKeys& keys, Columns& columns, float* scratch) {
  if (keys.by_rows) return RowPass(keys, columns).attend();
  static constexpr decltype(&steps_of<1>) kStepsOfParts[] = {steps_of<1>, steps_of<2>, steps_of<3>};
  const bool masked = columns[0].seen != nullptr || columns[1].seen != nullptr;
  const bool fetched = columns[0].elements != nullptr, added = columns[0].distance != nullptr || fetched;
  const Steps& steps = kStepsOfParts[keys.parts - 1](masked, added, fetched);
  // Both begin from zero, or none does.
  for (Column& column : columns) {
    if (column.fresh && !(columns[0].fresh && columns[1].fresh)) clear(keys, column);
  }
  if (added) {
    const int64_t strip[2] = {steepest_strip(keys, columns[0]), steepest_strip(keys, columns[1])};
    const bool both = strip[0] == strip[1];
    if (strip[0] >= 0) steps.look_ahead(keys, columns, scratch, strip[0], {true, both});
    if (strip[1] >= 0 && !both) steps.look_ahead(keys, columns, scratch, strip[1], {false, true});
  }
  for_each_range(keys, columns, turn_of(keys.columns, keys.parts),
                 [&](const tile::Range& range) { steps.attend(keys, columns, scratch, range); });
  for (Column& column : columns) {
    if (column.fresh) clear(keys, column);
  }
}

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
                            keys.by_rows ? panel.o + v * keys.row_of_o : panel.o + v,
                            keys.by_rows ? keys.row_of_o : kPanel,
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
                            panel.factors == nullptr ? nullptr : panel.factors + v,
                            panel.dtype,
                            panel.seen == nullptr ? nullptr : panel.seen + v,
                            panel.seen_strips,
                            v / static_cast<int>(kSeenColumns) * static_cast<int>(kAttendKeys / kSeenKeys),
                            panel.query_rows == nullptr ? nullptr : panel.query_rows + v,
                            panel.fresh};
      if (waiting == 2) attend_columns(keys, columns, scratch);
      waiting %= 2;
    }
  }
  if (waiting == 1) {
    columns[1] = shadow_of(columns[0], scratch + kAttendScratch - 3 * kTile);
    if (keys.by_rows) columns[1].o = nullptr;
    attend_columns(keys, columns, scratch);
  }
  _tile_release();
}

}  // namespace fovea::cpu

#endif
