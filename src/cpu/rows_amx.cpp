// Few query rows on AMX tiles, whatever their type: every operand is a sum of bfloat16, its parts, and tiles multiply parts.
//
//   S[16 queries][keys]      += Q parts . K parts   rows of K are the left operand, 32 keys and 64 elements at a time
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
// Elements are taken apart on their way into the first-level cache, where a tile load finds them: 8 KB at most. An infinity is no
// sum of parts: such rows are left to row_dots and row_sums.
#include "cpu/amx_tiles.hpp"
#include "cpu/ops.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <array>
#include <atomic>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// The backend asks for VBMI, too; what has AVX2 has F16C.
#define FOVEA_AMX_ROWS \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,f16c,amx-tile,amx-bf16")))

namespace fovea::cpu {
namespace {

constexpr int kMostParts = 3;
constexpr int64_t kKeys = 2 * kTile;      // keys of a step: two tiles of rows of K, or the pairs of one of V
constexpr int64_t kElements = 4 * kTile;  // elements of a step: two tiles of K, four of V
constexpr int64_t kMostKeys = 128;        // of a call
constexpr int64_t kTileWords = kTile * kTile;

constexpr int parts_of(DType type) {
  return type == DType::kF32 ? 3 : type == DType::kF16 ? 2 : 1;
}
/// Whether part a of V, of so many, is multiplied with part b of P.
constexpr bool takes(int a, int b, int parts) {
  return parts == 1 || a + b < parts;
}

/// Of the scores of so few queries: tiles 0 to 3 and 6, of scores and of queries, have as many columns.
constexpr TileConfig narrow_config(int64_t queries) {
  TileConfig config = kTileConfig;
  for (const int tile : {0, 1, 2, 3, 6}) config.bytes_per_row[tile] = static_cast<uint16_t>(4 * queries);
  return config;
}
constexpr TileConfig kOneQuery = narrow_config(1), kFourQueries = narrow_config(4);

/// Tiles 0 to 6 have `rows` rows, those of the queries; tile 7 has 16.
constexpr std::array<TileConfig, kTile + 1> kRowConfigs = [] {
  std::array<TileConfig, kTile + 1> configs{};
  for (size_t rows = 0; rows < configs.size(); ++rows) {
    configs[rows] = kTileConfig;
    for (int i = 0; i < 7; ++i) configs[rows].rows[i] = static_cast<uint8_t>(rows);
  }
  return configs;
}();

/// Columns of the tiles of scores: queries, rounded up to what rows are taken out of.
constexpr int64_t columns_of(int64_t num_q) {
  return num_q == 1 ? 1 : num_q <= 4 ? 4 : kTile;
}
constexpr int64_t steps_of(int64_t size) {
  return (size + kElements - 1) / kElements;
}

/// A mask of the elements below `count` of so many.
template <class Mask>
constexpr Mask below(int64_t count) {
  constexpr int64_t kBits = 8 * sizeof(Mask);
  if (count <= 0) return 0;
  return count >= kBits ? static_cast<Mask>(~Mask{0}) : static_cast<Mask>((Mask{1} << count) - 1);
}

/// Which bytes of each row of `ahead` are fetched in one step of so many.
struct FetchPart {
  int64_t begin, end;

