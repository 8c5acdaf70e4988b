// What is added to scores, and which of them are seen, where no program is needed (score_form.hpp).
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_TERMS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_TERMS_INL_HPP
#undef FOVEA_CPU_OPS_TERMS_INL_HPP
#else
#define FOVEA_CPU_OPS_TERMS_INL_HPP
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/ops_products-inl.hpp"
#include "cpu/ops_program_elements-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3
/// 32 keys of 16 lanes: two bfloat16 are a word.
HWY_INLINE void pairs_of_elements(const Bf16* const* rows, int64_t j, V factors, float* dst, int64_t ld) {
  __m512i r[16];
#pragma GCC unroll 16
  for (int lane = 0; lane < 16; ++lane) r[lane] = _mm512_loadu_si512(rows[lane] + j);
  transpose_words(r);
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c) {
    const V low{_mm512_castsi512_ps(_mm512_slli_epi32(r[c], 16))};
    const V high{_mm512_castsi512_ps(_mm512_and_si512(r[c], high_half))};
    hn::StoreU(hn::Mul(low, factors), D(), dst + (j + 2 * c) * ld);
    hn::StoreU(hn::Mul(high, factors), D(), dst + (j + 2 * c + 1) * ld);
  }
}
#endif

/// 16 keys of 16 lanes.
template <class T>
HWY_INLINE void block_of_elements(const T* const* rows, int64_t j, const float* factors, float* dst,
                                  int64_t ld) {
#if HWY_TARGET == HWY_AVX3
  __m512i r[16];
#pragma GCC unroll 16
  for (int lane = 0; lane < 16; ++lane) r[lane] = _mm512_castps_si512(load_as_float(rows[lane] + j).raw);
  transpose_words(r);
  const V scale = hn::LoadU(D(), factors);
#pragma GCC unroll 16
  for (int c = 0; c < 16; ++c)
    hn::StoreU(hn::Mul(V{_mm512_castsi512_ps(r[c])}, scale), D(), dst + (j + c) * ld);
#else
  alignas(64) float block[kBlock][kBlock];
  for (int64_t lane = 0; lane < kBlock; ++lane) {
    const V scale = hn::Set(D(), factors[lane]);
    for (int64_t v = 0; v < kBlock; v += kLanes)
      hn::StoreU(hn::Mul(load_as_float(rows[lane] + j + v), scale), D(), block[lane] + v);
  }
  for (int64_t c = 0; c < kBlock; ++c) {
    for (int64_t lane = 0; lane < kBlock; ++lane) dst[(j + c) * ld + lane] = block[lane][c];
  }
#endif
}

template <class T>
void elements_of(const T* const* rows, int64_t lanes, int64_t n, const float* factors, float* dst,
                 int64_t ld) {
  for (int64_t x = 0; x < lanes; x += kBlock) {
    const T* const* block = rows + x;
    int64_t j = 0;
#if HWY_TARGET == HWY_AVX3
    if constexpr (std::is_same_v<T, Bf16>) {
      const V scale = hn::LoadU(D(), factors + x);
      for (; j + 32 <= n; j += 32) pairs_of_elements(block, j, scale, dst + x, ld);
    }
#endif
    for (; j + kBlock <= n; j += kBlock) block_of_elements(block, j, factors + x, dst + x, ld);
    for (; j < n; ++j) {
      for (int64_t lane = 0; lane < kBlock; ++lane)
        dst[j * ld + x + lane] = as_element(block[lane][j]) * factors[x + lane];
    }
  }
}

void key_elements(const void* const* rows, DType type, int64_t lanes, int64_t n, const float* factors,
                  float* dst, int64_t ld) {
  switch (type) {
    case DType::kF16:
      return elements_of(reinterpret_cast<const F16* const*>(rows), lanes, n, factors, dst, ld);
    case DType::kBF16:
      return elements_of(reinterpret_cast<const Bf16* const*>(rows), lanes, n, factors, dst, ld);
    default:
      return elements_of(reinterpret_cast<const float* const*>(rows), lanes, n, factors, dst, ld);
  }
}

#if HWY_TARGET == HWY_AVX3
/// A line that nobody reads soon is written without being read before.
HWY_INLINE void store_line(__m512i line, void* to, bool streams) {
  if (streams && reinterpret_cast<uintptr_t>(to) % sizeof line == 0) {
    _mm512_stream_si512(static_cast<__m512i*>(to), line);
  } else {
    _mm512_storeu_si512(to, line);
  }
}
#endif

