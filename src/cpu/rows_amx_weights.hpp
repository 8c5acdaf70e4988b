// Weights of few rows for tiles (rows_amx.cpp): made of scores as tiles leave them, a key after the other with queries on lanes, so that neither
// largest scores nor sums are those of lanes; transposed once, as pairs of bfloat16.
#pragma once

#include "cpu/attend_amx_steps.hpp"
#include "cpu/rows_amx_elements.hpp"
#include "cpu/transpose_words.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <limits>

namespace fovea::cpu {

/// Up to so many queries have their two parts in one tile: lanes r and r + kSideQueries.
constexpr int64_t kSideQueries = kTile / 2;

/// Products of parts of Q: those that lie side by side are one.
constexpr bool side_by_side(int64_t num_q, int parts) {
  return parts == 2 && num_q <= kSideQueries;
}

/// The first halves of a and b, and the second ones.
FOVEA_AMX_ROWS_INLINE __m512 first_halves(__m512 a, __m512 b) {
  return _mm512_shuffle_f32x4(a, b, 0x44);
}
FOVEA_AMX_ROWS_INLINE __m512 second_halves(__m512 a, __m512 b) {
  return _mm512_shuffle_f32x4(a, b, 0xee);
}

/// Two parts of 16 weights as words: in lane r the first part of weights r and r + 8, in lane r + 8 the second.
FOVEA_AMX_ROWS_INLINE void put_sides(__m512 x, uint32_t* words) {
  const __m512 first =
      _mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  const __m512 second = _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(_mm512_sub_ps(x, first)), _mm512_set1_epi32(0x8000)));
  const __m512i low = _mm512_castps_si512(first_halves(first, second)),
                top = _mm512_castps_si512(second_halves(first, second));
  _mm512_storeu_si512(words, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low, 16), top));
}

/// Tiles of weights of 32 keys where V is multiplied as it lies: two of 16 keys, once as the lower halves of words and once as the upper
/// ones, with zeros beside them.
constexpr int64_t kWeightsInPlace = 4;
/// Row r of those, of words with the keys w and w + 16.
FOVEA_AMX_ROWS_INLINE void put_in_place(__m512i words, int64_t r, uint32_t* tiles) {
  tiles += r * kTile;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  _mm512_storeu_si512(tiles, _mm512_andnot_si512(upper, words));
  _mm512_storeu_si512(tiles + kTileWords, _mm512_slli_epi32(words, 16));
  _mm512_storeu_si512(tiles + 2 * kTileWords, _mm512_srli_epi32(words, 16));
  _mm512_storeu_si512(tiles + 3 * kTileWords, _mm512_and_si512(words, upper));
}

/// Tiles of weights of 32 keys, of so many parts that do not lie side by side.
template <DType kType>
constexpr int64_t weight_tiles(int64_t parts) {
  return kType == DType::kBF16 ? kWeightsInPlace : parts;
}

/// Weights as the left operand of products with V of kType, from scores s[n][16], n a multiple of 32. Word w of a row holds the keys w and
/// w + 16 of 32. kSide: there are up to eight queries, and one part, or two side by side; a vector is then two keys.
template <DType kType, int kParts, bool kSide>
class RowWeigher {
 public:
  FOVEA_AMX_ROWS RowWeigher(float* s, int64_t n, float factor) : s_(s), n_(n), factor_(factor) {}

