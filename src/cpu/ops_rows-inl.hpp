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
#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/ops_row_elements-inl.hpp"
#include "cpu/ops_rows_lanes-inl.hpp"
#include "cpu/ops_rows_tables-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

/// Keys of R rows between which lines are fetched: it takes as many instructions as some of their products.
template <int R>
constexpr int64_t kPointKeys = R >= 4 ? 4 : 2;

/// Calls visit(j) for n keys, with a point in front of each kKeys.
template <int64_t kKeys, class Visit>
HWY_INLINE void for_each_key(int64_t n, const FetchShare& of_point, Visit&& visit) {
  PacedFetch fetch(of_point);
  int64_t j = 0;
  for (; j + kKeys <= n; j += kKeys) {
    fetch.point();
#pragma GCC unroll 4
    for (int64_t i = 0; i < kKeys; ++i) visit(j + i);
  }
  for (; j < n; ++j) visit(j);
}

/// s[r][j] (+)= dot(q[r], k[j]) over P pairs of vectors, q in registers.
template <class T, int R, int P>
HWY_INLINE void dots_strip(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t n, bool first,
                           float* s, int64_t lds, const FetchShare& of_point) {
  const D d;
  V query[R][2 * P];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x) {
      TwoVectors<T>::load(q + r * ldq + 2 * x * kLanes, query[r][2 * x], query[r][2 * x + 1]);
    }
  }
  const auto dots_of_key = [&](int64_t j) HWY_ATTR {
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
  };
  for_each_key<kPointKeys<R>>(n, of_point, dots_of_key);
}

#if HWY_TARGET != HWY_SCALAR
// Rows whose dot products with four keys stay in registers: 16 sums of 32 registers, 8 of 16.
constexpr int kDotRows = HWY_TARGET == HWY_AVX2 ? 2 : 4;

// Rows of K and V that are read a part at a time, because no more of q or o has room in 16 registers, come from memory at two
// thirds of the rate of whole ones on Zen 3.
constexpr bool kWholeRows = HWY_TARGET == HWY_AVX2;
constexpr int64_t kMostPairs = 8;  // of a row at a time: a head size of 128

