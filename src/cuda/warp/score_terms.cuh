// From q.k to the score that the softmax sees, element by element: scale, softcap, ALiBi, bias, mask, block mask, expressions,
// and the keep decisions of dropout. Problems without these terms run on faster kernels, which fold the scale into exp2 and
// know only the window.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/warp/dropout.cuh"
#include "cuda/warp/expression.cuh"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// The head of a problem's expression. `head` is that of the queries.
__device__ __forceinline__ Expression::Head expression_head(const tile::AttentionParams& p,
                                                            const tile::SequenceSpan& span, int batch,
                                                            int head) {
  return Expression::Head(p.expression, batch, head, head / p.group, span.used_q, span.used_k);
}
/// A row behind the last one gets the query of that, so that every tensor has its elements.
__device__ __forceinline__ int query_in_use(const tile::SequenceSpan& span, int i) {
  return max(min(i, span.used_q - 1), 0);
}

template <class T>
__device__ __forceinline__ float to_float(T x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return static_cast<float>(x);
  }
}

/// An element of a tensor that holds float32 or T.
template <class T>
__device__ __forceinline__ float load_either(const char* data, int64_t offset, bool is_f32) {
  return is_f32 ? __ldg(reinterpret_cast<const float*>(data) + offset)
                : to_float(__ldg(reinterpret_cast<const T*>(data) + offset));
}

/// The terms of one query row of one head. What depends on the row is computed once; functions take the key.
template <class T>
struct RowTerms {
  int64_t bias = 0, mask = 0, block_mask = 0;  ///< element offsets of key 0
  float slope = 0;
  int diagonal = 0;  ///< key position at which the query stands: i + used_k - used_q
  int i = 0;
  uint32_t dropout_head = 0;  ///< tile::dropout_head
  Expression::Head expression;
  Expression::Query query;

  __device__ __forceinline__ RowTerms(const tile::AttentionParams& p, const tile::SequenceSpan& span,
                                      int batch, int head, int row)
      : diagonal(row + span.used_k - span.used_q),
        i(row),
        dropout_head(tile::dropout_head(p, batch, head)),
        expression(expression_head(p, span, batch, head)),
        query(expression, query_in_use(span, row)) {
    if (p.bias.data != nullptr) bias = p.bias.offset(batch, head, row, 0);
    if (p.mask.data != nullptr) mask = p.mask.offset(batch, head, row, 0);
    if (p.block_mask.data != nullptr) block_mask = p.block_mask.offset(batch, head, row / p.block_q, 0);
    if (p.alibi != nullptr) slope = p.alibi[batch * p.alibi_batch + head * p.alibi_head];
  }

  /// Whether mask and block mask let the row see key j; the caller looks at the window. j < used_k.
  __device__ __forceinline__ bool sees(const tile::AttentionParams& p, int j) const {
    if constexpr (!Expression::kHasTerms) {
      if (p.mask.data != nullptr && p.mask.data[mask + j * p.mask.column] == 0) return false;
      if (p.block_mask.data != nullptr &&
          p.block_mask.data[block_mask + (j / p.block_k) * p.block_mask.column] == 0) {
        return false;
      }
    }
    return Expression::sees(expression, query, Expression::Key(expression, j));
  }

  /// Score of key j in natural units from the raw product q.k, without masks. j < used_k.
  __device__ __forceinline__ float score(const tile::AttentionParams& p, float dot, int j) const {
    const float s = score_before_expression(p, dot, j);
    if constexpr (!Expression::kHasScore) return s;
    return Expression::score(expression, query, Expression::Key(expression, j), s);
  }

  /// d score / d (scale * q.k).
  __device__ __forceinline__ float product_slope(const tile::AttentionParams& p, float dot, int j) const {
    return cap_slope(p, dot) * expression_slope(p, dot, j);
  }
  /// d score / d bias.
  __device__ __forceinline__ float expression_slope(const tile::AttentionParams& p, float dot, int j) const {
    float slope = 1.0f;
    if constexpr (Expression::kHasScore)
      Expression::score(expression, query, Expression::Key(expression, j), score_before_expression(p, dot, j),
                        slope);
    return slope;
  }
  /// d_score times the derivatives of the score, to the gradients of named tensors.
  __device__ __forceinline__ void add_gradients(const tile::AttentionParams& p, float dot, int j,
                                                float d_score) const {
    Expression::add_gradients(expression, query, Expression::Key(expression, j),
                              score_before_expression(p, dot, j), d_score);
  }

  __device__ __forceinline__ float score_before_expression(const tile::AttentionParams& p, float dot,
                                                           int j) const {
    float s = dot * p.scale;
    if constexpr (Expression::kHasTerms) return s;
    if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap);
    if (p.alibi != nullptr) s -= slope * fabsf(static_cast<float>(diagonal - j));
    if (p.bias.data != nullptr) s += load_either<T>(p.bias.data, bias + j * p.bias.column, p.bias_is_f32());
    return s;
  }

  /// Of the softcap.
  __device__ __forceinline__ float cap_slope(const tile::AttentionParams& p, float dot) const {
    if (Expression::kHasTerms || p.softcap <= 0) return 1.0f;
    const float t = tanhf(dot * p.scale / p.softcap);
    return 1.0f - t * t;
  }

  /// Dropout's factors of keys j and j + 1, j even: 0, or 1 / (1 - p).
  __device__ __forceinline__ float2 keep_pair(const tile::Dropout& dropout, int j) const {
    return keep_factors(dropout,
                        dropout.kept_pair(dropout_head, static_cast<uint32_t>(i), static_cast<uint32_t>(j)));
  }
};

}  // namespace fovea::cuda
