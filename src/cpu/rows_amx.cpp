// Few query rows on AMX tiles, whatever their type: every operand is a sum of bfloat16, its parts, and tiles multiply parts.
//
//   S[16 queries][keys]      += Q parts . K parts   rows of K are the left operand, 32 keys and a line of each at a time
//   O[16 queries][columns]   += P parts . V parts   P is the left operand, pairs of keys of V the right one
//
// A bfloat16 and a float8_e4m3fn are one part, a float16 is two, a float32 three, each with the next 8 bits of the significand: no
// bit is lost. Scores are as precise as those of float32; P has two parts where V has them, and the product of the second ones, below
// 2^-14, is left out: float16 results have 11 bits.
//
//   K and V    Q and P    products with K, with V
//   bfloat16   bfloat16   1, 1
//   e4m3       any        as many as Q and P have parts
//   float16    float16    4, 3
//
// Up to eight queries of two parts have both in one tile, side by side: half of the products.
//
// Rows of bfloat16 are operands where they lie, those of V with half of the places of P empty (sums_in_place()).
//
// A tile load waits for the stores before it, 50 cycles, and the vectors behind it fill the window meanwhile. So there are two buffers:
// while a unit of 32 rows and a line of each is taken apart into one of them, some rows at a time, tiles multiply what is in the other.
//
// The unit that multiplies tiles sleeps 250 to 500 ns after its last product, and takes 600 ns to wake up. So it gets a product of nothing
// wherever there are none for long: stay_awake().
//
// An infinity is no sum of parts: such rows are left to row_dots and row_sums.
#include "cpu/rows_amx_elements.hpp"
#include "cpu/rows_amx_weights.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <array>
#include <atomic>

namespace fovea::cpu {
namespace {

/// Whether part a of V, of so many, is multiplied with part b of P.
constexpr bool takes(int a, int b, int parts) {
  return parts == 1 || a + b < parts;
}

/// A product of a unit of K: half h of its elements, part a of the keys of tile t, part b of the queries.
struct KeyProduct {
  int h, a, b, t;
};
template <DType kType, int kQueryParts>
constexpr auto kKeyProducts = [] {
  std::array<KeyProduct, size_t{2} * halves_of(kType) * parts_of(kType) * kQueryParts> products{};
  size_t count = 0;
  for (int h = 0; h < halves_of(kType); ++h)
    for (int a = 0; a < parts_of(kType); ++a)
      for (int b = 0; b < kQueryParts; ++b)
        for (int t = 0; t < 2; ++t) products[count++] = {h, a, b, t};
  return products;
}();

/// A tile of keys with part b of the queries, which is tile 6, 7 or 3. Tile numbers must be literals.
#define FOVEA_KEY_PRODUCT(sums, keys, b)               \
  if constexpr (b == 0) _tile_dpbf16ps(sums, keys, 6); \
  if constexpr (b == 1) _tile_dpbf16ps(sums, keys, 7); \
  if constexpr (b == 2) _tile_dpbf16ps(sums, keys, 3);
/// Products [kFirst, kLast) of a unit, with the queries of its elements. Tiles 0 and 1 sum up, those of neighbouring products. Each tile of keys and
/// of queries is loaded once.
template <DType kType, int kQueryParts, int kFirst, int kLast>
FOVEA_AMX_ROWS_INLINE void multiply_keys(const uint32_t* keys, const uint32_t* queries) {
  if constexpr (kFirst < kLast) {
    constexpr KeyProduct kThis = kKeyProducts<kType, kQueryParts>[kFirst];
    constexpr int64_t kHalves = halves_of(kType);
    constexpr bool kLoadsQueries = kThis.a == 0 && kThis.t == 0;
    const uint32_t* part = queries + (kHalves * kThis.b + kThis.h) * kTileWords;
    if constexpr (kLoadsQueries && kThis.b == 0) _tile_loadd(6, part, 64);
    if constexpr (kLoadsQueries && kThis.b == 1) _tile_loadd(7, part, 64);
    if constexpr (kLoadsQueries && kThis.b == 2) _tile_loadd(3, part, 64);
    const uint32_t* left = keys + (kHalves * kThis.a + kThis.h) * kHalf + kThis.t * kTileWords;
    if constexpr (kThis.t == 0) {
      if constexpr (kThis.b == 0) _tile_loadd(4, left, 64);
      FOVEA_KEY_PRODUCT(0, 4, kThis.b)
    } else {
      if constexpr (kThis.b == 0) _tile_loadd(5, left, 64);
      FOVEA_KEY_PRODUCT(1, 5, kThis.b)
    }
    multiply_keys<kType, kQueryParts, kFirst + 1, kLast>(keys, queries);
  }
}
#undef FOVEA_KEY_PRODUCT

/// Writes the columns of a[16] to the rows of `to`, of which there are `rows`. True where one of them is NaN.
FOVEA_AMX_ROWS inline bool put_columns(const __m512* a, int64_t rows, float* to, int64_t ld) {
  __m512 b[16], c[16];
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int x = 0; x < 2; ++x) {
      const __m512d top = _mm512_castps_pd(b[i + x]), bottom = _mm512_castps_pd(b[i + x + 2]);
      c[i + 2 * x] = _mm512_castpd_ps(_mm512_unpacklo_pd(top, bottom));
      c[i + 2 * x + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(top, bottom));
    }
  }
  // c[4 g + i] holds, in its quarter x, column 4 x + i of rows 4 g to 4 g + 3.
  __mmask16 bad = 0;
  for (int64_t i = 0; i < std::min<int64_t>(4, rows); ++i) {
    const __m512 even01 = _mm512_shuffle_f32x4(c[i], c[4 + i], 0x88);
    const __m512 odd01 = _mm512_shuffle_f32x4(c[i], c[4 + i], 0xdd);
    const __m512 even23 = _mm512_shuffle_f32x4(c[8 + i], c[12 + i], 0x88);
    const __m512 odd23 = _mm512_shuffle_f32x4(c[8 + i], c[12 + i], 0xdd);
    const __m512 columns[4] = {
        _mm512_shuffle_f32x4(even01, even23, 0x88), _mm512_shuffle_f32x4(odd01, odd23, 0x88),
        _mm512_shuffle_f32x4(even01, even23, 0xdd), _mm512_shuffle_f32x4(odd01, odd23, 0xdd)};
    for (int64_t x = 0; x < 4 && i + 4 * x < rows; ++x) {
      bad |= _mm512_cmp_ps_mask(columns[x], columns[x], _CMP_UNORD_Q);
      _mm512_storeu_ps(to + (i + 4 * x) * ld, columns[x]);
    }
  }
  return bad != 0;
}

