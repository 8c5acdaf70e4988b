// The products themselves: of the keys of a step, and sums of its values.
#include "block_integers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns of its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define FOVEA_VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

namespace fovea_ggml {
namespace {

constexpr int kLargerSize = 0x0b;      // of VRANGEPS: the larger of two numbers without their signs
constexpr float kNothing = 0x1p-100f;  // numbers up to this are 0: 32,767 divided by them might be infinite

FOVEA_VNNI inline __m128i load16(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
FOVEA_VNNI inline __m256i load32(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

/// Writes a query as blocks, and what `offset` more in each byte of a key adds to a product. Returns the query's unit.
FOVEA_VNNI float stage_query(const float* q, int64_t num_blocks, int32_t offset, QueryBlock* blocks,
                             int32_t* offsets) {
  constexpr float kMost = 127 * 128;  // high bytes up to 127, low ones from -64 to 63
  __m512 all = _mm512_setzero_ps();
  for (int64_t i = 0; i < num_blocks * kBlockElements; i += 16)
    all = _mm512_range_ps(all, _mm512_loadu_ps(q + i), kLargerSize);
  const float largest = _mm512_reduce_max_ps(all);
  const __m512 factor = _mm512_set1_ps(largest > kNothing ? kMost / largest : 0);
  for (int64_t b = 0; b < num_blocks; ++b, q += kBlockElements) {
    __m512i sum = _mm512_setzero_si512();
    for (int64_t half = 0; half < 2; ++half) {
      const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(q + 16 * half), factor));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7);
      const __m512i low = _mm512_sub_epi32(x, _mm512_slli_epi32(high, 7));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(blocks[b].high + 4 * half), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(blocks[b].low + 4 * half), _mm512_cvtepi32_epi8(low));
      sum = _mm512_add_epi32(sum, x);
    }
    offsets[b] = -offset * _mm512_reduce_add_epi32(sum);
  }
  return largest / kMost;
}

/// v[x] = lane x of each of four 128-bit parts of the four a[]: dwords of 4 rows, transposed.
FOVEA_VNNI inline void transpose_fours(const __m512i* a, __m512i* v) {
  const __m512i t0 = _mm512_unpacklo_epi32(a[0], a[1]), t1 = _mm512_unpackhi_epi32(a[0], a[1]);
  const __m512i t2 = _mm512_unpacklo_epi32(a[2], a[3]), t3 = _mm512_unpackhi_epi32(a[2], a[3]);
  v[0] = _mm512_unpacklo_epi64(t0, t2);
  v[1] = _mm512_unpackhi_epi64(t0, t2);
  v[2] = _mm512_unpacklo_epi64(t1, t3);
  v[3] = _mm512_unpackhi_epi64(t1, t3);
}

/// Bytes 4 x to 4 x + 3 of a block of each of 16 keys, as numbers without a sign: those of the block and kOffset.
struct Q8Lanes {
  static constexpr int64_t kBytes = kQ8Bytes;
  static constexpr int32_t kOffset = 128;
  FOVEA_VNNI static void load(const uint8_t* const* rows, int64_t at, __m512i (&lanes)[8]) {
    const __m512i sign = _mm512_set1_epi8(-128);
    __m512i a[2][4], t[2][4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m256i first = load32(rows[8 * half + i] + at + 2);
        a[half][i] =
            _mm512_inserti64x4(_mm512_castsi256_si512(first), load32(rows[8 * half + 4 + i] + at + 2), 1);
      }
      transpose_fours(a[half], t[half]);
    }
#pragma GCC unroll 4
    for (int x = 0; x < 4; ++x) {
      lanes[x] = _mm512_xor_si512(_mm512_shuffle_i32x4(t[0][x], t[1][x], 0x88), sign);
      lanes[4 + x] = _mm512_xor_si512(_mm512_shuffle_i32x4(t[0][x], t[1][x], 0xdd), sign);
    }
  }
};
struct Q4Lanes {
  static constexpr int64_t kBytes = kQ4Bytes;
  static constexpr int32_t kOffset = 8;
  FOVEA_VNNI static void load(const uint8_t* const* rows, int64_t at, __m512i (&lanes)[8]) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i a[4], t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512i row = _mm512_castsi128_si512(load16(rows[i] + at + 2));
      row = _mm512_inserti32x4(row, load16(rows[4 + i] + at + 2), 1);
      row = _mm512_inserti32x4(row, load16(rows[8 + i] + at + 2), 2);
      a[i] = _mm512_inserti32x4(row, load16(rows[12 + i] + at + 2), 3);
    }
    transpose_fours(a, t);