/// s[r][j] (+)= dot(q[r], k[j]) of kRows rows and n keys, a multiple of four, over `pairs` pairs of vectors. The sums stay in
/// registers until they are whole: adding up the lanes of one takes as long as a dot product of 100 elements. q is in the order of
/// TwoVectors, 2 * kLanes elements a pair, the rows side by side.
template <class T, int kRows>
void dots_of_four(const float* q, const T* k, int64_t ldk, int64_t n, int64_t pairs, bool first, float* s,
                  int64_t lds, const FetchShare& of_point) {
  const D d;
  PacedFetch fetch(of_point);
  for (int64_t j = 0; j < n; j += 4) {
    V sum[kRows][4];
    for (auto& row : sum)
      for (V& x : row) x = hn::Zero(d);
    for (int64_t x = 0; x < pairs; ++x) {
      fetch.point();
      const float* query = q + x * 2 * kRows * kLanes;
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        V a, b;
        TwoVectors<T>::values(k + (j + i) * ldk + 2 * x * kLanes, a, b);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sum[r][i] = hn::MulAdd(a, hn::LoadU(d, query + 2 * r * kLanes), sum[r][i]);
          sum[r][i] = hn::MulAdd(b, hn::LoadU(d, query + (2 * r + 1) * kLanes), sum[r][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums_of_four(sum[r], TwoVectors<T>::kFactor, first, s + r * lds + j);
  }
}

/// The same for rows of q as they are, `size` a multiple of 2 * kLanes.
template <class T, int kRows>
void dots_of_rows(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t n, int64_t size, float* s,
                  int64_t lds, const FetchShare& of_point) {
  constexpr int64_t kStep = 2 * kLanes;
  float ordered[kMostPairs * kRows * kStep];
  for (int64_t c = 0; c < size; c += kMostPairs * kStep) {
    const int64_t pairs = std::min(kMostPairs, (size - c) / kStep);
    for (int64_t x = 0; x < pairs; ++x) {
      for (int64_t r = 0; r < kRows; ++r) {
        V a, b;
        TwoVectors<T>::load(q + r * ldq + c + x * kStep, a, b);
        hn::StoreU(a, D(), ordered + (kRows * x + r) * kStep);
        hn::StoreU(b, D(), ordered + (kRows * x + r) * kStep + kLanes);
      }
    }
    dots_of_four<T, kRows>(ordered, k + c, ldk, n, pairs, c == 0, s, lds, of_point);
  }
}
#endif

template <class T, int R>
void dots(const float* q, int64_t ldq, const T* k, int64_t ldk, int64_t n, int64_t size, float* s,
          int64_t lds, const FetchShare& share) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (R == 4 || kWholeRows) {
    if (n % 4 == 0 && size % (2 * kLanes) == 0) {
      constexpr int kRows = std::min(R, kDotRows);
      const FetchShare of_point = share.part(R / kRows * (n / 4) * (size / (2 * kLanes)));
      for (int r = 0; r < R; r += kRows)
        dots_of_rows<T, kRows>(q + r * ldq, ldq, k, ldk, n, size, s + r * lds, lds, of_point);
      return;
    }
  }
#endif
  constexpr int kPairs = R == 4 ? 2 : 4;  // at most 16 registers of q
  constexpr int64_t kWide = 2 * kPairs * kLanes, kNarrow = 2 * kLanes;
  int64_t c = 0;
  const FetchShare of_point = share.part(n / kPointKeys<R> * (size / kWide + size % kWide / kNarrow));
  for (; c + kWide <= size; c += kWide) {
    dots_strip<T, R, kPairs>(q + c, ldq, k + c, ldk, n, c == 0, s, lds, of_point);
  }
  for (; c + kNarrow <= size; c += kNarrow) {
    dots_strip<T, R, 1>(q + c, ldq, k + c, ldk, n, c == 0, s, lds, of_point);
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
                           int64_t ldo, const FetchShare& of_point) {
  const D d;
  V acc[R][2 * P];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x)
      TwoVectors<T>::load(o + r * ldo + 2 * x * kLanes, acc[r][2 * x], acc[r][2 * x + 1]);
  }
  const auto add = [&](int64_t j) HWY_ATTR {
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x) {
      V a, b;
      TwoVectors<T>::values(v + j * ldv + 2 * x * kLanes, a, b);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const V weight = hn::Set(d, p[r * ldp + j] * TwoVectors<T>::kFactor);
        acc[r][2 * x] = hn::MulAdd(a, weight, acc[r][2 * x]);
        acc[r][2 * x + 1] = hn::MulAdd(b, weight, acc[r][2 * x + 1]);
      }
    }
  };
  for_each_key<kPointKeys<R>>(n, of_point, add);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int x = 0; x < P; ++x)
      TwoVectors<T>::store(acc[r][2 * x], acc[r][2 * x + 1], o + r * ldo + 2 * x * kLanes);
  }
}

#if HWY_TARGET != HWY_SCALAR
/// o[r] += sum over j of p[r][j] * v[j] of kKeys keys, over `pairs` pairs of vectors. o is in the order of TwoVectors, 2 * kLanes
/// elements a pair, the rows side by side.
template <class T, int kRows, int kKeys>
HWY_INLINE void sums_of_keys(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t pairs, float* o) {
  const D d;
  V weight[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) weight[r][i] = hn::Set(d, p[r * ldp + i] * TwoVectors<T>::kFactor);
  }
  for (int64_t x = 0; x < pairs; ++x) {
    float* const to = o + x * 2 * kRows * kLanes;
    V acc[kRows][2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = hn::LoadU(d, to + 2 * r * kLanes);
      acc[r][1] = hn::LoadU(d, to + (2 * r + 1) * kLanes);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      V a, b;
      TwoVectors<T>::values(v + i * ldv + 2 * x * kLanes, a, b);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        acc[r][0] = hn::MulAdd(a, weight[r][i], acc[r][0]);
        acc[r][1] = hn::MulAdd(b, weight[r][i], acc[r][1]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      hn::StoreU(acc[r][0], d, to + 2 * r * kLanes);
      hn::StoreU(acc[r][1], d, to + (2 * r + 1) * kLanes);
    }
  }
}

