// Online softmax with vectors, on every processor: blocks of queries are independent, so a free thread takes
// the next one. Highway (a library) compiles this file once for each instruction set
// and picks the best when the program runs.
#include "ladder/harness/vector.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ladder/05_cpu_threads/kernel.cpp"
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
using D = hn::ScalableTag<float>;

float dot(const float* a, const float* b, int n) {
  const D lanes;
  const int step = static_cast<int>(hn::Lanes(lanes));
  auto sums = hn::Zero(lanes);
  int c = 0;
  for (; c + step <= n; c += step) sums = hn::MulAdd(hn::LoadU(lanes, a + c), hn::LoadU(lanes, b + c), sums);
  float sum = hn::GetLane(hn::SumOfLanes(lanes, sums));
  for (; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

/// to = to + factor x.
void add_scaled(float* to, float factor, const float* x, int n) {
  const D lanes;
  const int step = static_cast<int>(hn::Lanes(lanes));
  const auto factors = hn::Set(lanes, factor);
  int c = 0;
  for (; c + step <= n; c += step)
    hn::StoreU(hn::MulAdd(factors, hn::LoadU(lanes, x + c), hn::LoadU(lanes, to + c)), lanes, to + c);
  for (; c < n; ++c) to[c] += factor * x[c];
}

/// x = exp(x - shift) for kKeys values, and their sum.
float exponentials(float* x, float shift) {
  const D lanes;
  const auto shifts = hn::Set(lanes, shift);
  auto sums = hn::Zero(lanes);
  for (size_t j = 0; j < kKeys; j += hn::Lanes(lanes)) {
    const auto e = hn::Exp(lanes, hn::Sub(hn::LoadU(lanes, x + j), shifts));
    hn::StoreU(e, lanes, x + j);
    sums = hn::Add(sums, e);
  }
  return hn::GetLane(hn::SumOfLanes(lanes, sums));
}

/// One query against a block of keys: scores, the new maximum, and the update of sum and output.
void row_step(const float* q, const float* k, const float* v, int keys, int d, float scale, float& row_max,
              float& row_sum, float* o) {
  float weights[kKeys];
  std::fill(weights, weights + kKeys, -INFINITY);  // keys behind the last weigh exp(-inf) = 0
  for (int j = 0; j < keys; ++j) weights[j] = dot(q, k + j * d, d) * scale;
  const float block_max = std::max(row_max, *std::max_element(weights, weights + keys));
  const float factor = std::exp(row_max - block_max);  // exp(-inf) = 0 for the first block
  row_max = block_max;
  for (int c = 0; c < d; ++c) o[c] *= factor;
  row_sum = row_sum * factor + exponentials(weights, row_max);
  for (int j = 0; j < keys; ++j) add_scaled(o, weights[j], v + j * d, d);
}

/// kRows queries, from row i0 of batch entry b on, against all keys.
void query_block(const Attention<float>& p, int b, int i0) {
  const int n = p.seqlen, d = p.head_dim;
  const auto first = static_cast<ptrdiff_t>(b) * n;
  const float *k = p.k + first * d, *v = p.v + first * d;
  const int rows = std::min(kRows, n - i0);
  const float* q = p.q + (first + i0) * d;
  float *o = p.o + (first + i0) * d, *lse = p.lse + first + i0;
  float row_max[kRows], row_sum[kRows];
  std::fill(row_max, row_max + rows, -INFINITY);
  std::fill(row_sum, row_sum + rows, 0.0f);
  std::fill(o, o + rows * d, 0.0f);

  for (int j0 = 0; j0 < n; j0 += kKeys) {
    const int keys = std::min(kKeys, n - j0);
    for (int i = 0; i < rows; ++i)
      row_step(q + i * d, k + j0 * d, v + j0 * d, keys, d, p.scale, row_max[i], row_sum[i], o + i * d);
  }
  for (int i = 0; i < rows; ++i) {
    for (int c = 0; c < d; ++c) o[i * d + c] /= row_sum[i];
    lse[i] = row_max[i] + std::log(row_sum[i]);
  }
}

}  // namespace
}  // namespace ladder::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ladder {
void cpu_threads(const Attention<float>& p) {
  constexpr int kRows = HWY_STATIC_DISPATCH(kRows);
  const int blocks = (p.seqlen + kRows - 1) / kRows, all = p.batch * blocks;
  std::atomic<int> next{0};
  const auto work = [&] {
    for (int i = next++; i < all; i = next++) LADDER_BEST(query_block)(p, i / blocks, i % blocks * kRows);
  };
  std::vector<std::jthread> others;  // the vector's destructor joins them
  for (unsigned t = 1; t < std::thread::hardware_concurrency(); ++t) others.emplace_back(work);
  work();
}
}  // namespace ladder
#endif
