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

/// Writes a query as blocks, and their sums. Returns the query's unit.
FOVEA_VNNI float stage_query(const float* q, int64_t num_blocks, QueryBlock* blocks, int32_t* sums) {
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
    sums[b] = _mm512_reduce_add_epi32(sum);
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

/// What bytes of a key are more than its numbers, so that they need no sign.
constexpr int32_t lanes_offset(BlockType type) {
  return type == BlockType::kQ8_0 || type == BlockType::kIq4Nl ? 128 : middle_of(type);
}

/// Bytes 4 x to 4 x + 3 of a block of each of 16 keys: elements 4 x to 4 x + 3, lanes_offset more than their numbers.
FOVEA_VNNI inline void load_bytes(const uint8_t* const* rows, int64_t at, __m512i (&lanes)[8]) {
  const __m512i sign = _mm512_set1_epi8(-128);
  __m512i a[2][4], t[2][4];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i first = load32(rows[8 * half + i] + at);
      a[half][i] = _mm512_inserti64x4(_mm512_castsi256_si512(first), load32(rows[8 * half + 4 + i] + at), 1);
    }
    transpose_fours(a[half], t[half]);
  }
#pragma GCC unroll 4
  for (int x = 0; x < 4; ++x) {
    lanes[x] = _mm512_xor_si512(_mm512_shuffle_i32x4(t[0][x], t[1][x], 0x88), sign);
    lanes[4 + x] = _mm512_xor_si512(_mm512_shuffle_i32x4(t[0][x], t[1][x], 0xdd), sign);
  }
}
FOVEA_VNNI inline void load_halves(const uint8_t* const* rows, int64_t at, __m512i (&lanes)[8]) {
  const __m512i low = _mm512_set1_epi8(15);
  __m512i a[4], t[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i row = _mm512_castsi128_si512(load16(rows[i] + at));
    row = _mm512_inserti32x4(row, load16(rows[4 + i] + at), 1);
    row = _mm512_inserti32x4(row, load16(rows[8 + i] + at), 2);
    a[i] = _mm512_inserti32x4(row, load16(rows[12 + i] + at), 3);
  }
  transpose_fours(a, t);
#pragma GCC unroll 4
  for (int x = 0; x < 4; ++x) {
    lanes[x] = _mm512_and_si512(t[x], low);
    lanes[4 + x] = _mm512_and_si512(_mm512_srli_epi32(t[x], 4), low);
  }
}
/// Adds 16 to the bytes whose elements have their fifth bit: bit i of a key's four bytes is that of element i.
FOVEA_VNNI inline void add_fifths(const uint8_t* const* rows, int64_t at, __m512i (&lanes)[8]) {
  alignas(64) uint32_t fifths[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&fifths[i], rows[i] + at, sizeof(fifths[i]));
  const __m512i all = _mm512_load_si512(fifths);
  const __m512i first_byte = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
#pragma GCC unroll 8
  for (int x = 0; x < 8; ++x) {
    const __m512i byte = _mm512_add_epi8(first_byte, _mm512_set1_epi8(static_cast<char>(x / 2)));
    const __m512i bit = _mm512_set1_epi32(static_cast<int32_t>(x % 2 == 0 ? 0x08040201u : 0x80402010u));
    const __mmask64 has = _mm512_test_epi8_mask(_mm512_shuffle_epi8(all, byte), bit);
    lanes[x] = _mm512_mask_add_epi8(lanes[x], has, lanes[x], _mm512_set1_epi8(16));
  }
}
template <BlockType kType>
FOVEA_VNNI inline void load_lanes(const uint8_t* const* rows, int64_t at, __m512i (&lanes)[8]) {
  if constexpr (kType == BlockType::kQ8_0) return load_bytes(rows, at + numbers_at(kType), lanes);
  load_halves(rows, at + numbers_at(kType), lanes);
  if constexpr (has_fifth_bits(kType)) add_fifths(rows, at + fifths_at(kType), lanes);
  if constexpr (kType == BlockType::kIq4Nl) {
    const __m512i table =
        _mm512_xor_si512(_mm512_broadcast_i32x4(load16(kIq4Numbers)), _mm512_set1_epi8(-128));
#pragma GCC unroll 8
    for (__m512i& x : lanes) x = _mm512_shuffle_epi8(table, x);
  }
}

