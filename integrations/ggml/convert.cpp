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
// Rows of other heads lie between those of one, where the processor foresees nothing: 2 KB of Q8_0 rows of 128 are on their way from memory.
constexpr int64_t kRowsAhead = 8;
constexpr size_t kCacheLine = 64;

const char* row_of(const ggml_tensor& t, int64_t row, int64_t head, int64_t batch) {
  return static_cast<const char*>(t.data) + static_cast<size_t>(row) * t.nb[1] +
         static_cast<size_t>(head) * t.nb[2] + static_cast<size_t>(batch) * t.nb[3];
}

void fetch_ahead(const char* row, size_t bytes) {
  for (size_t x = 0; x < bytes; x += kCacheLine) __builtin_prefetch(row + x);
  __builtin_prefetch(row + bytes - 1);
}

/// How rows of a type become those of another: in vectors where the blocks are what those know, else by ggml's own function.
struct RowConversion {
  RowConversion(ggml_type from, ggml_type to);
  void operator()(const char* row, void* out, int64_t size) const;

 private:
  ggml_type to_;
  ToFloat to_float_;              ///< null: rows are float32
  ToBfloat16 to_bf16_ = nullptr;  ///< in one step
};

RowConversion::RowConversion(ggml_type from, ggml_type to)
    : to_(to), to_float_(ggml_get_type_traits(from)->to_float) {
  const Conversions& best = conversions();
  if (from == GGML_TYPE_F16) to_float_ = best.f16;
  if (const auto type = block_type_of(from)) {
    to_float_ = best.blocks[static_cast<int>(*type)];
    to_bf16_ = best.bf16_of_blocks[static_cast<int>(*type)];
  }
  if (from == GGML_TYPE_F32) to_bf16_ = best.from_float;
}

void RowConversion::operator()(const char* row, void* out, int64_t size) const {
  const bool rounds = to_ == GGML_TYPE_BF16;
  if (rounds && to_bf16_ != nullptr) return to_bf16_(row, static_cast<uint16_t*>(out), size);
  float between[kMostHeadSize];
  float* to = rounds ? between : static_cast<float*>(out);
  if (to_float_ == nullptr) {
    std::memcpy(to, row, static_cast<size_t>(size) * sizeof(float));
  } else {
    to_float_(row, to, size);
  }
  if (rounds) conversions().from_float(between, static_cast<uint16_t*>(out), size);
}

}  // namespace

void rows_as(ggml_type type, const ggml_tensor& tensor, int64_t batch, int64_t head, int64_t heads,
             int64_t first, int64_t count, int threads, void* out) {
  const RowConversion convert(tensor.type, type);
  const size_t row_bytes = ggml_row_size(tensor.type, tensor.ne[0]);
  const size_t element_bytes = ggml_type_size(type);
  const int64_t size = tensor.ne[0], turns = (count + kRows - 1) / kRows;
#pragma omp parallel for num_threads(threads) if (turns > 1)
  for (int64_t turn = 0; turn < turns; ++turn) {
    const int64_t begin = turn * kRows, end = std::min(begin + kRows, count);
    for (int64_t x = begin * heads; x < end * heads; ++x) {
      const int64_t j = x / heads, h = x % heads, at = (h * count + j) * size;
      const char* row = row_of(tensor, first + j, head + h, batch);
      if (j + kRowsAhead < count)
        fetch_ahead(row + static_cast<size_t>(kRowsAhead) * tensor.nb[1], row_bytes);
      convert(row, static_cast<char*>(out) + static_cast<size_t>(at) * element_bytes, size);
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
      conversions().from_float(row, to, size);
    }
  }
}

}  // namespace fovea_ggml
