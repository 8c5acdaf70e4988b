// Products of blocks as float32: each number is one in a register, for as many rows at a time as have room there.
//
// Included once per instruction set: the guard lets it in again for each.
#if defined(FOVEA_GGML_BLOCK_FLOATS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef FOVEA_GGML_BLOCK_FLOATS_INL_HPP
#undef FOVEA_GGML_BLOCK_FLOATS_INL_HPP
#else
#define FOVEA_GGML_BLOCK_FLOATS_INL_HPP
#endif

#include <type_traits>

#include "integrations/ggml/block_steps.hpp"
#include "integrations/ggml/blocks-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace fovea_ggml::HWY_NAMESPACE {

/// Rows whose products with four keys stay in registers: 16 of 32, or 8 of 16.
constexpr int kFloatRows = HWY_TARGET == HWY_AVX3 ? 4 : 2;
/// Blocks of a row of O that stay there for so many rows.
constexpr int float_blocks(int rows) {
  return std::clamp((HWY_TARGET == HWY_AVX3 ? 16 : 8) / (rows * kVectors), 1, 4);
}

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void store_sums(const V* v, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = hn::GetLane(v[i]);
}
#else
/// Adds up blocks of four lanes.
template <class DV>
HWY_INLINE auto sum_of_blocks(DV, hn::Vec<DV> v) {
  if constexpr (hn::MaxLanes(DV()) <= 4) {
    return v;
  } else {
    const hn::Half<DV> half;
    return sum_of_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
/// Stores the sums of the lanes of each of four vectors.
HWY_INLINE void store_sums(const V* v, float* out) {
  const D d;
  const hn::Repartition<double, D> pairs;
  const auto fold = [&](V a, V b) HWY_ATTR {
    return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  };
  const auto low = hn::BitCast(pairs, fold(v[0], v[1])), high = hn::BitCast(pairs, fold(v[2], v[3]));
  const V four = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, low, high)),
                         hn::BitCast(d, hn::InterleaveUpper(pairs, low, high)));
  hn::StoreU(sum_of_blocks(d, four), hn::Full128<float>(), out);
}
#endif

/// Vector x of block b of key j.
template <class OfType>
HWY_INLINE V element(const uint8_t* block, int x, const Step& step, int64_t b, int64_t j) {
  const V scale = hn::Set(D(), step.scales[b][j]), number = OfType::numbers(block, x);
  if constexpr (OfType::kHasLeast) return hn::MulAdd(number, scale, hn::Set(D(), step.leasts[b][j]));
  return hn::Mul(number, scale);
}