  FetchPart(const FetchRows& ahead, int64_t step, int64_t steps) {
    const int64_t lines = (ahead.bytes + kLine - 1) / kLine;
    begin = lines * step / steps * kLine;
    end = lines * (step + 1) / steps * kLine;
  }
  /// Inlined at once: GCC drops calls of a function that only prefetches.
  __attribute__((always_inline)) FOVEA_AMX_ROWS void operator()(const FetchRows& ahead, int64_t row) const {
    if (row >= ahead.n) return;
    for (int64_t byte = begin; byte < end; byte += kLine) _mm_prefetch(ahead.rows[row] + byte, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t kLine = 64;
};

/// Writes the parts of the pairs (a, b), `stride` words apart; with kRound the last is rounded to nearest. Returns what is left of
/// both before the last: NaN where one is not finite.
template <int kParts, bool kRound = false>
FOVEA_AMX_ROWS inline __m512 put_pairs(__m512 a, __m512 b, uint32_t* words, int64_t stride) {
  const __m512 high = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  __m512 left = _mm512_setzero_ps();
  for (int part = 0; part < kParts; ++part, words += stride) {
    __m512i low = _mm512_castps_si512(a), top = _mm512_castps_si512(b);
    if (kRound && part + 1 == kParts) {
      low = _mm512_add_epi32(low, _mm512_set1_epi32(0x8000));
      top = _mm512_add_epi32(top, _mm512_set1_epi32(0x8000));
    }
    _mm512_storeu_si512(words, _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low, 16), top));
    if (part + 1 == kParts) break;
    a = _mm512_sub_ps(a, _mm512_and_ps(a, high));
    b = _mm512_sub_ps(b, _mm512_and_ps(b, high));
    if (part == 0) left = _mm512_add_ps(a, b);
  }
  return left;
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

/// 16 float16 of a row from x on, of which `count` exist; all do where kWhole.
template <bool kWhole>
FOVEA_AMX_ROWS inline __m512 floats_of(const char* row, int64_t x, int64_t count) {
  const char* at = row + 2 * x;
  return _mm512_cvtph_ps(kWhole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))
                                : _mm256_maskz_loadu_epi16(below<__mmask16>(count), at));
}
/// 16 elements of 16 bits, widened.
template <bool kWhole>
FOVEA_AMX_ROWS inline __m512i words_of(const char* row, int64_t x, int64_t count) {
  const char* at = row + 2 * x;
  return _mm512_cvtepu16_epi32(kWhole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))
                                      : _mm256_maskz_loadu_epi16(below<__mmask16>(count), at));
}
/// 64 bytes.
template <bool kWhole>
FOVEA_AMX_ROWS inline __m512i line_of(const char* at, int64_t count) {
  return kWhole ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(below<__mmask64>(count), at);
}

/// Which elements of a row of K are word w of step g of 64, in half h: put_keys() writes them in this order.
constexpr int64_t element_of(DType type, int64_t g, int64_t h, int64_t w, int64_t which) {
  switch (type) {
    case DType::kBF16:
      return kElements * g + 32 * h + 2 * w + which;
    case DType::kE4M3:
      return kElements * g + 16 * (w / 4) + 8 * h + 2 * (w % 4) + which;
    default:
      return kElements * g + 32 * h + w + 16 * which;
  }
}

/// Elements [c, c + 64) of a row of K, of which `count` exist, as words of the left operand: half h of part p at
/// words + (2 p + h) * kKeys * kTile.
template <DType kType, bool kWhole>
FOVEA_AMX_ROWS inline void put_key(const char* row, int64_t c, int64_t count, uint32_t* words) {
  constexpr int64_t kHalf = kKeys * kTile;
  if constexpr (kType == DType::kBF16) {
    const char* at = row + 2 * c;
    _mm512_storeu_si512(words, line_of<kWhole>(at, 2 * count));
    _mm512_storeu_si512(words + kHalf, line_of<kWhole>(at + 64, 2 * count - 64));
  } else if constexpr (kType == DType::kE4M3) {
    const Bytes bytes = bytes_of(line_of<kWhole>(row + c, count));
    _mm512_storeu_si512(words, _mm512_unpacklo_epi8(bytes.low, bytes.high));
    _mm512_storeu_si512(words + kHalf, _mm512_unpackhi_epi8(bytes.low, bytes.high));
  } else {
    for (int64_t x = 0; x < kElements; x += 2 * kTile, words += kHalf) {
      put_pairs<2>(floats_of<kWhole>(row, c + x, count - x),
                   floats_of<kWhole>(row, c + x + kTile, count - x - kTile), words, 2 * kHalf);
    }
  }
}

/// Elements [c, c + 64) of two rows of V, of which `first_count` and `second_count` exist, as words of the right operand: tile t
/// of part p at words + (4 p + t) * kTileWords. Returns what is NaN where some are not finite.
template <DType kType, bool kWhole>
FOVEA_AMX_ROWS inline __m512 put_values(const char* first, int64_t first_count, const char* second,
                                        int64_t second_count, int64_t c, uint32_t* words) {
  __m512 left = _mm512_setzero_ps();
  if constexpr (kType == DType::kE4M3) {
    // Transposes the dwords, four by four, so that the interleaved tiles are neighbouring columns.
    const __m512i turn = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const Bytes a = bytes_of(_mm512_permutexvar_epi32(turn, line_of<kWhole>(first + c, first_count)));
    const Bytes b = bytes_of(_mm512_permutexvar_epi32(turn, line_of<kWhole>(second + c, second_count)));
    const __m512i a0 = _mm512_unpacklo_epi8(a.low, a.high), a1 = _mm512_unpackhi_epi8(a.low, a.high);
    const __m512i b0 = _mm512_unpacklo_epi8(b.low, b.high), b1 = _mm512_unpackhi_epi8(b.low, b.high);
    _mm512_storeu_si512(words, _mm512_unpacklo_epi16(a0, b0));
    _mm512_storeu_si512(words + kTileWords, _mm512_unpackhi_epi16(a0, b0));
    _mm512_storeu_si512(words + 2 * kTileWords, _mm512_unpacklo_epi16(a1, b1));
    _mm512_storeu_si512(words + 3 * kTileWords, _mm512_unpackhi_epi16(a1, b1));
  } else {
    for (int64_t x = 0; x < kElements; x += kTile, words += kTileWords) {
      if constexpr (kType == DType::kBF16) {
        const __m512i low = words_of<kWhole>(first, c + x, first_count - x);
        const __m512i top = words_of<kWhole>(second, c + x, second_count - x);
        _mm512_storeu_si512(words, _mm512_or_si512(low, _mm512_slli_epi32(top, 16)));
      } else {
        left = _mm512_add_ps(
            left, put_pairs<2>(floats_of<kWhole>(first, c + x, first_count - x),
                               floats_of<kWhole>(second, c + x, second_count - x), words, 4 * kTileWords));
      }
    }
  }
  return left;
}

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

