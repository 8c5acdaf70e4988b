// The textbook's loops in blocks: kRows queries at a time share what they read of K and V while it is in the
// cache.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "ladder/harness/task.hpp"

namespace ladder {
namespace {

constexpr int kRows = 32;  ///< queries that share a read of K and V
constexpr int kKeys = 64;  ///< of K or V in the first-level cache: 64 x 128 x 4 bytes = 32 KiB

}  // namespace

/// p.workspace: S and then P of kRows queries, kRows x seqlen.
void cpu_blocked(const Attention<float>& p) {
  const int n = p.seqlen, d = p.head_dim;
  for (int b = 0; b < p.batch; ++b) {
    const auto first = static_cast<ptrdiff_t>(b) * n;
    const float *k = p.k + first * d, *v = p.v + first * d;
    for (int i0 = 0; i0 < n; i0 += kRows) {
      const int rows = std::min(kRows, n - i0);
      const float* q = p.q + (first + i0) * d;
      float *o = p.o + (first + i0) * d, *lse = p.lse + first + i0;
      const auto scores = [&](int i) { return p.workspace + static_cast<ptrdiff_t>(i) * n; };

      for (int j0 = 0; j0 < n; j0 += kKeys) {
        const int end = std::min(j0 + kKeys, n);
        for (int i = 0; i < rows; ++i) {
          for (int j = j0; j < end; ++j) {
            float sum = 0;
            for (int c = 0; c < d; ++c) sum += q[i * d + c] * k[j * d + c];
            scores(i)[j] = sum * p.scale;
          }
        }
      }
      for (int i = 0; i < rows; ++i) {
        float* row = scores(i);
        const float row_max = *std::max_element(row, row + n);
        float row_sum = 0;
        for (int j = 0; j < n; ++j) {
          row[j] = std::exp(row[j] - row_max);
          row_sum += row[j];
        }
        for (int j = 0; j < n; ++j) row[j] /= row_sum;
        lse[i] = row_max + std::log(row_sum);
      }
      std::fill(o, o + rows * d, 0.0f);
      for (int j0 = 0; j0 < n; j0 += kKeys) {
        const int end = std::min(j0 + kKeys, n);
        for (int i = 0; i < rows; ++i) {
          for (int j = j0; j < end; ++j) {
            const float weight = scores(i)[j];
            for (int c = 0; c < d; ++c) o[i * d + c] += weight * v[j * d + c];
          }
        }
      }
    }
  }
}

}  // namespace ladder
