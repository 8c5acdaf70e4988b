// Derivatives of a score, as trees of the same graph.
//
// With u' for the derivative of u by the variable:
//
//   (u + v)' = u' + v'      (u * v)' = u' * v + u * v'      (u / v)' = u' / v - u / v * (v' / v)
//   exp(u)' = exp(u) * u'   log(u)' = u' / u                tanh(u)' = (1 - tanh(u) * tanh(u)) * u'
//   sqrt(u)' = 0.5 / sqrt(u) * u'                           where(c, u, v)' = where(c, u', v')
//
// Where a function has a kink or a step, the derivative is one of those on its sides:
//
//   abs(u)            0 at u == 0
//   min, max, clamp   that of the first operand where operands are equal: clamp(u, a, b)' = u' at u == a and u == b
//   floor, where      the step itself has no derivative: floor(u)' = 0
//
// What does not depend on the variable has the derivative 0, even where its value is infinite or NaN: the derivative of
// s * 0 + x by s is 0 for every x. Ints do not depend on any variable. Inside a product of the chain rule the usual
// arithmetic holds: the derivative of tanh(s / 0.0) is 0 * infinity, NaN.
#pragma once

#include <vector>

#include "expr/graph.hpp"

namespace fovea::expr {

/// Adds the derivative of `root` by the node `variable` (s, or an element of a float tensor) to the graph.
NodeId differentiate(Graph& graph, NodeId root, NodeId variable);

/// An expression and its derivative by s, in one graph, so that both share what they can.
struct ScoreDerivative {
  Expression score;
  NodeId by_s = kNoNode;
};
ScoreDerivative differentiate_by_s(const Expression& score);
/// Whether the derivative by s is 1 everywhere.
bool slope_is_one(const Expression& score);

/// The derivative of the score by one element that it reads: a backward pass adds it, times the gradient of the score,
/// to the gradient of the tensor at the element's index. A score that reads a tensor at two places has one for each.
struct ElementDerivative {
  NodeId element = kNoNode;  ///< the node of the tensor; its operands are the index
  NodeId derivative = kNoNode;
};
/// Those of the elements of float tensor number `tensor` on which the score depends.
std::vector<ElementDerivative> differentiate_by_elements(Expression& score, size_t tensor);

}  // namespace fovea::expr
