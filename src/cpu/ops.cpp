// The vector operations, written once with Highway and compiled for each instruction set.
#include "cpu/ops.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// Targets that add nothing here over their neighbours are left out.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/ops.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using V = hn::Vec<D>;
#if HWY_TARGET != HWY_SCALAR
using D4 = hn::FixedTag<float, 4>;
#endif

// Vector width and the register tile of the products. 32 registers: 8 x 3 accumulators; 16 registers: 4 x 3.
// Each leaves room for 3 right operands and a broadcast, and has at least 8 independent chains (latency 4 x 2
// pipes).
constexpr int kLanes = static_cast<int>(HWY_LANES(float));
constexpr int kVectors = kPanel / kLanes;
constexpr int kTileRows = (HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64) ? 8 : 4;
static_assert(kPanel % (3 * kLanes) == 0 || kLanes == 1);

// ---- products
// ----------------------------------------------------------------------------------------------------

/// Words of bfloat16 rows with odd strides start at odd halves of a word.
HWY_INLINE V broadcast_word(const float* word) {
  float value;
  std::memcpy(&value, word, sizeof(value));
  return hn::Set(D(), value);
}

/// One float per word.
struct FloatWords {
  static HWY_INLINE V multiply_add(V a, V b, V acc) { return hn::MulAdd(a, b, acc); }
};

#if HWY_TARGET == HWY_AVX3
/// A pair of bfloat16 per word: VDPBF16PS. Written as asm so that it needs no target of its own; used only
/// where CPUID reports AVX512_BF16.
struct Bf16Words {
  static HWY_INLINE V multiply_add(V a, V b, V acc) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
    return acc;
  }
};
#endif

enum class Into { kSet, kSetMax, kScale, kAdd };

/// C[R][C vectors] from K steps. `extra` is column_max for kSetMax and alpha for kScale.
template <class Words, Into kInto, bool kUnitRow, int R, int C>
HWY_INLINE void register_tile(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT b,
                              int64_t ldb, int64_t k, float* HWY_RESTRICT c, int64_t ldc,
                              float* HWY_RESTRICT extra) {
  const D d;
  V acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < C; ++v) acc[r][v] = hn::Zero(d);
  }
  for (int64_t step = 0; step < k; ++step) {
    V right[C];
#pragma GCC unroll 3
    for (int v = 0; v < C; ++v) right[v] = hn::LoadU(d, b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V left = broadcast_word(kUnitRow ? a + r : a + r * a_stride);
#pragma GCC unroll 3
      for (int v = 0; v < C; ++v) acc[r][v] = Words::multiply_add(left, right[v], acc[r][v]);
    }
    a += kUnitRow ? a_stride : 1;
    b += ldb;
  }
#pragma GCC unroll 3
  for (int v = 0; v < C; ++v) {
    V lane_value =
        (kInto == Into::kSetMax || kInto == Into::kScale) ? hn::LoadU(d, extra + v * kLanes) : hn::Zero(d);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* out = c + r * ldc + v * kLanes;
      if constexpr (kInto == Into::kScale) acc[r][v] = hn::MulAdd(hn::LoadU(d, out), lane_value, acc[r][v]);
      if constexpr (kInto == Into::kAdd) acc[r][v] = hn::Add(hn::LoadU(d, out), acc[r][v]);
      if constexpr (kInto == Into::kSetMax) lane_value = hn::Max(lane_value, acc[r][v]);
      hn::StoreU(acc[r][v], d, out);
    }
    if constexpr (kInto == Into::kSetMax) hn::StoreU(lane_value, d, extra + v * kLanes);
  }
}

/// All rows of C vectors of columns.
template <class Words, Into kInto, bool kUnitRow, int C>
HWY_INLINE void column_strip(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t k, float* c,
                             int64_t ldc, float* extra) {
  const int64_t stride = kUnitRow ? a.k_stride : a.row_stride;
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    register_tile<Words, kInto, kUnitRow, kTileRows, C>(a.data + r * a.row_stride, stride, b, ldb, k,
                                                        c + r * ldc, ldc, extra);
  }
  if (kTileRows > 4 && r + 4 <= rows) {
    register_tile<Words, kInto, kUnitRow, 4, C>(a.data + r * a.row_stride, stride, b, ldb, k, c + r * ldc,
                                                ldc, extra);
    r += 4;
  }
  if (r + 2 <= rows) {
    register_tile<Words, kInto, kUnitRow, 2, C>(a.data + r * a.row_stride, stride, b, ldb, k, c + r * ldc,
                                                ldc, extra);
    r += 2;
  }
  if (r < rows) {
    register_tile<Words, kInto, kUnitRow, 1, C>(a.data + r * a.row_stride, stride, b, ldb, k, c + r * ldc,
                                                ldc, extra);
  }
}

