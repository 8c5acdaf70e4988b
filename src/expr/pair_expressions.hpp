// The expressions of a problem.
#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "expr/graph.hpp"

namespace fovea::expr {

/// Both declare the same tensors, in the order of the problem's.
struct PairExpressions {
  std::optional<Expression> score, sees;
  /// Whether they say the problem's softcap, slopes, bias and masks as well (problem_terms.hpp).
  bool has_terms = false;
};

/// The name that indexes dimension `d` of an element alone, if any: `h` of table[h, k - q] in dimension 0.
inline std::optional<Variable> index_name(const Graph& graph, const Node& element, size_t d) {
  const Node& index = graph[element.operand[d]];
  if (index.op != Op::kVariable) return std::nullopt;
  return index.variable();
}

/// Calls visit(graph, node) for each element that the expression reads.
template <class Visit>
void for_each_element(const Expression& expression, Visit&& visit) {
  const std::vector<bool> needed = needed_by(expression.graph, expression.root);
  for (NodeId id = 0; id < needed.size(); ++id) {
    if (needed[id] && expression.graph[id].op == Op::kTensor) visit(expression.graph, expression.graph[id]);
  }
}

/// Whether the expression has one of the names.
inline bool depends_on(const Expression& expression, std::initializer_list<Variable> names) {
  const std::vector<bool> needed = needed_by(expression.graph, expression.root);
  for (NodeId id = 0; id < needed.size(); ++id) {
    const Node& node = expression.graph[id];
    if (!needed[id] || node.op != Op::kVariable) continue;
    for (const Variable name : names)
      if (node.variable() == name) return true;
  }
  return false;
}

}  // namespace fovea::expr
