// Rows of K and V as the operands of tiles (rows_amx.cpp): sums of bfloat16 parts, taken apart on their way into the first-level cache.
#pragma once

#include "cpu/amx_tiles.hpp"
#include "cpu/ops.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// The backend asks for VBMI and AVX512-FP16, too; what has AVX2 has F16C.
#define FOVEA_AMX_ROWS \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512fp16,f16c,amx-tile,amx-bf16")))
#define FOVEA_AMX_ROWS_INLINE __attribute__((always_inline)) FOVEA_AMX_ROWS inline

namespace fovea::cpu {

constexpr int kMostParts = 3;
constexpr int64_t kKeys = 2 * kTile;      // keys of a unit: two tiles of rows of K, or the pairs of one of V
constexpr int64_t kElements = 4 * kTile;  // rows of O have a multiple
constexpr int64_t kTileWords = kTile * kTile;
constexpr __mmask32 kUpper = 0xaaaaaaaa;  // the upper halves of words

constexpr int parts_of(DType type) {
  return type == DType::kF32 ? 3 : type == DType::kF16 ? 2 : 1;
}
/// How many tiles of K the elements of a unit are beside each other. A unit is a line of each row where those are taken apart, so that its parts are
/// 4 KB in every type: two units, queries and sums stay in a first-level cache of 48 KB that two threads share.
constexpr int64_t halves_of(DType type) {
  return type == DType::kF16 ? 1 : 2;
}
/// Elements of a unit.
constexpr int64_t elements_of(DType type) {
  return halves_of(type) * 2 * kTile;
}

/// A mask of the elements below `count` of so many.
template <class Mask>
constexpr Mask below(int64_t count) {
  constexpr int64_t kBits = 8 * sizeof(Mask);
  if (count <= 0) return 0;
  return count >= kBits ? static_cast<Mask>(~Mask{0}) : static_cast<Mask>((Mask{1} << count) - 1);
}

/// Writes the parts of the pairs (a, b), `stride` words apart; with kRound the last is rounded to nearest. `left` becomes NaN where
/// one has several parts and is not finite.
template <int kParts, bool kRound = false>
FOVEA_AMX_ROWS_INLINE void put_pairs(__m512 a, __m512 b, uint32_t* words, int64_t stride, __m512& left) {
  const __m512 high = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  for (int part = 0; part < kParts; ++part, words += stride) {
    __m512i low = _mm512_castps_si512(a), top = _mm512_castps_si512(b);
    if (kRound && part + 1 == kParts) {
      low = _mm512_add_epi32(low, _mm512_set1_epi32(0x8000));
      top = _mm512_add_epi32(top, _mm512_set1_epi32(0x8000));
    }
    _mm512_storeu_si512(words, _mm512_mask_blend_epi16(kUpper, _mm512_srli_epi32(low, 16), top));
    if (part + 1 == kParts) break;
    a = _mm512_sub_ps(a, _mm512_and_ps(a, high));
    b = _mm512_sub_ps(b, _mm512_and_ps(b, high));
    // What is left of float16 is small enough to be multiplied, which is one instruction less.
    if (part == 0)
      left = kParts == 2 ? _mm512_fmadd_ps(a, b, left) : _mm512_add_ps(left, _mm512_add_ps(a, b));
  }
}

/// A product that nobody reads. Only where tiles 2, 3 and 7 are free.
FOVEA_AMX_ROWS_INLINE void stay_awake() {
  _tile_dpbf16ps(3, 2, 7);
}

/// A float16 becomes its parts with its bits moved and not counted anew. That makes them 2^112 times smaller, of numbers that are multiplied by
/// 2^10 before, so that none is subnormal. Queries and weights are as much larger.
constexpr float scale_of(DType type) {
  return type == DType::kF16 ? 0x1p-102f : 1.0f;
}
constexpr float scale_of_other(DType type) {
  return 1 / scale_of(type);
}
/// Weights for products with V of kType.
template <DType kType>
FOVEA_AMX_ROWS_INLINE __m512 scaled_weight(__m512 p) {
  return kType != DType::kF16 ? p : _mm512_mul_ps(p, _mm512_set1_ps(scale_of_other(kType)));
}

/// What each float8_e4m3fn without its sign is as bfloat16: low and high bytes.
struct E4M3Bytes {
  alignas(64) uint8_t low[128], high[128];
};
constexpr E4M3Bytes kE4M3Bytes = [] {
  E4M3Bytes bytes{};
  for (int i = 0; i < 128; ++i) {
    const uint16_t bits = from_float<Bf16>(to_float(E4M3{static_cast<uint8_t>(i)})).bits;
    bytes.low[i] = static_cast<uint8_t>(bits & 0xff);
    bytes.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}();

struct Bytes {
  __m512i low, high;
};

/// 64 float8_e4m3fn as bfloat16.
FOVEA_AMX_ROWS inline Bytes bytes_of(__m512i x) {
  const auto look_up = [&](const uint8_t* table) __attribute__((always_inline)) FOVEA_AMX_ROWS {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), x, _mm512_load_si512(table + 64));
  };
  const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(0x80)));
  return {look_up(kE4M3Bytes.low), _mm512_or_si512(look_up(kE4M3Bytes.high), sign)};
}