/// 16 keys of `lanes` lanes.
template <class T>
HWY_INLINE void store_block(const float* tile, int64_t ld, int64_t lanes, T* const* rows, int64_t j,
                            [[maybe_unused]] bool streams) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (std::is_same_v<T, float>) {
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(tile + i * ld);
    transpose_words(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (i < lanes) store_line(r[i], rows[i] + j, streams);
    return;
  }
#endif
  alignas(64) float block[kBlock][kBlock];
  transpose_block(tile, ld, block[0], kBlock);
  constexpr DType kType = std::is_same_v<T, float> ? DType::kF32
                          : std::is_same_v<T, F16> ? DType::kF16
                                                   : DType::kBF16;
  for (int64_t lane = 0; lane < lanes; ++lane) from_float_any(block[lane], kBlock, kType, rows[lane] + j);
}

template <class T>
void store_elements(const float* tile, int64_t ld, int64_t lanes, int64_t n, T* const* rows, bool streams) {
  for (int64_t x = 0; x < lanes; x += kBlock) {
    const int64_t count = std::min(kBlock, lanes - x);
    int64_t j = 0;
    for (; j + kBlock <= n; j += kBlock) store_block(tile + j * ld + x, ld, count, rows + x, j, streams);
    for (; j < n; ++j) {
      for (int64_t lane = x; lane < x + count; ++lane) {
        if constexpr (std::is_same_v<T, float>) {
          rows[lane][j] = tile[j * ld + lane];
        } else {
          rows[lane][j] = from_float<T>(tile[j * ld + lane]);
        }
      }
    }
  }
}

void end_streams() {
#if HWY_TARGET == HWY_AVX3
  _mm_sfence();
#endif
}

void store_key_elements(const float* tile, int64_t ld, int64_t lanes, int64_t n, DType type,
                        void* const* rows, bool streams) {
  switch (type) {
    case DType::kF16:
      return store_elements(tile, ld, lanes, n, reinterpret_cast<F16* const*>(rows), streams);
    case DType::kBF16:
      return store_elements(tile, ld, lanes, n, reinterpret_cast<Bf16* const*>(rows), streams);
    default:
      return store_elements(tile, ld, lanes, n, reinterpret_cast<float* const*>(rows), streams);
  }
}

void store_key_pairs(const uint32_t* pairs, int64_t lanes, int64_t n, void* const* rows,
                     [[maybe_unused]] bool streams) {
  for (int64_t x = 0; x < lanes; x += kBlock) {
    const int64_t count = std::min(kBlock, lanes - x);
    int64_t w = 0;
#if HWY_TARGET == HWY_AVX3
    for (; 2 * (w + kBlock) <= n; w += kBlock) {
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(pairs + (w + i) * kPanel + x);
      transpose_words(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        if (i < count) store_line(r[i], static_cast<uint32_t*>(rows[x + i]) + w, streams);
    }
#endif
    for (int64_t lane = x; lane < x + count; ++lane) {
      auto* row = static_cast<char*>(rows[lane]);
      for (int64_t j = 2 * w; j < n; j += 2)
        std::memcpy(row + 2 * j, pairs + j / 2 * kPanel + lane, static_cast<size_t>(j + 1 < n ? 4 : 2));
    }
  }
}

/// Bit j says whether element j of kSeenKeys is 0 but for the bits that are not in `significant`.
template <class T>
HWY_INLINE uint32_t zero_bits(const T* elements, T significant) {
  const hn::CappedTag<T, kSeenKeys> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  uint8_t set[8] = {};
  uint32_t bits = 0;
  for (int64_t j = 0; j < kSeenKeys; j += lanes) {
    const auto x = hn::And(hn::LoadU(d, elements + j), hn::Set(d, significant));
    hn::StoreMaskBits(d, hn::Eq(x, hn::Zero(d)), set);
    uint32_t of_vector;
    std::memcpy(&of_vector, set, sizeof of_vector);
    bits |= of_vector << j;
  }
  return bits;
}

template <class T>
void seen_of(const void* const* rows, int64_t n, T significant, bool zeros, uint32_t* seen) {
  const uint32_t others = zeros ? 0 : ~uint32_t{0};
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    uint32_t* to = seen + lane;
    if (lane > 0 && rows[lane] == rows[lane - 1]) {  // of another head of the group
      for (int64_t j = 0; j < n; j += kSeenKeys, to += kPanel) *to = to[-1];
      continue;
    }
    const auto* row = static_cast<const T*>(rows[lane]);
    int64_t j = 0;
    for (; j + kSeenKeys <= n; j += kSeenKeys, to += kPanel) *to = zero_bits(row + j, significant) ^ others;
    if (j == n) continue;
    T last[kSeenKeys] = {};
    std::copy_n(row + j, n - j, last);
    *to = (zero_bits(last, significant) ^ others) & ((uint32_t{1} << (n - j)) - 1);
  }
}