/// Columns in strips of three vectors, and of two where a single one would be left (it would wait for its own
/// latency).
template <class Words, Into kInto, bool kUnitRow>
HWY_INLINE void product(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t k,
                        float* c, int64_t ldc, float* extra) {
  int64_t left = cols / kLanes;
  int64_t col = 0;
  while (left > 0) {
    float* lane_values = extra == nullptr ? nullptr : extra + col;
    if (left == 1) {
      column_strip<Words, kInto, kUnitRow, 1>(a, b + col, ldb, rows, k, c + col, ldc, lane_values);
      break;
    }
    const int64_t strip = (left == 2 || left == 4) ? 2 : 3;
    if (strip == 2) {
      column_strip<Words, kInto, kUnitRow, 2>(a, b + col, ldb, rows, k, c + col, ldc, lane_values);
    } else {
      column_strip<Words, kInto, kUnitRow, 3>(a, b + col, ldb, rows, k, c + col, ldc, lane_values);
    }
    left -= strip;
    col += strip * kLanes;
  }
}

template <class Words>
void scores(Operand a, const float* b, int64_t rows, int64_t k, float* c, float* column_max) {
  if (column_max != nullptr) {
    product<Words, Into::kSetMax, false>(a, b, kPanel, rows, kPanel, k, c, kPanel, column_max);
  } else {
    product<Words, Into::kSet, false>(a, b, kPanel, rows, kPanel, k, c, kPanel, nullptr);
  }
}

template <class Words>
void accumulate(Operand a, const float* b, int64_t rows, int64_t k, float* c, const float* alpha) {
  if (alpha != nullptr) {
    product<Words, Into::kScale, true>(a, b, kPanel, rows, kPanel, k, c, kPanel, const_cast<float*>(alpha));
  } else {
    product<Words, Into::kAdd, true>(a, b, kPanel, rows, kPanel, k, c, kPanel, nullptr);
  }
}

template <class Words>
void accumulate_strided(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t k, float* c) {
  product<Words, Into::kAdd, true>(a, b, ldb, rows, kPanel, k, c, kPanel, nullptr);
}

template <class Words>
void update(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t k, float* c,
            int64_t ldc) {
  product<Words, Into::kAdd, false>(a, b, ldb, rows, cols, k, c, ldc, nullptr);
}

// ---- exponentials
// ------------------------------------------------------------------------------------------------

/// 2^x for x <= 127: round to n + f, a minimax polynomial (relative error; our own Remez run) in f, then the
/// exponent. Below -126 the result is 0, so that no subnormal slows the products down; NaN stays NaN. Degree
/// 6 errs by 2e-9, less than the rounding of float; degree 5 by 8e-8, enough where the weights are rounded to
/// bfloat16.
template <int kDegree>
HWY_INLINE V exp2_fast(V x) {
  const D d;
#if HWY_TARGET == HWY_AVX3
  const V safe = x;
#else
  // Without VSCALEF the exponent is added as an integer, which has neither NaN nor anything beyond the range
  // of float.
  const auto in_range = hn::And(hn::Ge(x, hn::Set(d, -126.0f)), hn::Le(x, hn::Set(d, 127.0f)));
  const V safe = hn::IfThenElseZero(in_range, x);
#endif
  const V n = hn::Round(safe);
  const V f = hn::Sub(safe, n);
  V p;
  if constexpr (kDegree == 6) {
    p = hn::MulAdd(hn::Set(d, 0.000153458121613f), f, hn::Set(d, 0.001339993117724f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.009618488956331f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.055503287771054f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.240226468906455f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.693147205737196f));
    p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  } else {
    p = hn::MulAdd(hn::Set(d, 0.001327647263195f), f, hn::Set(d, 0.009675541343121f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.055507132718556f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.240221197237107f));
    p = hn::MulAdd(p, f, hn::Set(d, 0.693146967065035f));
    p = hn::MulAdd(p, f, hn::Set(d, 1.000000071654714f));
  }
#if HWY_TARGET == HWY_AVX3
  return V{
      _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), p.raw, n.raw)};
#else
  const DI di;
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, n));
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  const V above = hn::IfThenElse(hn::Eq(x, x), hn::Set(d, std::numeric_limits<float>::infinity()), x);
  const V outside = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), above);
  return hn::IfThenElse(in_range, scaled, outside);
#endif
}

#if HWY_TARGET == HWY_AVX3
/// Lanes of two rows as bfloat16 pairs: word i = (low[i], high[i]).
HWY_INLINE __m512i pair_words(V low, V high) {
  __m512i both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high.raw), "v"(low.raw));  // halves: low, then high
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, both);
}
#endif

