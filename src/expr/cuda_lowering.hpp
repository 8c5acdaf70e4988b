// The nodes of an expression as steps of CUDA text.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "expr/cuda_ints.hpp"
#include "expr/cuda_steps.hpp"
#include "expr/cuda_text.hpp"
#include "expr/graph.hpp"

namespace fovea::expr {

/// An element of a float tensor, for its gradient.
struct ElementGradient {
  StepId wanted, inside;  ///< bools
  StepId pointer, derivative;
};

/// An element of a 16-bit tensor for each pair, whose rows, of one query, lie in one piece.
struct PairElement {
  NodeId node;
  StepId row;   ///< the pointer to that of key 0
  StepId step;  ///< from one query's row to the next
  StepId value;
  DType dtype;
};

class CudaLowering {
 public:
  /// Both outlive the lowering. `needed` says which nodes are used.
  CudaLowering(const CudaTextInput& input, const std::vector<TensorDeclaration>& tensors, const Graph& graph,
               const std::vector<bool>& needed);

  const Steps& steps() const { return steps_; }
  /// The value of a float, NaN where the pair is not valid.
  StepId score(NodeId id);
  /// Whether a bool is true and the pair valid.
  StepId sees(NodeId id);
  ElementGradient gradient(NodeId element, NodeId derivative);
  const std::vector<PairElement>& pair_elements() const { return pair_elements_; }
  /// Whether elements are read at positions that nothing compares with the extent.
  bool reads_by(Variable position) const { return reads_[position == Variable::kK]; }

 private:
  void lower(NodeId id);
  void lower_variable(NodeId id, const Node& node);
  void lower_int(NodeId id, const Node& node);
  void lower_float(NodeId id, const Node& node);
  void lower_element(NodeId id, const Node& node);
  void lower_validity(NodeId id, const Node& node);
  StepId condition(const Node& node);
  StepId float_operation(const Node& node, const std::vector<StepId>& operands);
  StepId quotient(StepId a, StepId b, NodeId divisor);

  /// An int as float: computed in floats from the pair on, where all of its parts are floats exactly.
  StepId to_float(NodeId id);
  StepId exact_float(NodeId id);
  StepId exact_sum(const Sum& sum);
  StepId biased_difference(const SumParts& parts);
  StepId exact_total(StepId result, std::vector<std::pair<StepId, double>> terms);
  StepId exact_call(const Node& node);

  bool is_inside(const Node& element, size_t dimension);
  StepId inside(const Node& element);
  StepId pointer(const Node& element, bool gradient);
  /// Notes elements that are a PairElement.
  void note_pair_element(NodeId id, StepId pointer, StepId value);
  StepId offset(const Sum& index, size_t tensor, size_t dimension, bool gradient);

  /// The value of a node of any type.
  StepId step(NodeId id);

  const CudaTextInput& input_;
  const std::vector<TensorDeclaration>& tensors_;
  const Graph& graph_;
  Steps steps_;
  IntSteps ints_;
  std::vector<StepId> values_, valid_;
  std::vector<Sum> sums_;             ///< of ints
  std::map<StepId, NodeId> origins_;  ///< of the terms of sums
  bool reads_[2] = {};
  std::vector<PairElement> pair_elements_;
};

}  // namespace fovea::expr
