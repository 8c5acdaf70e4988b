// The scores of a query row, key by key, as kernels see them that know every term: one expression, whatever it is made of.
// Problems without such terms run on faster kernels, which fold the scale into exp2 and know only the window.
#pragma once

#include <type_traits>

#include "cuda/warp/argument_terms.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/expression_objects.cuh"

namespace fovea::cuda {

/// Two expressions as one: `Terms` of the arguments, and the problem's expression of the score that they give. A key is seen
/// where both see it.
template <class Terms>
struct ScoreExpression {
  /// Whether Query reads tensors by the query without looking whether it is inside.
  static constexpr bool kReadsByQuery = Expression::kReadsByQuery;
  /// Whether add_gradients does anything.
  static constexpr bool kHasGradients = Expression::kHasGradients;
  /// Whether the score's derivative by s may be negative.
  static constexpr bool kSlopeHasSign = Expression::kHasScore;

  struct Head {
    typename Terms::Head terms;
    Expression::Head expression;
    __device__ __forceinline__ Head(const tile::AttentionParams& p, const tile::SequenceSpan& span, int batch,
                                    int head)
        : terms(p, span, batch, head), expression(expression_head(p, span, batch, head)) {}
  };
  struct Query {
    typename Terms::Query terms;
    Expression::Query expression;
    __device__ __forceinline__ Query(const Head& head, int q)
        : terms(head.terms, q), expression(head.expression, q) {}
  };
  struct Key {
    typename Terms::Key terms;
    Expression::Key expression;
    __device__ __forceinline__ Key(const Head& head, int k)
        : terms(head.terms, k), expression(head.expression, k) {}
  };

  /// Whether the score is more than s, or `sees` hides a key.
  __device__ __forceinline__ static bool says_anything(const tile::AttentionParams& p) {
    return Expression::kHasScore || Expression::kHasSees || Terms::has_score(p) || Terms::has_sees(p);
  }
  /// Whether the score's derivative by s may differ from 1.
  __device__ __forceinline__ static bool has_slope(const tile::AttentionParams& p) {
    return Expression::kHasScore || Terms::has_slope(p);
  }

  __device__ __forceinline__ static bool sees(const Head& head, const Query& query, const Key& key) {
    return Terms::sees(head.terms, query.terms, key.terms,
                       [&] { return Expression::sees(head.expression, query.expression, key.expression); });
  }
  __device__ __forceinline__ static float score(const Head& head, const Query& query, const Key& key,
                                                float s) {
    return Expression::score(head.expression, query.expression, key.expression,
                             Terms::score(head.terms, query.terms, key.terms, s));
  }
  /// The score's derivative by the bias.
  __device__ __forceinline__ static float bias_slope(const Head& head, const Query& query, const Key& key,
                                                     float s) {
    float slope = 1.0f;
    if constexpr (Expression::kHasScore)
      Expression::score(head.expression, query.expression, key.expression,
                        Terms::score(head.terms, query.terms, key.terms, s), slope);
    return slope;
  }
  /// The score's derivative by s.
  __device__ __forceinline__ static float slope(const Head& head, const Query& query, const Key& key,
                                                float s) {
    return Terms::slope(head.terms, s) * bias_slope(head, query, key, s);
  }
  /// Calls add(place, x) for each element whose gradient is asked for, as Expression does.
  template <class Add>
  __device__ __forceinline__ static void add_gradients(const Head& head, const Query& query, const Key& key,
                                                       float s, float d_score, const Add& add) {
    Expression::add_gradients(head.expression, query.expression, key.expression,
                              Terms::score(head.terms, query.terms, key.terms, s), d_score, add);
  }
};

/// That of a problem whose q is T.
template <class T>
using ScoreOf = ScoreExpression<std::conditional_t<Expression::kHasTerms, NoArgumentTerms, ArgumentTerms<T>>>;

/// The row of a query of one head. What depends on the row is computed once; functions take the key, which is inside its
/// sequence, and the raw product q.k.
template <class T>
struct ScoreRow {
  using Score = ScoreOf<T>;

  const tile::AttentionParams& p;
  typename Score::Head head;
  typename Score::Query query;

  __device__ __forceinline__ ScoreRow(const tile::AttentionParams& params, const tile::SequenceSpan& span,
                                      int batch, int head_q, int row)
      : p(params),
        head(params, span, batch, head_q),
        query(head, Score::kReadsByQuery ? query_in_use(span, row) : row) {}

  /// Whether the row sees key j; the caller looks at the window.
  __device__ __forceinline__ bool sees(int j) const {
    return Score::sees(head, query, typename Score::Key(head, j));
  }
  /// Score of key j in natural units, without masks.
  __device__ __forceinline__ float score(float dot, int j) const {
    return Score::score(head, query, typename Score::Key(head, j), dot * p.scale);
  }
  /// d score / d (scale * q.k).
  __device__ __forceinline__ float slope(float dot, int j) const {
    return Score::slope(head, query, typename Score::Key(head, j), dot * p.scale);
  }
  /// d score / d bias.
  __device__ __forceinline__ float bias_slope(float dot, int j) const {
    return Score::bias_slope(head, query, typename Score::Key(head, j), dot * p.scale);
  }
  /// d_score times the derivatives of the score, to the gradients of named tensors.
  template <class Add>
  __device__ __forceinline__ void add_gradients(float dot, int j, float d_score, const Add& add) const {
    Score::add_gradients(head, query, typename Score::Key(head, j), dot * p.scale, d_score, add);
  }
};

}  // namespace fovea::cuda
