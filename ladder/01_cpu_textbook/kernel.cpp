// Attention as in the textbook: S = scale Q K^T, P = softmax(S), O = P V, one matrix after the other.
#include <algorithm>
#include <cmath>
#include <cstddef>

#include "ladder/harness/task.hpp"

namespace ladder {

/// p.workspace: S and then P of one batch entry, seqlen x seqlen.
void cpu_textbook(const Attention<float>& p) {
  const int n = p.seqlen, d = p.head_dim;
  for (int b = 0; b < p.batch; ++b) {
    const auto first = static_cast<ptrdiff_t>(b) * n;
    const float *q = p.q + first * d, *k = p.k + first * d, *v = p.v + first * d;
    float *o = p.o + first * d, *lse = p.lse + first;
    const auto scores = [&](int i) { return p.workspace + static_cast<ptrdiff_t>(i) * n; };

    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) {
        float sum = 0;
        for (int c = 0; c < d; ++c) sum += q[i * d + c] * k[j * d + c];
        scores(i)[j] = sum * p.scale;
      }
    }
    for (int i = 0; i < n; ++i) {
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
    for (int i = 0; i < n; ++i) {
      for (int c = 0; c < d; ++c) {
        float sum = 0;
        for (int j = 0; j < n; ++j) sum += scores(i)[j] * v[j * d + c];
        o[i * d + c] = sum;
      }
    }
  }
}

}  // namespace ladder