void to_pairs(const float* s, int64_t n, uint32_t* pairs) {
#if HWY_TARGET == HWY_AVX3
  const D d;
  for (int64_t j = 0; j < n; j += 2) {
    for (int v = 0; v < kVectors; ++v) {
      const V low = hn::LoadU(d, s + j * kPanel + v * kLanes);
      const V high = j + 1 < n ? hn::LoadU(d, s + (j + 1) * kPanel + v * kLanes) : hn::Zero(d);
      _mm512_storeu_si512(pairs + (j / 2) * kPanel + v * kLanes, pair_words(low, high));
    }
  }
#else
  (void)s;
  (void)n;
  (void)pairs;
#endif
}

template <bool kPairs>
HWY_INLINE void softmax_tile(float* HWY_RESTRICT s, int64_t n, float factor,
                             const float* HWY_RESTRICT column_max, PanelState state,
                             uint32_t* HWY_RESTRICT pairs) {
  const D d;
  const V scale = hn::Set(d, factor);
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int v = 0; v < kVectors; ++v) {
    const int x = v * kLanes;
    const V before = hn::LoadU(d, state.row_max + x);
    const V raised = hn::Max(before, hn::Mul(hn::LoadU(d, column_max + x), scale));
    // Against a maximum of -inf every difference would be NaN; against 0 the weights of such a row are 0.
    const V subtract = hn::IfThenZeroElse(hn::Eq(raised, lowest), raised);
    const V alpha = exp2_fast<6>(hn::Sub(before, subtract));
    hn::StoreU(raised, d, state.row_max + x);
    hn::StoreU(alpha, d, state.alpha + x);
    V sum0 = hn::Mul(hn::LoadU(d, state.row_sum + x), alpha);
    V sum1 = hn::Zero(d);
    float* column = s + x;
    int64_t j = 0;
    for (; j + 2 <= n; j += 2, column += 2 * kPanel) {
      const V p0 = exp2_fast < kPairs ? 5 : 6 > (hn::MulSub(hn::LoadU(d, column), scale, subtract));
      const V p1 = exp2_fast < kPairs ? 5 : 6 > (hn::MulSub(hn::LoadU(d, column + kPanel), scale, subtract));
      sum0 = hn::Add(sum0, p0);
      sum1 = hn::Add(sum1, p1);
#if HWY_TARGET == HWY_AVX3
      if constexpr (kPairs) {
        _mm512_storeu_si512(pairs + (j / 2) * kPanel + x, pair_words(p0, p1));
        continue;
      }
#endif
      hn::StoreU(p0, d, column);
      hn::StoreU(p1, d, column + kPanel);
    }
    if (j < n) {
      const V p0 = exp2_fast < kPairs ? 5 : 6 > (hn::MulSub(hn::LoadU(d, column), scale, subtract));
      sum0 = hn::Add(sum0, p0);
#if HWY_TARGET == HWY_AVX3
      if constexpr (kPairs) _mm512_storeu_si512(pairs + (j / 2) * kPanel + x, pair_words(p0, hn::Zero(d)));
#endif
      if constexpr (!kPairs) hn::StoreU(p0, d, column);
    }
    hn::StoreU(hn::Add(sum0, sum1), d, state.row_sum + x);
  }
  (void)pairs;
}

void softmax(float* s, int64_t n, float factor, const float* column_max, PanelState state, uint32_t* pairs) {
#if HWY_TARGET == HWY_AVX3
  if (pairs != nullptr) {
    softmax_tile<true>(s, n, factor, column_max, state, pairs);
    return;
  }
#endif
  softmax_tile<false>(s, n, factor, column_max, state, pairs);
}

#if HWY_TARGET == HWY_AVX3
/// Three vectors of one row as 48 bfloat16.
HWY_INLINE void store_bf16_row(const V* row, uint16_t* out) {
  __m512i first;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(first) : "v"(row[1].raw), "v"(row[0].raw));
  __m256i last;
  asm("vcvtneps2bf16 %1, %0" : "=v"(last) : "v"(row[2].raw));
  _mm512_storeu_si512(out, first);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), last);
}
#endif

/// Writes one or two rows of p and ds in the forms that the products of the backward read.
template <bool kPairs>
HWY_INLINE void store_gradient_rows(V (*p)[kVectors], V (*ds)[kVectors], int64_t j, bool second, float* p_out,
                                    float* ds_out, int64_t ld, uint32_t* ds_pairs) {
  const D d;
#if HWY_TARGET == HWY_AVX3
  if constexpr (kPairs) {
    for (int r = 0; r < (second ? 2 : 1); ++r) {
      store_bf16_row(p[r], reinterpret_cast<uint16_t*>(p_out + (j + r) * ld));
      store_bf16_row(ds[r], reinterpret_cast<uint16_t*>(ds_out + (j + r) * ld));
    }
    for (int v = 0; v < kVectors; ++v) {
      _mm512_storeu_si512(ds_pairs + (j / 2) * kPanel + v * kLanes,
                          pair_words(ds[0][v], second ? ds[1][v] : hn::Zero(d)));
    }
    return;
  }
#endif
  for (int r = 0; r < (second ? 2 : 1); ++r) {
    for (int v = 0; v < kVectors; ++v) {
      hn::StoreU(p[r][v], d, p_out + (j + r) * ld + v * kLanes);
      hn::StoreU(ds[r][v], d, ds_out + (j + r) * ld + v * kLanes);
    }
  }
  (void)ds_pairs;
}

