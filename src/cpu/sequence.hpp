// One sequence and one head of a problem, with pointers and lengths resolved: the algorithms see no batches, no
// packing and no broadcasting.
#pragma once

#include <cstdint>

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
  int64_t row_q = 0, row_k = 0;  ///< first row (0 unless packed)
  int64_t length_q = 0,
          length_k = 0;  ///< rows that the tensors hold for it (the last packed sequence: to the end)
  int64_t used_q = 0, used_k = 0;  ///< rows that take part (seqused)
};

inline SequenceSpan sequence_span(const AttentionProblem& p, const Buffers& buffers, int64_t batch) {
  SequenceSpan span{0, 0, p.seqlen_q, p.seqlen_k, 0, 0};
  if (p.packed) {
    const auto* q = buffers.get<const int32_t>(Role::kCuSeqlensQ);
    const auto* k = buffers.get<const int32_t>(Role::kCuSeqlensK);
    span = {q[batch], k[batch], q[batch + 1] - q[batch], k[batch + 1] - k[batch], 0, 0};
  }
  const int64_t sequence_q = span.length_q, sequence_k = span.length_k;
  if (p.packed && batch + 1 == p.batch) {
    // The last sequence takes the rows behind it, so that their zeros are written.
    span.length_q = p.total_q - span.row_q;
    span.length_k = p.total_k - span.row_k;
  }
  const auto* used_q = buffers.get<const int32_t>(Role::kSeqUsedQ);
  const auto* used_k = buffers.get<const int32_t>(Role::kSeqUsedK);
  span.used_q = used_q ? used_q[batch] : sequence_q;
  span.used_k = used_k ? used_k[batch] : sequence_k;
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

/// One head of a (batch, heads, seqlen_q, seqlen_k) tensor as a matrix of rows i and columns j.
inline MatrixView pairs_of(const AttentionProblem& p, const Buffers& buffers, Role role, int64_t batch,
                           int64_t head) {
  const TensorDesc& t = p[role];
  if (!t.present) return {};
  char* base = buffers.get<char>(role);
  if (base == nullptr) return {base, t.stride[2], t.stride[3]};
  return {base + (batch * t.stride[0] + head * t.stride[1]) * size_of(t.dtype), t.stride[2], t.stride[3]};
}

/// The float32 row statistics (lse, dlse) of one head: element i at data + i * stride.
inline MatrixView stats_of(const AttentionProblem& p, const Buffers& buffers, Role role, int64_t batch,
                           int64_t head, int64_t first_row) {
  const TensorDesc& t = p[role];
  if (!t.present) return {};
  float* base = buffers.get<float>(role);
  return {reinterpret_cast<char*>(base + batch * t.stride[0] + head * t.stride[1] + first_row * t.stride[2]),
          t.stride[2], 0};
}

inline float alibi_slope(const AttentionProblem& p, const Buffers& buffers, int64_t batch, int64_t head) {
  const TensorDesc& t = p[Role::kAlibi];
  return t.present ? buffers.get<const float>(Role::kAlibi)[batch * t.stride[0] + head * t.stride[1]] : 0.0f;
}

}  // namespace fovea::cpu
