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
void store(char* row, DType type, int64_t c, float x) {
  switch (type) {
    case DType::kF16:
      reinterpret_cast<F16*>(row)[c] = from_float<F16>(x);
      break;
    case DType::kBF16:
      reinterpret_cast<Bf16*>(row)[c] = from_float<Bf16>(x);
      break;
    default:
      reinterpret_cast<float*>(row)[c] = x;
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
        char* out = o_at(o, b, s, h);
        for (int64_t c = 0; c < o.shape[3]; ++c) {
          float value = 0;
          for (size_t i = 0; i < weight.size(); ++i) {
            // A part without keys (lse = -inf) contributes nothing, even when its o holds NaN.
            if (weight[i] != 0)
              value += weight[i] * load_element(o_at(o_parts[i], b, s, h), o_parts[i].dtype, c);
          }
          store(out, o.dtype, c, sum == 0 ? 0.0f : value / sum);
        }
        if (lse.present) *lse_at(lse, b, h, s) = sum == 0 ? largest : subtract + std::log(sum);
      }
    }
  }
}

}  // namespace fovea::cpu
