// What attend_amx.cpp is made of: products of two blocks of 16 rows with two columns of tiles, and the weights of a strip of scores
// that are made beside them.
#pragma once

#include "cpu/amx_tiles.hpp"
#include "cpu/ops.hpp"
#include "cpu/parts.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <array>
#include <atomic>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define FOVEA_AMX_INLINE FOVEA_AMX __attribute__((always_inline)) inline

namespace fovea::cpu::amx {

inline constexpr int64_t kStrip = kAttendStrip;  // keys: rows of a block of two by two tiles
inline constexpr int64_t kWidth = 2 * kTile;     // queries
inline constexpr int64_t kPairsOfStrip = kStrip / 2;

static_assert(kStrip == 2 * kTile);

/// A block of 2 x 2 accumulators in memory.
struct Accumulators {
  std::array<float*, 2> column{};
  std::array<int64_t, 2> stride{};
};

/// A product of two blocks of 16 rows with two columns. Parts of an operand lie `left_part` and `right_part` words apart.
struct Product {
  const float* left;
  int64_t left_stride;
  std::array<const float*, 2> right;
  int64_t right_stride;
  int64_t words;  ///< of a part
  int64_t left_part, right_part;
};

/// Which parts of the operands are multiplied, in an order in which neighbours share one. Products of parts that together are below the
/// last bits of the type are left out; values of float16 are rounded to it again, so two second parts may be, too.
struct PartPair {
  int left, right;
};
enum class Of { kScores, kValues };
template <int kParts, Of of>
constexpr auto part_pairs() {
  if constexpr (kParts == 1) {
    return std::array<PartPair, 1>{{{0, 0}}};
  } else if constexpr (kParts == 3) {
    return std::array<PartPair, 6>{{{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}}};
  } else if constexpr (of == Of::kScores) {
    return std::array<PartPair, 4>{{{0, 0}, {0, 1}, {1, 1}, {1, 0}}};
  } else {
    return std::array<PartPair, 3>{{{1, 0}, {0, 0}, {0, 1}}};
  }
}

/// What there is beside products: something that scores begin with, keys that are not seen, and rows of elements that are fetched ahead.
enum Form : int { kPlain = 0, kAdded = 1, kMasked = 2, kFetched = 4 };

/// The weights of a strip while they are made, and the sums of those of a turn.
struct Weights {
  static constexpr bool kKeysOnLeft = true;  ///< what comes from far is the left operand
  const float* scores;                       ///< [keys][kWidth]
  uint32_t* pairs;                           ///< [keys / 2][kWidth]
  int64_t part;                              ///< words between the parts of weights
  int64_t left;                              ///< pairs of keys
  __m512 factor;
  __m512 offset[2];  ///< 1/2 - m
  __m512 sum[2];
  __m512i seen[2];     ///< keys of the strip, a bit for each
  const int32_t* bit;  ///< of the next key
  const void* const*
      ahead;  ///< lines to fetch, one beside each pair of keys of a column, in bytes from there
  int64_t ahead_bytes, next_line;
};

/// Which keys of a strip a row sees.
struct SeenOfRow {
  __mmask32 keys;
  __mmask16 even, odd;
};

/// A row of queries where queries are rows: side by side, so that one register finds all of it.
struct alignas(64) WeightRow {
  float sum[kTile];      ///< of the weights of a pass, in parts
  const char* elements;  ///< bfloat16, added to the scores
  float element_factor;  ///< in units of log2
  float offset;          ///< 1/2 - m
  SeenOfRow seen;        ///< of this strip
  float reference;       ///< m
};

/// Weights where queries are rows. Two vectors are the keys of even and of odd number of a strip.
struct RowWeights {
  static constexpr bool kKeysOnLeft = false;
  const float* scores;  ///< [rows][kWidth], even keys and odd ones
  uint32_t* pairs;      ///< [rows][pairs_stride]
  int64_t pairs_stride;
  int64_t left;  ///< pairs of rows
  WeightRow* row;
  __m512 factor;
  int64_t at, ahead;  ///< bytes of the strip's elements in a row, and of those that are fetched
};

/// The bits of a word.
struct alignas(64) Bits {
  int32_t bit[32];
};
inline constexpr Bits kBits = [] {
  Bits bits{};
  for (int i = 0; i < 32; ++i) bits.bit[i] = static_cast<int32_t>(uint32_t{1} << i);
  return bits;
}();

/// 2^f for f in [-1/2, 1/2]: a minimax polynomial, relative error 2e-9.
FOVEA_AMX_INLINE __m512 exp2_by_degree_6(__m512 f) {
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.000153458121613f), f, _mm512_set1_ps(0.001339993117724f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.009618488956331f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.055503287771054f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240226468906455f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693147205737196f));
  return _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
}

