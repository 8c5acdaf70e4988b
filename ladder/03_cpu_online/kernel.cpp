// Online softmax: K and V pass once, and only a block of scores exists at a time. A row keeps its largest
// score so far and the sum of exp(score - largest); when the largest grows, sum and output are multiplied by
// exp(old - new).
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "ladder/harness/task.hpp"

namespace ladder {
namespace {

constexpr int kRows = 32;  ///< queries that share a read of K and V
constexpr int kKeys = 64;  ///< of K and V in the first-level cache

/// One query against a block of keys: scores, the new maximum, and the update of sum and output.
void row_step(const float* q, const float* k, const float* v, int keys, int d, float scale, float& row_max,
              float& row_sum, float* o) {
  float weights[kKeys];
  float block_max = row_max;
  for (int j = 0; j < keys; ++j) {
    float sum = 0;
    for (int c = 0; c < d; ++c) sum += q[c] * k[j * d + c];
    weights[j] = sum * scale;
    block_max = std::max(block_max, weights[j]);
  }
  const float factor = std::exp(row_max - block_max);  // exp(-inf) = 0 for the first block
  row_max = block_max;
  row_sum *= factor;
  for (int c = 0; c < d; ++c) o[c] *= factor;
  for (int j = 0; j < keys; ++j) {
    weights[j] = std::exp(weights[j] - row_max);
    row_sum += weights[j];
    for (int c = 0; c < d; ++c) o[c] += weights[j] * v[j * d + c];
  }
}

}  // namespace

void cpu_online(const Attention<float>& p) {
  const int n = p.seqlen, d = p.head_dim;
  for (int b = 0; b < p.batch; ++b) {
    const auto first = static_cast<ptrdiff_t>(b) * n;
    const float *k = p.k + first * d, *v = p.v + first * d;
    for (int i0 = 0; i0 < n; i0 += kRows) {
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
  }
}

}  // namespace ladder