/// The same of n keys, four at a time, for rows of o as they are, `size` a multiple of 2 * kLanes. What is summed up stays in a
/// first-level cache.
template <class T, int kRows>
void sums_of_rows(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t n, int64_t size, float* o,
                  int64_t ldo, const FetchShare& share) {
  constexpr int64_t kStep = 2 * kLanes;
  const D d;
  alignas(64) float ordered[kMostPairs * kRows * kStep];
  PacedFetch fetch(share.part((n / 4 + n % 4) * ceil_div(size, kMostPairs * kStep)));
  for (int64_t c = 0; c < size; c += kMostPairs * kStep) {
    const int64_t pairs = std::min(kMostPairs, (size - c) / kStep);
    const auto each_pair = [&](auto&& take) HWY_ATTR {
      for (int64_t x = 0; x < pairs; ++x) {
        for (int64_t r = 0; r < kRows; ++r)
          take(o + r * ldo + c + x * kStep, ordered + (kRows * x + r) * kStep);
      }
    };
    each_pair([&](const float* row, float* to) HWY_ATTR {
      V a, b;
      TwoVectors<T>::load(row, a, b);
      hn::StoreU(a, d, to);
      hn::StoreU(b, d, to + kLanes);
    });
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
      fetch.point();
      sums_of_keys<T, kRows, 4>(p + j, ldp, v + j * ldv + c, ldv, pairs, ordered);
    }
    for (; j < n; ++j) {
      fetch.point();
      sums_of_keys<T, kRows, 1>(p + j, ldp, v + j * ldv + c, ldv, pairs, ordered);
    }
    each_pair([&](float* row, const float* from)
                  HWY_ATTR { TwoVectors<T>::store(hn::LoadU(d, from), hn::LoadU(d, from + kLanes), row); });
  }
}
#endif

template <class T, int R>
void sums(const float* p, int64_t ldp, const T* v, int64_t ldv, int64_t n, int64_t size, float* o,
          int64_t ldo, const FetchShare& share) {
  // So many pairs of vectors of each row stay in registers: 16 of 32, or 8 of 16; of one row what a head size of 128 has.
  constexpr int kPairs = std::clamp((HWY_TARGET == HWY_AVX2 ? 4 : 8) / R, 1, 4);
  constexpr int64_t kWide = 2 * kPairs * kLanes, kNarrow = 2 * kLanes;
  int64_t c = 0;
  const FetchShare of_point = share.part(n / kPointKeys<R> * (size / kWide + size % kWide / kNarrow));
  for (; c + kWide <= size; c += kWide) {
    sums_strip<T, R, kPairs>(p, ldp, v + c, ldv, n, o + c, ldo, of_point);
  }
  for (; c + kNarrow <= size; c += kNarrow) {
    sums_strip<T, R, 1>(p, ldp, v + c, ldv, n, o + c, ldo, of_point);
  }
  for (; c < size; ++c) {
    for (int r = 0; r < R; ++r) {
      float sum = o[r * ldo + c];
      for (int64_t j = 0; j < n; ++j) sum += p[r * ldp + j] * to_float(v[j * ldv + c]);
      o[r * ldo + c] = sum;
    }
  }
}

// Rows whose sums of 32 columns stay in registers.
constexpr int kSumRows = HWY_TARGET == HWY_AVX3 ? 8 : 4;

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
/// o[r] += sum over j of p[r][j] * v[j], each element of v made a float once for all rows. Returns to how many columns it added.
template <class T>
int64_t sums_of_floats(const float* p, int64_t ldp, int64_t rows, const T* v, int64_t ldv, int64_t n,
                       int64_t size, float* o, int64_t ldo, RowsAhead& ahead) {
  constexpr int64_t kKeys = 32, kColumns = kUnitsAtOnce * kUnit;  // 16 KB stay in a first-level cache
  const int64_t whole = size / kUnit * kUnit;
  const V factor = hn::Set(D(), TwoVectors<T>::kFactor);
  alignas(64) float block[kKeys * kColumns];
  const FetchShare share = FetchShare::all(ahead).part(ceil_div(n, kKeys) * ceil_div(whole, kColumns) *
                                                       passes_of_rows<kSumRows>(rows));
  for (int64_t j = 0; j < n; j += kKeys) {
    const int64_t keys = std::min(kKeys, n - j);
    for (int64_t c = 0; c < whole; c += kColumns) {
      const int64_t columns = std::min(kColumns, whole - c);
      for (int64_t i = 0; i < keys; ++i) {
        for (int64_t x = 0; x < columns; x += 2 * kLanes) {
          V a, b;
          TwoVectors<T>::values(v + (j + i) * ldv + c + x, a, b);
          TwoVectors<T>::store(hn::Mul(a, factor), hn::Mul(b, factor), block + i * kColumns + x);
        }
      }
      for_each_rows<kSumRows>(rows, [&](auto count, int64_t r) HWY_ATTR {
        sums<float, count()>(p + r * ldp + j, ldp, block, kColumns, keys, columns, o + r * ldo + c, ldo,
                             share);
      });
    }
  }
  return whole;
}
#endif

