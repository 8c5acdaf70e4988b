// Online softmax of a score tile, and its gradients.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_SOFTMAX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_SOFTMAX_INL_HPP
#undef FOVEA_CPU_OPS_SOFTMAX_INL_HPP
#else
#define FOVEA_CPU_OPS_SOFTMAX_INL_HPP
#endif

#include <limits>

#include "cpu/ops_program_functions-inl.hpp"
#include "cpu/ops_vectors-inl.hpp"
#include "cpu/scratch.hpp"
#include "cpu/subnormals.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

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
    // -inf - (-inf) is NaN; with 0 in place of a maximum of -inf the weights of the row are 0.
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
  const WithoutSubnormals mode;
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

/// Lines of rows that are fetched a few at a time: all at once would wait for the 16 buffers of a core.
class Fetch {
 public:
  Fetch(const FetchRows& rows, int64_t steps)
      : rows_(rows),
        lines_of_row_(rows.bytes / 64),
        lines_of_step_(ceil_div(rows.n * lines_of_row_, steps)) {}
  HWY_INLINE void step() {
    for (int64_t i = 0; i < lines_of_step_ && row_ < rows_.n; ++i) {
      __builtin_prefetch(rows_.rows[row_] + line_ * 64, 0, 2);
      if (++line_ < lines_of_row_) continue;
      line_ = 0;
      ++row_;
    }
  }

 private:
  const FetchRows& rows_;
  int64_t lines_of_row_, lines_of_step_, row_ = 0, line_ = 0;
};

template <bool kPairs>
HWY_INLINE void gradient_tile(const float* HWY_RESTRICT s, const float* HWY_RESTRICT dp, int64_t n,
                              float factor, const float* HWY_RESTRICT lse2, const float* HWY_RESTRICT delta,
                              float* p_out, float* ds_out, int64_t ld, uint32_t* ds_pairs,
                              const FetchRows& ahead) {
  const WithoutSubnormals mode;
  Fetch fetch(ahead, ceil_div(n, 2));
  const D d;
  const V scale = hn::Set(d, factor);
  V p[2][kVectors], ds[2][kVectors];
  for (int64_t j = 0; j < n; j += 2) {
    fetch.step();
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
               const float* delta, float* p, float* ds, int64_t ld, uint32_t* ds_pairs,
               const FetchRows& ahead) {
  gradient_tile<kPairs>(s, dp, n, factor, lse2, delta, p, ds, ld, ds_pairs, ahead);
}

void gradients_float(float* s, float* dp, int64_t n, float factor, const float* lse2, const float* delta,
                     const FetchRows& ahead) {
  const WithoutSubnormals mode;
  Fetch fetch(ahead, n);
  const D d;
  const V scale = hn::Set(d, factor);
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < n; ++j) {
    fetch.step();
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

void multiply_gradients(float* ds, const float* factor, int64_t count) {
  const D d;
  for (int64_t i = 0; i < count; i += kLanes) {
    const V gradient = hn::LoadU(d, ds + i);
    const V product = hn::Mul(gradient, hn::LoadU(d, factor + i));
    hn::StoreU(hn::IfThenZeroElse(hn::Eq(gradient, hn::Zero(d)), product), d, ds + i);
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

/// n is a multiple of the lanes of a vector.
void end_rows(const float* maxima, const float* sums, int64_t n, float* factors, float* lse) {
  const D d;
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity()), ln2 = hn::Set(d, 0.6931471805599453f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const V sum = hn::LoadU(d, sums + i);
    const auto empty = hn::Eq(sum, hn::Zero(d));
    const V value = hn::MulAdd(ln2, hn::LoadU(d, maxima + i), Logarithm{}(sum));
    hn::StoreU(hn::IfThenElse(empty, lowest, value), d, lse + i);
    hn::StoreU(hn::IfThenZeroElse(empty, hn::Div(hn::LoadU(d, factors + i), sum)), d, factors + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_SOFTMAX_INL_HPP
