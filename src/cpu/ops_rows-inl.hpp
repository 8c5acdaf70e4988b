// Operations for few queries: products and softmax of single rows.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_ROWS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_ROWS_INL_HPP
#undef FOVEA_CPU_OPS_ROWS_INL_HPP
#else
#define FOVEA_CPU_OPS_ROWS_INL_HPP
#endif

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/ops_tiles-inl.hpp"
#include "cpu/ops_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

/// Prefetches the row of `ahead` that has turn r, in cache lines of 64 bytes. Rows of four parts take turns: where rows of a head are side by side,
/// those of a step are four pages, whose look-ups overlap.
constexpr int64_t kLine = 64;
HWY_INLINE void fetch(const Ahead& ahead, int64_t r) {
  constexpr int64_t kParts = 4;
  if (r >= ahead.rows) return;
  const int64_t place = ahead.rows % kParts == 0 ? r % kParts * (ahead.rows / kParts) + r / kParts : r;
  const char* row = ahead.data + place * ahead.stride_bytes;
  for (int64_t byte = 0; byte < ahead.row_bytes; byte += kLine) __builtin_prefetch(row + byte, 0, 2);
}

/// The lines of each row that pass `pass` of so many fetches: memory is to be busy in all of them.
HWY_INLINE Ahead part_of(const Ahead& ahead, int64_t pass, int64_t passes) {
  const int64_t lines = (ahead.row_bytes + kLine - 1) / kLine;
  const int64_t begin = lines * pass / passes * kLine, end = lines * (pass + 1) / passes * kLine;
  return {ahead.data + begin, ahead.stride_bytes, begin < end ? ahead.rows : 0, end - begin};
}