/// Calls with a value of the type of the elements of n rows of `rows`; NaN is no E4M3Number.
template <bool kTables, class With>
HWY_INLINE void with_elements(DType type, [[maybe_unused]] const void* rows, [[maybe_unused]] int64_t ld,
                              [[maybe_unused]] int64_t n, [[maybe_unused]] int64_t size, With&& with) {
  if (type == DType::kF16) return with(F16());
  if (type == DType::kBF16) return with(Bf16());
#if HWY_TARGET == HWY_AVX3
  if constexpr (kTables) {
    if (type == DType::kE4M3) return with(E4M3Code());
  }
#endif
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  if (type == DType::kE4M3 && !any_nan(static_cast<const E4M3*>(rows), ld, n, size))
    return with(E4M3Number());
#endif
  if (type == DType::kE4M3) return with(E4M3());
  with(float());
}

/// Whether elements of type T are looked up.
template <class T>
constexpr bool kInTables =
#if HWY_TARGET == HWY_AVX3
    std::is_same_v<T, E4M3Code>;
#else
    false;
#endif

template <class Words, bool kTables>
void row_dots(const FewRows& q, const void* k, DType type, int64_t ldk, int64_t n, int64_t d, float* s,
              int64_t lds, RowsAhead& ahead) {
  with_elements<kTables>(type, k, ldk, n, d, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* const keys = static_cast<const T*>(k);
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
    if constexpr (kOnLanes<T> && !std::is_same_v<T, E4M3>) {
      if (q.lanes != nullptr) return lane_dots<T, Words>(q, keys, ldk, n, d, s, lds, ahead);
    }
#endif
    if constexpr (kInTables<T>) {
      code_dots<Words>(q.rows, q.ld, q.count, keys, ldk, n, d, s, lds, ahead);
    } else {
      const FetchShare share = FetchShare::all(ahead).part(passes_of_rows<4>(q.count));
      for_each_rows<4>(q.count, [&](auto rows, int64_t r) HWY_ATTR {
        dots<T, rows()>(q.rows + r * q.ld, q.ld, keys, ldk, n, d, s + r * lds, lds, share);
      });
    }
  });
}

template <class Words, bool kTables>
void row_sums(const float* p, int64_t ldp, int64_t num_q, const void* v, DType type, int64_t ldv, int64_t n,
              int64_t d, float* o, int64_t ldo, RowsAhead& ahead) {
  with_elements<kTables>(type, v, ldv, n, d, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* values = static_cast<const T*>(v);
    if constexpr (kInTables<T>) {
      code_sums_of_rows<Words>(p, ldp, num_q, values, ldv, n, d, o, ldo, ahead);
    } else {
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
      if (num_q >= kLeastLaneRows) {
        int64_t done = 0;
        if constexpr (LaneWords<T, Words>::kPairs) {
          done = sums_of_pairs(p, ldp, num_q, values, ldv, n, d, o, ldo, ahead);
        } else if (std::is_same_v<T, E4M3Number> && num_q > kSumRows) {
          done = sums_of_floats(p, ldp, num_q, values, ldv, n, d, o, ldo, ahead);
        }
        if (done > 0) values += done, o += done, d -= done, ahead.lines = 0;
      }
#endif
#if HWY_TARGET != HWY_SCALAR
      if constexpr (kWholeRows) {  // with more rows products take longer than lines from memory
        if (num_q <= kSumRows && d % (2 * kLanes) == 0) {
          // Two rows and the weights of four keys have 12 of 16 registers.
          const FetchShare share = FetchShare::all(ahead).part(passes_of_rows<2>(num_q));
          for_each_rows<2>(num_q, [&](auto rows, int64_t r) HWY_ATTR {
            sums_of_rows<T, rows()>(p + r * ldp, ldp, values, ldv, n, d, o + r * ldo, ldo, share);
          });
          return;
        }
      }
#endif
      const FetchShare share = FetchShare::all(ahead).part(passes_of_rows<kSumRows>(num_q));
      for_each_rows<kSumRows>(num_q, [&](auto rows, int64_t r) HWY_ATTR {
        sums<T, rows()>(p + r * ldp, ldp, values, ldv, n, d, o + r * ldo, ldo, share);
      });
    }
  });
}