/// The products of one half of 64 elements: 32 keys, all parts. Tile numbers must be literals.
#define FOVEA_HALF(h, first, second)                               \
  for (int b = 0; b < query_parts; ++b) {                          \
    _tile_loadd(6, queries + (2 * b + (h)) * kTileWords, 64);      \
    for (int a = 0; a < kParts; ++a) {                             \
      const uint32_t* left = keys + (2 * a + (h)) * kKeys * kTile; \
      _tile_loadd(4, left, 64);                                    \
      _tile_dpbf16ps(first, 4, 6);                                 \
      _tile_loadd(5, left + kTileWords, 64);                       \
      _tile_dpbf16ps(second, 5, 6);                                \
    }                                                              \
  }

/// Elements [c, c + 64) of 32 rows of K from row j on; those behind the last are 0.
template <DType kType>
FOVEA_AMX_ROWS inline void put_keys(const TileRows& k, int64_t j, int64_t c, uint32_t* words,
                                    const FetchRows& ahead) {
  const int64_t count = k.size - c;
  const FetchPart fetch(ahead, c / kElements, steps_of(k.size));
  if (j + kKeys <= k.n && count >= kElements) {
    for (int64_t r = j; r < j + kKeys; ++r, words += kTile) {
      fetch(ahead, r);
      put_key<kType, true>(k.rows[r], c, count, words);
    }
  } else {
    for (int64_t r = j; r < j + kKeys; ++r, words += kTile) {
      fetch(ahead, r);
      put_key<kType, false>(k.rows[std::min(r, k.n - 1)], c, r < k.n ? count : 0, words);
    }
  }
}

template <DType kType>
FOVEA_AMX_ROWS bool dots_of(const uint32_t* staged, int64_t num_q, int query_parts, const TileRows& k,
                            float* s, int64_t lds, const FetchRows& ahead) {
  constexpr int kParts = parts_of(kType);
  const int64_t steps = steps_of(k.size);
  alignas(64) uint32_t keys[kParts * 2 * kKeys * kTile];
  alignas(64) float sums[2][kKeys * kTile];
  bool bad = false;
  for (int64_t j = 0; j < k.n; j += kKeys) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t g = 0; g < steps; ++g) {
      put_keys<kType>(k, j, g * kElements, keys, ahead);
      // GCC does not know that a tile load reads memory.
      std::atomic_signal_fence(std::memory_order_seq_cst);
      const uint32_t* queries = staged + g * query_parts * 2 * kTileWords;
      FOVEA_HALF(0, 0, 1)
      FOVEA_HALF(1, 2, 3)
    }
    // Two sums of each score: a product waits 52 cycles for the one before it in its tile, and takes 16.
    const int64_t columns = columns_of(num_q);
    const auto row = static_cast<size_t>(4 * columns);
    _tile_stored(0, sums[0], row);
    _tile_stored(1, sums[0] + kTile * columns, row);
    _tile_stored(2, sums[1], row);
    _tile_stored(3, sums[1] + kTile * columns, row);
    for (int64_t x = 0; x < std::min(kKeys, k.n - j); x += kTile) {
      __m512 scores[kTile];
      for (int64_t i = 0; i < columns; ++i) {
        const int64_t at = x * columns + i * kTile;
        scores[i] = _mm512_add_ps(_mm512_load_ps(sums[0] + at), _mm512_load_ps(sums[1] + at));
      }
      float* to = s + j + x;
      if (columns == 1) {
        bad |= _mm512_cmp_ps_mask(scores[0], scores[0], _CMP_UNORD_Q) != 0;
        _mm512_storeu_ps(to, scores[0]);
      } else if (columns == 4) {
        bad |= put_four_columns(scores, num_q, to, lds);
      } else {
        bad |= put_columns(scores, num_q, to, lds);
      }
    }
  }
  return kParts == 1 || !bad;
}
#undef FOVEA_HALF

