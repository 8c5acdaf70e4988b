// Merges partial results over disjoint keys: o = sum_i exp(lse_i - lse) o_i, lse = log sum_i exp(lse_i).
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/backends.hpp"
#include "cpu/panel.hpp"

namespace fovea::cpu {
namespace {

float* lse_at(const TensorDesc& t, int64_t b, int64_t h, int64_t s) {
  return static_cast<float*>(t.data) + b * t.stride[0] + h * t.stride[1] + s * t.stride[2];
}
char* o_at(const TensorDesc& t, int64_t b, int64_t s, int64_t h) {
  return static_cast<char*>(t.data) +
         (b * t.stride[0] + s * t.stride[1] + h * t.stride[2]) * size_of(t.dtype);
}
/// Columns of a row that are summed at a time.
constexpr int64_t kColumns = 128;

/// Calls visit with `row` as a pointer to its elements.
template <class Visit>
void visit_row(char* row, DType type, Visit&& visit) {
  switch (type) {
    case DType::kF16:
      return visit(reinterpret_cast<F16*>(row));
    case DType::kBF16:
      return visit(reinterpret_cast<Bf16*>(row));
    default:
      return visit(reinterpret_cast<float*>(row));
  }
}

/// out = sum_i weight[i] parts[i] / sum over the columns of one row. A part without keys (lse = -inf) contributes nothing, even when its
/// o holds NaN.
void merge_row(std::span<const TensorDesc> parts, std::span<const float> weight, float sum, int64_t b,
               int64_t s, int64_t h, const TensorDesc& o) {
  for (int64_t first = 0; first < o.shape[3]; first += kColumns) {
    const int64_t count = std::min(kColumns, o.shape[3] - first);
    float values[kColumns] = {};
    for (size_t i = 0; i < parts.size(); ++i) {
      if (weight[i] == 0) continue;
      visit_row(o_at(parts[i], b, s, h), parts[i].dtype, [&](const auto* part) {
        for (int64_t c = 0; c < count; ++c) values[c] += weight[i] * to_float(part[first + c]);
      });
    }
    visit_row(o_at(o, b, s, h), o.dtype, [&]<class T>(T* out) {
      for (int64_t c = 0; c < count; ++c) out[first + c] = from_float<T>(sum == 0 ? 0.0f : values[c] / sum);
    });
  }
}

}  // namespace

void merge(std::span<const TensorDesc> o_parts, std::span<const TensorDesc> lse_parts, const TensorDesc& o,
           const TensorDesc& lse) {
  std::vector<float> weight(o_parts.size());
  for (int64_t b = 0; b < o.shape[0]; ++b) {
    for (int64_t s = 0; s < o.shape[1]; ++s) {
      for (int64_t h = 0; h < o.shape[2]; ++h) {
        float largest = -std::numeric_limits<float>::infinity();
        for (const TensorDesc& part : lse_parts) largest = std::max(largest, *lse_at(part, b, h, s));
        const float subtract = largest == -std::numeric_limits<float>::infinity() ? 0.0f : largest;
        float sum = 0;
        for (size_t i = 0; i < weight.size(); ++i) {
          weight[i] = std::exp(*lse_at(lse_parts[i], b, h, s) - subtract);
          sum += weight[i];
        }
        merge_row(o_parts, weight, sum, b, s, h, o);
        if (lse.present) *lse_at(lse, b, h, s) = sum == 0 ? largest : subtract + std::log(sum);
      }
    }
  }
}

}  // namespace fovea::cpu