/// 32 float16, two in a word, as the words of their two parts. `left` becomes NaN where one is not finite.
FOVEA_AMX_ROWS inline void put_any_halves(__m512i x, uint32_t* words, int64_t stride, __m512& left) {
  const auto scaled = [](__m512i halves) __attribute__((always_inline)) FOVEA_AMX_ROWS {
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves)),
                         _mm512_set1_ps(scale_of(DType::kF16)));
  };
  put_pairs<2>(scaled(x), scaled(_mm512_srli_epi32(x, 16)), words, stride, left);
}
/// Where the words of 32 float16 go: those of part p to words + p * stride.
struct HalfWords {
  uint32_t* words;
  int64_t stride;
};
#if defined(__clang__) && __clang_major__ < 15
// Clang 14 has __m512h only in files that are for AVX512-FP16 as a whole.
using Large = __m512;
FOVEA_AMX_ROWS_INLINE Large none_large() {
  return _mm512_setzero_ps();
}
FOVEA_AMX_ROWS_INLINE void put_halves(__m512i x, HalfWords x_to, __m512i y, HalfWords y_to, Large& large) {
  put_any_halves(x, x_to.words, x_to.stride, large);
  put_any_halves(y, y_to.words, y_to.stride, large);
}
FOVEA_AMX_ROWS_INLINE bool is_nan(Large x) {
  return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0;
}
#else
using Large = __m512h;
FOVEA_AMX_ROWS_INLINE Large none_large() {
  return _mm512_setzero_ph();
}
/// Writes both parts. The second, which it returns, is NaN where x is 64 or more.
FOVEA_AMX_ROWS_INLINE __m512h put_small_halves(__m512i x, HalfWords to) {
  const __m512i exponent_and_sign = _mm512_set1_epi16(static_cast<short>(0x8fff));
  const __m512h all = _mm512_mul_ph(_mm512_castsi512_ph(x), _mm512_castsi512_ph(_mm512_set1_epi16(0x6400)));
  const __m512i first =
      _mm512_and_si512(_mm512_castph_si512(all), _mm512_set1_epi16(static_cast<short>(0xfff8)));
  const __m512h second = _mm512_sub_ph(all, _mm512_castsi512_ph(first));
  _mm512_storeu_si512(to.words,
                      _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(all), 3), exponent_and_sign));
  _mm512_storeu_si512(to.words + to.stride,
                      _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(second), 3), exponent_and_sign));
  return second;
}
/// The same of two vectors of smaller ones: `large` becomes NaN where some are 64 or more, which have no such parts. One multiply-add tells of both:
/// beside tiles there is one port for those.
FOVEA_AMX_ROWS_INLINE void put_halves(__m512i x, HalfWords x_to, __m512i y, HalfWords y_to, Large& large) {
  const __m512h second_x = put_small_halves(x, x_to), second_y = put_small_halves(y, y_to);
  large = _mm512_fmadd_ph(second_x, second_y, large);
}
FOVEA_AMX_ROWS_INLINE bool is_nan(Large x) {
  return _mm512_cmp_ph_mask(x, x, _CMP_UNORD_Q) != 0;
}
#endif

/// The first `count` of 64 bytes, zeros behind them.
FOVEA_AMX_ROWS_INLINE __m512i line_of(const char* at, int64_t count) {
  return _mm512_maskz_loadu_epi8(below<__mmask64>(count), at);
}

/// Which elements of a row of K are word w of unit g, in half h: put_two_keys() writes them in this order.
constexpr int64_t element_of(DType type, int64_t g, int64_t h, int64_t w, int64_t which) {
  switch (type) {
    case DType::kE4M3:
      return elements_of(type) * g + 16 * (w / 4) + 8 * h + 2 * (w % 4) + which;
    default:
      return elements_of(type) * g + 32 * h + 2 * w + which;
  }
}