/// Weights of a call, apart: part b of keys [32 x, 32 x + 32) at (kMostParts x + b) * kTileWords.
template <int kParts, bool kRound>
FOVEA_AMX_ROWS void put_weights(const float* p, int64_t ldp, int64_t num_p, int64_t n, uint32_t* weights) {
  for (int64_t x = 0; x * kKeys < n; ++x) {
    const int64_t left = n - x * kKeys;
    for (int64_t r = 0; r < num_p; ++r) {
      const float* row = p + r * ldp + x * kKeys;
      put_pairs<kParts, kRound>(_mm512_maskz_loadu_ps(below<__mmask16>(left), row),
                                _mm512_maskz_loadu_ps(below<__mmask16>(left - kTile), row + kTile),
                                weights + kMostParts * x * kTileWords + r * kTile, kTileWords);
    }
  }
}

/// Columns [c, c + 64) of 32 rows of V from row j on; those behind the last are 0. Returns what is NaN where some are not finite.
template <DType kType>
FOVEA_AMX_ROWS inline __m512 put_block(const TileRows& v, int64_t j, int64_t c, uint32_t* words,
                                       const FetchRows& ahead) {
  const int64_t count = v.size - c;
  const FetchPart fetch(ahead, c / kElements, steps_of(v.size));
  __m512 left = _mm512_setzero_ps();
  if (j + kKeys <= v.n && count >= kElements) {
    for (int64_t r = j; r < j + kTile; ++r, words += kTile) {
      fetch(ahead, r);
      fetch(ahead, r + kTile);
      left =
          _mm512_add_ps(left, put_values<kType, true>(v.rows[r], count, v.rows[r + kTile], count, c, words));
    }
  } else {
    for (int64_t r = j; r < j + kTile; ++r, words += kTile) {
      const int64_t second = r + kTile;
      fetch(ahead, r);
      fetch(ahead, second);
      left = _mm512_add_ps(left, put_values<kType, false>(v.rows[std::min(r, v.n - 1)], r < v.n ? count : 0,
                                                          v.rows[std::min(second, v.n - 1)],
                                                          second < v.n ? count : 0, c, words));
    }
  }
  return left;
}

/// Products of the weights with one tile of 16 columns, all parts. Tile numbers must be literals.
#define FOVEA_COLUMNS(t)                                                    \
  if (count > (t)*kTile) {                                                  \
    for (int a = 0; a < kParts; ++a) {                                      \
      _tile_loadd(7, values + (4 * a + (t)) * kTileWords, 64);              \
      _tile_dpbf16ps(t, 4, 7);                                              \
      if (weight_parts > 1 && takes(a, 1, kParts)) _tile_dpbf16ps(t, 5, 7); \
      if (weight_parts > 2 && takes(a, 2, kParts)) _tile_dpbf16ps(t, 6, 7); \
    }                                                                       \
  }

template <DType kType>
FOVEA_AMX_ROWS int64_t sums_of(const uint32_t* weights, int weight_parts, const TileRows& v, float* o,
                               int64_t ldo, const FetchRows& ahead) {
  constexpr int kParts = parts_of(kType);
  const auto o_bytes = static_cast<size_t>(ldo * 4);
  alignas(64) uint32_t values[kParts * 4 * kTileWords];
  for (int64_t c = 0; c < v.size; c += kElements) {
    const int64_t count = v.size - c;
    __m512 bad = _mm512_setzero_ps();
    float* out = o + c;
    _tile_loadd(0, out, o_bytes);
    if (count > kTile) _tile_loadd(1, out + kTile, o_bytes);
    if (count > 2 * kTile) _tile_loadd(2, out + 2 * kTile, o_bytes);
    if (count > 3 * kTile) _tile_loadd(3, out + 3 * kTile, o_bytes);
    for (int64_t j = 0; j < v.n; j += kKeys) {
      bad = _mm512_add_ps(bad, put_block<kType>(v, j, c, values, ahead));
      std::atomic_signal_fence(std::memory_order_seq_cst);
      const uint32_t* left = weights + kMostParts * (j / kKeys) * kTileWords;
      _tile_loadd(4, left, 64);
      if (weight_parts > 1) _tile_loadd(5, left + kTileWords, 64);
      if (weight_parts > 2) _tile_loadd(6, left + 2 * kTileWords, 64);
      FOVEA_COLUMNS(0)
      FOVEA_COLUMNS(1)
      FOVEA_COLUMNS(2)
      FOVEA_COLUMNS(3)
    }
    if (kParts > 1 && _mm512_cmp_ps_mask(bad, bad, _CMP_UNORD_Q) != 0) return c;
    _tile_stored(0, out, o_bytes);
    if (count > kTile) _tile_stored(1, out + kTile, o_bytes);
    if (count > 2 * kTile) _tile_stored(2, out + 2 * kTile, o_bytes);
    if (count > 3 * kTile) _tile_stored(3, out + 3 * kTile, o_bytes);
  }
  return v.size;
}
#undef FOVEA_COLUMNS

}  // namespace

