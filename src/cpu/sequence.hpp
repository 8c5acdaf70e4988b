// One sequence and one head of a problem, with pointers and lengths resolved: the algorithms see no batches, no
// packing, no caches and no broadcasting.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/problem.hpp"
#include "tile/kv_range.hpp"

namespace fovea::cpu {

/// A matrix inside a tensor: element (row, column) at data + row * stride + column * column_stride, strides in
/// elements.
struct MatrixView {
  char* data = nullptr;
  int64_t stride = 0;
  int64_t column_stride = 1;

  template <class T>
  T* row(int64_t r) const {
    return reinterpret_cast<T*>(data) + r * stride;
  }
  template <class T>
  T& at(int64_t r, int64_t c) const {
    return reinterpret_cast<T*>(data)[r * stride + c * column_stride];
  }
  explicit operator bool() const { return data != nullptr; }
};

/// Lengths of one sequence and where its rows start in packed tensors.
struct SequenceSpan {
  int64_t row_q = 0, row_k = 0;  ///< first row (0 unless packed, or behind rows that do not exist)
  int64_t length_q = 0,
          length_k = 0;  ///< rows that the tensors hold for it (the last packed sequence: to the end)
  int64_t used_q = 0, used_k = 0;  ///< rows that take part (seqused)
};

inline SequenceSpan sequence_span(const AttentionProblem& p, const Buffers& buffers, int64_t batch) {
  SequenceSpan span{0, 0, p.seqlen_q, p.seqlen_k, 0, 0};
  if (p.packed) {
    const auto* q = buffers.get<const int32_t>(Role::kCuSeqlensQ);
    span.row_q = q[batch];
    span.length_q = q[batch + 1] - q[batch];
  }
  if (p.packed_k) {
    const auto* k = buffers.get<const int32_t>(Role::kCuSeqlensK);
    span.row_k = k[batch];
    span.length_k = k[batch + 1] - k[batch];
  }
  const int64_t sequence_q = span.length_q, sequence_k = span.length_k;
  // The last sequence takes the rows behind it, so that their zeros are written.
  if (p.packed && batch + 1 == p.batch) span.length_q = p.total_q - span.row_q;
  if (p.packed_k && batch + 1 == p.batch) span.length_k = p.total_k - span.row_k;
  const auto* used_q = buffers.get<const int32_t>(Role::kSeqUsedQ);
  const auto* used_k = buffers.get<const int32_t>(Role::kSeqUsedK);
  span.used_q = used_q ? used_q[batch] : sequence_q;
  span.used_k = used_k ? used_k[batch] : sequence_k;
  if (const auto* pads = buffers.get<const int32_t>(Role::kLeftPadK)) {
    span.row_k += pads[batch];
    span.length_k -= pads[batch];
    span.used_k -= pads[batch];
  }
  return span;
}

inline tile::Window window_of(const AttentionProblem& p, const SequenceSpan& span) {
  return {span.used_q, span.used_k, p.window_left, p.window_right};
}

/// Rows of one head of a (batch, seqlen, heads, size) tensor; empty view when the tensor is absent.
inline MatrixView rows_of(const AttentionProblem& p, const Buffers& buffers, Role role, int64_t batch,
                          int64_t head, int64_t first_row) {
  const TensorDesc& t = p[role];
  if (!t.present) return {};
  char* base = buffers.get<char>(role);
  if (base == nullptr) return {base, t.stride[1], t.stride[3]};  // no elements
  return {base + (batch * t.stride[0] + first_row * t.stride[1] + head * t.stride[2]) * size_of(t.dtype),
          t.stride[1], t.stride[3]};
}

/// Rows of all heads of a sequence in a (batch, seqlen, heads, size) tensor, without a division for each.
struct HeadRows {
  char* data;
  int64_t row_bytes, head_bytes;

