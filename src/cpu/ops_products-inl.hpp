// Products of the panel, over words: scores, accumulate, update.
//
// Included once per instruction set of ops.cpp: the guard lets it in again for each.
#if defined(FOVEA_CPU_OPS_PRODUCTS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_CPU_OPS_PRODUCTS_INL_HPP
#undef FOVEA_CPU_OPS_PRODUCTS_INL_HPP
#else
#define FOVEA_CPU_OPS_PRODUCTS_INL_HPP
#endif

#include <cstring>

#include "cpu/ops_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea::cpu {
namespace HWY_NAMESPACE {

/// Loads a word that may not be aligned: bfloat16 rows with odd strides start in the middle of a word.
HWY_INLINE V broadcast_word(const float* word) {
  float value;
  std::memcpy(&value, word, sizeof(value));
  return hn::Set(D(), value);
}

/// One float per word.
struct FloatWords {
  static constexpr bool kPairs = false;
  static HWY_INLINE V multiply_add(V a, V b, V acc) { return hn::MulAdd(a, b, acc); }
};

#if HWY_TARGET == HWY_AVX3
/// A pair of bfloat16 per word: VDPBF16PS. Written as asm so that it needs no compiler target of its own; runs
/// only where CPUID reports AVX512_BF16.
struct Bf16Words {
  static constexpr bool kPairs = true;
  static HWY_INLINE V multiply_add(V a, V b, V acc) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc.raw) : "v"(a.raw), "v"(b.raw));
    return acc;
  }
  /// Of numbers that bfloat16 holds.
  static HWY_INLINE V pairs_of(V even, V odd) {
    const DU d;
    const auto upper = hn::Set(d, 0xffff0000u);
    return hn::BitCast(D(), hn::OrAnd(hn::ShiftRight<16>(hn::BitCast(d, even)), hn::BitCast(d, odd), upper));
  }
  /// Elements of `low`, then of `high`, rounded to nearest even.
  static HWY_INLINE hn::Vec<DU> rounded(V low, V high) {
    hn::Vec<DU> pairs;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(pairs.raw) : "v"(low.raw), "v"(high.raw));
    return pairs;
  }
};
#endif

enum class Into { kSet, kSetMax, kTermMax, kScale, kAdd };

/// For kTermMax: the products times `scale`, and to row r and column x is added data[r * step + x].
struct Term {
  const float* data = nullptr;
  int64_t step = 0;
  float scale = 1;

  HWY_INLINE Term at(int64_t row, int64_t column) const { return {data + row * step + column, step, scale}; }
};

/// Whether products leave out lanes. GCC 12 joins loads of single lanes in such loops, of the next row, too, which may not exist.
inline constexpr bool kLeavesOut = HWY_TARGET != HWY_SCALAR;

/// How far the vectors of a strip take part in a product that goes to `all`.
struct VectorEnds {
  const LaneEnds* lanes = nullptr;
  int64_t first_lane = 0;

  HWY_INLINE int64_t of(int vector, int64_t all) const {
    if (!kLeavesOut || lanes == nullptr) return all;
    return lanes->of[(first_lane + vector * kLanes) / kLaneStep];
  }
};

/// Adds the products of `steps` steps to vectors from kFirst on, and moves a and b behind these steps.
template <class Words, bool kUnitRow, int kFirst, int R, int C>
HWY_INLINE void multiply_steps(const float* HWY_RESTRICT& a, int64_t a_stride, const float* HWY_RESTRICT& b,
                               int64_t ldb, int64_t steps, V (&acc)[R][C]) {
  for (int64_t step = 0; step < steps; ++step) {
    V right[C];
#pragma GCC unroll 3
    for (int v = kFirst; v < C; ++v) right[v] = hn::LoadU(D(), b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V left = broadcast_word(kUnitRow ? a + r : a + r * a_stride);
#pragma GCC unroll 3
      for (int v = kFirst; v < C; ++v) acc[r][v] = Words::multiply_add(left, right[v], acc[r][v]);
    }
    a += kUnitRow ? a_stride : 1;
    b += ldb;
  }
}

/// C[R][C vectors] from K steps. `extra` is column_max for kSetMax and kTermMax, and alpha for kScale.
template <class Words, Into kInto, bool kUnitRow, int R, int C>
HWY_INLINE void register_tile(const float* HWY_RESTRICT a, int64_t a_stride, const float* HWY_RESTRICT b,
                              int64_t ldb, int64_t k, float* HWY_RESTRICT c, int64_t ldc,
                              float* HWY_RESTRICT extra, [[maybe_unused]] const Term& term,
                              [[maybe_unused]] VectorEnds ends) {
  constexpr bool kMax = kInto == Into::kSetMax || kInto == Into::kTermMax;
  const D d;
  V acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int v = 0; v < C; ++v) acc[r][v] = hn::Zero(d);
  }
  if constexpr (kUnitRow) {
    const int64_t first = ends.of(0, k), second = ends.of(C > 1 ? 1 : 0, k), third = ends.of(C - 1, k);
    multiply_steps<Words, kUnitRow, 0>(a, a_stride, b, ldb, first, acc);
    if constexpr (C > 1) multiply_steps<Words, kUnitRow, 1>(a, a_stride, b, ldb, second - first, acc);
    if constexpr (C > 2) multiply_steps<Words, kUnitRow, 2>(a, a_stride, b, ldb, third - second, acc);
  } else {
    multiply_steps<Words, kUnitRow, 0>(a, a_stride, b, ldb, k, acc);
  }