  /// Raises row_max, rescales older sums and adds to row_sum. False, and nothing is changed, where a score is NaN.
  FOVEA_AMX_ROWS bool weigh(int64_t num_q, const TileSums& sums, uint32_t* words, RowsAhead& ahead) {
    const __mmask16 exist = below<__mmask16>(num_q);
    RowFetch fetch(ahead);
    const __m512 old = load(exist, sums.row_max), raised = _mm512_max_ps(old, largest(fetch));
    const __m512 subtract = _mm512_maskz_mov_ps(
        _mm512_cmp_ps_mask(raised, _mm512_set1_ps(-std::numeric_limits<float>::infinity()), _CMP_NEQ_UQ),
        raised);
    offset_ = _mm512_sub_ps(_mm512_set1_ps(0.5f), subtract);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < n_; j += kKeys) {
      stay_awake();  // after 50 to 150 ns, and more where lines are waited for
      put(s_ + j * kTile, words + j / kKeys * weight_tiles<kType>(kWordParts) * kTileWords, sum, fetch);
    }
    if (_mm512_mask_cmp_ps_mask(lanes_of(exist), sum, sum, _CMP_UNORD_Q) != 0) return false;
    if (kSide) sum = _mm512_add_ps(sum, second_halves(sum, sum));
    const __m512 same = _mm512_set1_ps(1.0f);
    const __m512 factors = _mm512_mask_mov_ps(
        amx::exp2_of<kMostParts>(_mm512_add_ps(_mm512_sub_ps(old, subtract), _mm512_set1_ps(0.5f))),
        _mm512_cmp_ps_mask(raised, old, _CMP_EQ_OQ) | static_cast<__mmask16>(~lanes_of(exist)), same);
    _mm512_mask_storeu_ps(sums.row_max, exist, raised);
    _mm512_mask_storeu_ps(sums.row_sum, exist,
                          _mm512_fmadd_ps(_mm512_maskz_loadu_ps(exist, sums.row_sum), factors, sum));
    rescale(sums, factors, _mm512_cmp_ps_mask(factors, same, _CMP_NEQ_UQ));
    return true;
  }

 private:
  static constexpr int kWordParts = kSide ? 1 : kParts;  // tiles of 32 keys
  // Of other types, operations have more vectors than lines to wait for.
  static constexpr bool kFetches = kType == DType::kBF16;

  static __mmask16 lanes_of(__mmask16 exist) {
    return kSide ? static_cast<__mmask16>(exist | exist << kSideQueries) : exist;
  }
  static FOVEA_AMX_ROWS_INLINE __m512 load(__mmask16 exist, const float* x) {
    const __m512 lanes = _mm512_maskz_loadu_ps(exist, x);
    return kSide ? first_halves(lanes, lanes) : lanes;
  }

  /// The rows of some lanes, times their factors.
  static FOVEA_AMX_ROWS_INLINE void rescale(const TileSums& sums, __m512 factors, __mmask16 rows) {
    alignas(64) float by[kTile];
    _mm512_store_ps(by, factors);
    for (int64_t r = 0; r < kTile; ++r) {
      if ((rows >> r & 1) == 0) continue;
      float* row = sums.o + r * sums.ld;
      for (int64_t c = 0; c < sums.ld; c += kTile)
        _mm512_storeu_ps(row + c, _mm512_mul_ps(_mm512_loadu_ps(row + c), _mm512_set1_ps(by[r])));
    }
  }

  /// The largest score of each lane, times the factor. kSide: they are replaced by those of keys w and w + 16 side by side, parts
  /// added up.
  FOVEA_AMX_ROWS_INLINE __m512 largest(RowFetch& fetch) {
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 most[4] = {lowest, lowest, lowest, lowest};
    for (int64_t j = 0; j < n_; j += kSide ? kKeys : kTile) {
      float* s = s_ + j * kTile;
#pragma GCC unroll 16
      for (int64_t w = 0; w < kTile; ++w, s += kTile) {
        if (kFetches && w % (kSide ? 1 : 2) == 0) fetch.lines<2>();
        __m512 score = _mm512_loadu_ps(s);
        if constexpr (kSide) {
          const __m512 behind = _mm512_loadu_ps(s + kTileWords);
          const __m512 second_part = second_halves(score, behind);
          score = first_halves(score, behind);
          if (kParts == 2) score = _mm512_add_ps(score, second_part);
          _mm512_storeu_ps(s, score);
        }
        most[w % 4] = _mm512_max_ps(most[w % 4], score);
      }
    }
    __m512 m = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    if (kSide) m = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, 0x4e));
    return _mm512_mul_ps(m, _mm512_set1_ps(factor_));
  }

  FOVEA_AMX_ROWS_INLINE __m512 weight(const float* s) const {
    return amx::exp2_of<kParts>(_mm512_fmadd_ps(_mm512_loadu_ps(s), _mm512_set1_ps(factor_), offset_));
  }

  /// Weights of 32 keys.
  FOVEA_AMX_ROWS_INLINE void put(const float* s, uint32_t* words, __m512& sum, RowFetch& fetch) const {
    alignas(64) uint32_t lanes[kWordParts][kTileWords];
    __m512 left = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int64_t w = 0; w < kTile; ++w) {
      if (kFetches) fetch.lines<2>();
      __m512 first = weight(s + w * kTile);
      if constexpr (kSide) {
        sum = _mm512_add_ps(sum, first);
        if constexpr (kParts == 2)
          put_sides(scaled_weight<kType>(first), lanes[0] + w * kTile);
        else
          put_pairs<1, true>(scaled_weight<kType>(first), scaled_weight<kType>(second_halves(first, first)),
                             lanes[0] + w * kTile, 0, left);
      } else {
        const __m512 second = weight(s + w * kTile + kTileWords);
        sum = _mm512_add_ps(sum, _mm512_add_ps(first, second));
        put_pairs<kParts, kParts != kMostParts>(scaled_weight<kType>(first), scaled_weight<kType>(second),
                                                lanes[0] + w * kTile, kTileWords, left);
      }
    }
    for (int part = 0; part < kWordParts; ++part) {
      __m512i rows[kTile];
      for (int64_t w = 0; w < kTile; ++w) rows[w] = _mm512_load_si512(lanes[part] + w * kTile);
      transpose_words(rows);
      for (int64_t r = 0; r < kTile; ++r) {
        if constexpr (kType == DType::kBF16)
          put_in_place(rows[r], r, words);
        else
          _mm512_storeu_si512(words + part * kTileWords + r * kTile, rows[r]);
      }
    }
  }

  float* s_;
  int64_t n_;
  float factor_;
  __m512 offset_;
};

/// Weights p, given row by row, as the left operand: part b of keys [32 x, 32 x + 32) at (parts x + b) * kTileWords, or both parts side by
/// side. Rows that do not exist are 0.
template <DType kType, int kParts, bool kSides>
FOVEA_AMX_ROWS void put_weights(const float* p, int64_t ldp, int64_t num_p, int64_t n, uint32_t* weights) {
  constexpr int kWordParts = kSides ? 1 : kParts;
  constexpr int64_t kPartWords = kSides ? kSideQueries * kTile : kTileWords;
  __m512 left = _mm512_setzero_ps();
  for (int64_t x = 0; x * kKeys < n; ++x) {
    const int64_t count = n - x * kKeys;
    uint32_t* words = weights + weight_tiles<kType>(kWordParts) * x * kTileWords;
    std::fill_n(words, weight_tiles<kType>(kWordParts) * kTileWords, 0u);
    for (int64_t r = 0; r < num_p; ++r) {
      const float* row = p + r * ldp + x * kKeys;
      put_pairs<kParts, kParts != kMostParts>(
          scaled_weight<kType>(_mm512_maskz_loadu_ps(below<__mmask16>(count), row)),
          scaled_weight<kType>(_mm512_maskz_loadu_ps(below<__mmask16>(count - kTile), row + kTile)),
          words + r * kTile, kPartWords, left);
      if constexpr (kType == DType::kBF16) put_in_place(_mm512_loadu_si512(words + r * kTile), r, words);
    }
  }
}

}  // namespace fovea::cpu

#endif
