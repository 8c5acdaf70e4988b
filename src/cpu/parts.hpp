// A number as a sum of bfloat16 parts, each with the next 8 bits of its significand: two hold a float16, three a float32.
#pragma once

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

// What every processor with AMX has, and functions of others may take in.
#define FOVEA_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define FOVEA_PARTS FOVEA_AVX512 __attribute__((always_inline)) inline

namespace fovea::cpu {

/// The parts of 16 numbers, one after the other, as float32 whose lower halves are 0. Each is rounded to nearest, so the rest may have the
/// other sign. Of an infinity, and of numbers that round to one, the rest is none.
class Parts {
 public:
  FOVEA_PARTS explicit Parts(__m512 x) : rest_(x) {}
  FOVEA_PARTS __m512 next() {
    const __m512i raised = _mm512_add_epi32(_mm512_castps_si512(rest_), _mm512_set1_epi32(0x8000));
    const __m512 part =
        _mm512_castsi512_ps(_mm512_and_si512(raised, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    rest_ = _mm512_sub_ps(rest_, part);
    return part;
  }

 private:
  __m512 rest_;
};

/// The same by cutting off: three operations less. The lower halves of the last part are not 0.
class CutParts {
 public:
  FOVEA_PARTS explicit CutParts(__m512 x) : rest_(x) {}
  FOVEA_PARTS __m512 next() {
    const __m512 before = rest_;
    rest_ = _mm512_sub_ps(
        before, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(before),
                                                     _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
    return before;
  }

 private:
  __m512 rest_;
};

/// Pairs of bfloat16 from parts: low in the lower halves. Bytes are moved, not bits: a shift would take the port of the multiply-adds.
FOVEA_PARTS __m512i pair_of(__m512 low, __m512 high) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_bsrli_epi128(_mm512_castps_si512(low), 2),
                                 _mm512_castps_si512(high));
}

/// A sum that is finite as long as all parts are: each times 0.
FOVEA_PARTS __m512 add_lasting(__m512 sum, __m512 low, __m512 high) {
  const __m512 zero = _mm512_setzero_ps();
  return _mm512_fmadd_ps(low, zero, _mm512_fmadd_ps(high, zero, sum));
}
FOVEA_PARTS bool is_finite(__m512 sum) {
  return _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) == 0;
}

}  // namespace fovea::cpu

#endif
