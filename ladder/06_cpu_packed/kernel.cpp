// Threads and vectors, over packed tiles: K transposed and V padded once, so that products are register tiles
// of kTile queries by two vectors whose operands come from memory in the order of use. Tails are padding.
// Highway (a library) compiles this file once for each instruction set and picks the best when the program
// runs.
#include "ladder/harness/vector.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ladder/06_cpu_packed/kernel.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <thread>
#include <vector>

#include "ladder/harness/task.hpp"

HWY_BEFORE_NAMESPACE();
namespace ladder::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kRows = 32;  ///< queries that share a read of K and V
constexpr int kKeys = 64;  ///< of K and V in the first-level cache
constexpr int kTile =
    4;  ///< queries of a register tile: 4 x 2 sums hide the latency of two multiply-add pipes
constexpr int kPad = 32;  ///< columns are padded to two vectors of 16
constexpr int kMostD = 128;
using D = hn::CappedTag<float, 16>;
using Vec = hn::Vec<D>;

constexpr int padded(int x, int to) {
  return (x + to - 1) / to * to;
}

/// C (kTile x columns) = or += A (kTile x depth, rows lda apart) B (depth x columns, rows ldb apart). Columns
/// come in steps of two vectors.
HWY_INLINE void multiply_tile(const float* a, int lda, const float* b, int ldb, float* c, int ldc,
                              int columns, int depth, bool add) {
  const D lanes;
  const int step = static_cast<int>(hn::Lanes(lanes));
  for (int j = 0; j < columns; j += 2 * step) {
    Vec s00, s01, s10, s11, s20, s21, s30, s31;
    s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = hn::Zero(lanes);
    const float* row = b + j;
    for (int k = 0; k < depth; ++k, row += ldb) {
      const Vec b0 = hn::LoadU(lanes, row), b1 = hn::LoadU(lanes, row + step);
      const Vec a0 = hn::Set(lanes, a[k]), a1 = hn::Set(lanes, a[lda + k]);
      const Vec a2 = hn::Set(lanes, a[2 * lda + k]), a3 = hn::Set(lanes, a[3 * lda + k]);
      s00 = hn::MulAdd(a0, b0, s00), s01 = hn::MulAdd(a0, b1, s01);
      s10 = hn::MulAdd(a1, b0, s10), s11 = hn::MulAdd(a1, b1, s11);
      s20 = hn::MulAdd(a2, b0, s20), s21 = hn::MulAdd(a2, b1, s21);
      s30 = hn::MulAdd(a3, b0, s30), s31 = hn::MulAdd(a3, b1, s31);
    }
    const auto put = [&](int i, Vec x0, Vec x1) {
      float* to = c + i * ldc + j;
      hn::StoreU(add ? hn::Add(x0, hn::LoadU(lanes, to)) : x0, lanes, to);
      hn::StoreU(add ? hn::Add(x1, hn::LoadU(lanes, to + step)) : x1, lanes, to + step);
    };
    put(0, s00, s01), put(1, s10, s11), put(2, s20, s21), put(3, s30, s31);
  }
}

/// The weights of one row of scores, and the factor that rescales earlier sums.
float softmax_row(float* x, int keys, float scale, float& row_max, float& row_sum) {
  const D lanes;
  std::fill(x + keys, x + kKeys, -INFINITY);  // keys behind the last weigh exp(-inf) = 0
  Vec largest = hn::Set(lanes, row_max);
  for (size_t j = 0; j < kKeys; j += hn::Lanes(lanes)) {
    const Vec s = hn::Mul(hn::LoadU(lanes, x + j), hn::Set(lanes, scale));
    hn::StoreU(s, lanes, x + j);
    largest = hn::Max(largest, s);
  }
  const float new_max = hn::GetLane(hn::MaxOfLanes(lanes, largest));
  const float factor = std::exp(row_max - new_max);  // exp(-inf) = 0 for the first block
  Vec sums = hn::Zero(lanes);
  for (size_t j = 0; j < kKeys; j += hn::Lanes(lanes)) {
    const Vec e = hn::Exp(lanes, hn::Sub(hn::LoadU(lanes, x + j), hn::Set(lanes, new_max)));
    hn::StoreU(e, lanes, x + j);
    sums = hn::Add(sums, e);
  }
  row_max = new_max;
  row_sum = row_sum * factor + hn::GetLane(hn::SumOfLanes(lanes, sums));
  return factor;
}

