// Products of up to four rows with elements of 8 bits that are looked up in tables: columns on lanes, 64 at a time, those of queries and
// of sums in the order in which they come out of the tables.
//
//   for each 4 keys     S[r][key] += q[r] . k[key]           words are pairs of columns, or floats
//   for each 2 keys     O[r] += p[r][keys] . v[keys]         words are pairs of keys; of floats each key by itself
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_ROWS_TABLES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_ROWS_TABLES_INL_HPP
#undef FOVEA_CPU_OPS_ROWS_TABLES_INL_HPP
#else
#define FOVEA_CPU_OPS_ROWS_TABLES_INL_HPP
#endif

#include <algorithm>
#include <type_traits>

#include "cpu/ops_e4m3_tables-inl.hpp"
#include "cpu/ops_products-inl.hpp"
#include "cpu/ops_rows_lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET == HWY_AVX3

constexpr int kPartsOfCodes = 4;  // vectors of as many floats as a vector has codes

/// Part i of vector x becomes part x of vector i.
HWY_INLINE void parts_in_turn(V* v) {
  const __m512 low01 = _mm512_shuffle_f32x4(v[0].raw, v[1].raw, 0x44);
  const __m512 high01 = _mm512_shuffle_f32x4(v[0].raw, v[1].raw, 0xee);
  const __m512 low23 = _mm512_shuffle_f32x4(v[2].raw, v[3].raw, 0x44);
  const __m512 high23 = _mm512_shuffle_f32x4(v[2].raw, v[3].raw, 0xee);
  v[0] = V{_mm512_shuffle_f32x4(low01, low23, 0x88)};
  v[1] = V{_mm512_shuffle_f32x4(low01, low23, 0xdd)};
  v[2] = V{_mm512_shuffle_f32x4(high01, high23, 0x88)};
  v[3] = V{_mm512_shuffle_f32x4(high01, high23, 0xdd)};
}

HWY_INLINE auto lanes_left(int64_t count, int part) {
  return hn::FirstN(D(), static_cast<size_t>(std::clamp<int64_t>(count - part * kLanes, 0, kLanes)));
}
/// `count` floats, zeros behind them.
HWY_INLINE void load_parts(const float* p, int64_t count, V* v) {
#pragma GCC unroll 4
  for (int x = 0; x < kPartsOfCodes; ++x) v[x] = hn::MaskedLoad(lanes_left(count, x), D(), p + x * kLanes);
}
HWY_INLINE void store_parts(const V* v, int64_t count, float* p) {
#pragma GCC unroll 4
  for (int x = 0; x < kPartsOfCodes; ++x) hn::BlendedStore(v[x], lanes_left(count, x), D(), p + x * kLanes);
}

/// What a product takes of 64 codes.
template <class Words>
struct CodeProducts {
  static constexpr int kVectors = 4;  ///< of a row
  static constexpr int kKeys = 1;     ///< whose values are words

  /// Vector x of a row, of that half of its codes that holds it.
  static HWY_INLINE V vector_of(V half, int x) { return x % 2 == 0 ? even_of(half) : odd_of(half); }
  static HWY_INLINE void of_values(const E4M3Tables& tables, Codes row, Codes, V* v) {
    V a, b;
    tables.halves(row, a, b);
    v[0] = even_of(a);
    v[1] = odd_of(a);
    v[2] = even_of(b);
    v[3] = odd_of(b);
  }
  /// Of sums in their order.
  static HWY_INLINE void order(V* v) {
    parts_in_turn(v);
    even_and_odd_of(v[0], v[1]);
    even_and_odd_of(v[2], v[3]);
  }
  static HWY_INLINE void order_back(V* v) {
#pragma GCC unroll 2
    for (int x = 0; x < kPartsOfCodes; x += 2) {
      const V even = v[x], odd = v[x + 1];
      v[x] = hn::InterleaveLower(D(), even, odd);
      v[x + 1] = hn::InterleaveUpper(D(), even, odd);
    }
    parts_in_turn(v);
  }
  static HWY_INLINE void order_query(V* v) {
    order(v);
  }

 private:
  static HWY_INLINE void even_and_odd_of(V& a, V& b) {
    const __m512 even = _mm512_shuffle_ps(a.raw, b.raw, 0x88), odd = _mm512_shuffle_ps(a.raw, b.raw, 0xdd);
    a = V{even};
    b = V{odd};
  }
};
template <>
struct CodeProducts<Bf16Words> {
  static constexpr int kVectors = 2;
  static constexpr int kKeys = 2;

  static HWY_INLINE V vector_of(V half, int) { return half; }
  static HWY_INLINE void of_values(const E4M3Tables& tables, Codes row, Codes next, V* v) {
    tables.pairs(row, next, v);
  }
  static HWY_INLINE void order(V* v) { parts_in_turn(v); }
  static HWY_INLINE void order_back(V* v) { parts_in_turn(v); }
  static HWY_INLINE void order_query(V* v) {
    const __m512i first = Bf16Words::rounded(v[0], v[1]).raw, second = Bf16Words::rounded(v[2], v[3]).raw;
    v[0] = V{_mm512_castsi512_ps(_mm512_shuffle_i32x4(first, second, 0x88))};
    v[1] = V{_mm512_castsi512_ps(_mm512_shuffle_i32x4(first, second, 0xdd))};
  }
};

