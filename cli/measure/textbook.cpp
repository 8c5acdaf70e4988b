// The textbook loop: all scores of a head in memory, one thread.
#include "cli/measure/textbook.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace fovea::cli {

void textbook_attention(const TextbookShape& shape, float scale, std::span<const float> q,
                        std::span<const float> k, std::span<const float> v, std::span<float> o) {
  const int64_t rows = shape.seqlen_q, columns = shape.seqlen_k, group = shape.heads_q / shape.heads_kv;
  std::vector<float> scores(static_cast<size_t>(rows * columns));
  for (int64_t batch = 0; batch < shape.batch; ++batch) {
    for (int64_t head = 0; head < shape.heads_q; ++head) {
      const auto row_of = [&](int64_t seqlen, int64_t heads, int64_t h, int64_t size, int64_t row) {
        return static_cast<size_t>(((batch * seqlen + row) * heads + h) * size);
      };
      for (int64_t i = 0; i < rows; ++i) {
        const float* q_row = q.data() + row_of(rows, shape.heads_q, head, shape.head_dim, i);
        float* s = scores.data() + i * columns;
        for (int64_t j = 0; j < columns; ++j) {
          const float* k_row = k.data() + row_of(columns, shape.heads_kv, head / group, shape.head_dim, j);
          float dot = 0;
          for (int64_t d = 0; d < shape.head_dim; ++d) dot += q_row[d] * k_row[d];
          s[j] = scale * dot;
        }
      }
      for (int64_t i = 0; i < rows; ++i) {
        float* s = scores.data() + i * columns;
        float largest = -std::numeric_limits<float>::infinity(), sum = 0;
        for (int64_t j = 0; j < columns; ++j) largest = std::max(largest, s[j]);
        for (int64_t j = 0; j < columns; ++j) sum += s[j] = std::exp(s[j] - largest);
        for (int64_t j = 0; j < columns; ++j) s[j] /= sum;
      }
      for (int64_t i = 0; i < rows; ++i) {
        const float* s = scores.data() + i * columns;
        float* o_row = o.data() + row_of(rows, shape.heads_q, head, shape.head_dim_v, i);
        std::fill_n(o_row, shape.head_dim_v, 0.0f);
        for (int64_t j = 0; j < columns; ++j) {
          const float* v_row = v.data() + row_of(columns, shape.heads_kv, head / group, shape.head_dim_v, j);
          for (int64_t d = 0; d < shape.head_dim_v; ++d) o_row[d] += s[j] * v_row[d];
        }
      }
    }
  }
}

}  // namespace fovea::cli