/// 2^(t - 1/2): 2^floor(t) times a minimax polynomial of 2^(f - 1/2) over f = t - floor(t). Relative error 1.7e-7; a degree less has
/// 2.7e-6, which shows in lse.
/// Elements that `kept` leaves out are 0. Where weights are not rounded to 16 bits, a degree more: relative error 2e-9.
template <int kParts>
FOVEA_AMX_INLINE __m512 exp2_of(__m512 t, __mmask16 kept = 0xffff) {
  const __m512 f = _mm512_reduce_ps(t, 0x09);  // rounds down, raises no exception
  if constexpr (kParts == 3)
    return _mm512_maskz_scalef_ps(kept, exp2_by_degree_6(_mm512_sub_ps(f, _mm512_set1_ps(0.5f))), t);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0x1.5c08e6p-10f), f, _mm512_set1_ps(0x1.a09316p-8f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.43616ep-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.5bc792p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.f5e57cp-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.6a09e4p-1f));
  return _mm512_maskz_scalef_ps(kept, p, t);
}

/// Pairs of bfloat16, rounded to nearest, ties away from zero. Bytes are moved, not bits: a shift would take the port of the multiply-adds.
FOVEA_AMX_INLINE __m512i round_to_pairs(__m512 low, __m512 high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i bits = _mm512_bsrli_epi128(_mm512_add_epi32(_mm512_castps_si512(low), half), 2);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, bits, _mm512_add_epi32(_mm512_castps_si512(high), half));
}

/// The weight of key j, for one column.
template <int kForm, int kParts>
FOVEA_AMX_INLINE __m512 weigh(const Weights& w, int64_t j, int column) {
  const __m512 score = _mm512_loadu_ps(w.scores + j * kWidth + column * kTile);
  const __m512 t = _mm512_fmadd_ps(score, w.factor, w.offset[column]);
  if constexpr ((kForm & kMasked) == 0) return exp2_of<kParts>(t);
  return exp2_of<kParts>(t, _mm512_test_epi32_mask(w.seen[column], _mm512_set1_epi32(w.bit[j])));
}

/// The weights of keys 2 j and 2 j + 1, for one column.
template <int kForm, int kParts>
FOVEA_AMX_INLINE void weigh_pair(Weights& w, int64_t j, int column) {
  if constexpr ((kForm & kFetched) != 0) {
    const char* line = static_cast<const char*>(w.ahead[2 * j + column]) + w.ahead_bytes;
    __builtin_prefetch(line, 0, 2);
    __builtin_prefetch(line + w.next_line, 0, 2);
  }
  const __m512 low = weigh<kForm, kParts>(w, 2 * j, column),
               high = weigh<kForm, kParts>(w, 2 * j + 1, column);
  w.sum[column] = _mm512_add_ps(w.sum[column], _mm512_add_ps(low, high));
  uint32_t* pairs = w.pairs + j * kWidth + column * kTile;
  if constexpr (kParts == 1) {
    _mm512_storeu_si512(pairs, round_to_pairs(low, high));
  } else {
    CutParts a(low), b(high);
    for (int part = 0; part < kParts; ++part)
      _mm512_storeu_si512(pairs + part * w.part, pair_of(a.next(), b.next()));
  }
}