template <bool kPairs>
HWY_INLINE void gradient_tile(const float* HWY_RESTRICT s, const float* HWY_RESTRICT dp, int64_t n,
                              float factor, const float* HWY_RESTRICT lse2, const float* HWY_RESTRICT delta,
                              float* p_out, float* ds_out, int64_t ld, uint32_t* ds_pairs) {
  const D d;
  const V scale = hn::Set(d, factor);
  V p[2][kVectors], ds[2][kVectors];
  for (int64_t j = 0; j < n; j += 2) {
    const bool second = j + 1 < n;
    for (int r = 0; r < (second ? 2 : 1); ++r) {
#pragma GCC unroll 3
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = (j + r) * kPanel + v * kLanes;
        const V weight = exp2_fast < kPairs
                             ? 5
                             : 6 > (hn::MulSub(hn::LoadU(d, s + at), scale, hn::LoadU(d, lse2 + v * kLanes)));
        const V gradient = hn::Mul(weight, hn::Sub(hn::LoadU(d, dp + at), hn::LoadU(d, delta + v * kLanes)));
        p[r][v] = weight;
        ds[r][v] = hn::IfThenZeroElse(hn::Eq(weight, hn::Zero(d)), gradient);
      }
    }
    store_gradient_rows<kPairs>(p, ds, j, second, p_out, ds_out, ld, ds_pairs);
  }
}

template <bool kPairs>
void gradients(const float* s, const float* dp, int64_t n, float factor, const float* lse2,
               const float* delta, float* p, float* ds, int64_t ld, uint32_t* ds_pairs) {
  gradient_tile<kPairs>(s, dp, n, factor, lse2, delta, p, ds, ld, ds_pairs);
}

void gradients_float(float* s, float* dp, int64_t n, float factor, const float* lse2, const float* delta) {
  const D d;
  const V scale = hn::Set(d, factor);
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < n; ++j) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = j * kPanel + v * kLanes;
      const V score = hn::LoadU(d, s + at);
      const V raw = exp2_fast<6>(hn::MulSub(score, scale, hn::LoadU(d, lse2 + v * kLanes)));
      // A masked score has no weight, even in a row whose lse is NaN.
      const V weight = hn::IfThenZeroElse(hn::Eq(score, lowest), raw);
      const V gradient = hn::Mul(weight, hn::Sub(hn::LoadU(d, dp + at), hn::LoadU(d, delta + v * kLanes)));
      hn::StoreU(weight, d, s + at);
      hn::StoreU(hn::IfThenZeroElse(hn::Eq(weight, hn::Zero(d)), gradient), d, dp + at);
    }
  }
}

template <bool kPairs>
void store_gradients(const float* p_tile, const float* ds_tile, int64_t n, float* p_out, float* ds_out,
                     int64_t ld, uint32_t* ds_pairs) {
  const D d;
  V p[2][kVectors], ds[2][kVectors];
  for (int64_t j = 0; j < n; j += 2) {
    const bool second = j + 1 < n;
    for (int r = 0; r < (second ? 2 : 1); ++r) {
      for (int v = 0; v < kVectors; ++v) {
        p[r][v] = hn::LoadU(d, p_tile + (j + r) * kPanel + v * kLanes);
        ds[r][v] = hn::LoadU(d, ds_tile + (j + r) * kPanel + v * kLanes);
      }
    }
    store_gradient_rows<kPairs>(p, ds, j, second, p_out, ds_out, ld, ds_pairs);
  }
}

// ---- masks and terms
// ---------------------------------------------------------------------------------------------

void mask_range(float* s, int64_t n, int32_t j0, const int32_t* begin, const int32_t* end) {
  const D d;
  const DI di;
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int v = 0; v < kVectors; ++v) {
    const auto first = hn::LoadU(di, begin + v * kLanes);
    const auto last = hn::LoadU(di, end + v * kLanes);
    for (int64_t j = 0; j < n; ++j) {
      float* at = s + j * kPanel + v * kLanes;
      const auto key = hn::Set(di, j0 + static_cast<int32_t>(j));
      const auto outside = hn::Or(hn::Lt(key, first), hn::Not(hn::Lt(key, last)));
      hn::StoreU(hn::IfThenElse(hn::RebindMask(d, outside), lowest, hn::LoadU(d, at)), d, at);
    }
  }
}