/// The same of a[4], which hold 16 rows of four columns.
FOVEA_AMX_ROWS inline bool put_four_columns(const __m512* a, int64_t rows, float* to, int64_t ld) {
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
  __mmask16 bad = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const __m512i from = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(r)));
    const __m512 low = _mm512_permutex2var_ps(a[0], from, a[1]),
                 high = _mm512_permutex2var_ps(a[2], from, a[3]);
    const __m512 column = _mm512_shuffle_f32x4(low, high, 0x44);
    bad |= _mm512_cmp_ps_mask(column, column, _CMP_UNORD_Q);
    _mm512_storeu_ps(to + r * ld, column);
  }
  return bad != 0;
}

/// Scores of 16 keys, as a tile has them, row by row. True where one is NaN.
FOVEA_AMX_ROWS inline bool put_scores(const float* tile, int64_t num_q, float* s, int64_t lds) {
  __m512 a[kTile];
  if (num_q == 1) {
    const __m512i rows =
        _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
    a[0] = _mm512_i32gather_ps(rows, tile, 4);
    _mm512_storeu_ps(s, a[0]);
    return _mm512_cmp_ps_mask(a[0], a[0], _CMP_UNORD_Q) != 0;
  }
  if (num_q <= 4) {
    for (int64_t i = 0; i < 4; ++i) {
      const float* at = tile + 4 * i * kTile;
      const __m256 low =
          _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(at)), _mm_load_ps(at + kTile), 1);
      const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(at + 2 * kTile)),
                                               _mm_load_ps(at + 3 * kTile), 1);
      a[i] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
    return put_four_columns(a, num_q, s, lds);
  }
  for (int64_t i = 0; i < kTile; ++i) a[i] = _mm512_load_ps(tile + i * kTile);
  return put_columns(a, num_q, s, lds);
}

