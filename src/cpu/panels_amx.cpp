// Panels on their way in and out, beside AMX: 16 x 16 words are transposed in registers.
#include "cpu/ops.hpp"
#include "cpu/scratch.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <algorithm>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "cpu/transpose_words.hpp"

// The instruction sets of processors with AMX.
#define FOVEA_BESIDE_AMX __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

namespace fovea::cpu {
namespace {

constexpr int64_t kBlock = 16;

/// The first `count` of 32 bits.
__mmask32 first_32(int64_t count) {
  return static_cast<__mmask32>((uint64_t{1} << std::clamp<int64_t>(count, 0, 32)) - 1);
}

}  // namespace

namespace {

/// 32 rows from `rows` on, of which `count` exist, and up to 32 of `size` columns: words of a column are pairs of rows, at `dst` + column * words.
/// Loops are unrolled: GCC would keep 32 addresses and all vectors in memory.
template <bool kWhole>
FOVEA_BESIDE_AMX inline void pair_block(const uint16_t* rows, int64_t stride, int64_t count, int64_t size,
                                        int64_t words, uint32_t* dst) {
  const __mmask32 mask = first_32(size);
  const auto row = [&](int64_t i) __attribute__((target("avx512f,avx512bw"), always_inline)) {
    if constexpr (kWhole) return _mm512_loadu_si512(rows + i * stride);
    return i < count ? _mm512_maskz_loadu_epi16(mask, rows + i * stride) : _mm512_setzero_si512();
  };
    // Unpacking takes four columns of each quarter: 8 q to 8 q + 3, and 8 q + 4 to 8 q + 7.
#pragma GCC unroll 2
  for (int64_t half = 0; half < 2; ++half) {
    __m512i pairs[kBlock];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kBlock; ++i) {
      const __m512i even = row(2 * i), odd = row(2 * i + 1);
      pairs[i] = half == 0 ? _mm512_unpacklo_epi16(even, odd) : _mm512_unpackhi_epi16(even, odd);
    }
    transpose_words(pairs);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kBlock; ++i) {
      const int64_t to = i / 4 * 8 + half * 4 + i % 4;
      if (kWhole || to < round_up(size, kBlock)) _mm512_storeu_si512(dst + to * words, pairs[i]);
    }
  }
}

}  // namespace

FOVEA_BESIDE_AMX void pair_columns_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size,
                                       int64_t words, uint32_t* dst) {
  for (int64_t w = 0; w < words; w += kBlock) {
    for (int64_t column = 0; column < size; column += 2 * kBlock) {
      const int64_t count = n - 2 * w, left = size - column;
      const uint16_t* from = rows + 2 * w * stride + column;
      uint32_t* to = dst + column * words + w;
      if (count >= 2 * kBlock && left >= 2 * kBlock) {
        pair_block<true>(from, stride, count, left, words, to);
      } else {
        pair_block<false>(from, stride, count, left, words, to);
      }
    }
  }
}

FOVEA_BESIDE_AMX void key_columns_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size,
                                      int64_t words, uint32_t* dst) {
  for (int64_t j = 0; j < n; j += 2 * kBlock, dst += 2 * kBlock * words) {
    for (int64_t odd = 0; odd < 2; ++odd) {
      for (int64_t w = 0; w < words; w += kBlock) {
        const __mmask32 mask = first_32(size - 2 * w);
        __m512i block[kBlock];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kBlock; ++i) {
          const int64_t row = j + 2 * i + odd;
          block[i] =
              row < n ? _mm512_maskz_loadu_epi16(mask, rows + row * stride + 2 * w) : _mm512_setzero_si512();
        }
        transpose_words(block);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kBlock; ++i)
          _mm512_storeu_si512(dst + (w + i) * 2 * kBlock + odd * kBlock, block[i]);
      }
    }
  }
}