void seen_of_elements(const void* const* rows, DType type, int64_t n, bool zeros, uint32_t* seen) {
  switch (type) {
    case DType::kF32:
      return seen_of<uint32_t>(rows, n, 0x7fffffff, zeros, seen);
    case DType::kI32:
      return seen_of<uint32_t>(rows, n, 0xffffffff, zeros, seen);
    case DType::kF16:
    case DType::kBF16:
      return seen_of<uint16_t>(rows, n, 0x7fff, zeros, seen);
    default:
      return seen_of<uint8_t>(rows, n, 0xff, zeros, seen);
  }
}

/// Words of n keys and kPanel lanes: seen(j, x) tells which lanes from x on see key j.
template <class Sees>
HWY_INLINE void words_of_keys(int64_t n, uint32_t* words, const Sees& sees) {
  const DI di;
  for (int64_t j = 0; j < n; j += kSeenKeys) {
    for (int64_t x = 0; x < kPanel; x += kLanes) {
      auto bits = hn::Zero(di);
      for (int64_t i = 0; i < std::min(kSeenKeys, n - j); ++i) {
        const auto bit = hn::Set(di, static_cast<int32_t>(uint32_t{1} << i));
        bits = hn::Or(bits, hn::IfThenElseZero(sees(j + i, x), bit));
      }
      hn::StoreU(bits, di, reinterpret_cast<int32_t*>(words + j / kSeenKeys * kPanel + x));
    }
  }
}

void seen_of_scores(const float* s, int64_t n, uint32_t* seen) {
  const D d;
  const V lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  words_of_keys(n, seen, [&](int64_t j, int64_t x) {
    return hn::Not(hn::RebindMask(DI(), hn::Eq(hn::LoadU(d, s + j * kPanel + x), lowest)));
  });
}

void seen_of_classes(const int32_t* lanes, const int32_t* keys, int64_t n, uint32_t* seen) {
  const DI di;
  words_of_keys(n, seen,
                [&](int64_t j, int64_t x) { return hn::Eq(hn::LoadU(di, lanes + x), hn::Set(di, keys[j])); });
}

template <bool kDistance, bool kElements, bool kSeen>
HWY_INLINE void add_block(float* HWY_RESTRICT s, int64_t rows, int64_t j0, const ScoreAddends& a,
                          const float* HWY_RESTRICT elements, float* HWY_RESTRICT maxima) {
  const D d;
  const DI di;
  const V scale = hn::Set(d, a.scale), lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t x = 0; x < kPanel; x += kLanes) {
    V top = maxima != nullptr ? hn::LoadU(d, maxima + x) : lowest;
    const float* distance = kDistance ? a.distance + x - j0 * a.step : nullptr;
    const VI seen =
        kSeen ? hn::LoadU(di, reinterpret_cast<const int32_t*>(a.seen + j0 / kSeenKeys * kPanel + x))
              : hn::Zero(di);
#pragma GCC unroll 4
    for (int64_t j = 0; j < rows; ++j) {
      V score = hn::LoadU(d, s + j * kPanel + x);
      if constexpr (kDistance) {
        score = hn::MulAdd(score, scale, hn::LoadU(d, distance - j * a.step));
      } else {
        score = hn::Mul(score, scale);
      }
      if constexpr (kElements) score = hn::Add(score, hn::LoadU(d, elements + j * kPanel + x));
      if constexpr (kSeen) {
        const VI bit = hn::Set(di, static_cast<int32_t>(uint32_t{1} << ((j0 + j) % kSeenKeys)));
        score = hn::IfThenElse(hn::RebindMask(d, hn::TestBit(seen, bit)), score, lowest);
      }
      top = hn::Max(top, score);
      hn::StoreU(score, d, s + j * kPanel + x);
    }
    if (maxima != nullptr) hn::StoreU(top, d, maxima + x);
  }
}

