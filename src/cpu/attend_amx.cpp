// The forward step on AMX tiles: panels of queries against a block of keys that they see whole.
//
//   for each strip of 32 keys, for each panel of a pair          tiles     S^T = K Q^T
//                                                                vectors   P^T = exp2(factor * S^T - m)
//   for each 32 columns of V, for each panel of the pair         tiles     O^T += V^T P^T
//
// A strip of scores (6 KB) is written, turned into weights and forgotten: it stays in the first-level cache. Two panels
// take turns, so that a strip of K or V serves 96 queries: for 48 the second-level cache would have to bring 21 bytes a
// cycle beside the products, and it brings 19.
//
// The reference m is an earlier maximum of the row, not the present one: the scores need no pass of their own to find it,
// and O is not rescaled. Weights are then above 1 where scores rise; where their sum says that they rise too far, the
// panel is left to the steps with true maxima.
//
// Tiles and vectors take turns and do not overlap: while tiles work, these processors run multiply-adds, VSCALEFPS and VREDUCEPS of
// 512 bits at half their rate.
#include "cpu/amx_tiles.hpp"
#include "cpu/ops.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace fovea::cpu {
namespace {

constexpr int kVectors = kPanel / 16;
constexpr int64_t kStrip = 2 * kTile;  // rows of a block of two by three tiles
// Scores of 9 / log2(e) = 6 above m, or as much of many smaller ones: weights keep their precision at any size, and the
// sums of float32 have room for 2^100 more.
constexpr float kLargestSum = 512.0f;

/// What a panel carries over a block.
struct Turn {
  __m512 offset[kVectors];  ///< 1/2 - m
  __m512 sum[kVectors];     ///< of the weights
};

/// 2^(t - 1/2), relative error 7.5e-8: 2^floor(t) times a minimax polynomial of 2^(f - 1/2) over f = t - floor(t).
FOVEA_AMX inline __m512 exp2_of(__m512 t) {
  const __m512 f = _mm512_reduce_ps(t, 0x09);  // rounds down, raises no exception
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0x1.5c08e6p-10f), f, _mm512_set1_ps(0x1.a09316p-8f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.43616ep-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.5bc792p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.f5e57cp-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.6a09e4p-1f));
  return _mm512_scalef_ps(p, t);
}

/// Pairs of bfloat16, rounded to nearest, ties away from zero.
FOVEA_AMX inline __m512i pairs_of(__m512 low, __m512 high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, bits, _mm512_add_epi32(_mm512_castps_si512(high), half));
}

/// Rows that have seen no key yet take the largest score of the strip as their reference.
FOVEA_AMX void begin_turn(const float* scores, float factor, float* row_max, Turn& turn) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int v = 0; v < kVectors; ++v) {
    __m512 reference = _mm512_loadu_ps(row_max + 16 * v);
    const __mmask16 fresh = _mm512_cmp_ps_mask(reference, lowest, _CMP_EQ_OQ);
    if (fresh != 0) {
      __m512 top = lowest;
      for (int64_t j = 0; j < kStrip; ++j)
        top = _mm512_max_ps(top, _mm512_loadu_ps(scores + j * kPanel + 16 * v));
      reference = _mm512_mask_mul_ps(reference, fresh, top, _mm512_set1_ps(factor));
      _mm512_storeu_ps(row_max + 16 * v, reference);
    }
    turn.offset[v] = _mm512_sub_ps(_mm512_set1_ps(0.5f), reference);
    turn.sum[v] = _mm512_setzero_ps();
  }
}

/// `kept`: the bits of the strip's keys, with dropout.
template <bool kDropout>
FOVEA_AMX void weigh_strip(const float* scores, float factor, Turn& turn, uint32_t* pairs,
                           const uint8_t* kept) {
  const __m512 scale = _mm512_set1_ps(factor);
  __m512 offset[kVectors], sum[kVectors];
  std::copy_n(turn.offset, kVectors, offset);
  std::copy_n(turn.sum, kVectors, sum);
  for (int64_t j = 0; j < kStrip; j += 2, scores += 2 * kPanel, pairs += kPanel) {
    for (int v = 0; v < kVectors; ++v) {
      const __m512 low = exp2_of(_mm512_fmadd_ps(_mm512_loadu_ps(scores + 16 * v), scale, offset[v]));
      const __m512 high =
          exp2_of(_mm512_fmadd_ps(_mm512_loadu_ps(scores + kPanel + 16 * v), scale, offset[v]));
      sum[v] = _mm512_add_ps(sum[v], _mm512_add_ps(low, high));
      __m512i words = pairs_of(low, high);
      if constexpr (kDropout) {
        __mmask32 keeps;
        std::memcpy(&keeps, kept + j / 2 * kKeptBytes + 4 * v, sizeof keeps);
        words = _mm512_maskz_mov_epi16(keeps, words);
      }
      _mm512_storeu_si512(pairs + 16 * v, words);
    }
  }
  std::copy_n(sum, kVectors, turn.sum);
}