void column_max(const float* s, int64_t n, float* maxima) {
  const D d;
  for (int v = 0; v < kVectors; ++v) {
    V m = hn::LoadU(d, maxima + v * kLanes);
    for (int64_t j = 0; j < n; ++j) m = hn::Max(m, hn::LoadU(d, s + j * kPanel + v * kLanes));
    hn::StoreU(m, d, maxima + v * kLanes);
  }
}

/// tanh(|x|) = 1 - 2 / (exp(2|x|) + 1) loses all digits near 0, where the odd series to x^7 (error 2e-8 below
/// 0.2) takes over.
HWY_INLINE V tanh_fast(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const V size = hn::Min(hn::Abs(x), hn::Set(d, 20.0f));
  const V e = exp2_fast<6>(hn::Mul(size, hn::Set(d, 2.88539008177793f)));
  const V large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  const V x2 = hn::Mul(size, size);
  V series = hn::MulAdd(x2, hn::Set(d, 62.0f / 2835), hn::Set(d, -17.0f / 315));
  series = hn::MulAdd(series, x2, hn::Set(d, 2.0f / 15));
  series = hn::MulAdd(series, x2, hn::Set(d, -1.0f / 3));
  series = hn::MulAdd(hn::Mul(series, x2), size, size);
  const V magnitude = hn::IfThenElse(hn::Lt(size, hn::Set(d, 0.2f)), series, large);
  return hn::IfThenElse(hn::Eq(x, x), hn::CopySign(magnitude, x), x);
}

void softcap(float* s, int64_t count, float scale, float cap, float* derivative) {
  const D d;
  const V factor = hn::Set(d, scale / cap);
  const V limit = hn::Set(d, cap);
  for (int64_t i = 0; i < count; i += kLanes) {
    const V t = tanh_fast(hn::Mul(hn::LoadU(d, s + i), factor));
    hn::StoreU(hn::Mul(t, limit), d, s + i);
    if (derivative != nullptr) hn::StoreU(hn::NegMulAdd(t, t, hn::Set(d, 1.0f)), d, derivative + i);
  }
}

// ---- layout and types
// --------------------------------------------------------------------------------------------

void transpose(const float* src, int64_t ld_src, int64_t rows, int64_t cols, float* dst, int64_t ld_dst) {
  int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const D4 d;
  const hn::Repartition<double, D4> dd;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= cols; c += 4) {
      const auto a0 = hn::LoadU(d, src + (r + 0) * ld_src + c);
      const auto a1 = hn::LoadU(d, src + (r + 1) * ld_src + c);
      const auto a2 = hn::LoadU(d, src + (r + 2) * ld_src + c);
      const auto a3 = hn::LoadU(d, src + (r + 3) * ld_src + c);
      const auto b0 = hn::BitCast(dd, hn::InterleaveLower(d, a0, a1));
      const auto b1 = hn::BitCast(dd, hn::InterleaveUpper(d, a0, a1));
      const auto b2 = hn::BitCast(dd, hn::InterleaveLower(d, a2, a3));
      const auto b3 = hn::BitCast(dd, hn::InterleaveUpper(d, a2, a3));
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, b0, b2)), d, dst + (c + 0) * ld_dst + r);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, b0, b2)), d, dst + (c + 1) * ld_dst + r);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dd, b1, b3)), d, dst + (c + 2) * ld_dst + r);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dd, b1, b3)), d, dst + (c + 3) * ld_dst + r);
    }
    for (; c < cols; ++c) {
      for (int64_t i = r; i < r + 4; ++i)
        std::memcpy(dst + c * ld_dst + i, src + i * ld_src + c, sizeof(float));
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) std::memcpy(dst + c * ld_dst + r, src + r * ld_src + c, sizeof(float));
  }
}

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
using DH = hn::Rebind<hwy::float16_t, D>;
#endif
using DB = hn::Rebind<hwy::bfloat16_t, D>;

HWY_INLINE V load_as_float(const float* p) {
  return hn::LoadU(D(), p);
}
HWY_INLINE V load_as_float(const F16* p) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  // Highway's emulation knows no NaN and Inf of float16.
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = to_float(p[i]);
  return hn::LoadU(D(), values);
#else
  return hn::PromoteTo(D(), hn::LoadU(DH(), reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}
HWY_INLINE V load_as_float(const Bf16* p) {
  return hn::PromoteTo(D(), hn::LoadU(DB(), reinterpret_cast<const hwy::bfloat16_t*>(p)));
}

template <class T>
void widen(const T* src, int64_t count, float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_as_float(src + i), D(), dst + i);
  for (; i < count; ++i) dst[i] = to_float(src[i]);
}

