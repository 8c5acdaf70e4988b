// Numbers of float16 and float32 as sums of bfloat16 parts, in the layouts that attend_amx.cpp multiplies.
#include "cpu/ops.hpp"
#include "cpu/scratch.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "cpu/parts.hpp"

namespace fovea::cpu {
namespace {

constexpr int64_t kLanes = 16;

/// Words of bfloat16 from the upper halves of those of a, then those of b.
FOVEA_PARTS __m512i upper_halves(__m512 a, __m512 b) {
  alignas(64) static constexpr auto kOdd = [] {
    std::array<uint16_t, 32> odd{};
    for (size_t i = 0; i < 32; ++i) odd[i] = static_cast<uint16_t>(2 * i + 1);
    return odd;
  }();
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a), _mm512_load_si512(kOdd.data()),
                                   _mm512_castps_si512(b));
}

/// Elements [0, count) of 16; 0 behind them.
FOVEA_PARTS __m512 load(const char* row, DType type, int64_t count) {
  const auto there = static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, kLanes)) - 1);
  if (type == DType::kF32) return _mm512_maskz_loadu_ps(there, row);
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, row));
}

}  // namespace

FOVEA_AVX512 bool split_rows_amx(const PartRows& from, int parts, uint16_t* dst, int64_t row_size,
                                 int64_t part_size) {
  __m512 all = _mm512_setzero_ps();
  for (int64_t j = 0; j < from.n; ++j) {
    const char* row = from.data + j * from.stride_bytes;
    for (int64_t c = 0; c < row_size; c += 2 * kLanes) {
      const __m512 first = load(row + c * size_of(from.type), from.type, from.size - c);
      const __m512 second = load(row + (c + kLanes) * size_of(from.type), from.type, from.size - c - kLanes);
      all = add_lasting(all, first, second);
      Parts a(first), b(second);
      for (int part = 0; part < parts; ++part) {
        const __m512 low = a.next(), high = b.next();
        all = add_lasting(all, low, high);
        _mm512_storeu_si512(dst + part * part_size + j * row_size + c, upper_halves(low, high));
      }
    }
  }
  return is_finite(all);
}

FOVEA_AVX512 bool split_lanes_amx(const float* src, int64_t size, int parts, uint32_t* dst,
                                  int64_t part_words) {
  __m512 all = _mm512_setzero_ps();
  for (int64_t w = 0; w < part_words / kPanel; ++w) {
    for (int64_t x = 0; x < kPanel; x += kLanes) {
      const float* at = src + 2 * w * kPanel + x;
      const __m512 first = 2 * w < size ? _mm512_loadu_ps(at) : _mm512_setzero_ps();
      const __m512 second = 2 * w + 1 < size ? _mm512_loadu_ps(at + kPanel) : _mm512_setzero_ps();
      all = add_lasting(all, first, second);
      Parts even(first), odd(second);
      for (int part = 0; part < parts; ++part) {
        const __m512 low = even.next(), high = odd.next();
        all = add_lasting(all, low, high);
        _mm512_storeu_si512(dst + part * part_words + w * kPanel + x, pair_of(low, high));
      }
    }
  }
  return is_finite(all);
}

}  // namespace fovea::cpu

#endif
