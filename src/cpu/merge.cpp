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

/// sum += weight * row, of one part.
template <class T>
void add_row(const char* row, float weight, float* sum, int64_t elements) {
  const auto* const from = reinterpret_cast<const T*>(row);
  for (int64_t c = 0; c < elements; ++c) sum[c] += weight * to_float(from[c]);
}
/// row = sum / divisor.
template <class T>
void divide_row(const float* sum, float divisor, char* row, int64_t elements) {
  auto* const to = reinterpret_cast<T*>(row);
  for (int64_t c = 0; c < elements; ++c) to[c] = from_float<T>(sum[c] / divisor);
}

using AddRow = void (*)(const char* row, float weight, float* sum, int64_t elements);
using DivideRow = void (*)(const float* sum, float divisor, char* row, int64_t elements);
AddRow add_row_of(DType type) {
  if (type == DType::kF16) return add_row<F16>;
  return type == DType::kBF16 ? add_row<Bf16> : add_row<float>;
}
DivideRow divide_row_of(DType type) {
  if (type == DType::kF16) return divide_row<F16>;
  return type == DType::kBF16 ? divide_row<Bf16> : divide_row<float>;
}

}  // namespace

void merge(std::span<const TensorDesc> o_parts, std::span<const TensorDesc> lse_parts, const TensorDesc& o,
           const TensorDesc& lse) {
  const int64_t elements = o.shape[3];
  std::vector<float> weight(o_parts.size()), row(static_cast<size_t>(elements));
  std::vector<AddRow> add;
  for (const TensorDesc& part : o_parts) add.push_back(add_row_of(part.dtype));
  const DivideRow divide = divide_row_of(o.dtype);
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
        std::fill(row.begin(), row.end(), 0.0f);
        for (size_t i = 0; i < weight.size(); ++i) {
          // A part without keys (lse = -inf) contributes nothing, even when its o holds NaN.
          if (weight[i] != 0) add[i](o_at(o_parts[i], b, s, h), weight[i], row.data(), elements);
        }
        // Without any keys the row is all 0.
        divide(row.data(), sum == 0 ? 1.0f : sum, o_at(o, b, s, h), elements);
        if (lse.present) *lse_at(lse, b, h, s) = sum == 0 ? largest : subtract + std::log(sum);
      }
    }
  }
}

}  // namespace fovea::cpu