/// Calls pass(rows, first) for the rows four at a time, then for what is left of them; `rows` is a constant.
template <class Pass>
HWY_INLINE void for_each_four(int64_t count, Pass&& pass) {
  for (int64_t r = 0; r < count; r += 4) {
    const int64_t rows = count - r;
    if (rows >= 4) {
      pass(std::integral_constant<int, 4>(), r);
    } else if (rows == 3) {
      pass(std::integral_constant<int, 3>(), r);
    } else if (rows == 2) {
      pass(std::integral_constant<int, 2>(), r);
    } else {
      pass(std::integral_constant<int, 1>(), r);
    }
  }
}

/// sum[r][i] += q[r] * k[i] in 64 columns, or the first of them. A vector of q is loaded once for four keys: loads are what binds.
/// With `fetches` a point behind each key.
template <class Words, int R, class Load>
HWY_INLINE void multiply_codes(const E4M3Tables& tables, const float* q, const E4M3* k, int64_t stride,
                               const Load& load, V (&sum)[R][4], PacedFetch& fetch, bool fetches) {
  using Products = CodeProducts<Words>;
  V halves[2][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    tables.halves(load(k + i * stride), halves[0][i], halves[1][i]);
    if (fetches) fetch.point();
  }
#pragma GCC unroll 4
  for (int x = 0; x < Products::kVectors; ++x) {
    V v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) v[i] = Products::vector_of(halves[x * 2 / Products::kVectors][i], x);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V query = hn::LoadU(D(), q + (r * Products::kVectors + x) * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[r][i] = Words::multiply_add(v[i], query, sum[r][i]);
    }
  }
}

/// s[r][i] (+)= dot(q[r], k[i]) of four keys. q is in the order of the tables, of each 64 columns the rows side by side.
template <class Words, int R>
HWY_INLINE void dots_of_codes(const E4M3Tables& tables, const float* q, const E4M3* k, int64_t stride,
                              int64_t size, bool first, float* s, int64_t lds, PacedFetch& fetch) {
  constexpr int64_t kQuery = R * CodeProducts<Words>::kVectors * kLanes;
  V sum[R][4];
  for (auto& row : sum)
    for (V& x : row) x = hn::Zero(D());
  int64_t c = 0;
  for (; c + kCodes <= size; c += kCodes, q += kQuery) {
    const auto load = [](const E4M3* row) HWY_ATTR { return load_codes(row); };
    multiply_codes<Words, R>(tables, q, k + c, stride, load, sum, fetch, c == 0);
  }
  if (c < size) {
    const FirstCodes there = first_codes(size - c);
    const auto load = [there](const E4M3* row) HWY_ATTR { return load_codes(row, there); };
    multiply_codes<Words, R>(tables, q, k + c, stride, load, sum, fetch, c == 0);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums_of_four(sum[r], 1, first, s + r * lds);
}

/// `size` columns of R rows, as dots_of_codes() takes them.
template <class Words, int R>
HWY_INLINE void stage_queries(const float* q, int64_t ldq, int64_t size, float* to) {
  using Products = CodeProducts<Words>;
  for (int64_t c = 0; c < size; c += kCodes) {
    for (int64_t r = 0; r < R; ++r) {
      V v[kPartsOfCodes];
      load_parts(q + r * ldq + c, size - c, v);
      Products::order_query(v);
      for (int x = 0; x < Products::kVectors; ++x, to += kLanes) hn::StoreU(v[x], D(), to);
    }
  }
}

template <class Words, int R>
HWY_NOINLINE void code_dots_of(const float* q, int64_t ldq, const E4M3* k, int64_t ldk, int64_t n,
                               int64_t size, float* s, int64_t lds, const FetchShare& share) {
  constexpr int64_t kColumns = 4 * kCodes;  // whose queries are staged at a time
  const E4M3Tables tables;
  alignas(64) float staged[R * kColumns / kCodes * CodeProducts<Words>::kVectors * kLanes];
  PacedFetch fetch(share.part(4 * (n / 4 + n % 4) * ((size + kColumns - 1) / kColumns)));
  for (int64_t c = 0; c < size; c += kColumns) {
    const int64_t columns = std::min(kColumns, size - c);
    const bool first = c == 0;
    stage_queries<Words, R>(q + c, ldq, columns, staged);
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) {
      dots_of_codes<Words, R>(tables, staged, k + j * ldk + c, ldk, columns, first, s + j, lds, fetch);
    }
    for (; j < n; ++j) {
      float dots[R * 4];  // four times the same
      dots_of_codes<Words, R>(tables, staged, k + j * ldk + c, 0, columns, true, dots, 4, fetch);
      for (int r = 0; r < R; ++r) s[r * lds + j] = first ? dots[4 * r] : s[r * lds + j] + dots[4 * r];
    }
  }
}

