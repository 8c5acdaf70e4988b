// Leaves a problem with expressions alone.
#include "cpu/terms_in_expressions.hpp"

#include <memory>
#include <utility>

#include "expr/pair_expressions.hpp"
#include "expr/problem_terms.hpp"

namespace fovea::cpu {
namespace {

/// The score that is s.
expr::Expression unchanged_score(const std::vector<expr::TensorDeclaration>& tensors) {
  expr::Expression score;
  score.use = expr::Use::kScore;
  score.tensors = tensors;
  score.root = score.graph.variable(expr::Variable::kS);
  return score;
}

/// With a negative scale the largest product is the smallest score, so that the scale is a part of the score.
void scale_in_score(AttentionProblem& p) {
  expr::PairExpressions all;
  if (p.expressions) all = *p.expressions;
  if (all.score) return;
  all.score = unchanged_score(all.sees ? all.sees->tensors : std::vector<expr::TensorDeclaration>{});
  p.expressions = std::make_shared<const expr::PairExpressions>(std::move(all));
}

}  // namespace

AttentionProblem with_terms_in_expressions(const AttentionProblem& problem) {
  AttentionProblem p = *expr::with_terms_in_expressions(problem, kMaxTermTensors);
  if (p.has(Role::kDBias)) {
    for (NamedTensor& named : p.named) {
      if (named.place != index_of(Role::kBias)) continue;
      named.gradient = p[Role::kDBias];
      named.gradient_place = index_of(Role::kDBias);
    }
  }
  for (const Role role : {Role::kAlibi, Role::kBias, Role::kDBias, Role::kMask, Role::kBlockMask})
    p.tensors[index_of(role)].present = false;
  p.softcap = 0;
  if (p.scale <= 0) scale_in_score(p);
  return p;
}

}  // namespace fovea::cpu