/// Keys j0 .. j0 + kKeys of batch entry b: K as (d, kKeys), V as (kKeys, padded d).
void pack(const Attention<float>& p, int b, int j0, float* kt, float* v) {
  const int d = p.head_dim, dv = padded(d, kPad), keys = std::min(kKeys, p.seqlen - j0);
  const ptrdiff_t first = (static_cast<ptrdiff_t>(b) * p.seqlen + j0) * d;
  std::fill(kt, kt + d * kKeys, 0.0f);
  std::fill(v, v + kKeys * dv, 0.0f);
  for (int j = 0; j < keys; ++j) {
    for (int c = 0; c < d; ++c) kt[c * kKeys + j] = p.k[first + j * d + c];
    std::copy_n(p.v + first + j * d, d, v + j * dv);
  }
}

/// kRows queries, from row i0 of batch entry b on, against all keys; `packed`: those of the batch entry.
void query_block(const Attention<float>& p, int b, int i0, const float* packed) {
  const int n = p.seqlen, d = p.head_dim, dv = padded(d, kPad), rows = std::min(kRows, n - i0);
  const ptrdiff_t first = static_cast<ptrdiff_t>(b) * n + i0;
  alignas(64) float q[kRows * kMostD] = {}, o[kRows * kMostD] = {}, s[kRows * kKeys];
  std::copy_n(p.q + first * d, rows * d, q);
  float row_max[kRows], row_sum[kRows];
  std::fill(row_max, row_max + kRows, -INFINITY);
  std::fill(row_sum, row_sum + kRows, 0.0f);

  for (int j0 = 0; j0 < n; j0 += kKeys, packed += kKeys * (d + dv)) {
    const int keys = std::min(kKeys, n - j0);
    const float *kt = packed, *v = packed + kKeys * d;
    for (int i = 0; i < kRows; i += kTile)
      multiply_tile(q + i * d, d, kt, kKeys, s + i * kKeys, kKeys, kKeys, d, false);
    for (int i = 0; i < kRows; ++i) {
      const float factor = softmax_row(s + i * kKeys, keys, p.scale, row_max[i], row_sum[i]);
      for (int c = 0; c < dv; ++c) o[i * dv + c] *= factor;
    }
    for (int i = 0; i < kRows; i += kTile)
      multiply_tile(s + i * kKeys, kKeys, v, dv, o + i * dv, dv, dv, kKeys, true);
  }
  for (int i = 0; i < rows; ++i) {
    for (int c = 0; c < d; ++c) p.o[(first + i) * d + c] = o[i * dv + c] / row_sum[i];
    p.lse[first + i] = row_max[i] + std::log(row_sum[i]);
  }
}

}  // namespace
}  // namespace ladder::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ladder {

/// p.workspace: for each batch entry and block of 64 keys, 64 (d + d padded to 32) values.
void cpu_packed(const Attention<float>& p) {
  constexpr int kRows = HWY_STATIC_DISPATCH(kRows), kKeys = HWY_STATIC_DISPATCH(kKeys);
  const int d = p.head_dim, blocks = (p.seqlen + kRows - 1) / kRows, panels = (p.seqlen + kKeys - 1) / kKeys;
  const auto panel = [&](int b, int j) {
    return p.workspace + (static_cast<ptrdiff_t>(b) * panels + j) * kKeys * (d + (d + 31) / 32 * 32);
  };
  const auto on_all = [](int count, const auto& body) {
    std::atomic<int> next{0};
    const auto work = [&] {
      for (int i = next++; i < count; i = next++) body(i);
    };
    std::vector<std::jthread> others;
    for (unsigned t = 1; t < std::thread::hardware_concurrency(); ++t) others.emplace_back(work);
    work();
  };
  on_all(p.batch * panels, [&](int i) {
    float* to = panel(i / panels, i % panels);
    LADDER_BEST(pack)(p, i / panels, i % panels * kKeys, to, to + kKeys * d);
  });
  on_all(p.batch * blocks, [&](int i) {
    LADDER_BEST(query_block)(p, i / blocks, i % blocks * kRows, panel(i / blocks, 0));
  });
}

}  // namespace ladder
#endif