/// Adds the sums of the weights to those of the rows. False, with nothing added, where scores rose too far above the references.
FOVEA_AMX bool end_turn(const Turn& turn, float* row_sum) {
  for (int v = 0; v < kVectors; ++v) {
    // An offset of infinity belongs to a row whose scores are all -inf.
    if (_mm512_cmp_ps_mask(turn.sum[v], _mm512_set1_ps(kLargestSum), _CMP_GT_OQ) != 0 ||
        _mm512_cmp_ps_mask(turn.offset[v], _mm512_set1_ps(std::numeric_limits<float>::infinity()),
                           _CMP_EQ_OQ) != 0) {
      return false;
    }
  }
  for (int v = 0; v < kVectors; ++v)
    _mm512_storeu_ps(row_sum + 16 * v, _mm512_add_ps(_mm512_loadu_ps(row_sum + 16 * v), turn.sum[v]));
  return true;
}

/// O^T += V^T P^T for the columns from `column` on, 32 or the last 16.
FOVEA_AMX void add_values(const AttendBlock& block, int64_t column, const uint32_t* pairs, int64_t keys,
                          float* o) {
  const float* values = block.values.data + column * block.values.row_stride;
  const auto* weights = reinterpret_cast<const float*>(pairs);
  o += column * kPanel;
  if (column + kTile < block.columns) {
    tile_block<2, 3>(values, block.values.row_stride, weights, kPanel, keys / 2, o, kPanel, false);
  } else {
    tile_block<1, 3>(values, block.values.row_stride, weights, kPanel, keys / 2, o, kPanel, false);
  }
}

/// One or two panels. Bit x of the result: panel x is left to other steps.
FOVEA_AMX uint32_t attend_pair(const AttendBlock& block, const AttendPanel* panels, int count,
                               const AttendScratch& scratch) {
  Turn turns[2];
  uint32_t* pairs[2] = {scratch.pairs, scratch.pairs + scratch.most_keys / 2 * kPanel};
  const int64_t last = std::max(panels[0].keys, panels[count - 1].keys);
  for (int64_t j = 0; j < last; j += kStrip) {
    const float* keys = block.keys.data + j * block.keys.row_stride;
    for (int x = 0; x < count; ++x) {
      const AttendPanel& panel = panels[x];
      if (j >= panel.keys) continue;
      tile_block<2, 3>(keys, block.keys.row_stride, panel.queries, kPanel, block.words, scratch.scores,
                       kPanel, true);
      if (j == 0) begin_turn(scratch.scores, block.factor, panel.row_max, turns[x]);
      uint32_t* weights = pairs[x] + j / 2 * kPanel;
      if (panel.kept == nullptr) {
        weigh_strip<false>(scratch.scores, block.factor, turns[x], weights, nullptr);
      } else {
        weigh_strip<true>(scratch.scores, block.factor, turns[x], weights, panel.kept + j / 2 * kKeptBytes);
      }
    }
  }
  // GCC does not know that a tile load reads memory.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  uint32_t left = 0;
  for (int x = 0; x < count; ++x) {
    if (!end_turn(turns[x], panels[x].row_sum)) left |= 1u << x;
  }
  for (int64_t column = 0; column < block.columns; column += 2 * kTile) {
    for (int x = 0; x < count; ++x) {
      if ((left >> x & 1) == 0) add_values(block, column, pairs[x], panels[x].keys, panels[x].o);
    }
  }
  return left;
}

/// Words of 16 x 16 pairs: row c of `columns` is word w of row r of `rows`.
FOVEA_AMX void transpose_words(const __m512i* rows, uint32_t* columns, int64_t ld) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // b[4 g + c] holds, in its quarter q, column 4 q + c of rows 4 g to 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i even01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88);
    const __m512i odd01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    _mm512_storeu_si512(columns + c * ld, _mm512_shuffle_i32x4(even01, even23, 0x88));
    _mm512_storeu_si512(columns + (4 + c) * ld, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    _mm512_storeu_si512(columns + (8 + c) * ld, _mm512_shuffle_i32x4(even01, even23, 0xdd));
    _mm512_storeu_si512(columns + (12 + c) * ld, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
  }
}

}  // namespace

FOVEA_AMX void pair_columns_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size, int64_t words,
                                uint32_t* dst) {
  for (int64_t w = 0; w < words; w += 16) {
    const int64_t first = 2 * w;
    for (int64_t column = 0; column < size; column += 16) {
      const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(16, size - column)) - 1);
      __m512i pairs[16];
      for (int64_t i = 0; i < 16; ++i) {
        const int64_t row = first + 2 * i;
        const uint16_t* at = rows + row * stride + column;
        const __m256i low = _mm256_maskz_loadu_epi16(row < n ? mask : 0, at);
        const __m256i high = _mm256_maskz_loadu_epi16(row + 1 < n ? mask : 0, at + stride);
        pairs[i] =
            _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
      }
      transpose_words(pairs, dst + column * words + w, words);
    }
  }
}

FOVEA_AMX uint32_t attend_amx(const AttendBlock& block, const AttendPanel* panels, int64_t count,
                              const AttendScratch& scratch) {
  uint32_t left = 0;
  _tile_loadconfig(&kTileConfig);
  for (int64_t x = 0; x < count; x += 2)
    left |= attend_pair(block, panels + x, count - x > 1 ? 2 : 1, scratch) << x;
  _tile_release();
  return left;
}

}  // namespace fovea::cpu

#endif
