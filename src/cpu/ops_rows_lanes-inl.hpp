// Products of five rows and more: with keys, where a lane belongs to a row, as in panels, so that no sum of lanes is left, and an
// element of k is converted once for all rows.
//
//   for each 16 keys
//     for each word w of their rows
//       S^T[key][lane] += k[key][w] * q^T[w][lane]      k is broadcast from memory
//     the rows of S are those of S^T, transposed
//
// Up to eight rows have two lanes each: those of neighbouring words.
//
// And where a word is a pair of bfloat16, sums of values: two keys a word, columns on lanes, eight rows at a time.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_ROWS_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_ROWS_LANES_INL_HPP
#undef FOVEA_CPU_OPS_ROWS_LANES_INL_HPP
#else
#define FOVEA_CPU_OPS_ROWS_LANES_INL_HPP
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/ops_e4m3_tables-inl.hpp"
#include "cpu/ops_products-inl.hpp"
#include "cpu/ops_row_elements-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

constexpr int64_t kRowLanes = 16;  // of a group of rows
constexpr int kLaneVectors = static_cast<int>(kRowLanes) / kLanes;
constexpr int64_t kLaneKeys = 16;    // of a block
constexpr int64_t kUnit = 32;        // elements that are converted at a time
constexpr int64_t kUnitsAtOnce = 4;  // 16 rows of so many units, as floats 8 KB, stay in a first-level cache
static_assert(kUnit % (2 * kLanes) == 0);

// Keys whose sums stay in registers, in chains of every second word: 16 of 32 registers, or 8 of 16, as many as two pipes need. A pointer to each
// key has a register of its own, as an index beside it makes a multiply-add two operations.
constexpr int kSumKeys = HWY_TARGET == HWY_AVX3 ? 8 : 4;
constexpr int kSumChains = HWY_TARGET == HWY_AVX3 ? 2 : 1;
constexpr int64_t kLaneSteps = 8;  // between which lines are fetched
static_assert(kLaneSteps % kSumChains == 0);

/// With 16 registers dot products of two rows take no longer, but for what an element of 8 bits costs to convert.
template <class T>
constexpr bool kOnLanes = HWY_TARGET == HWY_AVX3 || std::is_same_v<T, E4M3Number>;

/// An element of 8 bits that is converted with its neighbours, to bfloat16 too.
template <class T>
constexpr bool kOfEightBits = std::is_base_of_v<E4M3, T> && !std::is_same_v<E4M3, T>;

/// What a product takes of rows of `size` elements of type T: `Words` where it takes T as it is, else floats.
template <class T, class Words>
struct LaneWords {
  static constexpr bool kPairs = Words::kPairs && (std::is_same_v<T, Bf16> || kOfEightBits<T>);
  using Product = std::conditional_t<kPairs, Words, FloatWords>;
  static constexpr int64_t kOfUnit = kPairs ? kUnit / 2 : kUnit;
  static constexpr bool kInPlace = std::is_same_v<T, float> || (kPairs && std::is_same_v<T, Bf16>);

  /// The words of `size` elements, zeros up to a multiple of kUnit. Floats are in the order of TwoVectors.
  static HWY_INLINE void of_row(const T* row, int64_t size, float* words) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (std::is_same_v<T, E4M3Code>) {
      words_of_codes<kPairs>(row, size, words);
    } else
#endif
      of_units(row, size, words);
  }

 private:
  static HWY_INLINE void of_units(const T* row, int64_t size, float* words) {
    for (int64_t c = 0; c < size; c += kUnit, words += kOfUnit) {
      if (size - c >= kUnit) {
        of_unit(row + c, words);
      } else {
        T padded[kUnit] = {};
        std::copy_n(row + c, size - c, padded);
        of_unit(padded, words);
      }
    }
  }
  static HWY_INLINE void of_unit(const T* unit, float* words) {
    if constexpr (kPairs && std::is_same_v<T, Bf16>) {
      std::memcpy(words, unit, kUnit * sizeof(T));
    } else {
      for (int64_t c = 0; c < kUnit; c += 2 * kLanes) {
        V a, b;
        TwoVectors<T>::values(unit + c, a, b);
        if constexpr (kPairs) {
          hn::StoreU(Words::pairs_of(a, b), D(), words + c / 2);
        } else {
          hn::StoreU(a, D(), words + c);
          hn::StoreU(b, D(), words + c + kLanes);
        }
      }
    }
  }
};