void to_float_any(const void* src, DType type, int64_t count, float* dst) {
  if (type == DType::kF16) {
    widen(static_cast<const F16*>(src), count, dst);
  } else if (type == DType::kBF16) {
    widen(static_cast<const Bf16*>(src), count, dst);
  } else {
    std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
  }
}

void from_float_any(const float* src, int64_t count, DType type, void* dst) {
  if (type == DType::kF16) {
    auto* out = static_cast<F16*>(dst);
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<F16>(src[i]);
  } else if (type == DType::kBF16) {
    auto* out = static_cast<Bf16*>(dst);
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<Bf16>(src[i]);
  } else {
    std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(float));
  }
}

void interleave(const uint16_t* a, const uint16_t* b, int64_t count, uint32_t* words) {
  if (b == nullptr) {
    for (int64_t c = 0; c < count; ++c) words[c] = a[c];
  } else {
    for (int64_t c = 0; c < count; ++c)
      words[c] = static_cast<uint32_t>(a[c]) | (static_cast<uint32_t>(b[c]) << 16);
  }
}

// ---- few queries
// -------------------------------------------------------------------------------------------------

/// Asks for row r of `ahead`; 64 bytes a cache line. Only rows that do not follow each other: those that do
/// are what the hardware's own prefetchers see coming.
HWY_INLINE void fetch(const Ahead& ahead, int64_t r) {
  if (r >= ahead.rows || ahead.stride_bytes == ahead.row_bytes) return;
  const char* row = ahead.data + r * ahead.stride_bytes;
  for (int64_t byte = 0; byte < ahead.row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

/// Two vectors of a row as float32. 32 bfloat16 come as (even, odd) elements: one shift and one mask, no
/// shuffles; the float32 operands beside them are de-interleaved to match, once a pass. Few instructions a
/// cache line matter here: the out-of-order window must reach over the next page to keep memory busy.
template <class T>
struct TwoVectors {
  static HWY_INLINE void values(const T* p, V& a, V& b) {
    a = load_as_float(p);
    b = load_as_float(p + kLanes);
  }
  static HWY_INLINE void load(const float* p, V& a, V& b) {
    a = hn::LoadU(D(), p);
    b = hn::LoadU(D(), p + kLanes);
  }
  static HWY_INLINE void store(V a, V b, float* p) {
    hn::StoreU(a, D(), p);
    hn::StoreU(b, D(), p + kLanes);
  }
};
#if HWY_TARGET != HWY_SCALAR
template <>
struct TwoVectors<Bf16> {
  static HWY_INLINE void values(const Bf16* p, V& a, V& b) {
    const auto words =
        hn::BitCast(DU(), hn::LoadU(hn::Repartition<uint8_t, D>(), reinterpret_cast<const uint8_t*>(p)));
    a = hn::BitCast(D(), hn::ShiftLeft<16>(words));
    b = hn::BitCast(D(), hn::And(words, hn::Set(DU(), 0xffff0000u)));
  }
  static HWY_INLINE void load(const float* p, V& a, V& b) { hn::LoadInterleaved2(D(), p, a, b); }
  static HWY_INLINE void store(V a, V b, float* p) { hn::StoreInterleaved2(a, b, D(), p); }
};
#endif

/// s[r][j] (+)= dot(q[r], k[j]) over P pairs of vectors, q in registers.
template <class T, int R, int P>
HWY_INLINE void dots_strip(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t n, bool first,
                           float* s, int64_t lds, const Ahead& ahead) {
  const D d;
  V query[R][2 * P];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x) {
      TwoVectors<T>::load(q + r * ldq + 2 * x * kLanes, query[r][2 * x], query[r][2 * x + 1]);
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    fetch(ahead, j);
    const T* row = k + j * ldk;
    V even[R], odd[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) even[r] = odd[r] = hn::Zero(d);
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x) {
      V a, b;
      TwoVectors<T>::values(row + 2 * x * kLanes, a, b);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        even[r] = hn::MulAdd(a, query[r][2 * x], even[r]);
        odd[r] = hn::MulAdd(b, query[r][2 * x + 1], odd[r]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float dot = hn::GetLane(hn::SumOfLanes(d, hn::Add(even[r], odd[r])));
      s[r * lds + j] = first ? dot : s[r * lds + j] + dot;
    }
  }
}

template <class T, int R>
void dots(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t n, int64_t size, float* s,
          int64_t lds, Ahead ahead) {
  constexpr int kPairs = R == 4 ? 2 : 4;  // at most 16 registers of q
  constexpr int64_t kWide = 2 * kPairs * kLanes, kNarrow = 2 * kLanes;
  int64_t c = 0;
  for (; c + kWide <= size; c += kWide, ahead.rows = 0) {
    dots_strip<T, R, kPairs>(q + c, ldq, k + c, ldk, n, c == 0, s, lds, ahead);
  }
  for (; c + kNarrow <= size; c += kNarrow, ahead.rows = 0) {
    dots_strip<T, R, 1>(q + c, ldq, k + c, ldk, n, c == 0, s, lds, ahead);
  }
  if (c == size) return;
  for (int r = 0; r < R; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = c == 0 ? 0.0f : s[r * lds + j];
      for (int64_t i = c; i < size; ++i) sum += to_float(k[j * ldk + i]) * q[r * ldq + i];
      s[r * lds + j] = sum;
    }
  }
}

