// Where the objects of an expression are made from a problem.
#pragma once

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

}  // namespace fovea::cuda