constexpr int64_t kHalf = kKeys * kTile;  // words of 32 elements of a unit of K

/// 64 float8_e4m3fn of a row of K as words of the left operand: half h at words + h * kHalf.
FOVEA_AMX_ROWS_INLINE void put_byte_keys(__m512i row, uint32_t* words) {
  const Bytes bytes = bytes_of(row);
  _mm512_storeu_si512(words, _mm512_unpacklo_epi8(bytes.low, bytes.high));
  _mm512_storeu_si512(words + kHalf, _mm512_unpackhi_epi8(bytes.low, bytes.high));
}

/// A line of two rows of K as words of the left operand: half h, or part h, at words + h * kHalf, those of the second kTile words behind.
template <DType kType>
FOVEA_AMX_ROWS_INLINE void put_two_keys(const char* first, const char* second, uint32_t* words,
                                        [[maybe_unused]] Large& large) {
  if constexpr (kType == DType::kE4M3) {
    for (const char* row : {first, second}) {
      put_byte_keys(_mm512_loadu_si512(row), words);
      words += kTile;
    }
  } else {
    put_halves(_mm512_loadu_si512(first), {words, kHalf}, _mm512_loadu_si512(second), {words + kTile, kHalf},
               large);
  }
}

/// Which of 64 columns of V lane n of tile t is: the order in which put_values() has least to shuffle.
constexpr int64_t column_of(DType type, int64_t t, int64_t n) {
  switch (type) {
    case DType::kE4M3:
      return 16 * (n / 4) + 4 * t + n % 4;
    case DType::kBF16:
      return 32 * (t / 2) + 2 * n + t % 2;
    default:
      return 32 * (t / 2) + 8 * (n / 4) + 4 * (t % 2) + n % 4;
  }
}

/// Rows of 8 bits side by side, byte by byte, as words of the right operand.
FOVEA_AMX_ROWS_INLINE void put_byte_values(__m512i first, __m512i second, uint32_t* words) {
  const Bytes low = bytes_of(_mm512_unpacklo_epi8(first, second)),
              high = bytes_of(_mm512_unpackhi_epi8(first, second));
  _mm512_storeu_si512(words, _mm512_unpacklo_epi8(low.low, low.high));
  _mm512_storeu_si512(words + kTileWords, _mm512_unpackhi_epi8(low.low, low.high));
  _mm512_storeu_si512(words + 2 * kTileWords, _mm512_unpacklo_epi8(high.low, high.high));
  _mm512_storeu_si512(words + 3 * kTileWords, _mm512_unpackhi_epi8(high.low, high.high));
}

/// Column tiles of a unit of V.
constexpr int64_t column_tiles_of(DType type) {
  return elements_of(type) / kTile;
}
/// Lines of two rows of V as words of the right operand: column_of() tile t of part p at words + (column_tiles_of() p + t) * kTileWords.
template <DType kType>
FOVEA_AMX_ROWS_INLINE void put_two_values(__m512i first, __m512i second, uint32_t* words,
                                          [[maybe_unused]] Large& large) {
  if constexpr (kType == DType::kE4M3) {
    put_byte_values(first, second, words);
  } else {
    put_halves(_mm512_unpacklo_epi16(first, second), {words, 2 * kTileWords},
               _mm512_unpackhi_epi16(first, second), {words + kTileWords, 2 * kTileWords}, large);
  }
}

/// Fetches all that is left. The unit of tiles is kept awake: from memory a line takes 30 to 80 ns.
FOVEA_AMX_ROWS_INLINE void fetch_rest(RowFetch& fetch) {
  constexpr int64_t kAwakeLines = 8;
  for (int64_t line = 0; fetch.more(); ++line) {
    if (line % kAwakeLines == 0) stay_awake();
    fetch.lines<1>();
  }
}

/// A unit: kSize elements, from kSize g on, of rows [j, j + 32) of K or V.
template <DType kType>
struct RowUnit {
  static constexpr int64_t kSize = elements_of(kType), kBytes = kSize * size_of(kType);
  const TileRows& rows;
  int64_t steps = (rows.size + kSize - 1) / kSize;
  int64_t j = 0, g = 0;
  bool whole = false;

