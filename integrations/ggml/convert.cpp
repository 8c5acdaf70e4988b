// Conversions of rows. Types without a conversion in vectors go through ggml's own functions.
#include "convert.hpp"

#include <algorithm>
#include <cstring>

#include "blocks.hpp"
#include "operation.hpp"

namespace fovea_ggml {
namespace {

// Rows that a thread converts at a time.
constexpr int64_t kRows = 64;

const char* row_of(const ggml_tensor& t, int64_t row, int64_t head, int64_t batch) {
  return static_cast<const char*>(t.data) + static_cast<size_t>(row) * t.nb[1] +
         static_cast<size_t>(head) * t.nb[2] + static_cast<size_t>(batch) * t.nb[3];
}

/// ggml's own function, or one in vectors where the blocks are what that knows.
ggml_to_float_t conversion_from(ggml_type type) {
  const ggml_type_traits& traits = *ggml_get_type_traits(type);
  const bool blocks = traits.blck_size == kBlockElements;
  if (type == GGML_TYPE_F16) return f16_to_float;
  if (type == GGML_TYPE_Q8_0 && blocks && traits.type_size == kQ8Bytes) return q8_0_to_float;
  if (type == GGML_TYPE_Q4_0 && blocks && traits.type_size == kQ4Bytes) return q4_0_to_float;
  return traits.to_float;
}

}  // namespace

void rows_as(ggml_type type, const ggml_tensor& tensor, int64_t batch, int64_t head, int64_t heads,
             int64_t first, int64_t count, int threads, void* out) {
  const ggml_to_float_t convert = conversion_from(tensor.type);
  const int64_t size = tensor.ne[0], turns = (count + kRows - 1) / kRows;
#pragma omp parallel for num_threads(threads) if (heads * turns > 1)
  for (int64_t turn = 0; turn < heads * turns; ++turn) {
    const int64_t h = turn / turns, begin = turn % turns * kRows, end = std::min(begin + kRows, count);
    for (int64_t j = begin; j < end; ++j) {
      const char* row = row_of(tensor, first + j, head + h, batch);
      const int64_t at = (h * count + j) * size;
      float between[kMostHeadSize];
      float* to = type == GGML_TYPE_F32 ? static_cast<float*>(out) + at : between;
      if (convert == nullptr) {
        std::memcpy(to, row, static_cast<size_t>(size) * sizeof(float));
      } else {
        convert(row, to, size);
      }
      if (type == GGML_TYPE_BF16) float_to_bf16(between, static_cast<uint16_t*>(out) + at, size);
    }
  }
}

void queries_as(const ggml_tensor& q, ggml_type type, int threads, void* out) {
  const int64_t size = q.ne[0], queries = q.ne[1], heads = q.ne[2], rows = queries * heads * q.ne[3];
#pragma omp parallel for num_threads(threads) if (rows >= kRows)
  for (int64_t x = 0; x < rows; ++x) {
    const auto* row =
        reinterpret_cast<const float*>(row_of(q, x / heads % queries, x % heads, x / heads / queries));
    auto* to = static_cast<uint16_t*>(out) + x * size;
    if (type == GGML_TYPE_F16) {
      ggml_fp32_to_fp16_row(row, to, size);
    } else {
      float_to_bf16(row, to, size);
    }
  }
}

}  // namespace fovea_ggml