FOVEA_BESIDE_AMX void value_pairs_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size,
                                      int64_t columns, uint32_t* dst) {
  // Element i of the first row, and of the second, 32 further: for 16 columns, and the next 16.
  alignas(64) static constexpr uint16_t kInTurn[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                       37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                       11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kInTurn), high = _mm512_add_epi16(low, _mm512_set1_epi16(kBlock));
  for (int64_t j = 0; j < round_up(n, 2 * kBlock); j += 2, dst += columns) {
    for (int64_t c = 0; c < columns; c += 2 * kBlock) {
      const __mmask32 mask = first_32(size - c);
      const uint16_t* at = rows + j * stride + c;
      const __m512i first = _mm512_maskz_loadu_epi16(j < n ? mask : 0, at),
                    second = _mm512_maskz_loadu_epi16(j + 1 < n ? mask : 0, at + stride);
      _mm512_storeu_si512(dst + c, _mm512_permutex2var_epi16(first, low, second));
      _mm512_storeu_si512(dst + c + kBlock, _mm512_permutex2var_epi16(first, high, second));
    }
  }
}

FOVEA_BESIDE_AMX void stage_lanes_amx(const char* const* rows, int64_t count, int64_t size, int64_t words,
                                      float* dst) {
  for (int64_t first = 0; first < kPanel; first += kBlock) {
    for (int64_t w = 0; w < words; w += kBlock) {
      const __mmask32 mask = first_32(size - 2 * w);
      __m512i block[kBlock];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kBlock; ++i) {
        block[i] = first + i < count ? _mm512_maskz_loadu_epi16(mask, rows[first + i] + 4 * w)
                                     : _mm512_setzero_si512();
      }
      transpose_words(block);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kBlock; ++i) _mm512_storeu_si512(dst + (w + i) * kPanel + first, block[i]);
    }
  }
}

namespace {

/// Two numbers of each lane as a word of bfloat16.
FOVEA_BESIDE_AMX inline __m512i words_of(__m512 low, __m512 high) {
  alignas(64) static constexpr uint16_t kInTurn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                       21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                       11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInTurn), (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/// 16 lanes, of which `count` exist, and up to 32 of `size` elements of their rows.
template <bool kWhole>
FOVEA_BESIDE_AMX inline void write_block(const float* o, int64_t size, const float* factor, int64_t count,
                                         char* const* rows, int64_t offset) {
  const __m512 by_lane = _mm512_loadu_ps(factor);
  const __mmask16 keeps = _mm512_cmp_ps_mask(by_lane, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  const auto column = [&](int64_t c) __attribute__((target("avx512f"), always_inline)) {
    if (!kWhole && c >= size) return _mm512_setzero_ps();
    return _mm512_maskz_mul_ps(keeps, _mm512_loadu_ps(o + c * kPanel), by_lane);
  };
  __m512i words[kBlock];
#pragma GCC unroll 16
  for (int64_t w = 0; w < kBlock; ++w) words[w] = words_of(column(2 * w), column(2 * w + 1));
  transpose_words(words);
  const __mmask32 mask = first_32(size);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kBlock; ++i) {
    if constexpr (kWhole) {
      _mm512_storeu_si512(rows[i] + offset, words[i]);
    } else if (i < count) {
      _mm512_mask_storeu_epi16(rows[i] + offset, mask, words[i]);
    }
  }
}

}  // namespace

FOVEA_BESIDE_AMX void write_lanes_amx(const float* o, int64_t size, const float* factor, int64_t count,
                                      char* const* rows) {
  for (int64_t first = 0; first < count; first += kBlock) {
    for (int64_t column = 0; column < size; column += 2 * kBlock) {
      const int64_t left = size - column;
      const auto write =
          count - first >= kBlock && left >= 2 * kBlock ? write_block<true> : write_block<false>;
      write(o + column * kPanel + first, left, factor + first, count - first, rows + first, 2 * column);
    }
  }
}

FOVEA_BESIDE_AMX void write_rows_amx(const float* o, int64_t ld, int64_t size, const float* factor,
                                     int64_t count, char* const* rows) {
  for (int64_t row = 0; row < count; ++row, o += ld) {
    const __m512 of_row = _mm512_set1_ps(factor[row]);
    const __mmask16 keeps = factor[row] == 0.0f ? 0 : 0xffff;
    for (int64_t c = 0; c < size; c += 2 * kBlock) {
      const int64_t left = size - c;
      const __m512 low = _mm512_maskz_mul_ps(keeps, _mm512_loadu_ps(o + c), of_row);
      const __m512 high = left > kBlock ? _mm512_maskz_mul_ps(keeps, _mm512_loadu_ps(o + c + kBlock), of_row)
                                        : _mm512_setzero_ps();
      _mm512_mask_storeu_epi16(rows[row] + 2 * c, first_32(left), (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

}  // namespace fovea::cpu

#endif