/// Whether rows begin in one set of a first-level cache, which has room for eight to twelve lines.
template <class T>
HWY_INLINE bool in_one_set(int64_t ld) {
  constexpr int64_t kSetBytes = 4096;
  return ld * static_cast<int64_t>(sizeof(T)) % kSetBytes == 0;
}

/// Lanes that each of up to 16 rows has: its neighbouring words.
constexpr int64_t lanes_of_row(int64_t rows) {
  return rows > kRowLanes / 2 ? 1 : 2;
}

/// 16 words of each row, transposed: kRowLanes of word w of all rows, or of words 2 w and 2 w + 1. The rows are kUnit floats apart.
HWY_INLINE void store_on_lanes(const float* rows, int64_t share, float* lanes) {
  if (share == 1) return transpose_block(rows, kUnit, lanes, kRowLanes);
  alignas(64) float turned[kRowLanes * kRowLanes];
  transpose_block(rows, kUnit, turned, kRowLanes);
  for (int64_t w = 0; w < kRowLanes; w += 2) {
    for (int64_t r = 0; r < kRowLanes / 2; ++r) {
      lanes[w / 2 * kRowLanes + 2 * r] = turned[w * kRowLanes + r];
      lanes[w / 2 * kRowLanes + 2 * r + 1] = turned[(w + 1) * kRowLanes + r];
    }
  }
}

/// `lanes` of up to 16 rows, for keys of type T.
template <class T, class Words>
void rows_on_lanes(const float* rows, int64_t ld, int64_t count, int64_t size, float* lanes) {
  using W = LaneWords<T, Words>;
  const int64_t share = lanes_of_row(count);
  alignas(64) float words[kRowLanes * kUnit] = {};
  for (int64_t c = 0; c < size; c += kUnit) {
    const int64_t left = std::min(kUnit, size - c);
    for (int64_t r = 0; r < count; ++r) {
      float elements[kUnit] = {};
      for (int64_t x = 0; x < left; ++x) elements[x] = rows[r * ld + c + x] * TwoVectors<T>::kFactor;
      float* const to = words + r * kUnit;
      if constexpr (W::kPairs) {
        narrow(elements, kUnit, reinterpret_cast<Bf16*>(to));
      } else {
        for (int64_t x = 0; x < kUnit; x += 2 * kLanes) {
          V a, b;
          TwoVectors<T>::load(elements + x, a, b);
          hn::StoreU(a, D(), to + x);
          hn::StoreU(b, D(), to + x + kLanes);
        }
      }
    }
    for (int64_t w = 0; w < W::kOfUnit; w += kRowLanes, lanes += kRowLanes / share * kRowLanes)
      store_on_lanes(words + w, share, lanes);
  }
}

/// kShare words at p, over and over.
template <int kShare>
HWY_INLINE V broadcast_words(const char* p) {
  if constexpr (kShare == 1) {
    return broadcast_word(reinterpret_cast<const float*>(p));
  } else {
    double two;
    std::memcpy(&two, p, sizeof(two));
    return hn::BitCast(D(), hn::Set(hn::Repartition<double, D>(), two));
  }
}

using LaneSums = V[kLaneVectors];  ///< of one key