#pragma GCC unroll 3
  for (int v = 0; v < C; ++v) {
    V lane_value = kMax || kInto == Into::kScale ? hn::LoadU(d, extra + v * kLanes) : hn::Zero(d);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* out = c + r * ldc + v * kLanes;
      if constexpr (kInto == Into::kScale) acc[r][v] = hn::MulAdd(hn::LoadU(d, out), lane_value, acc[r][v]);
      if constexpr (kInto == Into::kAdd) acc[r][v] = hn::Add(hn::LoadU(d, out), acc[r][v]);
      if constexpr (kInto == Into::kTermMax)
        acc[r][v] = hn::MulAdd(acc[r][v], hn::Set(d, term.scale),
                               hn::LoadU(d, term.data + r * term.step + v * kLanes));
      if constexpr (kMax) lane_value = hn::Max(lane_value, acc[r][v]);
      hn::StoreU(acc[r][v], d, out);
    }
    if constexpr (kMax) hn::StoreU(lane_value, d, extra + v * kLanes);
  }
}

/// Rows r to r + R of C vectors. Scores leave out those vectors in front that end before row r.
template <class Words, Into kInto, bool kUnitRow, int R, int C>
HWY_INLINE void row_tile(Operand a, const float* b, int64_t ldb, int64_t r, int64_t k, float* c, int64_t ldc,
                         float* extra, const Term& term, VectorEnds ends) {
  if constexpr (kInto == Into::kSet && C > 1) {
    if (ends.of(0, r + 1) <= r)
      return row_tile<Words, kInto, kUnitRow, R, C - 1>(a, b + kLanes, ldb, r, k, c + kLanes, ldc, extra,
                                                        term, {ends.lanes, ends.first_lane + kLanes});
  }
  register_tile<Words, kInto, kUnitRow, R, C>(a.data + r * a.row_stride, kUnitRow ? a.k_stride : a.row_stride,
                                              b, ldb, k, c + r * ldc, ldc, extra, term.at(r, 0), ends);
}

/// All rows of C vectors of columns.
template <class Words, Into kInto, bool kUnitRow, int C>
HWY_INLINE void column_strip(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t k, float* c,
                             int64_t ldc, float* extra, const Term& term, VectorEnds ends) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    row_tile<Words, kInto, kUnitRow, kTileRows, C>(a, b, ldb, r, k, c, ldc, extra, term, ends);
  if (kTileRows > 4 && r + 4 <= rows) {
    row_tile<Words, kInto, kUnitRow, 4, C>(a, b, ldb, r, k, c, ldc, extra, term, ends);
    r += 4;
  }
  if (r + 2 <= rows) {
    row_tile<Words, kInto, kUnitRow, 2, C>(a, b, ldb, r, k, c, ldc, extra, term, ends);
    r += 2;
  }
  if (r < rows) row_tile<Words, kInto, kUnitRow, 1, C>(a, b, ldb, r, k, c, ldc, extra, term, ends);
}

/// Columns in strips of three vectors; two strips of two where one vector would be left over, since a single
/// one waits for its own latency.
template <class Words, Into kInto, bool kUnitRow>
HWY_INLINE void product(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t k,
                        float* c, int64_t ldc, float* extra, const Term& term = {},
                        const LaneEnds* ends = nullptr) {
  int64_t left = (!kLeavesOut || ends == nullptr ? cols : ends->wanted + kLanes - 1) / kLanes;
  int64_t col = 0;
  while (left > 0) {
    float* lane_values = extra == nullptr ? nullptr : extra + col;
    const VectorEnds strip_ends{ends, col};
    if (left == 1) {
      column_strip<Words, kInto, kUnitRow, 1>(a, b + col, ldb, rows, k, c + col, ldc, lane_values,
                                              term.at(0, col), strip_ends);
      break;
    }
    const int64_t strip = (left == 2 || left == 4) ? 2 : 3;
    if (strip == 2) {
      column_strip<Words, kInto, kUnitRow, 2>(a, b + col, ldb, rows, k, c + col, ldc, lane_values,
                                              term.at(0, col), strip_ends);
    } else {
      column_strip<Words, kInto, kUnitRow, 3>(a, b + col, ldb, rows, k, c + col, ldc, lane_values,
                                              term.at(0, col), strip_ends);
    }
    left -= strip;
    col += strip * kLanes;
  }
}

template <class Words>
void scores(Operand a, const float* b, int64_t rows, int64_t k, float* c, float* column_max,
            const LaneEnds* ends) {
  if (column_max != nullptr) {
    product<Words, Into::kSetMax, false>(a, b, kPanel, rows, kPanel, k, c, kPanel, column_max, {}, ends);
  } else {
    product<Words, Into::kSet, false>(a, b, kPanel, rows, kPanel, k, c, kPanel, nullptr, {}, ends);
  }
}

template <class Words>
void accumulate(Operand a, const float* b, int64_t rows, int64_t k, float* c, const float* alpha,
                const LaneEnds* ends) {
  if (alpha != nullptr) {
    product<Words, Into::kScale, true>(a, b, kPanel, rows, kPanel, k, c, kPanel, const_cast<float*>(alpha),
                                       {}, ends);
  } else {
    product<Words, Into::kAdd, true>(a, b, kPanel, rows, kPanel, k, c, kPanel, nullptr, {}, ends);
  }
}

template <class Words>
void accumulate_strided(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t k, float* c,
                        const LaneEnds* ends) {
  product<Words, Into::kAdd, true>(a, b, ldb, rows, kPanel, k, c, kPanel, nullptr, {}, ends);
}

template <class Words>
void update(Operand a, const float* b, int64_t ldb, int64_t rows, int64_t cols, int64_t k, float* c,
            int64_t ldc) {
  product<Words, Into::kAdd, false>(a, b, ldb, rows, cols, k, c, ldc, nullptr);
}

}  // namespace HWY_NAMESPACE
}  // namespace fovea::cpu
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_CPU_OPS_PRODUCTS_INL_HPP