/// Numbers of the even and the odd keys of a strip.
struct Two {
  __m512 even, odd;
};

/// The scores of a row in units of log2, plus `offset`. Elements that are not seen are not read.
template <int kForm>
FOVEA_AMX_INLINE Two logarithms_of(const RowWeights& w, const WeightRow& row, const float* scores,
                                   __m512 offset) {
  const char* at = row.elements + w.at;
  const __m512i words =
      (kForm & kMasked) != 0 ? _mm512_maskz_loadu_epi16(row.seen.keys, at) : _mm512_loadu_si512(at);
  const __m512 factor = _mm512_set1_ps(row.element_factor);
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  const __m512 odd =
      _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  return {_mm512_fmadd_ps(_mm512_loadu_ps(scores), w.factor, _mm512_fmadd_ps(even, factor, offset)),
          _mm512_fmadd_ps(_mm512_loadu_ps(scores + kTile), w.factor, _mm512_fmadd_ps(odd, factor, offset))};
}

/// The weights of rows 2 j and 2 j + 1, for one of them.
template <int kForm, int kParts>
FOVEA_AMX_INLINE void weigh_pair(RowWeights& w, int64_t j, int which) {
  const int64_t i = 2 * j + which;
  WeightRow& row = w.row[i];
  __builtin_prefetch(row.elements + w.ahead, 0, 2);
  const Two t = logarithms_of<kForm>(w, row, w.scores + i * kWidth, _mm512_set1_ps(row.offset));
  const __m512 even = exp2_of<kParts>(t.even, (kForm & kMasked) != 0 ? row.seen.even : __mmask16{0xffff});
  const __m512 odd = exp2_of<kParts>(t.odd, (kForm & kMasked) != 0 ? row.seen.odd : __mmask16{0xffff});
  _mm512_store_ps(row.sum, _mm512_add_ps(_mm512_load_ps(row.sum), _mm512_add_ps(even, odd)));
  _mm512_storeu_si512(w.pairs, round_to_pairs(even, odd));
  w.pairs += w.pairs_stride;
}

/// Those of the kPairs pairs of keys that go with product `i` of four.
template <int kPairs, int kForm, int kParts, class W>
FOVEA_AMX_INLINE void weigh_beside(W& w, int i) {
  for (int x = kPairs * i / 2; x < kPairs * (i + 1) / 2; ++x) weigh_pair<kForm, kParts>(w, x / 2, x % 2);
}

template <int kPairs, int kForm>
FOVEA_AMX_INLINE void advance(Weights& w) {
  if constexpr ((kForm & kMasked) != 0) w.bit += 2 * kPairs;
  if constexpr ((kForm & kFetched) != 0) w.ahead += 2 * kPairs;
  w.scores += 2 * kPairs * kWidth;
  w.pairs += kPairs * kWidth;
  w.left -= kPairs;
}

template <int kPairs, int kForm>
FOVEA_AMX_INLINE void advance(RowWeights& w) {
  w.scores += 2 * kPairs * kWidth;
  w.row += 2 * kPairs;
  w.left -= kPairs;
}

template <int kForm, int kParts, class W>
FOVEA_AMX_INLINE void weigh_rest(W& w) {
  while (w.left > 0) {
    weigh_pair<kForm, kParts>(w, 0, 0);
    weigh_pair<kForm, kParts>(w, 0, 1);
    advance<1, kForm>(w);
  }
}

// Tiles: 0 to 3 accumulators (row, column), 4 and 5 rows of the left operand, 6 and 7 columns of the right one. Numbers of tiles must be
// literals, hence the macros.

#define FOVEA_STORE(t, row, x) \
  _tile_stored(t, to.column[x] + (row)*kTile * to.stride[x], static_cast<size_t>(to.stride[x] * 4))
