// What a lane of bwd_sm90_wide knows of its pairs: two of the 64 rows that stay against the rows that are streamed past them, as wgmma lays
// out their scores.
#pragma once

#include <type_traits>

#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "tile/attention_params.hpp"

namespace fovea::cuda {

/// The expression's share of the lane's pairs; queries or keys stay. Rows behind the last one get that, so that every tensor has their
/// elements: the mask takes them out.
template <bool kQueriesStay>
struct BwdSm90WidePairs {
  using Row = std::conditional_t<kQueriesStay, Expression::Query, Expression::Key>;
  Expression::Head head;
  tile::SequenceSpan span;
  int first_column;  ///< the lane's first
  Row row[2];

  /// `first_row`: the lane's first; the other is 8 behind it.
  __device__ __forceinline__ BwdSm90WidePairs(const tile::AttentionParams& p,
                                              const tile::SequenceSpan& of_sequence, int batch, int head_q,
                                              int first_row, int column)
      : head(expression_head(p, of_sequence, batch, head_q)),
        span(of_sequence),
        first_column(column),
        row{at<kQueriesStay>(first_row), at<kQueriesStay>(first_row + 8)} {}

  /// Query or key x.
  template <bool kQuery>
  __device__ __forceinline__ auto at(int x) const {
    if constexpr (kQuery) {
      return Expression::Query(head, Expression::kReadsByQuery ? query_in_use(span, x) : x);
    } else {
      return Expression::Key(head, Expression::kReadsByKey ? max(min(x, span.used_k - 1), 0) : x);
    }
  }
  /// Calls visit(i, query, key) for each element of the lane's scores of kColumns columns.
  template <int kColumns, class Visit>
  __device__ __forceinline__ void each(const Visit& visit) const {
#pragma unroll
    for (int c = 0; c < kColumns / 4; ++c) {
      const auto column = at<!kQueriesStay>(first_column + c / 2 * 8 + c % 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = c / 2 * 4 + 2 * half + c % 2;
        if constexpr (kQueriesStay) {
          visit(i, row[half], column);
        } else {
          visit(i, column, row[half]);
        }
      }
    }
  }
};

}  // namespace fovea::cuda