/// Combines the lanes of each of R vectors, of one as of four.
template <class Combine, int R>
HWY_INLINE void lanes_of_rows(const V* v, float* to) {
#if HWY_TARGET == HWY_SCALAR
  for (int r = 0; r < R; ++r) to[r] = hn::GetLane(v[r]);
#else
  if constexpr (R == 1) {
    const V halves = Combine()(v[0], hn::Shuffle1032(v[0]));
    to[0] = hn::GetLane(all_blocks<Combine>(D(), Combine()(halves, hn::Shuffle2301(halves))));
  } else {
    static_assert(R == 4);
    hn::StoreU(lanes_of_four<Combine>(v), hn::Full128<float>(), to);
  }
#endif
}

/// All lanes of a vector, in place of a mask.
struct All {};
HWY_INLINE V loaded(All, const float* p) {
  return hn::LoadU(D(), p);
}
HWY_INLINE V chosen(All, V a, V) {
  return a;
}
HWY_INLINE void put(All, V a, float* p) {
  hn::StoreU(a, D(), p);
}
using Mask = hn::Mask<D>;
HWY_INLINE V loaded(Mask there, const float* p) {
  return hn::MaskedLoad(there, D(), p);
}
HWY_INLINE V chosen(Mask there, V a, V b) {
  return hn::IfThenElse(there, a, b);
}
HWY_INLINE void put(Mask there, V a, float* p) {
  hn::BlendedStore(a, there, D(), p);
}

/// Calls visit(j, there) for the vectors of n scores: of the last one `there` are those that exist, of the others all.
template <class Visit>
HWY_INLINE void for_each_vector(int64_t n, Visit&& visit) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) visit(j, All());
  if (j < n) visit(j, hn::FirstN(D(), static_cast<size_t>(n - j)));
}

/// Of each row the same, however many there are.
template <int R>
HWY_INLINE void softmax_of_rows(float* s, int64_t lds, int64_t n, float factor, const PanelState& state) {
  const D d;
  const V none = hn::Set(d, -std::numeric_limits<float>::infinity());
  V largest[R], sum[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    largest[r] = none;
    sum[r] = hn::Zero(d);
  }
  for_each_vector(n, [&](int64_t j, auto there) HWY_ATTR {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      largest[r] = hn::Max(largest[r], chosen(there, loaded(there, s + r * lds + j), none));
  });
  float of_rows[R], subtract[R];
  lanes_of_rows<LargestOf, R>(largest, of_rows);
  for (int r = 0; r < R; ++r) {
    const float before = state.row_max[r], raised = std::max(before, of_rows[r] * factor);
    subtract[r] = raised == -std::numeric_limits<float>::infinity() ? 0.0f : raised;
    state.alpha[r] = raised == before ? 1.0f : std::exp2(before - subtract[r]);
    state.row_max[r] = raised;
  }
  const V scale = hn::Set(d, factor);
  for_each_vector(n, [&](int64_t j, auto there) HWY_ATTR {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      float* const at = s + r * lds + j;
      const V p = exp2_fast<6>(hn::MulSub(loaded(there, at), scale, hn::Set(d, subtract[r])));
      sum[r] = hn::Add(sum[r], chosen(there, p, hn::Zero(d)));
      put(there, p, at);
    }
  });
  lanes_of_rows<SumOf, R>(sum, of_rows);
  for (int r = 0; r < R; ++r) state.row_sum[r] = state.row_sum[r] * state.alpha[r] + of_rows[r];
}

void row_softmax(float* s, int64_t lds, int64_t rows, int64_t n, float factor, const PanelState& state) {
  if (rows == kWeighedRows) return softmax_of_rows<kWeighedRows>(s, lds, n, factor, state);
  for (int64_t r = 0; r < rows; ++r)
    softmax_of_rows<1>(s + r * lds, lds, n, factor, {state.row_max + r, state.row_sum + r, state.alpha + r});
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