/// o[r] += sum over j of p[r][j] * v[j], P pairs of vectors that stay in registers.
template <class T, int R, int P>
HWY_INLINE void sums_strip(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t n, float* o,
                           int64_t ldo, const Ahead& ahead) {
  const D d;
  V acc[R][2 * P];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x)
      TwoVectors<T>::load(o + r * ldo + 2 * x * kLanes, acc[r][2 * x], acc[r][2 * x + 1]);
  }
  for (int64_t j = 0; j < n; ++j) {
    fetch(ahead, j);
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x) {
      V a, b;
      TwoVectors<T>::values(v + j * ldv + 2 * x * kLanes, a, b);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V weight = hn::Set(d, p[r * ldp + j]);
        acc[r][2 * x] = hn::MulAdd(a, weight, acc[r][2 * x]);
        acc[r][2 * x + 1] = hn::MulAdd(b, weight, acc[r][2 * x + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x)
      TwoVectors<T>::store(acc[r][2 * x], acc[r][2 * x + 1], o + r * ldo + 2 * x * kLanes);
  }
}

template <class T, int R>
void sums(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t n, int64_t size, float* o,
          int64_t ldo, Ahead ahead) {
  constexpr int kPairs = R == 4 ? 2 : 4;
  constexpr int64_t kWide = 2 * kPairs * kLanes, kNarrow = 2 * kLanes;
  int64_t c = 0;
  for (; c + kWide <= size; c += kWide, ahead.rows = 0) {
    sums_strip<T, R, kPairs>(p, ldp, v + c, ldv, n, o + c, ldo, ahead);
  }
  for (; c + kNarrow <= size; c += kNarrow, ahead.rows = 0) {
    sums_strip<T, R, 1>(p, ldp, v + c, ldv, n, o + c, ldo, ahead);
  }
  for (; c < size; ++c) {
    for (int r = 0; r < R; ++r) {
      float sum = o[r * ldo + c];
      for (int64_t j = 0; j < n; ++j) sum += p[r * ldp + j] * to_float(v[j * ldv + c]);
      o[r * ldo + c] = sum;
    }
  }
}

template <class T>
void dots_rows(const float* q, int64_t ldq, int64_t num_q, const void* k, int64_t ldk, int64_t n, int64_t d,
               float* s, int64_t lds, Ahead ahead) {
  const T* keys = static_cast<const T*>(k);
  int64_t r = 0;
  for (; r + 4 <= num_q; r += 4, ahead.rows = 0)
    dots<T, 4>(q + r * ldq, ldq, keys, ldk, n, d, s + r * lds, lds, ahead);
  for (; r + 2 <= num_q; r += 2, ahead.rows = 0)
    dots<T, 2>(q + r * ldq, ldq, keys, ldk, n, d, s + r * lds, lds, ahead);
  for (; r < num_q; ++r, ahead.rows = 0)
    dots<T, 1>(q + r * ldq, ldq, keys, ldk, n, d, s + r * lds, lds, ahead);
}

template <class T>
void sums_rows(const float* p, int64_t ldp, int64_t num_q, const void* v, int64_t ldv, int64_t n, int64_t d,
               float* o, int64_t ldo, Ahead ahead) {
  const T* values = static_cast<const T*>(v);
  int64_t r = 0;
  for (; r + 4 <= num_q; r += 4, ahead.rows = 0)
    sums<T, 4>(p + r * ldp, ldp, values, ldv, n, d, o + r * ldo, ldo, ahead);
  for (; r + 2 <= num_q; r += 2, ahead.rows = 0)
    sums<T, 2>(p + r * ldp, ldp, values, ldv, n, d, o + r * ldo, ldo, ahead);
  for (; r < num_q; ++r, ahead.rows = 0)
    sums<T, 1>(p + r * ldp, ldp, values, ldv, n, d, o + r * ldo, ldo, ahead);
}

void row_dots(const float* q, int64_t ldq, int64_t num_q, const void* k, DType type, int64_t ldk, int64_t n,
              int64_t d, float* s, int64_t lds, Ahead ahead) {
  if (type == DType::kF16) return dots_rows<F16>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
  if (type == DType::kBF16) return dots_rows<Bf16>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
  return dots_rows<float>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
}

