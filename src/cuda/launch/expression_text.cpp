// Gives expr/cuda_text.hpp the facts that a problem knows.
#include "cuda/launch/expression_text.hpp"

#include <algorithm>
#include <optional>

#include "expr/cuda_text.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cuda {
namespace {

/// s as it is: for a scale that exponents cannot have as their factor.
expr::Expression score_as_it_is(const expr::Expression& sees) {
  expr::Expression score;
  score.use = expr::Use::kScore;
  score.tensors = sees.tensors;
  score.root = score.graph.variable(expr::Variable::kS);
  return score;
}

/// A bound of positions of few values, so that lengths do not change the text: up to 2^21 distances are floats without a conversion.
int64_t bound_of_positions(const AttentionProblem& p) {
  constexpr int64_t kSmall = int64_t{1} << 21, kLongest = int64_t{1} << 30, kLargestTile = 512;
  return std::max(p.seqlen_q, p.seqlen_k) + kLargestTile <= kSmall ? kSmall : kLongest + kLargestTile;
}

}  // namespace

std::string expression_text(const AttentionProblem& p) {
  const expr::PairExpressions& expressions = *p.expressions;
  expr::CudaTextInput input;
  std::optional<expr::Expression> plain;
  if (expressions.score) {
    input.score = &*expressions.score;
  } else if (!(static_cast<float>(p.scale) > 0)) {
    plain = score_as_it_is(*expressions.sees);
    input.score = &*plain;
  }
  if (expressions.sees) input.sees = &*expressions.sees;
  input.positions = bound_of_positions(p);
  input.batch = p.batch;
  input.has_terms = expressions.has_terms;
  input.heads = p.heads_q;
  for (size_t i = 0; i < p.named.size(); ++i) {
    const NamedTensor& named = p.named[i];
    if (named.place == index_of(Role::kBias))
      input.pairs_of = i;  // dbias_sm90 takes the pairs for those of the bias
    input.gradients.push_back(named.gradient.present);
    auto& extents = input.extents.emplace_back();
    auto& strides = input.strides.emplace_back();
    for (size_t d = 0; d < extents.size(); ++d) {
      const bool has = d < static_cast<size_t>(named.tensor.ndim);
      extents[d] = has ? named.tensor.shape[d] : 1;
      strides[d] = has ? named.tensor.stride[d] : 0;
    }
  }
  return expr::cuda_text(input);
}

}  // namespace fovea::cuda