/// sums[key] += the products of `words` words of kSumKeys keys, `stride` bytes apart.
template <class Product, int kShare>
HWY_INLINE void multiply_lanes(const float* HWY_RESTRICT lanes, const char* HWY_RESTRICT k, int64_t stride,
                               int64_t words, LaneSums* HWY_RESTRICT sums, const FetchShare& of_point) {
  constexpr int64_t kBytes = kShare * static_cast<int64_t>(sizeof(float));
  const char* row[kSumKeys];
  LaneSums sum[kSumKeys][kSumChains];
#pragma GCC unroll 8
  for (int i = 0; i < kSumKeys; ++i) {
    row[i] = k + i * stride;
#pragma GCC unroll 4
    for (int v = 0; v < kLaneVectors; ++v) {
      sum[i][0][v] = sums[i][v];
#pragma GCC unroll 2
      for (int chain = 1; chain < kSumChains; ++chain) sum[i][chain][v] = hn::Zero(D());
    }
  }
  PacedFetch fetch(of_point);
  for (int64_t step = 0; step < words / kShare; step += kLaneSteps, lanes += kLaneSteps * kRowLanes) {
    fetch.point();
#pragma GCC unroll 8
    for (int x = 0; x < kLaneSteps; ++x) {
      V q[kLaneVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kLaneVectors; ++v) q[v] = hn::LoadU(D(), lanes + x * kRowLanes + v * kLanes);
#pragma GCC unroll 8
      for (int i = 0; i < kSumKeys; ++i) {
        const V key = broadcast_words<kShare>(row[i] + x * kBytes);
        LaneSums& of_chain = sum[i][x % kSumChains];
#pragma GCC unroll 4
        for (int v = 0; v < kLaneVectors; ++v) of_chain[v] = Product::multiply_add(key, q[v], of_chain[v]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kSumKeys; ++i) row[i] += kLaneSteps * kBytes;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSumKeys; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kLaneVectors; ++v) {
#pragma GCC unroll 2
      for (int chain = 1; chain < kSumChains; ++chain) sum[i][0][v] = hn::Add(sum[i][0][v], sum[i][chain][v]);
      sums[i][v] = sum[i][0][v];
    }
  }
}

/// Row r of s is lane r of `sums`, or the sum of lanes 2 r and 2 r + 1.
template <int kShare>
HWY_INLINE void store_lanes(const LaneSums* sums, int64_t rows, int64_t keys, float* s, int64_t lds) {
#if HWY_TARGET == HWY_AVX3
  __m512i lanes[kLaneKeys];
#pragma GCC unroll 16
  for (int i = 0; i < kLaneKeys; ++i) lanes[i] = _mm512_castps_si512(sums[i][0].raw);
  transpose_words(lanes);
  const auto mask = static_cast<__mmask16>((1u << keys) - 1);
#pragma GCC unroll 16
  for (int r = 0; r < kRowLanes / kShare; ++r) {
    if (r >= rows) break;
    __m512 row = _mm512_castsi512_ps(lanes[kShare * r]);
    if constexpr (kShare == 2) row = _mm512_add_ps(row, _mm512_castsi512_ps(lanes[2 * r + 1]));
    _mm512_mask_storeu_ps(s + r * lds, mask, row);
  }
#else
  alignas(64) float lanes[kLaneKeys * kRowLanes], turned[kRowLanes * kLaneKeys];
  for (int i = 0; i < kLaneKeys; ++i) {
    for (int v = 0; v < kLaneVectors; ++v) hn::Store(sums[i][v], D(), lanes + i * kRowLanes + v * kLanes);
  }
  transpose_block(lanes, kRowLanes, turned, kLaneKeys);
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = turned + kShare * r * kLaneKeys;
    for (int64_t j = 0; kShare == 2 && j < kLaneKeys; ++j) row[j] += row[kLaneKeys + j];
    std::copy_n(row, keys, s + r * lds);
  }
#endif
}

/// Rows of 16 keys, or fewer, as products take them: those of kUnitsAtOnce units at a time.
template <class T, class Words>
class LaneKeys {
  using W = LaneWords<T, Words>;

 public:
  static constexpr int64_t kPart = kUnitsAtOnce * kUnit;
  using Product = typename W::Product;

  LaneKeys(const T* k, int64_t ld, int64_t size)
      : k_(k), ld_(ld), size_(size), in_place_(W::kInPlace && size % kUnit == 0 && !in_one_set<T>(ld)) {}

  /// The next are rows [first, first + count).
  HWY_INLINE void start(int64_t first, int64_t count) {
    first_ = first;
    count_ = count;
    part_ = -1;
    if (count < kLaneKeys) std::fill_n(words_, kLaneKeys * kWordsOfPart, 0.0f);
  }
  /// Finds the words of the part from element c on.
  HWY_INLINE void find(int64_t c) {
    const T* const rows = k_ + first_ * ld_ + c;
    if (in_place_ && count_ == kLaneKeys) {
      data = reinterpret_cast<const char*>(rows);
      stride = ld_ * static_cast<int64_t>(sizeof(T));
    } else if (c != part_) {
      for (int64_t i = 0; i < count_; ++i)
        W::of_row(rows + i * ld_, std::min(kPart, size_ - c), words_ + i * kWordsOfPart);
      data = reinterpret_cast<const char*>(words_);
      stride = kWordsOfPart * static_cast<int64_t>(sizeof(float));
      part_ = c;
    }
    words = (std::min(kPart, size_ - c) + kUnit - 1) / kUnit * W::kOfUnit;
  }
  static constexpr int64_t words_before(int64_t c) { return c / kUnit * W::kOfUnit; }
  /// How often kLaneSteps words of a whole row come.
  int64_t steps() const { return (size_ + kUnit - 1) / kUnit * W::kOfUnit / kLaneSteps; }