void row_sums(const float* p, int64_t ldp, int64_t num_q, const void* v, DType type, int64_t ldv, int64_t n,
              int64_t d, float* o, int64_t ldo, Ahead ahead) {
  if (type == DType::kF16) return sums_rows<F16>(p, ldp, num_q, v, ldv, n, d, o, ldo, ahead);
  if (type == DType::kBF16) return sums_rows<Bf16>(p, ldp, num_q, v, ldv, n, d, o, ldo, ahead);
  return sums_rows<float>(p, ldp, num_q, v, ldv, n, d, o, ldo, ahead);
}

float row_max(const float* s, int64_t n) {
  const D d;
  V m = hn::Set(d, -std::numeric_limits<float>::infinity());
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) m = hn::Max(m, hn::LoadU(d, s + j));
  float largest = hn::GetLane(hn::MaxOfLanes(d, m));
  for (; j < n; ++j) largest = std::max(largest, s[j]);
  return largest;
}

float row_exp2(float* s, int64_t n, float factor, float max2) {
  const D d;
  const V scale = hn::Set(d, factor), subtract = hn::Set(d, max2);
  V sum = hn::Zero(d);
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    const V p = exp2_fast<6>(hn::MulSub(hn::LoadU(d, s + j), scale, subtract));
    sum = hn::Add(sum, p);
    hn::StoreU(p, d, s + j);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  if (j < n) {
    float tail[kLanes] = {};
    for (int64_t x = j; x < n; ++x) tail[x - j] = s[x];
    hn::StoreU(exp2_fast<6>(hn::MulSub(hn::LoadU(d, tail), scale, subtract)), d, tail);
    for (int64_t x = j; x < n; ++x) {
      s[x] = tail[x - j];
      total += s[x];
    }
  }
  return total;
}

// ---- tables
// ------------------------------------------------------------------------------------------------------

template <class Words, bool kPairs>
constexpr Ops make_ops(const char* name) {
  Ops ops{};
  ops.name = name;
  ops.word_elements = kPairs ? 2 : 1;
  ops.row_multiple = 1;
  ops.k_multiple = 1;
  ops.values_by_row = false;
  ops.scores = scores<Words>;
  ops.accumulate = accumulate<Words>;
  ops.accumulate_strided = accumulate_strided<Words>;
  ops.update = update<Words>;
  ops.softmax = softmax;
  ops.to_pairs = to_pairs;
  ops.gradients = gradients<kPairs>;
  ops.gradients_float = gradients_float;
  ops.store_gradients = store_gradients<kPairs>;
  ops.mask_range = mask_range;
  ops.column_max = column_max;
  ops.softcap = softcap;
  ops.transpose = transpose;
  ops.to_float = to_float_any;
  ops.from_float = from_float_any;
  ops.interleave = interleave;
  ops.row_dots = row_dots;
  ops.row_sums = row_sums;
  ops.row_max = row_max;
  ops.row_exp2 = row_exp2;
  return ops;
}

const Ops* float_table(const char* name) {
  static const Ops kOps = make_ops<FloatWords, false>(name);
  return &kOps;
}

#if HWY_TARGET == HWY_AVX3
const Ops* bf16_table() {
  static constexpr Ops kOps = make_ops<Bf16Words, true>("avx512_bf16");
  return &kOps;
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fovea::cpu {

#if HWY_ARCH_X86
const Ops* avx2_ops() {
  return N_AVX2::float_table("avx2");
}
const Ops* avx512_ops() {
  return N_AVX3::float_table("avx512");
}
const Ops* avx512_bf16_ops() {
  return N_AVX3::bf16_table();
}
const Ops* neon_ops() {
  return nullptr;
}
const Ops* generic_ops() {
  return HWY_STATIC_DISPATCH(float_table)("generic");
}
#elif HWY_ARCH_ARM
const Ops* avx2_ops() {
  return nullptr;
}
const Ops* avx512_ops() {
  return nullptr;
}
const Ops* avx512_bf16_ops() {
  return nullptr;
}
const Ops* amx_bf16_ops() {
  return nullptr;
}
const Ops* neon_ops() {
  return HWY_STATIC_DISPATCH(float_table)("neon");
}
const Ops* generic_ops() {
  return nullptr;
}
#else
const Ops* avx2_ops() {
  return nullptr;
}
const Ops* avx512_ops() {
  return nullptr;
}
const Ops* avx512_bf16_ops() {
  return nullptr;
}
const Ops* amx_bf16_ops() {
  return nullptr;
}
const Ops* neon_ops() {
  return nullptr;
}
const Ops* generic_ops() {
  return HWY_STATIC_DISPATCH(float_table)("generic");
}
#endif

}  // namespace fovea::cpu
#endif