/// Products of the rows of a head with the keys of a step, 32 at a time.
template <BlockType kType>
FOVEA_VNNI void integer_dots(const QueryBlock* q, const int32_t* sums, int64_t num_rows, const BlockRows& k,
                             Step& step, Ahead& ahead) {
  constexpr int kGroups = 2;
  const int64_t blocks = k.size / kBlockElements;
  for (int64_t j = 0; j < step.n; j += 16 * kGroups) {
    const uint8_t* rows[16 * kGroups];
    for (int64_t i = 0; i < 16 * kGroups; ++i) rows[i] = step.k + std::min(j + i, step.n - 1) * k.key_stride;
    for (int64_t b = 0; b < blocks; ++b) {
      ahead.point();
      __m512i lanes[kGroups][8];
      __m512 scale[kGroups], least[kGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
        load_lanes<kType>(rows + 16 * g, b * block_bytes(kType), lanes[g]);
        scale[g] = _mm512_load_ps(step.scales[b] + j + 16 * g);
        if constexpr (has_least(kType)) least[g] = _mm512_load_ps(step.leasts[b] + j + 16 * g);
      }
      for (int64_t r = 0; r < num_rows; ++r) {
        const QueryBlock& query = q[r * blocks + b];
        const int32_t sum_of_query = sums[r * blocks + b];
        __m512i high[kGroups], low[kGroups];
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
          high[g] = _mm512_setzero_si512();
          low[g] = _mm512_set1_epi32(-lanes_offset(kType) * sum_of_query);
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
          __m512 before = b == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to);
          if constexpr (has_least(kType))
            before = _mm512_fmadd_ps(_mm512_set1_ps(static_cast<float>(sum_of_query)), least[g], before);
          _mm512_store_ps(to, _mm512_fmadd_ps(sum, scale[g], before));
        }
      }
    }
  }
}

/// Whether pairs of words come from halves at once. Those of other formats come from bytes.
constexpr bool pairs_of_halves(BlockType type) {
  return type == BlockType::kQ4_0 || type == BlockType::kQ4_1;
}
/// The elements of a block as bytes, middle_of the format more than their numbers. Not for pairs_of_halves.
template <BlockType kType>
FOVEA_VNNI inline __m256i bytes_of(const uint8_t* block) {
  if constexpr (kType == BlockType::kQ8_0) {
    return load32(block + numbers_at(kType));
  } else {
    const __m128i both = load16(block + numbers_at(kType));
    const __m256i apart = _mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1);
    const __m256i halves = _mm256_and_si256(apart, _mm256_set1_epi8(15));
    if constexpr (kType == BlockType::kIq4Nl)
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load16(kIq4Numbers)), halves);
    uint32_t fifths;
    std::memcpy(&fifths, block + fifths_at(kType), sizeof(fifths));
    return _mm256_mask_add_epi8(halves, fifths, halves, _mm256_set1_epi8(16));
  }
}
/// The numbers of a block of two keys as pairs of words, middle_of the format more than they are.
template <BlockType kType>
FOVEA_VNNI inline void load_pairs(const uint8_t* a, const uint8_t* b, __m512i (&pairs)[2]) {
  if constexpr (pairs_of_halves(kType)) {
    const __m512i bits = _mm512_set1_epi16(15);
    const __m512i x = _mm512_cvtepu8_epi32(load16(a + numbers_at(kType)));
    const __m512i y = _mm512_cvtepu8_epi32(load16(b + numbers_at(kType)));
    const __m512i both = _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
    pairs[0] = _mm512_and_si512(both, bits);
    pairs[1] = _mm512_and_si512(_mm512_srli_epi32(both, 4), bits);
  } else {
    const __m512i x = _mm512_cvtepi8_epi16(bytes_of<kType>(a)), y = _mm512_cvtepi8_epi16(bytes_of<kType>(b));
    pairs[0] = _mm512_unpacklo_epi16(x, y);
    pairs[1] = _mm512_unpackhi_epi16(x, y);
  }
}
/// Puts sums of pairs in the order of elements: that of unpacked words is 0 to 3, 8 to 11, 16 to 19, 24 to 27, and the others.
template <BlockType kType>
FOVEA_VNNI inline void order_sums(__m512& a, __m512& b) {
  if constexpr (pairs_of_halves(kType)) return;
  const __m512 x = _mm512_shuffle_f32x4(a, b, 0x44), y = _mm512_shuffle_f32x4(a, b, 0xee);
  a = _mm512_shuffle_f32x4(x, x, 0xd8);
  b = _mm512_shuffle_f32x4(y, y, 0xd8);
}

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