template <DType kType, int kQueryParts>
FOVEA_AMX_ROWS void dots_of(const uint32_t* queries, const TileRows& k, float* s, RowsAhead& ahead) {
  constexpr int64_t kHalves = halves_of(kType);
  constexpr int kProducts = static_cast<int>(kKeyProducts<kType, kQueryParts>.size());
  alignas(64) uint32_t buffers[2][kHalves * parts_of(kType) * kHalf];
  RowUnit<kType> next{k};
  RowFetch fetch(ahead);
  next.look();
  for (int64_t i = 0; i < kKeys; i += kKeys / 4) {
    put_keys(next, i, buffers[0], fetch);
    stay_awake();
  }
  const auto store = [](float* scores) __attribute__((always_inline)) FOVEA_AMX_ROWS {
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + kTileWords, 64);
  };
  float* done =
      nullptr;  // where the sums in the tiles belong, once they are whole: stored later, as a store waits for products
  for (int64_t j = 0, g = 0, now = 0; j < k.n; now ^= 1) {
    if (++next.g == next.steps) {
      next.g = 0;
      next.j += kKeys;
    }
    next.look();
    const uint32_t *keys = buffers[now], *of = queries + g * kQueryParts * kHalves * kTileWords;
    uint32_t* to = buffers[now ^ 1];
    const bool more = next.j < k.n;
    // GCC does not know that a tile load reads memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (more) put_keys(next, 0, to, fetch);
    if (g == 0) {
      if (done != nullptr) store(done);
      _tile_zero(0);
      _tile_zero(1);
    }
    multiply_keys<kType, kQueryParts, 0, kProducts / 4>(keys, of);
    if (more) put_keys(next, kKeys / 4, to, fetch);
    multiply_keys<kType, kQueryParts, kProducts / 4, kProducts / 2>(keys, of);
    if (more) put_keys(next, kKeys / 2, to, fetch);
    multiply_keys<kType, kQueryParts, kProducts / 2, kProducts * 3 / 4>(keys, of);
    if (more) put_keys(next, kKeys * 3 / 4, to, fetch);
    multiply_keys<kType, kQueryParts, kProducts * 3 / 4, kProducts>(keys, of);
    g = next.g;
    if (g != 0) continue;
    done = s + j * kTile;
    j += kKeys;
  }
  if (done != nullptr) store(done);
}

/// A unit of bfloat16, which tiles multiply where it lies, but at edges, which are copied.
struct UnitInPlace {
  RowUnit<DType::kBF16> unit;
  alignas(64) char copy[kKeys * RowUnit<DType::kBF16>::kBytes];
  RowGroup rows[2];

  explicit UnitInPlace(const TileRows& all) : unit{all} {}
  FOVEA_AMX_ROWS_INLINE void look() {
    unit.look();
    if (unit.whole) {
      rows[0] = unit.group(0);
      rows[1] = unit.group(1);
    } else {
      put_edge();
    }
  }