template <class Words>
void code_dots(const float* q, int64_t ldq, int64_t num_q, const E4M3* k, int64_t ldk, int64_t n,
               int64_t size, float* s, int64_t lds, RowsAhead& ahead) {
  const FetchShare share = FetchShare::all(ahead).part((num_q + 3) / 4);
  for_each_four(num_q, [&](auto rows, int64_t r) HWY_ATTR {
    code_dots_of<Words, rows()>(q + r * ldq, ldq, k, ldk, n, size, s + r * lds, lds, share);
  });
}

/// o[r] += sum over j of p[r][j] * v[j], `size` columns, at most B vectors of codes. Weights are words.
template <class Words, int R, int B>
HWY_INLINE void code_sums_strip(const E4M3Tables& tables, const float* p, int64_t ldp, const E4M3* v,
                                int64_t ldv, int64_t n, int64_t size, float* o, int64_t ldo,
                                const FetchShare& share) {
  using Products = CodeProducts<Words>;
  FirstCodes there[B];
#pragma GCC unroll 2
  for (int b = 0; b < B; ++b) there[b] = first_codes(std::min(kCodes, size - b * kCodes));
  V sum[R][B][kPartsOfCodes];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) {
      load_parts(o + r * ldo + b * kCodes, size - b * kCodes, sum[r][b]);
      Products::order(sum[r][b]);
    }
  }
  PacedFetch fetch(share.part((n + Products::kKeys - 1) / Products::kKeys));
  for (int64_t j = 0; j < n; j += Products::kKeys, ++p) {
    fetch.point();
    // Where the last key has no other beside it, it is taken twice: that weight is 0.
    const E4M3 *const row = v + j * ldv, *const next = v + std::min(j + Products::kKeys, n) * ldv - ldv;
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) {
      V values[kPartsOfCodes];
      Products::of_values(tables, load_codes(row + b * kCodes, there[b]),
                          load_codes(next + b * kCodes, there[b]), values);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V weight = broadcast_word(p + r * ldp);
#pragma GCC unroll 4
        for (int x = 0; x < kPartsOfCodes; ++x)
          sum[r][b][x] = Words::multiply_add(values[x], weight, sum[r][b][x]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int b = 0; b < B; ++b) {
      Products::order_back(sum[r][b]);
      store_parts(sum[r][b], size - b * kCodes, o + r * ldo + b * kCodes);
    }
  }
}

/// Vectors of codes whose sums of so many rows are in registers: 16 of 32.
constexpr int64_t blocks_of_codes(int64_t rows) {
  return rows <= 2 ? 2 : 1;
}
/// Strips of columns that code_sums() goes through for so many rows.
constexpr int64_t code_strips(int64_t rows, int64_t size) {
  const int64_t strip = blocks_of_codes(rows) * kCodes;
  return size / strip + (size % strip + kCodes - 1) / kCodes;
}
template <class Words, int R>
HWY_NOINLINE void code_sums(const float* weights, int64_t ldw, const E4M3* v, int64_t ldv, int64_t n,
                            int64_t size, float* o, int64_t ldo, const FetchShare& share) {
  constexpr int64_t kBlocks = blocks_of_codes(R), kStrip = kBlocks * kCodes;
  const E4M3Tables tables;
  int64_t c = 0;
  for (; c + kStrip <= size; c += kStrip)
    code_sums_strip<Words, R, kBlocks>(tables, weights, ldw, v + c, ldv, n, kStrip, o + c, ldo, share);
  for (; c < size; c += kCodes)
    code_sums_strip<Words, R, 1>(tables, weights, ldw, v + c, ldv, n, std::min(kCodes, size - c), o + c, ldo,
                                 share);
}

/// Ops::row_sums() of codes.
template <class Words>
void code_sums_of_rows(const float* p, int64_t ldp, int64_t num_q, const E4M3* v, int64_t ldv, int64_t n,
                       int64_t size, float* o, int64_t ldo, RowsAhead& ahead) {
  const FetchShare share = FetchShare::all(ahead).part(num_q / 4 * code_strips(4, size) +
                                                       (num_q % 4 > 0 ? code_strips(num_q % 4, size) : 0));
  for_each_four(num_q, [&](auto rows, int64_t r) HWY_ATTR {
    if constexpr (Words::kPairs) {
      constexpr int64_t kWeights = kAttendKeys / 2;
      alignas(64) uint32_t weights[rows() * kWeights];
      for (int64_t i = 0; i < rows(); ++i)
        pair_weights<E4M3Code>(p + (r + i) * ldp, n, weights + i * kWeights);
      code_sums<Words, rows()>(reinterpret_cast<const float*>(weights), kWeights, v, ldv, n, size,
                               o + r * ldo, ldo, share);
    } else {
      code_sums<Words, rows()>(p + r * ldp, ldp, v, ldv, n, size, o + r * ldo, ldo, share);
    }
  });
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_ROWS_TABLES_INL_HPP