  HeadRows(const AttentionProblem& p, const Buffers& buffers, Role role, int64_t batch, int64_t first_row)
      : data(rows_of(p, buffers, role, batch, 0, first_row).data),
        row_bytes(p[role].stride[1] * size_of(p[role].dtype)),
        head_bytes(p[role].stride[2] * size_of(p[role].dtype)) {}
  char* row(int64_t query, int64_t head) const { return data + query * row_bytes + head * head_bytes; }
};

/// What the elements of k or v of a sequence and key head are multiplied by: 1 where the problem has no factors.
inline float descale_of(const AttentionProblem& p, const Buffers& buffers, Role role, int64_t batch,
                        int64_t head_kv) {
  const TensorDesc& t = p[role];
  return t.present ? buffers.get<const float>(role)[batch * t.stride[0] + head_kv * t.stride[1]] : 1.0f;
}

/// Where the keys (or values) of one sequence and head lie: rows of pages, by a table. A tensor without page_table has one
/// page for each sequence.
class KeyRows {
 public:
  KeyRows(const AttentionProblem& p, const Buffers& buffers, Role role, int64_t batch, int64_t head,
          int64_t first_row)
      : first_(first_row) {
    const TensorDesc& t = p[role];
    type_ = t.dtype;
    bytes_ = size_of(type_);
    stride_ = t.stride[1];
    page_stride_ = t.stride[0] * bytes_;
    data_ = buffers.get<char>(role);
    if (data_ == nullptr) return;  // no elements
    data_ += head * t.stride[2] * bytes_;
    if (p.has(Role::kPageTable)) {
      page_rows_ = p.cache_rows;
      table_ = buffers.get<const int32_t>(Role::kPageTable) + batch * p[Role::kPageTable].stride[0];
    } else {
      const auto* chosen = buffers.get<const int32_t>(Role::kCacheBatch);
      data_ += (chosen == nullptr ? batch : chosen[batch]) * page_stride_;
    }
  }

  int64_t stride() const { return stride_; }
  char* row(int64_t j) const {
    const int64_t row = first_ + j;
    if (table_ == nullptr) return data_ + row * stride_ * bytes_;
    return data_ + table_[row / page_rows_] * page_stride_ + row % page_rows_ * stride_ * bytes_;
  }
  /// How many of the n keys from j on lie one behind the other.
  int64_t run(int64_t j, int64_t n) const {
    return table_ == nullptr ? n : std::min(n, page_rows_ - (first_ + j) % page_rows_);
  }
  /// Calls visit(offset, rows, count) for the runs of keys [j, j + n).
  template <class Visit>
  void for_each_run(int64_t j, int64_t n, Visit&& visit) const {
    for (int64_t x = 0; x < n;) {
      const int64_t count = run(j + x, n - x);
      visit(x, MatrixView{row(j + x), stride_}, count);
      x += count;
    }
  }
  /// The same, but rows of pages of a few keys come together, side by side in `buffer`: a call for each would take longer than
  /// to copy them.
  template <class Visit>
  void for_each_part(int64_t j, int64_t n, int64_t size, char* buffer, Visit&& visit) const {
    constexpr int64_t kFewKeys = 8;
    if (n > 0 && table_ != nullptr && page_rows_ < kFewKeys) {
      const auto row_bytes = static_cast<size_t>(size * bytes_);
      const auto copy = [&](const char* from, char* to) { std::memcpy(to, from, row_bytes); };
      visit(0, block(j, n, size, type_, buffer, copy), n);
    } else {
      for_each_run(j, n, visit);
    }
  }
  /// Keys [j, j + n) of `size` elements as those of a type that has all their values: in place where they are one run of that type,
  /// else side by side in `buffer`, to which copy(from, to) brings each.
  template <class CopyRow>
  MatrixView block(int64_t j, int64_t n, int64_t size, DType as, char* buffer, CopyRow&& copy) const {
    if (as == type_ && run(j, n) == n) return {row(j), stride_};
    const int64_t bytes = size * size_of(as);
    for_each_run(j, n, [&](int64_t offset, const MatrixView& rows, int64_t count) {
      for (int64_t r = 0; r < count; ++r)
        copy(rows.data + r * stride_ * bytes_, buffer + (offset + r) * bytes);
    });
    return {buffer, size};
  }
  DType type() const { return type_; }

 private:
  char* data_ = nullptr;
  const int32_t* table_ = nullptr;  ///< null: one page
  DType type_ = DType::kF32;        ///< of the elements
  int64_t first_, stride_ = 0, bytes_ = 0, page_rows_ = 0, page_stride_ = 0;
};

/// The float32 row statistics (lse, dlse) of one head: element i at data + i * stride.
inline MatrixView stats_of(const AttentionProblem& p, const Buffers& buffers, Role role, int64_t batch,
                           int64_t head, int64_t first_row) {
  const TensorDesc& t = p[role];
  if (!t.present) return {};
  float* base = buffers.get<float>(role);
  return {reinterpret_cast<char*>(base + batch * t.stride[0] + head * t.stride[1] + first_row * t.stride[2]),
          t.stride[2], 0};
}

}  // namespace fovea::cpu