 private:
  __attribute__((noinline)) FOVEA_AMX_ROWS void put_edge() {
    for (int64_t r = 0; r < kKeys; ++r) {
      const char* row = unit.row(unit.j + r);
      const int64_t bytes = unit.bytes(unit.j + r);
      char* to = copy + r * unit.kBytes;
      _mm512_store_si512(to, line_of(row, bytes));
      _mm512_store_si512(to + 64, line_of(row + 64, bytes - 64));
    }
    rows[0] = {copy, unit.kBytes, unit.kBytes};
    rows[1] = {copy + kGroupRows * unit.kBytes, unit.kBytes, unit.kBytes};
    // GCC does not know that a tile load reads memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
};

/// What is fetched beside a quarter of a unit of K, of V and beside weights is as much as each of them takes of the time: products with K wait for
/// tile loads, and longer the more lines are on their way; those with V are twice as many.
constexpr int kPairsBesideKeys = 2, kPairsBesideValues = 10;
template <int kPairs>
FOVEA_AMX_ROWS_INLINE void fetch_pairs(RowFetch& fetch) {
#pragma GCC unroll 10
  for (int i = 0; i < kPairs; ++i) fetch.lines<2>();
}

/// Rows of K come from the second-level cache once, past the first (TILELOADDT1), which has room for what comes again.
FOVEA_AMX_ROWS void dots_in_place(const uint32_t* queries, const TileRows& k, float* s, RowsAhead& ahead) {
  UnitInPlace at(k);
  RowFetch fetch(ahead);
  int64_t &j = at.unit.j, &g = at.unit.g;
  for (; j < k.n; j += kKeys) {
    _tile_zero(0);
    _tile_zero(1);
    for (g = 0; g < at.unit.steps; ++g) {
      at.look();
      const RowGroup &upper = at.rows[0], &lower = at.rows[1];
      const auto upper_stride = static_cast<size_t>(upper.stride),
                 lower_stride = static_cast<size_t>(lower.stride);
      const uint32_t* of = queries + g * 2 * kTileWords;
      _tile_loadd(6, of, 64);
      _tile_stream_loadd(4, upper.first, upper_stride);
      fetch_pairs<kPairsBesideKeys>(fetch);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(5, lower.first, lower_stride);
      fetch_pairs<kPairsBesideKeys>(fetch);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(7, of + kTileWords, 64);
      _tile_stream_loadd(4, upper.first + 64, upper_stride);
      fetch_pairs<kPairsBesideKeys>(fetch);
      _tile_dpbf16ps(0, 4, 7);
      _tile_stream_loadd(5, lower.first + 64, lower_stride);
      fetch_pairs<kPairsBesideKeys>(fetch);
      _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, s + j * kTile, 64);
    _tile_stored(1, s + j * kTile + kTileWords, 64);
  }
}

/// With weights of kWeightsInPlace: a word of a row of V is columns 2 n and 2 n + 1 of one key, so weights in the lower halves of words, with zeros
/// above, make the sums of even columns, and those in the upper halves the ones of odd columns. A value that is not finite makes its neighbour NaN.
FOVEA_AMX_ROWS int64_t sums_in_place(const uint32_t* weights, const TileRows& v, float* o, int64_t ldo,
                                     RowsAhead& ahead) {
  const auto bytes = static_cast<size_t>(ldo * 4);
  UnitInPlace at(v);
  RowFetch fetch(ahead);
  int64_t &j = at.unit.j, &g = at.unit.g;
  for (; g < at.unit.steps; ++g, o += at.unit.kSize) {
    _tile_loadd(0, o, bytes);
    _tile_loadd(1, o + kTile, bytes);
    _tile_loadd(2, o + 2 * kTile, bytes);
    _tile_loadd(3, o + 3 * kTile, bytes);
    for (j = 0; j < v.n; j += kKeys) {
      at.look();
      const uint32_t* p = weights + j / kKeys * kWeightsInPlace * kTileWords;
      for (int64_t x = 0; x < 2; ++x, p += 2 * kTileWords) {
        const char* row = at.rows[x].first;
        const auto stride = static_cast<size_t>(at.rows[x].stride);
        _tile_loadd(4, p, 64);
        _tile_stream_loadd(6, row, stride);
        fetch_pairs<kPairsBesideValues>(fetch);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, p + kTileWords, 64);
        _tile_dpbf16ps(1, 5, 6);
        _tile_stream_loadd(7, row + 64, stride);
        fetch_pairs<kPairsBesideValues>(fetch);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, o, bytes);
    _tile_stored(1, o + kTile, bytes);
    _tile_stored(2, o + 2 * kTile, bytes);
    _tile_stored(3, o + 3 * kTile, bytes);
  }
  fetch_rest(fetch);
  return v.size;
}

/// Products of the weights with one tile of 16 columns, all parts. Tile numbers must be literals.
#define FOVEA_COLUMNS(t)                                                  \
  for (int a = 0; a < kParts; ++a) {                                      \
    _tile_loadd(7, values + (kColumnTiles * a + (t)) * kTileWords, 64);   \
    _tile_dpbf16ps(t, 4, 7);                                              \
    if (kWeightParts > 1 && takes(a, 1, kParts)) _tile_dpbf16ps(t, 5, 7); \
    if (kWeightParts > 2 && takes(a, 2, kParts)) _tile_dpbf16ps(t, 6, 7); \
  }
/// At the first unit of columns the sums of the ones before give way to theirs: a tile later than their last product, as a store waits for it.
#define FOVEA_EXCHANGE(t)                                                    \
  if (j == 0) {                                                              \
    if (g > 0) _tile_stored(t, o + (g - 1) * next.kSize + (t)*kTile, bytes); \
    _tile_loadd(t, o + g * next.kSize + (t)*kTile, bytes);                   \
  }
template <DType kType, int kWeightParts>
FOVEA_AMX_ROWS int64_t sums_of(const uint32_t* weights, const TileRows& v, float* o, int64_t ldo,
                               RowsAhead& ahead) {
  constexpr int kParts = parts_of(kType);
  constexpr int64_t kColumnTiles = column_tiles_of(kType), kPairs = kPairsAtOnce<kType>;
  const auto bytes = static_cast<size_t>(ldo * 4);
  alignas(64) uint32_t buffers[2][kParts * kColumnTiles * kTileWords];
  RowUnit<kType> next{v};
  RowFetch fetch(ahead);
  next.look();
  __m512 left = _mm512_setzero_ps();
  for (int64_t i = 0; i < kTile; i += kPairs) {
    put_values(next, i, buffers[0], left, fetch);
    stay_awake();
  }
  for (int64_t j = 0, g = 0, now = 0; g < next.steps; now ^= 1) {
    const __m512 left_here = left;  // of the columns that tiles work at
    if ((next.j += kKeys) >= v.n) {
      next.j = 0;
      ++next.g;
      left = _mm512_setzero_ps();
    }
    next.look();
    const bool more = next.g < next.steps;
    const uint32_t *values = buffers[now], *p = weights + kWeightParts * (j / kKeys) * kTileWords;
    uint32_t* to = buffers[now ^ 1];
    std::atomic_signal_fence(std::memory_order_seq_cst);
    _tile_loadd(4, p, 64);
    if (kWeightParts > 1) _tile_loadd(5, p + kTileWords, 64);
    if (kWeightParts > 2) _tile_loadd(6, p + 2 * kTileWords, 64);
    if (more) put_values(next, 0, to, left, fetch);
    FOVEA_EXCHANGE(0)
    FOVEA_COLUMNS(0)
    if (more) put_values(next, kPairs, to, left, fetch);
    FOVEA_EXCHANGE(1)
    FOVEA_COLUMNS(1)
    if constexpr (kColumnTiles == 4) {
      if (more) put_values(next, 2 * kPairs, to, left, fetch);
      FOVEA_EXCHANGE(2)
      FOVEA_COLUMNS(2)
      if (more) put_values(next, 3 * kPairs, to, left, fetch);
      FOVEA_EXCHANGE(3)
      FOVEA_COLUMNS(3)
    }
    j = next.j;
    if (j != 0) continue;
    if (kParts > 1 && _mm512_cmp_ps_mask(left_here, left_here, _CMP_UNORD_Q) != 0) return g * next.kSize;
    g = next.g;
  }
  float* last = o + (next.steps - 1) * next.kSize;
  _tile_stored(0, last, bytes);
  _tile_stored(1, last + kTile, bytes);
  if constexpr (kColumnTiles == 4) {
    _tile_stored(2, last + 2 * kTile, bytes);
    _tile_stored(3, last + 3 * kTile, bytes);
  }
  fetch_rest(fetch);
  return v.size;
}
#undef FOVEA_COLUMNS
#undef FOVEA_EXCHANGE

/// The operands of a problem: elements of K or V, parts of queries and weights, and whether those lie side by side.
template <DType kElementType, int kOtherParts, bool kBothSides>
struct Operands {
  static constexpr DType kType = kElementType;
  static constexpr int kParts = kOtherParts;
  static constexpr bool kSides = kBothSides;
  static constexpr int kTiles = kSides ? 1 : kParts;  ///< of 16 rows
};

/// Calls what(Operands) of `num` rows of `type` and of elements of `key_type`, which is the same or of 8 bits.
template <class What>
FOVEA_AMX_ROWS_INLINE auto with_operands(int64_t num, DType type, DType key_type, What what) {
  constexpr DType kE4M3 = DType::kE4M3, kBF16 = DType::kBF16, kF16 = DType::kF16;
  const bool sides = side_by_side(num, parts_of(type));
  if (key_type == kBF16) return what(Operands<kBF16, 1, false>());
  if (key_type == kF16) return sides ? what(Operands<kF16, 2, true>()) : what(Operands<kF16, 2, false>());
  if (parts_of(type) == 1) return what(Operands<kE4M3, 1, false>());
  if (parts_of(type) == 3) return what(Operands<kE4M3, 3, false>());
  return sides ? what(Operands<kE4M3, 2, true>()) : what(Operands<kE4M3, 2, false>());
}

/// Scores of 16 keys, both parts side by side, added up.
FOVEA_AMX_ROWS void add_sides(const float* s, float* sums) {
  for (int64_t j = 0; j < kTile; ++j) {
    const __m512 x = _mm512_loadu_ps(s + j * kTile);
    _mm512_store_ps(sums + j * kTile, _mm512_add_ps(x, second_halves(x, x)));
  }
}

/// For each of 64 places of a row the one that it is copied from.
struct Places {
  alignas(64) int32_t from[kElements];
};
template <DType kType, bool kToTiles>
constexpr Places kPlaces = [] {
  Places places{};
  for (int64_t place = 0; place < kElements; ++place) {
    const int64_t column = column_of(kType, place / kTile, place % kTile);
    const int64_t from = kToTiles ? column : place, to = kToTiles ? place : column;
    places.from[to] = static_cast<int32_t>(from);
  }
  return places;
}();

FOVEA_AMX_ROWS void copy_places(const float* from, const Places& places, int64_t count, float* to) {
  const __m512 first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + kTile),
               third = _mm512_loadu_ps(from + 2 * kTile), fourth = _mm512_loadu_ps(from + 3 * kTile);
  const __m512i half = _mm512_set1_epi32(2 * kTile);
  for (int64_t x = 0; x < kElements; x += kTile) {
    const __m512i at = _mm512_load_si512(places.from + x);
    const __m512 low = _mm512_permutex2var_ps(first, at, second),
                 high = _mm512_permutex2var_ps(third, at, fourth);
    _mm512_mask_storeu_ps(to + x, below<__mmask16>(count - x),
                          _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(at, half), high));
  }
}

}  // namespace

