// 16 x 16 words, transposed in registers of AVX-512.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

namespace fovea::cpu {

/// Word c of r[i] becomes word i of r[c].
__attribute__((target("avx512f"), always_inline)) inline void transpose_words(__m512i* r) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
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
    r[c] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    r[4 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    r[12 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
}

}  // namespace fovea::cpu

#endif