  void look() { whole = j + kKeys <= rows.n && (g + 1) * kSize <= rows.size; }
  /// Rows [16 x, 16 x + 16) of the unit, from its first column on.
  RowGroup group(int64_t x) const {
    const RowGroup& rows_of = rows.groups[j / kGroupRows + x];
    return {rows_of.first + g * kBytes, rows_of.stride, kBytes};
  }
  /// Bytes that row r has from the unit's first column on.
  int64_t bytes(int64_t r) const { return r < rows.n ? (rows.size - g * kSize) * size_of(kType) : 0; }
  const char* row(int64_t r) const {
    const int64_t exists = std::min(r, rows.n - 1);
    return rows.groups[exists / kGroupRows].row(exists % kGroupRows) + g * kBytes;
  }
};

/// A quarter of a unit of K, from row `first` of it on, as the left operand.
template <DType kType>
__attribute__((noinline)) FOVEA_AMX_ROWS void put_edge_keys(const RowUnit<kType>& unit, int64_t first,
                                                            uint32_t* words) {
  [[maybe_unused]] __m512 left = _mm512_setzero_ps();  // the scores tell
  for (int64_t i = first; i < first + kKeys / 4; ++i) {
    const __m512i line = line_of(unit.row(unit.j + i), unit.bytes(unit.j + i));
    if constexpr (kType == DType::kE4M3)
      put_byte_keys(line, words + i * kTile);
    else
      put_any_halves(line, words + i * kTile, kHalf, left);
  }
}
template <DType kType>
FOVEA_AMX_ROWS_INLINE void put_keys(const RowUnit<kType>& unit, int64_t first, uint32_t* words,
                                    RowFetch& fetch) {
  if (!unit.whole) return put_edge_keys(unit, first, words);
  const RowGroup rows = unit.group(first / kGroupRows);
  const char* row = rows.row(first % kGroupRows);
  Large large = none_large();
#pragma GCC unroll 4
  for (int64_t i = first; i < first + kKeys / 4; i += 2, row += 2 * rows.stride) {
    fetch.lines<2>();
    put_two_keys<kType>(row, row + rows.stride, words + i * kTile, large);
  }
  if (kType == DType::kF16 && is_nan(large)) put_edge_keys(unit, first, words);
}

/// Pairs of V that are taken apart beside the products of one tile of columns.
template <DType kType>
constexpr int64_t kPairsAtOnce = kTile / column_tiles_of(kType);

/// So many pairs of a unit of V, from `first` on, as the right operand. Returns NaN where parts of some are not finite.
template <DType kType>
__attribute__((noinline)) FOVEA_AMX_ROWS __m512 put_edge_values(const RowUnit<kType>& unit, int64_t first,
                                                                uint32_t* words) {
  __m512 left = _mm512_setzero_ps();
  for (int64_t i = first; i < first + kPairsAtOnce<kType>; ++i) {
    const int64_t r = unit.j + i, second = r + kTile;
    const __m512i a = line_of(unit.row(r), unit.bytes(r)), b = line_of(unit.row(second), unit.bytes(second));
    uint32_t* to = words + i * kTile;
    if constexpr (kType == DType::kE4M3) {
      put_byte_values(a, b, to);
    } else {
      put_any_halves(_mm512_unpacklo_epi16(a, b), to, 2 * kTileWords, left);
      put_any_halves(_mm512_unpackhi_epi16(a, b), to + kTileWords, 2 * kTileWords, left);
    }
  }
  return left;
}
/// The same; `left` becomes NaN there.
template <DType kType>
FOVEA_AMX_ROWS_INLINE void put_values(const RowUnit<kType>& unit, int64_t first, uint32_t* words,
                                      __m512& left, RowFetch& fetch) {
  if (!unit.whole) {
    left = _mm512_add_ps(left, put_edge_values(unit, first, words));
    return;
  }
  const RowGroup upper = unit.group(0), lower = unit.group(1);
  const char *row = upper.row(first), *second = lower.row(first);
  Large large = none_large();
#pragma GCC unroll 8
  for (int64_t i = first; i < first + kPairsAtOnce<kType>; ++i, row += upper.stride, second += lower.stride) {
    fetch.lines<2>();
    put_two_values<kType>(_mm512_loadu_si512(row), _mm512_loadu_si512(second), words + i * kTile, large);
  }
  if (kType == DType::kF16 && is_nan(large)) left = _mm512_add_ps(left, put_edge_values(unit, first, words));
}

}  // namespace fovea::cpu

#endif