/// scores[r][j] = dot(q[r], k[j]) of a step.
template <class OfType, int R>
HWY_NOINLINE void float_dots(const QueryRow* queries, const BlockRows& k, Step& step, float (*scores)[kStep],
                             Ahead& ahead) {
  const int64_t blocks = k.size / kBlockElements;
  for (int64_t j = 0; j < step.n; j += 4) {
    ahead.point();
    const uint8_t* rows[4];
    for (int64_t i = 0; i < 4; ++i) rows[i] = step.k + std::min(j + i, step.n - 1) * k.key_stride;
    V sum[R][4];
    for (auto& row : sum)
      for (V& x : row) x = hn::Zero(D());
    for (int64_t b = 0; b < blocks; ++b) {
#pragma GCC unroll 4
      for (int x = 0; x < kVectors; ++x) {
        V key[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) key[i] = element<OfType>(rows[i] + b * OfType::kBytes, x, step, b, j + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V q = hn::LoadU(D(), queries[r].q + b * kBlockElements + x * kLanes);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sum[r][i] = hn::MulAdd(key[i], q, sum[r][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store_sums(sum[r], scores[r] + j);
  }
}

/// weights[j] = p[j] * scale of v[j]. Returns factor * o, and the sum of p[j] * least of v[j] in each element.
template <class OfType>
HWY_INLINE void weigh_block(const float* p, int64_t block, const Step& step, float factor, const float* o,
                            float* weights, V* sum) {
  const D d;
  V leasts = hn::Zero(d);
  for (int64_t j = 0; j < step.n; j += kLanes) {
    const V weight = hn::Load(d, p + j);
    const auto unseen = hn::Eq(weight, hn::Zero(d));
    const V product = hn::Mul(weight, hn::Load(d, step.scales[block] + j));
    hn::Store(hn::IfThenZeroElse(unseen, product), d, weights + j);
    if constexpr (OfType::kHasLeast) {
      const V least = hn::Mul(weight, hn::Load(d, step.leasts[block] + j));
      leasts = hn::Add(leasts, hn::IfThenZeroElse(unseen, least));
    }
  }
  const V all = OfType::kHasLeast ? hn::SumOfLanes(d, leasts) : leasts;
#pragma GCC unroll 4
  for (int x = 0; x < kVectors; ++x)
    sum[x] = hn::MulAdd(hn::Set(d, factor), hn::LoadU(d, o + block * kBlockElements + x * kLanes), all);
}

/// o[r] = o[r] * alpha[r] + sum over j of p[r][j] * v[j], W blocks of a row.
template <class OfType, int R, int W>
HWY_INLINE void float_strip(QueryRow* queries, const BlockRows& v, int64_t block, const Step& step,
                            const float (*p)[kStep], const float* alpha, Ahead& ahead) {
  const D d;
  alignas(64) float weights[R][W][kStep];
  V sum[R][W][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      weigh_block<OfType>(p[r], block + w, step, alpha[r], queries[r].o, weights[r][w], sum[r][w]);
  }
  const uint8_t* row = step.v + block * OfType::kBytes;
  for (int64_t j = 0; j < step.n; ++j, row += v.key_stride) {
    if (j % 4 == 0) ahead.point();
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
#pragma GCC unroll 4
      for (int x = 0; x < kVectors; ++x) {
        const V value = OfType::numbers(row + w * OfType::kBytes, x);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          sum[r][w][x] = hn::MulAdd(value, hn::Set(d, weights[r][w][j]), sum[r][w][x]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
#pragma GCC unroll 4
      for (int x = 0; x < kVectors; ++x)
        hn::StoreU(sum[r][w][x], d, queries[r].o + (block + w) * kBlockElements + x * kLanes);
    }
  }
}

template <class OfType, int R>
HWY_NOINLINE void float_sums(QueryRow* queries, const BlockRows& v, const Step& step, const float (*p)[kStep],
                             const float* alpha, Ahead& ahead) {
  const int64_t blocks = v.size / kBlockElements;
  constexpr int kBlocks = float_blocks(R);
  int64_t b = 0;
  for (; b + kBlocks <= blocks; b += kBlocks)
    float_strip<OfType, R, kBlocks>(queries, v, b, step, p, alpha, ahead);
  for (; b < blocks; ++b) float_strip<OfType, R, 1>(queries, v, b, step, p, alpha, ahead);
}

/// Calls pass(count, first) for kFloatRows rows at a time, then for 3, 2 or 1; `count` is a constant.
template <class Pass>
HWY_INLINE void for_each_rows(int64_t rows, Pass&& pass) {
  int64_t r = 0;
  const auto all_of = [&](auto count) HWY_ATTR {
    for (; r + count() <= rows; r += count()) pass(count, r);
  };
  all_of(std::integral_constant<int, kFloatRows>());
  if constexpr (kFloatRows > 3) all_of(std::integral_constant<int, 3>());
  if constexpr (kFloatRows > 2) all_of(std::integral_constant<int, 2>());
  all_of(std::integral_constant<int, 1>());
}

/// Products in float32.
class FloatProducts {
 public:
  explicit FloatProducts(const BlockAttention& a) : a_(a) {}

  /// Of a head and a step.
  int64_t points() const {
    const int64_t passes = (a_.rows + kFloatRows - 1) / kFloatRows;
    return passes * kStep / 4 * (1 + a_.v.size / kBlockElements / float_blocks(kFloatRows));
  }
  /// What scores of a row are multiplied by.
  float unit(int64_t) const { return 1; }

  void dots(int64_t head, Step& step, Ahead& ahead) const {
    const QueryRow* queries = a_.queries + head * a_.rows;
    for_each_rows(a_.rows, [&](auto rows, int64_t r) HWY_ATTR {
      with_block_type(a_.k.type, [&](auto type) HWY_ATTR {
        float_dots<Block<type()>, rows()>(queries + r, a_.k, step, step.scores + r, ahead);
      });
    });
  }
  void sums(int64_t head, const Step& step, Ahead& ahead) const {
    QueryRow* queries = a_.queries + head * a_.rows;
    for_each_rows(a_.rows, [&](auto rows, int64_t r) HWY_ATTR {
      with_block_type(a_.v.type, [&](auto type) HWY_ATTR {
        float_sums<Block<type()>, rows()>(queries + r, a_.v, step, step.scores + r, step.alpha + r, ahead);
      });
    });
  }

 private:
  const BlockAttention& a_;
};

}  // namespace fovea_ggml::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // FOVEA_GGML_BLOCK_FLOATS_INL_HPP