  const char* data = nullptr;  ///< of the first row
  int64_t stride = 0;          ///< in bytes
  int64_t words = 0;           ///< of a row

 private:
  static constexpr int64_t kWordsOfPart = kUnitsAtOnce * W::kOfUnit;
  const T* k_;
  int64_t ld_, size_, first_ = 0, count_ = 0;
  int64_t part_ = -1;  ///< whose words are in words_
  bool in_place_;
  alignas(64) float words_[kLaneKeys * kWordsOfPart];
};

/// Scores of up to 16 rows with the keys that `keys` started with.
template <int kShare, class Keys>
HWY_INLINE void block_dots(const float* lanes, int64_t rows, Keys& keys, int64_t n, int64_t size, float* s,
                           int64_t lds, const FetchShare& of_point) {
  LaneSums sums[kLaneKeys];
#pragma GCC unroll 16
  for (LaneSums& of_key : sums)
    for (V& x : of_key) x = hn::Zero(D());
  for (int64_t c = 0; c < size; c += Keys::kPart) {
    keys.find(c);
    for (int64_t j = 0; j < kLaneKeys; j += kSumKeys)
      multiply_lanes<typename Keys::Product, kShare>(lanes + Keys::words_before(c) / kShare * kRowLanes,
                                                     keys.data + j * keys.stride, keys.stride, keys.words,
                                                     sums + j, of_point);
  }
  store_lanes<kShare>(sums, rows, n, s, lds);
}

template <class T, class Words>
void lane_dots(const FewRows& q, const T* k, int64_t ldk, int64_t n, int64_t size, float* s, int64_t lds,
               RowsAhead& ahead) {
  LaneKeys<T, Words> keys(k, ldk, size);
  const int64_t groups = (q.count + kRowLanes - 1) / kRowLanes;
  const FetchShare of_group = FetchShare::all(ahead).part(ceil_div(n, kLaneKeys) * groups);
  for (int64_t j = 0; j < n; j += kLaneKeys) {
    const int64_t count = std::min(kLaneKeys, n - j);
    keys.start(j, count);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * kRowLanes, rows = std::min(kRowLanes, q.count - first);
      const float* const lanes = q.lanes + g * lane_floats(size);
      float* const to = s + first * lds + j;
      const FetchShare of_point = of_group.part(keys.steps() / lanes_of_row(rows) * (kLaneKeys / kSumKeys));
      if (lanes_of_row(rows) == 1) {
        block_dots<1>(lanes, rows, keys, count, size, to, lds, of_point);
      } else {
        block_dots<2>(lanes, rows, keys, count, size, to, lds, of_point);
      }
    }
  }
}

template <class T, class Words>
bool groups_on_lanes(const float* rows, int64_t ld, int64_t count, int64_t size, float* lanes) {
  if constexpr (kOnLanes<T>) {
    for (int64_t r = 0; r < count; r += kRowLanes, lanes += lane_floats(size))
      rows_on_lanes<T, Words>(rows + r * ld, ld, std::min(kRowLanes, count - r), size, lanes);
  }
  return kOnLanes<T>;
}

template <class Words, bool kTables>
bool row_lanes(const float* rows, int64_t ld, int64_t count, int64_t size, DType key_type, float* lanes) {
  if (count < kLeastLaneRows) return false;
  if (key_type == DType::kF16) return groups_on_lanes<F16, Words>(rows, ld, count, size, lanes);
  if (key_type == DType::kBF16) return groups_on_lanes<Bf16, Words>(rows, ld, count, size, lanes);
#if HWY_TARGET == HWY_AVX3
  if (kTables && key_type == DType::kE4M3)
    return groups_on_lanes<E4M3Code, Words>(rows, ld, count, size, lanes);
#endif
  if (key_type == DType::kE4M3) return groups_on_lanes<E4M3Number, Words>(rows, ld, count, size, lanes);
  return groups_on_lanes<float, Words>(rows, ld, count, size, lanes);
}

#endif
#if HWY_TARGET == HWY_AVX3

constexpr int64_t kPairKeys =
    64;  // so many rows of kUnitsAtOnce units as bfloat16, 16 KB, stay in a first-level cache