FOVEA_AMX_ROWS void tile_columns_amx(const float* from, int64_t size, DType type, bool to_tiles, float* to) {
  const auto places = [&]<DType kType>() -> const Places& {
    return to_tiles ? kPlaces<kType, true> : kPlaces<kType, false>;
  };
  const Places& all = type == DType::kE4M3   ? places.operator()<DType::kE4M3>()
                      : type == DType::kBF16 ? places.operator()<DType::kBF16>()
                                             : places.operator()<DType::kF16>();
  for (int64_t c = 0; c < size; c += kElements)
    copy_places(from + c, all, to_tiles ? kElements : size - c, to + c);
}

FOVEA_AMX_ROWS void tile_start_amx() {
  _tile_loadconfig(&kTileConfig);
}
FOVEA_AMX_ROWS void tile_awake_amx() {
  stay_awake();
}
FOVEA_AMX_ROWS void tile_stop_amx() {
  _tile_release();
}

FOVEA_AMX_ROWS bool tile_queries_amx(const float* q, int64_t ldq, int64_t num_q, int64_t size,
                                     DType query_type, DType key_type, uint32_t* staged) {
  const int parts = parts_of(query_type);
  const bool sides = side_by_side(num_q, parts);
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i rows = _mm512_mullo_epi32(sides ? _mm512_and_si512(lanes, _mm512_set1_epi32(7)) : lanes,
                                          _mm512_set1_epi32(static_cast<int>(ldq)));
  const __mmask16 exist = below<__mmask16>(num_q),
                  lanes_exist = sides ? static_cast<__mmask16>(exist | exist << kSideQueries) : exist;
  const __m512 scale = _mm512_set1_ps(scale_of_other(key_type));
  __m512 bad = _mm512_setzero_ps(), left = bad;
  const auto column = [&](int64_t c) __attribute__((always_inline)) FOVEA_AMX_ROWS {
    const __m512 zero = _mm512_setzero_ps();
    const __m512 x = c < size ? _mm512_mask_i32gather_ps(zero, lanes_exist, rows, q + c, 4) : zero;
    const __m512 scaled = _mm512_mul_ps(x, scale);
    if (parts > 1) bad = _mm512_fmadd_ps(scaled, zero, bad);
    return scaled;
  };
  const int64_t tiles = sides ? 1 : parts;
  const int64_t halves = halves_of(key_type);
  for (int64_t g = 0; g * elements_of(key_type) < size; ++g, staged += tiles * halves * kTileWords) {
    for (int64_t h = 0; h < halves; ++h) {
      for (int64_t w = 0; w < kTile; ++w) {
        const __m512 a = column(element_of(key_type, g, h, w, 0)),
                     b = column(element_of(key_type, g, h, w, 1));
        alignas(64) uint32_t words[kMostParts][kTile];
        if (parts == 1) put_pairs<1>(a, b, words[0], kTile, left);
        if (parts == 2) put_pairs<2>(a, b, words[0], kTile, left);
        if (parts == 3) put_pairs<3>(a, b, words[0], kTile, left);
        if (sides) std::copy_n(words[1], kSideQueries, words[0] + kSideQueries);
        for (int64_t part = 0; part < tiles; ++part)
          std::copy_n(words[part], kTile, staged + (halves * part + h) * kTileWords + w * kTile);
      }
    }
  }
  return _mm512_cmp_ps_mask(bad, bad, _CMP_UNORD_Q) == 0;
}

