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

FOVEA_BESIDE_AMX void pair_columns_amx(const uint16_t* rows, int64_t stride, int64_t n, int64_t size,
                                       int64_t words, uint32_t* dst) {
  for (int64_t w = 0; w < words; w += kBlock) {
    for (int64_t column = 0; column < size; column += 2 * kBlock) {
      const __mmask32 mask = first_32(size - column);
      // Unpacking takes four columns of each quarter: 8 q to 8 q + 3, and 8 q + 4 to 8 q + 7.
      __m512i pairs[2][kBlock];
      for (int64_t i = 0; i < kBlock; ++i) {
        const int64_t row = 2 * (w + i);
        const uint16_t* at = rows + row * stride + column;
        const __m512i even = row < n ? _mm512_maskz_loadu_epi16(mask, at) : _mm512_setzero_si512();
        const __m512i odd =
            row + 1 < n ? _mm512_maskz_loadu_epi16(mask, at + stride) : _mm512_setzero_si512();
        pairs[0][i] = _mm512_unpacklo_epi16(even, odd);
        pairs[1][i] = _mm512_unpackhi_epi16(even, odd);
      }
      for (int64_t half = 0; half < 2; ++half) {
        transpose_words(pairs[half]);
        for (int64_t i = 0; i < kBlock; ++i) {
          const int64_t to = column + i / 4 * 8 + half * 4 + i % 4;
          if (to < round_up(size, kBlock)) _mm512_storeu_si512(dst + to * words + w, pairs[half][i]);
        }
      }
    }
  }
}

FOVEA_BESIDE_AMX void stage_lanes_amx(const char* const* rows, int64_t count, int64_t size, int64_t words,
                                      float* dst) {
  for (int64_t first = 0; first < kPanel; first += kBlock) {
    for (int64_t w = 0; w < words; w += kBlock) {
      const __mmask32 mask = first_32(size - 2 * w);
      __m512i block[kBlock];
      for (int64_t i = 0; i < kBlock; ++i) {
        block[i] = first + i < count ? _mm512_maskz_loadu_epi16(mask, rows[first + i] + 4 * w)
                                     : _mm512_setzero_si512();
      }
      transpose_words(block);
      for (int64_t i = 0; i < kBlock; ++i) _mm512_storeu_si512(dst + (w + i) * kPanel + first, block[i]);
    }
  }
}

FOVEA_BESIDE_AMX void write_lanes_amx(const float* o, int64_t size, const float* factor, int64_t count,
                                      char* const* rows) {
  for (int64_t first = 0; first < count; first += kBlock) {
    const __m512 by_lane = _mm512_loadu_ps(factor + first);
    const __mmask16 keeps = _mm512_cmp_ps_mask(by_lane, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    for (int64_t column = 0; column < size; column += 2 * kBlock) {
      __m512i half[2][kBlock];
      for (int64_t c = 0; c < 2 * kBlock; ++c) {
        const __mmask16 reads = column + c < size ? keeps : 0;
        half[c / kBlock][c % kBlock] = _mm512_castps_si512(_mm512_maskz_mul_ps(
            reads, _mm512_maskz_loadu_ps(reads, o + (column + c) * kPanel + first), by_lane));
      }
      transpose_words(half[0]);
      transpose_words(half[1]);
      const __mmask32 mask = first_32(size - column);
      for (int64_t i = 0; i < std::min(kBlock, count - first); ++i) {
        const __m512bh row =
            _mm512_cvtne2ps_pbh(_mm512_castsi512_ps(half[1][i]), _mm512_castsi512_ps(half[0][i]));
        _mm512_mask_storeu_epi16(rows[first + i] + 2 * column, mask, (__m512i)row);
      }
    }
  }
}

}  // namespace fovea::cpu

#endif