FOVEA_AMX_ROWS bool tile_queries_amx(const float* q, int64_t ldq, int64_t num_q, int64_t size,
                                     DType query_type, DType key_type, uint32_t* staged) {
  const int parts = parts_of(query_type);
  const __m512i rows =
      _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(static_cast<int>(ldq)));
  const __mmask16 exist = below<__mmask16>(num_q);
  const auto column = [&](int64_t c) __attribute__((always_inline)) FOVEA_AMX_ROWS {
    const __m512 zero = _mm512_setzero_ps();
    return c < size ? _mm512_mask_i32gather_ps(zero, exist, rows, q + c, 4) : zero;
  };
  __m512 bad = _mm512_setzero_ps();
  for (int64_t g = 0; g * kElements < size; ++g, staged += parts * 2 * kTileWords) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t w = 0; w < kTile; ++w) {
        const __m512 a = column(element_of(key_type, g, h, w, 0)),
                     b = column(element_of(key_type, g, h, w, 1));
        uint32_t* words = staged + h * kTileWords + w * kTile;
        constexpr int64_t kStride = 2 * kTileWords;
        bad = _mm512_add_ps(bad, parts == 1   ? put_pairs<1>(a, b, words, kStride)
                                 : parts == 2 ? put_pairs<2>(a, b, words, kStride)
                                              : put_pairs<3>(a, b, words, kStride));
      }
    }
  }
  return _mm512_cmp_ps_mask(bad, bad, _CMP_UNORD_Q) == 0;
}

FOVEA_AMX_ROWS bool tile_dots_amx(const uint32_t* queries, int64_t num_q, DType query_type, const TileRows& k,
                                  float* s, int64_t lds, const FetchRows& ahead) {
  const int parts = parts_of(query_type);
  _tile_loadconfig(num_q == 1 ? &kOneQuery : num_q <= 4 ? &kFourQueries : &kTileConfig);
  const bool right = k.type == DType::kF16 ? dots_of<DType::kF16>(queries, num_q, parts, k, s, lds, ahead)
                     : k.type == DType::kBF16
                         ? dots_of<DType::kBF16>(queries, num_q, parts, k, s, lds, ahead)
                         : dots_of<DType::kE4M3>(queries, num_q, parts, k, s, lds, ahead);
  _tile_release();
  return right;
}

FOVEA_AMX_ROWS int64_t tile_sums_amx(const float* p, int64_t ldp, int64_t num_p, DType query_type,
                                     const TileRows& v, float* o, int64_t ldo, const FetchRows& ahead) {
  alignas(64) uint32_t weights[kMostKeys / kKeys * kMostParts * kTileWords];
  const int parts = parts_of(query_type);
  if (parts == 1) {
    put_weights<1, true>(p, ldp, num_p, v.n, weights);
  } else if (parts == 2) {
    put_weights<2, true>(p, ldp, num_p, v.n, weights);
  } else {
    put_weights<3, false>(p, ldp, num_p, v.n, weights);
  }
  _tile_loadconfig(&kRowConfigs[static_cast<size_t>(num_p)]);
  const int64_t columns = v.type == DType::kF16    ? sums_of<DType::kF16>(weights, parts, v, o, ldo, ahead)
                          : v.type == DType::kBF16 ? sums_of<DType::kBF16>(weights, parts, v, o, ldo, ahead)
                                                   : sums_of<DType::kE4M3>(weights, parts, v, o, ldo, ahead);
  _tile_release();
  return columns;
}

}  // namespace fovea::cpu

#endif