#pragma GCC unroll 4
    for (int x = 0; x < 4; ++x) {
      lanes[x] = _mm512_and_si512(t[x], low);
      lanes[4 + x] = _mm512_and_si512(_mm512_srli_epi32(t[x], 4), low);
    }
  }
};

/// Products of the rows of a head with the keys of a step, 32 at a time.
template <class Lanes>
FOVEA_VNNI void integer_dots(const QueryBlock* q, const int32_t* offsets, int64_t num_rows,
                             const BlockRows& k, Step& step, Ahead& ahead) {
  constexpr int kGroups = 2;
  const int64_t blocks = k.size / kBlockElements;
  for (int64_t j = 0; j < step.n; j += 16 * kGroups) {
    const uint8_t* rows[16 * kGroups];
    for (int64_t i = 0; i < 16 * kGroups; ++i) rows[i] = step.k + std::min(j + i, step.n - 1) * k.key_stride;
    for (int64_t b = 0; b < blocks; ++b) {
      ahead.point();
      __m512i lanes[kGroups][8];
      __m512 scale[kGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        Lanes::load(rows + 16 * g, b * Lanes::kBytes, lanes[g]);
        scale[g] = _mm512_load_ps(step.scales[b] + j + 16 * g);
      }
      for (int64_t r = 0; r < num_rows; ++r) {
        const QueryBlock& query = q[r * blocks + b];
        __m512i high[kGroups], low[kGroups];
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
          high[g] = _mm512_setzero_si512();
          low[g] = _mm512_set1_epi32(offsets[r * blocks + b]);
        }
#pragma GCC unroll 8
        for (int x = 0; x < 8; ++x) {
          const __m512i above = _mm512_set1_epi32(query.high[x]), below = _mm512_set1_epi32(query.low[x]);
#pragma GCC unroll 2
          for (int g = 0; g < kGroups; ++g) {
            high[g] = _mm512_dpbusd_epi32(high[g], lanes[g][x], above);
            low[g] = _mm512_dpbusd_epi32(low[g], lanes[g][x], below);
          }
        }
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
          const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[g], 7), low[g]));
          float* to = step.scores[r] + j + 16 * g;
          const __m512 before = b == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
          _mm512_store_ps(to, _mm512_fmadd_ps(sum, scale[g], before));
        }
      }
    }
  }
}

/// The numbers of a block of two keys as pairs of words, kOffset more than they are.
struct Q8Pairs {
  static constexpr int64_t kBytes = kQ8Bytes;
  static constexpr int32_t kOffset = 0;
  FOVEA_VNNI static void load(const uint8_t* a, const uint8_t* b, __m512i (&pairs)[2]) {
    const __m512i x = _mm512_cvtepi8_epi16(load32(a + 2)), y = _mm512_cvtepi8_epi16(load32(b + 2));
    pairs[0] = _mm512_unpacklo_epi16(x, y);
    pairs[1] = _mm512_unpackhi_epi16(x, y);
  }
  /// Of sums of pairs: their order is that of unpacked words, 0 to 3, 8 to 11, 16 to 19, 24 to 27, and the others.
  FOVEA_VNNI static void order(__m512& a, __m512& b) {
    const __m512 x = _mm512_shuffle_f32x4(a, b, 0x44), y = _mm512_shuffle_f32x4(a, b, 0xee);
    a = _mm512_shuffle_f32x4(x, x, 0xd8);
    b = _mm512_shuffle_f32x4(y, y, 0xd8);
  }
};
struct Q4Pairs {
  static constexpr int64_t kBytes = kQ4Bytes;
  static constexpr int32_t kOffset = 8;
  FOVEA_VNNI static void load(const uint8_t* a, const uint8_t* b, __m512i (&pairs)[2]) {
    const __m512i bits = _mm512_set1_epi16(15);
    const __m512i x = _mm512_cvtepu8_epi32(load16(a + 2)), y = _mm512_cvtepu8_epi32(load16(b + 2));
    const __m512i both = _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
    pairs[0] = _mm512_and_si512(both, bits);
    pairs[1] = _mm512_and_si512(_mm512_srli_epi32(both, 4), bits);
  }
  FOVEA_VNNI static void order(__m512&, __m512&) {}
};