int64_t tile_second_row_amx(int64_t num_p, DType query_type) {
  return side_by_side(num_p, parts_of(query_type)) ? kSideQueries : 0;
}

FOVEA_AMX_ROWS void tile_dots_amx(const uint32_t* queries, int64_t num_q, DType query_type, const TileRows& k,
                                  float* s, RowsAhead& ahead) {
  with_operands(
      num_q, query_type, k.type, [&](auto of) __attribute__((always_inline)) FOVEA_AMX_ROWS {
        if constexpr (of.kType == DType::kBF16)
          dots_in_place(queries, k, s, ahead);
        else
          dots_of<of.kType, of.kTiles>(queries, k, s, ahead);
      });
}

FOVEA_AMX_ROWS bool tile_scores_amx(const float* s, int64_t n, int64_t num_q, DType query_type,
                                    DType key_type, float* rows, int64_t ld) {
  alignas(64) float sums[kTileWords];
  const bool sides = side_by_side(num_q, parts_of(query_type));
  bool bad = false;
  for (int64_t j = 0; j < n; j += kTile) {
    const float* scores = s + j * kTile;
    if (sides) add_sides(scores, sums);
    bad |= put_scores(sides ? sums : scores, num_q, rows + j, ld);
  }
  return parts_of(key_type) == 1 || !bad;
}