/// A block of o = itself * alpha + sums of pairs + the sum of p[j] * least of v[j].
template <BlockType kType>
FOVEA_VNNI inline void add_sums(__m512i (&sums)[2], const Weights& weights, const Step& step, int64_t row,
                                int64_t block, float* o) {
  if constexpr (middle_of(kType) != 0) {
    __m512i all = _mm512_setzero_si512();
    for (int i = 0; i < kStep; i += 32)
      all =
          _mm512_dpwssd_epi32(all, _mm512_load_si512(weights.words + i), _mm512_set1_epi16(middle_of(kType)));
    const __m512i offset = _mm512_set1_epi32(_mm512_reduce_add_epi32(all));
    for (__m512i& x : sums) x = _mm512_sub_epi32(x, offset);
  }
  const __m512 unit = _mm512_set1_ps(weights.unit);
  __m512 a = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[0]), unit);
  __m512 b = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[1]), unit);
  order_sums<kType>(a, b);
  if constexpr (has_least(kType)) {
    __m512 all = _mm512_setzero_ps();
    for (int i = 0; i < kStep; i += 16)
      all =
          _mm512_fmadd_ps(_mm512_load_ps(step.scores[row] + i), _mm512_load_ps(step.leasts[block] + i), all);
    const __m512 least = _mm512_set1_ps(_mm512_reduce_add_ps(all));
    a = _mm512_add_ps(a, least);
    b = _mm512_add_ps(b, least);
  }
  const __m512 alpha = _mm512_set1_ps(step.alpha[row]);
  o += block * kBlockElements;
  _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_loadu_ps(o), alpha, a));
  _mm512_storeu_ps(o + 16, _mm512_fmadd_ps(_mm512_loadu_ps(o + 16), alpha, b));
}

/// o[r] = o[r] * alpha[r] + sum over j of p[r][j] * v[j], W blocks of a row.
template <BlockType kType, int R, int W>
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
  const uint8_t* row = step.v + block * block_bytes(kType);
  const auto add_pair = [&](int64_t j, const uint8_t* first_row, const uint8_t* second_row)
      __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"), always_inline)) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      __m512i pairs[2];
      load_pairs<kType>(first_row + w * block_bytes(kType), second_row + w * block_bytes(kType), pairs);
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
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      add_sums<kType>(sum[r][w], weights[r][w], step, first + r, block + w, queries[r].o);
  }
}

/// Rows whose sums of a block stay in registers: 16 of 32. And blocks of a row, for so few rows that their sums are few chains.
constexpr int kIntegerRows = 8;
constexpr int integer_blocks(int rows) {
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

template <BlockType kType, int R>
FOVEA_VNNI void integer_sums(QueryRow* queries, const BlockRows& v, const Step& step, int64_t first,
                             Ahead& ahead) {
  const int64_t blocks = v.size / kBlockElements;
  constexpr int kBlocks = integer_blocks(R);
  int64_t b = 0;
  for (; b + kBlocks <= blocks; b += kBlocks)
    integer_strip<kType, R, kBlocks>(queries, v, b, step, first, ahead);
  for (; b < blocks; ++b) integer_strip<kType, R, 1>(queries, v, b, step, first, ahead);
}

/// How many of so many rows are summed up at once.
int64_t rows_at_once(int64_t rows) {
  return rows >= kIntegerRows ? kIntegerRows : rows >= 4 ? 4 : rows;
}
template <BlockType kType>
auto sums_of(int64_t rows) {
  switch (rows) {
    case 1:
      return integer_sums<kType, 1>;
    case 2:
      return integer_sums<kType, 2>;
    case 3:
      return integer_sums<kType, 3>;
    case 4:
      return integer_sums<kType, 4>;
    default:
      return integer_sums<kType, kIntegerRows>;
  }
}

}  // namespace

IntegerProducts::IntegerProducts(const BlockAttention& a) : a_(a), blocks_(a.k.size / kBlockElements) {
  const auto rows = static_cast<size_t>(a.heads * a.rows), blocks = static_cast<size_t>(blocks_);
  queries_.resize(rows * blocks);
  sums_.resize(rows * blocks);
  units_.resize(rows);
  for (size_t x = 0; x < rows; ++x)
    units_[x] = stage_query(a.queries[x].q, blocks_, &queries_[x * blocks], &sums_[x * blocks]);
}

int64_t IntegerProducts::points() const {
  const int64_t blocks = a_.v.size / kBlockElements, passes = (a_.rows + kIntegerRows - 1) / kIntegerRows;
  return kStep / 32 * blocks_ +
         passes * kStep / 8 * (blocks / (a_.rows <= 2 ? integer_blocks(static_cast<int>(a_.rows)) : 1));
}

void IntegerProducts::dots(int64_t head, Step& step, Ahead& ahead) const {
  const auto at = static_cast<size_t>(head * a_.rows * blocks_);
  with_block_type(a_.k.type, [&](auto type) {
    integer_dots<type()>(&queries_[at], &sums_[at], a_.rows, a_.k, step, ahead);
  });
}

void IntegerProducts::sums(int64_t head, const Step& step, Ahead& ahead) const {
  QueryRow* queries = a_.queries + head * a_.rows;
  for (int64_t r = 0, count; r < a_.rows; r += count) {
    count = rows_at_once(a_.rows - r);
    with_block_type(a_.v.type, [&](auto type) { sums_of<type()>(count)(queries + r, a_.v, step, r, ahead); });
  }
}

}  // namespace fovea_ggml
#endif