/// Two vectors of a row as float32. 32 bfloat16 come as (even, odd) elements: one shift and one mask, no
/// shuffles; the float32 operands are de-interleaved to match, once a pass. Few instructions per cache line
/// let the out-of-order window reach over the next page, which keeps memory busy.
template <class T>
struct TwoVectors {
  static constexpr float kFactor = 1;  ///< what values() are to be multiplied by
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
/// Vectors of even and of odd elements.
struct EvenAndOdd {
  static constexpr float kFactor = 1;
  static HWY_INLINE void load(const float* p, V& a, V& b) { hn::LoadInterleaved2(D(), p, a, b); }
  static HWY_INLINE void store(V a, V b, float* p) { hn::StoreInterleaved2(a, b, D(), p); }
};
template <>
struct TwoVectors<Bf16> : EvenAndOdd {
  static HWY_INLINE void values(const Bf16* p, V& a, V& b) {
    const auto words =
        hn::BitCast(DU(), hn::LoadU(hn::Repartition<uint8_t, D>(), reinterpret_cast<const uint8_t*>(p)));
    a = hn::BitCast(D(), hn::ShiftLeft<16>(words));
    b = hn::BitCast(D(), hn::And(words, hn::Set(DU(), 0xffff0000u)));
  }
};
#endif

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
/// A float8_e4m3fn that is a number: its bits, moved, are the float16 that is 256 times smaller.
struct E4M3Number : E4M3 {};
template <>
struct TwoVectors<E4M3Number> : EvenAndOdd {
  static constexpr float kFactor = 256;
  static HWY_INLINE void values(const E4M3Number* p, V& a, V& b) {
    const hn::Rebind<int16_t, D> pairs;
    const auto both = hn::LoadU(pairs, reinterpret_cast<const int16_t*>(p));
    const auto half = [&](auto high) HWY_ATTR {
      const auto bits = hn::And(hn::ShiftRight<1>(high), hn::Set(pairs, static_cast<int16_t>(0xbf80)));
      return hn::PromoteTo(D(), hn::BitCast(DH(), bits));
    };
    a = half(hn::ShiftLeft<8>(both));
    b = half(both);
  }
};

/// Whether some of n rows of d float8_e4m3fn is NaN.
bool any_nan(const E4M3* rows, int64_t ld, int64_t n, int64_t d) {
  const hn::ScalableTag<uint8_t> bytes;
  const auto size = hn::Set(bytes, 0x7f);
  auto largest = hn::Zero(bytes);
  constexpr auto kBytes = static_cast<int64_t>(hn::MaxLanes(bytes));
  bool nan = false;
  for (int64_t j = 0; j < n; ++j) {
    const auto* row = reinterpret_cast<const uint8_t*>(rows + j * ld);
    int64_t c = 0;
    for (; c + kBytes <= d; c += kBytes) largest = hn::Max(largest, hn::And(hn::LoadU(bytes, row + c), size));
    for (; c < d; ++c) nan = nan || (row[c] & 0x7f) == 0x7f;
  }
  return nan || !hn::AllFalse(bytes, hn::Eq(largest, size));
}
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
      const float dot = hn::GetLane(hn::SumOfLanes(d, hn::Add(even[r], odd[r]))) * TwoVectors<T>::kFactor;
      s[r * lds + j] = first ? dot : s[r * lds + j] + dot;
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
/// The sum of the blocks of four lanes.
template <class DV, class Vec>
HWY_INLINE auto sum_of_blocks(DV, Vec v) {
  if constexpr (hn::MaxLanes(DV()) <= 4) {
    return v;
  } else {
    const hn::Half<DV> half;
    return sum_of_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

/// The sums of the lanes of four vectors, times `factor`, side by side.
HWY_INLINE void sums_of_four(const V* v, float factor, bool first, float* out) {
  const D d;
  const hn::Repartition<double, D> pairs;
  const auto fold = [&](V a, V b) {
    return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const auto low = hn::BitCast(pairs, fold(v[0], v[1])), high = hn::BitCast(pairs, fold(v[2], v[3]));
  // Each block of four lanes holds a part of the four sums.
  const V parts = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, low, high)),
                          hn::BitCast(d, hn::InterleaveUpper(pairs, low, high)));
  const hn::Full128<float> four;
  auto sums = sum_of_blocks(d, parts);
  if (factor != 1.0f) sums = hn::Mul(sums, hn::Set(four, factor));
  if (!first) sums = hn::Add(sums, hn::LoadU(four, out));
  hn::StoreU(sums, four, out);
}

// Rows whose dot products with four keys stay in registers: 16 sums of 32 registers, 8 of 16.
constexpr int kDotRows = HWY_TARGET == HWY_AVX2 ? 2 : 4;

/// s[r][j] (+)= dot(q[r], k[j]) of kDotRows rows and n keys, a multiple of four, over `pairs` pairs of vectors. The sums stay in
/// registers until they are whole: adding up the lanes of one takes as long as a dot product of 100 elements. q is in the order of
/// TwoVectors, 2 * kLanes elements a pair, the rows side by side.
template <class T>
void dots_of_four(const float* q, const T* k, int64_t ldk, int64_t n, int64_t pairs, bool first, float* s,
                  int64_t lds, const Ahead& ahead) {
  const D d;
  for (int64_t j = 0; j < n; j += 4) {
    for (int64_t i = j; i < j + 4; ++i) fetch(ahead, i);
    V sum[kDotRows][4];
    for (auto& row : sum)
      for (V& x : row) x = hn::Zero(d);
    for (int64_t x = 0; x < pairs; ++x) {
      const float* query = q + x * 2 * kDotRows * kLanes;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        V a, b;
        TwoVectors<T>::values(k + (j + i) * ldk + 2 * x * kLanes, a, b);
#pragma GCC unroll 4
        for (int r = 0; r < kDotRows; ++r) {
          sum[r][i] = hn::MulAdd(a, hn::LoadU(d, query + 2 * r * kLanes), sum[r][i]);
          sum[r][i] = hn::MulAdd(b, hn::LoadU(d, query + (2 * r + 1) * kLanes), sum[r][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kDotRows; ++r) sums_of_four(sum[r], TwoVectors<T>::kFactor, first, s + r * lds + j);
  }
}

/// The same for rows of q as they are, `size` a multiple of 2 * kLanes.
template <class T>
void dots_of_rows(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t n, int64_t size, float* s,
                  int64_t lds, Ahead ahead) {
  constexpr int64_t kStep = 2 * kLanes, kMostPairs = 8;
  float ordered[kMostPairs * kDotRows * kStep];
  for (int64_t c = 0; c < size; c += kMostPairs * kStep, ahead.rows = 0) {
    const int64_t pairs = std::min(kMostPairs, (size - c) / kStep);
    for (int64_t x = 0; x < pairs; ++x) {
      for (int64_t r = 0; r < kDotRows; ++r) {
        V a, b;
        TwoVectors<T>::load(q + r * ldq + c + x * kStep, a, b);
        hn::StoreU(a, D(), ordered + (kDotRows * x + r) * kStep);
        hn::StoreU(b, D(), ordered + (kDotRows * x + r) * kStep + kLanes);
      }
    }
    dots_of_four(ordered, k + c, ldk, n, pairs, c == 0, s, lds, ahead);
  }
}
#endif

template <class T, int R>
void dots(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t n, int64_t size, float* s,
          int64_t lds, Ahead ahead) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (R == 4) {
    if (n % 4 == 0 && size % (2 * kLanes) == 0) {
      for (int r = 0; r < R; r += kDotRows, ahead.rows = 0)
        dots_of_rows(q + r * ldq, ldq, k, ldk, n, size, s + r * lds, lds, ahead);
      return;
    }
  }
#endif
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
        const V weight = hn::Set(d, p[r * ldp + j] * TwoVectors<T>::kFactor);
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

/// Calls pass(rows, first, ahead) for the rows of q four at a time, then two, then one; `rows` is a constant.
template <class Pass>
HWY_INLINE void for_each_rows(int64_t num_q, const Ahead& ahead, Pass&& pass) {
  const int64_t passes = num_q / 4 + (num_q % 4 + 1) / 2;
  int64_t r = 0, i = 0;
  for (; r + 4 <= num_q; r += 4) pass(std::integral_constant<int, 4>(), r, part_of(ahead, i++, passes));
  for (; r + 2 <= num_q; r += 2) pass(std::integral_constant<int, 2>(), r, part_of(ahead, i++, passes));
  for (; r < num_q; ++r) pass(std::integral_constant<int, 1>(), r, part_of(ahead, i++, passes));
}

template <class T>
void dots_rows(const float* q, int64_t ldq, int64_t num_q, const void* k, int64_t ldk, int64_t n, int64_t d,
               float* s, int64_t lds, const Ahead& ahead) {
  for_each_rows(num_q, ahead, [&](auto rows, int64_t r, const Ahead& part) {
    dots<T, rows()>(q + r * ldq, ldq, static_cast<const T*>(k), ldk, n, d, s + r * lds, lds, part);
  });
}

template <class T>
void sums_rows(const float* p, int64_t ldp, int64_t num_q, const void* v, int64_t ldv, int64_t n, int64_t d,
               float* o, int64_t ldo, const Ahead& ahead) {
  for_each_rows(num_q, ahead, [&](auto rows, int64_t r, const Ahead& part) {
    sums<T, rows()>(p + r * ldp, ldp, static_cast<const T*>(v), ldv, n, d, o + r * ldo, ldo, part);
  });
}

void row_dots(const float* q, int64_t ldq, int64_t num_q, const void* k, DType type, int64_t ldk, int64_t n,
              int64_t d, float* s, int64_t lds, Ahead ahead) {
  if (type == DType::kF16) return dots_rows<F16>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
  if (type == DType::kBF16) return dots_rows<Bf16>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  if (type == DType::kE4M3 && !any_nan(static_cast<const E4M3*>(k), ldk, n, d))
    return dots_rows<E4M3Number>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
#endif
  if (type == DType::kE4M3) return dots_rows<E4M3>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
  return dots_rows<float>(q, ldq, num_q, k, ldk, n, d, s, lds, ahead);
}

void row_sums(const float* p, int64_t ldp, int64_t num_q, const void* v, DType type, int64_t ldv, int64_t n,
              int64_t d, float* o, int64_t ldo, Ahead ahead) {
  if (type == DType::kF16) return sums_rows<F16>(p, ldp, num_q, v, ldv, n, d, o, ldo, ahead);
  if (type == DType::kBF16) return sums_rows<Bf16>(p, ldp, num_q, v, ldv, n, d, o, ldo, ahead);
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  if (type == DType::kE4M3 && !any_nan(static_cast<const E4M3*>(v), ldv, n, d))
    return sums_rows<E4M3Number>(p, ldp, num_q, v, ldv, n, d, o, ldo, ahead);
#endif
  if (type == DType::kE4M3) return sums_rows<E4M3>(p, ldp, num_q, v, ldv, n, d, o, ldo, ahead);
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

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_ROWS_INL_HPP