FOVEA_AMX_ROWS bool tile_weigh_amx(float* s, int64_t n, int64_t num_q, DType query_type, DType value_type,
                                   float factor, const TileSums& sums, uint32_t* weights, RowsAhead& ahead) {
  return with_operands(
      num_q, query_type, value_type, [&](auto of) __attribute__((always_inline)) FOVEA_AMX_ROWS {
        const auto weigh = [&](auto weigher) __attribute__((always_inline)) FOVEA_AMX_ROWS {
          return weigher.weigh(num_q, sums, weights, ahead);
        };
        if (of.kParts == 1 && num_q <= kSideQueries)
          return weigh(RowWeigher<of.kType, 1, true>(s, n, factor));
        return weigh(RowWeigher<of.kType, of.kParts, of.kSides>(s, n, factor));
      });
}

FOVEA_AMX_ROWS void tile_weights_amx(const float* p, int64_t ldp, int64_t n, int64_t num_p, DType query_type,
                                     DType value_type, uint32_t* weights) {
  with_operands(
      num_p, query_type, value_type, [&](auto of) __attribute__((always_inline)) FOVEA_AMX_ROWS {
        put_weights<of.kType, of.kParts, of.kSides>(p, ldp, num_p, n, weights);
      });
}

FOVEA_AMX_ROWS int64_t tile_sums_amx(const uint32_t* weights, int64_t num_p, DType query_type,
                                     const TileRows& v, float* o, int64_t ldo, RowsAhead& ahead) {
  return with_operands(
      num_p, query_type, v.type, [&](auto of) __attribute__((always_inline)) FOVEA_AMX_ROWS {
        if constexpr (of.kType == DType::kBF16)
          return sums_in_place(weights, v, o, ldo, ahead);
        else
          return sums_of<of.kType, of.kTiles>(weights, v, o, ldo, ahead);
      });
}

}  // namespace fovea::cpu

#endif