/// Weights of a step as words, and what their sums are multiplied by.
struct Weights {
  alignas(64) int16_t words[kStep];
  float unit;
};

/// p[j] * scale[j] in units of 1 / 32767 of the largest.
FOVEA_VNNI inline void make_weights(const float* p, const float* scales, Weights& to) {
  constexpr int kParts = kStep / 16;
  __m512 x[kParts], largest = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) {
    x[i] = _mm512_mul_ps(_mm512_load_ps(p + 16 * i), _mm512_load_ps(scales + 16 * i));
    largest = _mm512_range_ps(largest, x[i], kLargerSize);
  }
  const float most = _mm512_reduce_max_ps(largest);
  to.unit = most / 32767;
  const __m512 factor = _mm512_set1_ps(most > kNothing ? 32767 / most : 0);
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
#pragma GCC unroll 2
  for (int i = 0; i < kParts; i += 2) {
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], factor)),
                  b = _mm512_cvtps_epi32(_mm512_mul_ps(x[i + 1], factor));
    _mm512_store_si512(to.words + 16 * i, _mm512_permutexvar_epi64(order, _mm512_packs_epi32(a, b)));
  }
}

/// o[r] = o[r] * alpha[r] + sum over j of p[r][j] * v[j], W blocks of a row.
template <class Pairs, int R, int W>
FOVEA_VNNI inline void integer_strip(QueryRow* queries, const BlockRows& v, int64_t block, const Step& step,
                                     int64_t first, Ahead& ahead) {
  Weights weights[R][W];
  __m512i sum[R][W][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      make_weights(step.scores[first + r], step.scales[block + w], weights[r][w]);
      sum[r][w][0] = sum[r][w][1] = _mm512_setzero_si512();
    }
  }
  const uint8_t* row = step.v + block * Pairs::kBytes;
  const auto add_pair = [&](int64_t j, const uint8_t* first_row, const uint8_t* second_row)
      __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"), always_inline)) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      __m512i pairs[2];
      Pairs::load(first_row + w * Pairs::kBytes, second_row + w * Pairs::kBytes, pairs);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        int32_t both;
        std::memcpy(&both, weights[r][w].words + j, sizeof(both));
        const __m512i weight = _mm512_set1_epi32(both);
        sum[r][w][0] = _mm512_dpwssd_epi32(sum[r][w][0], pairs[0], weight);
        sum[r][w][1] = _mm512_dpwssd_epi32(sum[r][w][1], pairs[1], weight);
      }
    }
  };
  int64_t j = 0;
  for (; j + 8 <= step.n; j += 8, row += 8 * v.key_stride) {
    ahead.point();
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) add_pair(j + i, row + i * v.key_stride, row + (i + 1) * v.key_stride);
  }
  // An odd last key is taken twice: the weight beside it is 0.
  for (; j < step.n; j += 2, row += 2 * v.key_stride)
    add_pair(j, row, j + 1 < step.n ? row + v.key_stride : row);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512 alpha = _mm512_set1_ps(step.alpha[first + r]);
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      if constexpr (Pairs::kOffset != 0) {
        __m512i all = _mm512_setzero_si512();
        for (int i = 0; i < kStep; i += 32)
          all = _mm512_dpwssd_epi32(all, _mm512_load_si512(weights[r][w].words + i),
                                    _mm512_set1_epi16(Pairs::kOffset));
        const __m512i offset = _mm512_set1_epi32(_mm512_reduce_add_epi32(all));
        for (__m512i& x : sum[r][w]) x = _mm512_sub_epi32(x, offset);
      }
      const __m512 unit = _mm512_set1_ps(weights[r][w].unit);
      __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][w][0]), unit);
      __m512 b = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][w][1]), unit);
      Pairs::order(a, b);
      float* o = queries[r].o + (block + w) * kBlockElements;
      _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_loadu_ps(o), alpha, a));
      _mm512_storeu_ps(o + 16, _mm512_fmadd_ps(_mm512_loadu_ps(o + 16), alpha, b));
    }
  }
}