#define FOVEA_LOAD(t, row, x) \
  _tile_loadd(t, from.column[x] + (row)*kTile * from.stride[x], static_cast<size_t>(from.stride[x] * 4))

// Keys and values come from the second-level cache, and do not take the place of what is in the first.
#define FOVEA_LEFT(t, at, stride)        \
  do {                                   \
    if constexpr (W::kKeysOnLeft)        \
      _tile_stream_loadd(t, at, stride); \
    else                                 \
      _tile_loadd(t, at, stride);        \
  } while (false)
#define FOVEA_RIGHT(t, at, stride)       \
  do {                                   \
    if constexpr (W::kKeysOnLeft)        \
      _tile_loadd(t, at, stride);        \
    else                                 \
      _tile_stream_loadd(t, at, stride); \
  } while (false)

FOVEA_AMX_INLINE void store(const Accumulators& to) {
  FOVEA_STORE(0, 0, 0);
  FOVEA_STORE(1, 0, 1);
  FOVEA_STORE(2, 1, 0);
  FOVEA_STORE(3, 1, 1);
  // GCC does not know that a tile store writes memory.
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

/// Each accumulator of the block before goes to `to`, or nowhere, where the new one begins: from zero, or from `from`.
template <int kPairs, int kForm, int kParts, Of of, class W>
FOVEA_AMX_INLINE void first_step(const Product& p, const Accumulators* before, const Accumulators* begin,
                                 W& w) {
#define FOVEA_BEGIN(t, row, x)         \
  if (before != nullptr) {             \
    const Accumulators& to = *before;  \
    FOVEA_STORE(t, row, x);            \
  }                                    \
  if (begin != nullptr) {              \
    const Accumulators& from = *begin; \
    FOVEA_LOAD(t, row, x);             \
  } else {                             \
    _tile_zero(t);                     \
  }
  constexpr PartPair kPart = part_pairs<kParts, of>()[0];
  const auto left = static_cast<size_t>(p.left_stride * 4), right = static_cast<size_t>(p.right_stride * 4);
  const float* rows = p.left + kPart.left * p.left_part;
  FOVEA_LEFT(4, rows, left);
  FOVEA_RIGHT(6, p.right[0] + kPart.right * p.right_part, right);
  FOVEA_BEGIN(0, 0, 0);
  _tile_dpbf16ps(0, 4, 6);
  weigh_beside<kPairs, kForm, kParts>(w, 0);
  FOVEA_RIGHT(7, p.right[1] + kPart.right * p.right_part, right);
  FOVEA_BEGIN(1, 0, 1);
  _tile_dpbf16ps(1, 4, 7);
  weigh_beside<kPairs, kForm, kParts>(w, 1);
  FOVEA_LEFT(5, rows + kTile * p.left_stride, left);
  FOVEA_BEGIN(3, 1, 1);
  _tile_dpbf16ps(3, 5, 7);
  weigh_beside<kPairs, kForm, kParts>(w, 2);
  FOVEA_BEGIN(2, 1, 0);
  _tile_dpbf16ps(2, 5, 6);
  weigh_beside<kPairs, kForm, kParts>(w, 3);
  advance<kPairs, kForm>(w);
#undef FOVEA_BEGIN
}

/// Product i of the parts at a word. What it shares with the one before is in the tiles.
template <int kPairs, int kForm, int kParts, Of of, size_t i, class W>
FOVEA_AMX_INLINE void further_step(const Product& p, int64_t word, W& w) {
  constexpr auto kPairsOfParts = part_pairs<kParts, of>();
  constexpr PartPair kPart = kPairsOfParts[i];
  constexpr bool kNewLeft = i == 0 || kPairsOfParts[i == 0 ? 0 : i - 1].left != kPart.left;
  constexpr bool kNewRight = i == 0 || kPairsOfParts[i == 0 ? 0 : i - 1].right != kPart.right;
  const auto left = static_cast<size_t>(p.left_stride * 4), right = static_cast<size_t>(p.right_stride * 4);
  const float* rows = p.left + kPart.left * p.left_part + word;
  const int64_t column = kPart.right * p.right_part + word * p.right_stride;
  if constexpr (kNewLeft) FOVEA_LEFT(4, rows, left);
  if constexpr (kNewRight) FOVEA_RIGHT(6, p.right[0] + column, right);
  _tile_dpbf16ps(0, 4, 6);
  weigh_beside<kPairs, kForm, kParts>(w, 0);
  if constexpr (kNewRight) FOVEA_RIGHT(7, p.right[1] + column, right);
  _tile_dpbf16ps(1, 4, 7);
  weigh_beside<kPairs, kForm, kParts>(w, 1);
  if constexpr (kNewLeft) FOVEA_LEFT(5, rows + kTile * p.left_stride, left);
  _tile_dpbf16ps(3, 5, 7);
  weigh_beside<kPairs, kForm, kParts>(w, 2);
  _tile_dpbf16ps(2, 5, 6);
  weigh_beside<kPairs, kForm, kParts>(w, 3);
  advance<kPairs, kForm>(w);
}

/// Products of the parts at a word, from number i on.
template <int kPairs, int kForm, int kParts, Of of, size_t i, class W>
FOVEA_AMX_INLINE void steps_of_parts(const Product& p, int64_t word, W& w) {
  if constexpr (i < part_pairs<kParts, of>().size()) {
    if (w.left > 0) {
      further_step<kPairs, kForm, kParts, of, i>(p, word, w);
    } else {
      further_step<0, kForm, kParts, of, i>(p, word, w);
    }
    steps_of_parts<kPairs, kForm, kParts, of, i + 1>(p, word, w);
  }
}

/// The product stays in the tiles. kPairs pairs of keys are weighed beside each step, as long as there are some.
template <int kPairs, int kForm, int kParts, Of of, class W>
FOVEA_AMX_INLINE void multiply(const Product& p, const Accumulators* before, const Accumulators* begin,
                               W& w) {
  if (w.left > 0) {
    first_step<kPairs, kForm, kParts, of>(p, before, begin, w);
  } else {
    first_step<0, kForm, kParts, of>(p, before, begin, w);
  }
  steps_of_parts<kPairs, kForm, kParts, of, 1>(p, 0, w);
  for (int64_t word = kTile; word < p.words; word += kTile)
    steps_of_parts<kPairs, kForm, kParts, of, 0>(p, word, w);
}

/// O^T += V^T P^T, or without what was there, for the last 16 rows of O, where they are an odd number of blocks.
template <int kParts>
FOVEA_AMX inline void multiply_last_rows(const Product& p, const Accumulators& o, bool from_zero) {
  const auto left = static_cast<size_t>(p.left_stride * 4), right = static_cast<size_t>(p.right_stride * 4);
  const Accumulators &from = o, &to = o;
  if (from_zero) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    FOVEA_LOAD(0, 0, 0);
    FOVEA_LOAD(1, 0, 1);
  }
  for (int64_t word = 0; word < p.words; word += kTile) {
    for (const PartPair part : part_pairs<kParts, Of::kValues>()) {
      const int64_t column = part.right * p.right_part + word * p.right_stride;
      _tile_stream_loadd(4, p.left + part.left * p.left_part + word, left);
      _tile_loadd(6, p.right[0] + column, right);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, p.right[1] + column, right);
      _tile_dpbf16ps(1, 4, 7);
    }
  }
  FOVEA_STORE(0, 0, 0);
  FOVEA_STORE(1, 0, 1);
}

#undef FOVEA_LEFT
#undef FOVEA_RIGHT
#undef FOVEA_STORE
#undef FOVEA_LOAD

}  // namespace fovea::cpu::amx

#endif