/// o[r] += sum over j of p[r][j] * v[j] in 32 columns, the weights of two keys a word: ceil(n / 2) of each row.
template <int R>
HWY_INLINE void pair_sums_strip(const uint32_t* p, int64_t ldp, const Bf16* v, int64_t ldv, int64_t n,
                                float* o, int64_t ldo, const FetchShare& share) {
  using T = TwoVectors<Bf16>;
  const DU words;
  const auto upper = hn::Set(words, 0xffff0000u), lower = hn::Set(words, 0x0000ffffu);
  V even[R], odd[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) T::load(o + r * ldo, even[r], odd[r]);
  PacedFetch fetch(share.part((n + 1) / 2));
  for (int64_t j = 0; j < n; j += 2) {
    fetch.point();
    const auto row = [&](int64_t key) HWY_ATTR {
      return hn::LoadU(words, reinterpret_cast<const uint32_t*>(v + key * ldv));
    };
    const auto a = row(j), b = j + 1 < n ? row(j + 1) : hn::Zero(words);
    const V of_even = hn::BitCast(D(), hn::OrAnd(hn::ShiftLeft<16>(b), a, lower));
    const V of_odd = hn::BitCast(D(), hn::OrAnd(hn::ShiftRight<16>(a), b, upper));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V weights = hn::BitCast(D(), hn::Set(words, p[r * ldp + j / 2]));
      even[r] = Bf16Words::multiply_add(of_even, weights, even[r]);
      odd[r] = Bf16Words::multiply_add(of_odd, weights, odd[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) T::store(even[r], odd[r], o + r * ldo);
}

/// The same of all rows and `size` columns, a multiple of 32.
HWY_INLINE void pair_sums(const uint32_t* p, int64_t ldp, int64_t rows, const Bf16* v, int64_t ldv, int64_t n,
                          int64_t size, float* o, int64_t ldo, const FetchShare& share) {
  for (int64_t c = 0; c < size; c += kUnit) {
    for_each_rows<8>(rows, [&](auto count, int64_t r) HWY_ATTR {
      pair_sums_strip<count()>(p + r * ldp, ldp, v + c, ldv, n, o + r * ldo + c, ldo, share);
    });
  }
}

/// Weights for keys of type T, two a word, zeros up to a multiple of 32.
template <class T>
HWY_INLINE void pair_weights(const float* p, int64_t n, uint32_t* words) {
  const V factor = hn::Set(D(), TwoVectors<T>::kFactor);
  for (int64_t j = 0; j < n; j += kUnit, words += kLanes) {
    const auto weights = [&](int64_t first) HWY_ATTR {
      const auto there = hn::FirstN(D(), static_cast<size_t>(std::clamp<int64_t>(n - first, 0, kLanes)));
      return hn::Mul(hn::MaskedLoad(there, D(), p + first), factor);
    };
    hn::StoreU(Bf16Words::rounded(weights(j), weights(j + kLanes)), DU(), words);
  }
}

/// Returns to how many columns it added.
template <class T>
int64_t sums_of_pairs(const float* p, int64_t ldp, int64_t rows, const T* v, int64_t ldv, int64_t n,
                      int64_t size, float* o, int64_t ldo, RowsAhead& ahead) {
  constexpr int64_t kWeights = kAttendKeys / 2, kColumns = kUnitsAtOnce * kUnit;
  const int64_t whole = size / kUnit * kUnit;
  alignas(64) uint32_t weights[kMostLaneRows * kWeights];
  for (int64_t r = 0; r < rows; ++r) pair_weights<T>(p + r * ldp, n, weights + r * kWeights);
  const int64_t passes = whole / kUnit * passes_of_rows<8>(rows);
  if constexpr (std::is_same_v<T, Bf16>) {
    pair_sums(weights, kWeights, rows, v, ldv, n, whole, o, ldo, FetchShare::all(ahead).part(passes));
  } else {
    using W = LaneWords<T, Bf16Words>;
    alignas(64) float words[kPairKeys * kColumns / 2];
    const FetchShare share = FetchShare::all(ahead).part(ceil_div(n, kPairKeys) * passes);
    for (int64_t j = 0; j < n; j += kPairKeys) {
      const int64_t keys = std::min(kPairKeys, n - j);
      for (int64_t c = 0; c < whole; c += kColumns) {
        const int64_t columns = std::min(kColumns, whole - c);
        for (int64_t i = 0; i < keys; ++i)
          W::of_row(v + (j + i) * ldv + c, columns, words + i * kColumns / 2);
        pair_sums(weights + j / 2, kWeights, rows, reinterpret_cast<const Bf16*>(words), kColumns, keys,
                  columns, o + c, ldo, share);
      }
    }
  }
  return whole;
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_ROWS_LANES_INL_HPP