/// Rows whose sums of a block stay in registers: 16 of 32. And blocks of a row, for so few rows that their sums are few chains.
constexpr int kIntegerRows = 8;
constexpr int integer_blocks(int rows) {
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

template <class Pairs, int R>
FOVEA_VNNI void integer_sums(QueryRow* queries, const BlockRows& v, const Step& step, int64_t first,
                             Ahead& ahead) {
  const int64_t blocks = v.size / kBlockElements;
  constexpr int kBlocks = integer_blocks(R);
  int64_t b = 0;
  for (; b + kBlocks <= blocks; b += kBlocks)
    integer_strip<Pairs, R, kBlocks>(queries, v, b, step, first, ahead);
  for (; b < blocks; ++b) integer_strip<Pairs, R, 1>(queries, v, b, step, first, ahead);
}

/// How many of so many rows are summed up at once.
int64_t rows_at_once(int64_t rows) {
  return rows >= kIntegerRows ? kIntegerRows : rows >= 4 ? 4 : rows;
}
template <class Pairs>
auto sums_of(int64_t rows) {
  switch (rows) {
    case 1:
      return integer_sums<Pairs, 1>;
    case 2:
      return integer_sums<Pairs, 2>;
    case 3:
      return integer_sums<Pairs, 3>;
    case 4:
      return integer_sums<Pairs, 4>;
    default:
      return integer_sums<Pairs, kIntegerRows>;
  }
}

}  // namespace

IntegerProducts::IntegerProducts(const BlockAttention& a) : a_(a), blocks_(a.k.size / kBlockElements) {
  const auto rows = static_cast<size_t>(a.heads * a.rows), blocks = static_cast<size_t>(blocks_);
  queries_.resize(rows * blocks);
  offsets_.resize(rows * blocks);
  units_.resize(rows);
  const int32_t offset = a.k.type == BlockType::kQ8_0 ? Q8Lanes::kOffset : Q4Lanes::kOffset;
  for (size_t x = 0; x < rows; ++x)
    units_[x] = stage_query(a.queries[x].q, blocks_, offset, &queries_[x * blocks], &offsets_[x * blocks]);
}

int64_t IntegerProducts::points() const {
  const int64_t blocks = a_.v.size / kBlockElements, passes = (a_.rows + kIntegerRows - 1) / kIntegerRows;
  return kStep / 32 * blocks_ +
         passes * kStep / 8 * (blocks / (a_.rows <= 2 ? integer_blocks(static_cast<int>(a_.rows)) : 1));
}

void IntegerProducts::dots(int64_t head, Step& step, Ahead& ahead) const {
  const auto at = static_cast<size_t>(head * a_.rows * blocks_);
  const bool is_q8 = a_.k.type == BlockType::kQ8_0;
  (is_q8 ? integer_dots<Q8Lanes> : integer_dots<Q4Lanes>)(&queries_[at], &offsets_[at], a_.rows, a_.k, step,
                                                          ahead);
}

void IntegerProducts::sums(int64_t head, const Step& step, Ahead& ahead) const {
  QueryRow* queries = a_.queries + head * a_.rows;
  for (int64_t r = 0, count; r < a_.rows; r += count) {
    count = rows_at_once(a_.rows - r);
    const bool is_q8 = a_.v.type == BlockType::kQ8_0;
    (is_q8 ? sums_of<Q8Pairs>(count) : sums_of<Q4Pairs>(count))(queries + r, a_.v, step, r, ahead);
  }
}

}  // namespace fovea_ggml
#endif