/// Keys whose elements are added at a time.
constexpr int64_t kTermKeys = 2 * kBlock;
static_assert(kTermKeys == kSeenKeys);

/// Elements of the keys [j, j + keys) of all lanes.
HWY_INLINE void elements_from(const ScoreAddends& a, int64_t j, int64_t keys, float* elements) {
  const void* at[kPanel];
  for (int x = 0; x < kPanel; ++x)
    at[x] = static_cast<const char*>(a.rows[x]) + j * (a.dtype == DType::kF32 ? 4 : 2);
  key_elements(at, a.dtype, kPanel, keys, a.factors, elements, kPanel);
}

/// Fetches elements of lanes [begin, end) that follow those of kTermKeys keys from j on.
HWY_INLINE void fetch_elements(const ScoreAddends& a, int64_t j, int64_t begin, int64_t end) {
  if (a.fetched) return;
  // No prefetcher follows so many rows. Rows a page apart meet in one set of the first-level cache, so they come to the second.
  constexpr int64_t kAheadKeys = 4 * kTermKeys;
  const int64_t bytes = a.dtype == DType::kF32 ? 4 : 2;
  for (int64_t x = begin; x < end; ++x) {
    const char* row = static_cast<const char*>(a.rows[x]) + (j + kAheadKeys) * bytes;
    for (int64_t byte = 0; byte < kTermKeys * bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
  }
}

template <bool kDistance, bool kElements, bool kSeen>
void add_blocks(float* s, int64_t n, const ScoreAddends& a, float* maxima) {
  alignas(64) float elements[kElements ? kTermKeys * kPanel : 1];
  for (int64_t j = 0; j < n; j += kTermKeys) {
    const int64_t rows = std::min(kTermKeys, n - j);
    if constexpr (kElements) {
      fetch_elements(a, j, 0, kPanel);
      elements_from(a, j, rows, elements);
    }
    add_block<kDistance, kElements, kSeen>(s + j * kPanel, rows, j, a, elements, maxima);
  }
}

template <class Words>
void scores_and_term(Operand a, const float* b, int64_t rows, int64_t k, const ScoreAddends& term, float* c,
                     float* column_max) {
  alignas(64) float elements[kTermKeys * kPanel], nobodys_max[kPanel];
  if (column_max == nullptr) {
    std::fill_n(nobodys_max, kPanel, 0.0f);
    column_max = nobodys_max;
  }
  const auto multiply = [&](int64_t j, int64_t keys, const float* data, int64_t step) {
    product<Words, Into::kTermMax, false>({a.data + j * a.row_stride, a.row_stride, a.k_stride}, b, kPanel,
                                          keys, kPanel, k, c + j * kPanel, kPanel, column_max,
                                          {data, step, term.scale});
  };
  if (term.rows == nullptr) return multiply(0, rows, term.distance, -term.step);
  for (int64_t j = 0; j < rows; j += kTermKeys) {
    const int64_t keys = std::min(kTermKeys, rows - j);
    elements_from(term, j, keys, elements);
    // A core has some 20 lines on their way: those of all lanes at once would be waited for.
    for (int64_t i = 0; i < keys; i += kTileRows) {
      fetch_elements(term, j, i * kPanel / kTermKeys, (i + kTileRows) * kPanel / kTermKeys);
      multiply(j + i, std::min<int64_t>(kTileRows, keys - i), elements + i * kPanel, kPanel);
    }
  }
}

void add_terms(float* s, int64_t n, const ScoreAddends& a, float* maxima) {
  using Add = void (*)(float*, int64_t, const ScoreAddends&, float*);
  static constexpr Add kAdd[8] = {add_blocks<false, false, false>, add_blocks<true, false, false>,
                                  add_blocks<false, true, false>,  add_blocks<true, true, false>,
                                  add_blocks<false, false, true>,  add_blocks<true, false, true>,
                                  add_blocks<false, true, true>,   add_blocks<true, true, true>};
  kAdd[(a.distance != nullptr ? 1 : 0) + (a.rows != nullptr ? 2 : 0) + (a.seen != nullptr ? 4 : 0)](s, n, a,
                                                                                                    maxima);
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_TERMS_INL_HPP
