// Nodes are made here, once each.
#include "expr/graph.hpp"

#include <algorithm>

namespace fovea::expr {

size_t Graph::Hash::operator()(const Node& node) const {
  uint64_t hash = static_cast<uint64_t>(node.payload) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(node.op);
  for (const NodeId id : node.operands()) hash = (hash ^ (hash >> 29)) * 0xbf58476d1ce4e5b9u + id;
  return static_cast<size_t>(hash ^ (hash >> 32));
}

NodeId Graph::add(const Node& node) {
  const auto [place, is_new] = places_.try_emplace(node, static_cast<NodeId>(nodes_.size()));
  if (is_new) nodes_.push_back(node);
  return place->second;
}

NodeId Graph::number(double value) {
  return add({Op::kFloat, Type::kFloat, 0, {}, std::bit_cast<int64_t>(value)});
}

NodeId Graph::integer(int64_t value) {
  return add({Op::kInt, Type::kInt, 0, {}, value});
}

NodeId Graph::boolean(bool value) {
  return add({Op::kBool, Type::kBool, 0, {}, value ? 1 : 0});
}

NodeId Graph::variable(Variable v) {
  return add({Op::kVariable, type_of(v), 0, {}, static_cast<int64_t>(v)});
}

NodeId Graph::tensor(size_t place, DType dtype, std::span<const NodeId> index) {
  Node node{Op::kTensor,
            is_float(dtype) ? Type::kFloat : Type::kInt,
            static_cast<uint8_t>(index.size()),
            {},
            static_cast<int64_t>(place)};
  std::copy(index.begin(), index.end(), node.operand.begin());
  return add(node);
}

NodeId Graph::to_float(NodeId id) {
  return nodes_[id].type == Type::kInt ? make(Op::kToFloat, {id}) : id;
}

NodeId Graph::make(Op op, std::span<const NodeId> operands) {
  std::array<Type, kMaxRank> types{};
  for (size_t i = 0; i < operands.size(); ++i) types[i] = nodes_[operands[i]].type;
  const std::span<const Type> given(types.data(), operands.size());
  if (op == Op::kToFloat && given[0] == Type::kFloat) return operands[0];
  Node node{op, result_type(op, given), static_cast<uint8_t>(operands.size()), {}, 0};
  for (size_t i = 0; i < operands.size(); ++i) {
    const bool converts = op != Op::kToFloat && operand_type(op, given, i) == Type::kFloat;
    node.operand[i] = converts ? to_float(operands[i]) : operands[i];
  }
  if (simplifying_) {
    const NodeId simpler = simplified(node);
    if (simpler != kNoNode) return simpler;
  }
  return add(node);
}

std::vector<bool> needed_by(const Graph& graph, NodeId root) {
  std::vector<bool> needed(graph.size(), false);
  needed[root] = true;
  for (NodeId id = root + 1; id-- > 0;) {
    if (!needed[id]) continue;
    for (const NodeId operand : graph[id].operands()) needed[operand] = true;
  }
  return needed;
}

namespace {

/// Copies nodes as they are. It keeps its own stack, because a sum of many terms is a deep tree.
class Copy {
 public:
  Copy(const Graph& from, Graph& to) : from_(from), to_(to), place_(from.size(), kNoNode) {}

  NodeId of(NodeId root) {
    std::vector<NodeId> waiting = {root};
    while (!waiting.empty()) {
      const NodeId id = waiting.back();
      if (place_[id] != kNoNode) {
        waiting.pop_back();
        continue;
      }
      const auto operands = from_[id].operands();
      const auto missing = std::find_if(operands.begin(), operands.end(),
                                        [&](NodeId operand) { return place_[operand] == kNoNode; });
      if (missing != operands.end()) {
        waiting.push_back(*missing);
      } else {
        place_[id] = copied(from_[id]);
        waiting.pop_back();
      }
    }
    return place_[root];
  }

 private:
  NodeId copied(Node node) {
    for (size_t i = 0; i < node.operand_count; ++i) node.operand[i] = place_[node.operand[i]];
    return to_.add(node);
  }

  const Graph& from_;
  Graph& to_;
  std::vector<NodeId> place_;
};

}  // namespace

Expression compact(const Expression& expression) {
  Expression result{expression.use, expression.tensors, Graph(expression.graph.simplifying()), kNoNode};
  result.root = Copy(expression.graph, result.graph).of(expression.root);
  return result;
}

}  // namespace fovea::expr
