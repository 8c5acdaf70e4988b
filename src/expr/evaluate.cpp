// One pass over the nodes. All of them are computed; whether a pair is valid follows from the choices taken.
#include "expr/evaluate.hpp"

#include <limits>

namespace fovea::expr {

Evaluator::Evaluator(const Expression& expression, const TensorReader* tensors)
    : expression_(expression), tensors_(tensors), values_(expression.graph.size()) {}

Value Evaluator::leaf(const Node& node, const Pair& pair) const {
  switch (node.op) {
    case Op::kFloat:
      return {0, node.as_float()};
    case Op::kInt:
    case Op::kBool:
      return {node.payload};
    default:
      break;
  }
  switch (node.variable()) {
    case Variable::kS:
      return {0, pair.s};
    case Variable::kB:
      return {pair.b};
    case Variable::kH:
      return {pair.h};
    case Variable::kHk:
      return {pair.hk};
    case Variable::kQ:
      return {pair.q};
    case Variable::kK:
      return {pair.k};
    case Variable::kNq:
      return {pair.nq};
    case Variable::kNk:
      return {pair.nk};
  }
  return {0, 0, false};
}

Value Evaluator::element(const Node& node) const {
  std::array<int64_t, kMaxRank> index{};
  for (size_t i = 0; i < node.operand_count; ++i) {
    const Value& value = values_[node.operand[i]];
    if (!value.valid) return value;
    index[i] = value.integer;
  }
  const auto read =
      tensors_ ? tensors_->read(node.tensor(), {index.data(), node.operand_count}) : std::nullopt;
  if (!read) return {0, 0, false};
  return node.type == Type::kFloat ? Value{0, *read} : Value{static_cast<int64_t>(*read)};
}

Value Evaluator::value(NodeId root, const Pair& pair) {
  const Graph& graph = expression_.graph;
  if (values_.size() <= root) values_.resize(graph.size());
  for (NodeId id = 0; id <= root; ++id) {
    const Node& node = graph[id];
    if (node.op == Op::kTensor) {
      values_[id] = element(node);
    } else if (node.operand_count == 0) {
      values_[id] = leaf(node, pair);
    } else {
      std::array<Value, kMaxRank> operands;
      for (size_t i = 0; i < operands.size() && i < node.operand_count; ++i)
        operands[i] = values_[node.operand[i]];
      const Type type = graph[node.operand[0]].type;
      values_[id] = apply(node.op, type, {operands.data(), node.operand_count});
    }
  }
  return values_[root];
}

double Evaluator::score(NodeId root, const Pair& pair) {
  const Value result = value(root, pair);
  return result.valid ? result.number : std::numeric_limits<double>::quiet_NaN();
}

bool Evaluator::sees(const Pair& pair) {
  const Value result = value(pair);
  return result.valid && result.integer != 0;
}

}  // namespace fovea::expr
