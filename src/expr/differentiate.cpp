// Forward differentiation, node by node in the order of ids.
#include "expr/differentiate.hpp"

namespace fovea::expr {
namespace {

class Differentiator {
 public:
  Differentiator(Graph& graph, NodeId variable) : graph_(graph), variable_(variable) {}

  /// kNoNode stands for a derivative that is 0 everywhere. No term is made of it, so that 0 never meets an infinity.
  NodeId of(NodeId root) {
    if (variable_ > root) return kNoNode;  // operands stand before what uses them
    const std::vector<bool> needed = needed_by(graph_, root);
    derivatives_.assign(root + 1, kNoNode);
    for (NodeId id = variable_; id <= root; ++id) {
      if (needed[id] && graph_[id].type == Type::kFloat) derivatives_[id] = derivative(id);
    }
    return derivatives_[root];
  }

 private:
  NodeId make(Op op, std::initializer_list<NodeId> operands) { return graph_.make(op, operands); }
  NodeId or_zero(NodeId d) { return d == kNoNode ? graph_.number(0.0) : d; }

  NodeId sum(NodeId a, NodeId b) {
    if (a == kNoNode) return b;
    return b == kNoNode ? a : make(Op::kAdd, {a, b});
  }
  NodeId difference(NodeId a, NodeId b) {
    if (b == kNoNode) return a;
    return a == kNoNode ? make(Op::kNegate, {b}) : make(Op::kSubtract, {a, b});
  }
  NodeId product(NodeId a, NodeId b) { return b == kNoNode ? kNoNode : make(Op::kMultiply, {a, b}); }
  NodeId choice(NodeId condition, NodeId a, NodeId b) {
    if (a == kNoNode && b == kNoNode) return kNoNode;
    return make(Op::kWhere, {condition, or_zero(a), or_zero(b)});
  }

  NodeId derivative(NodeId id) {
    if (id == variable_) return graph_.number(1.0);
    const Node node = graph_[id];  // a copy: new nodes move the others
    const auto u = node.operand;
    const auto d = [&](size_t i) { return node.operand_count > i ? derivatives_[u[i]] : kNoNode; };
    switch (node.op) {
      case Op::kNegate:
        return difference(kNoNode, d(0));
      case Op::kAdd:
        return sum(d(0), d(1));
      case Op::kSubtract:
        return difference(d(0), d(1));
      case Op::kMultiply:
        return sum(product(u[1], d(0)), product(u[0], d(1)));
      case Op::kDivide: {
        const NodeId first = d(0) == kNoNode ? kNoNode : make(Op::kDivide, {d(0), u[1]});
        const NodeId second = d(1) == kNoNode ? kNoNode : make(Op::kDivide, {d(1), u[1]});
        return difference(first, product(id, second));
      }
      case Op::kWhere:
        return choice(u[0], d(1), d(2));
      case Op::kMin:
        return choice(make(Op::kLess, {u[1], u[0]}), d(1), d(0));
      case Op::kMax:
        return choice(make(Op::kGreater, {u[1], u[0]}), d(1), d(0));
      case Op::kClamp: {
        const NodeId raised = make(Op::kMax, {u[0], u[1]});
        const NodeId below = choice(make(Op::kLess, {u[0], u[1]}), d(1), d(0));
        return choice(make(Op::kGreater, {raised, u[2]}), d(2), below);
      }
      default:
        return d(0) == kNoNode ? kNoNode : of_function(node.op, id, u[0], d(0));
    }
  }

  /// Functions of one operand.
  NodeId of_function(Op op, NodeId id, NodeId u, NodeId d) {
    const NodeId zero = graph_.number(0.0);
    switch (op) {
      case Op::kAbs: {
        const NodeId below = make(Op::kWhere, {make(Op::kLess, {u, zero}), make(Op::kNegate, {d}), zero});
        return make(Op::kWhere, {make(Op::kGreater, {u, zero}), d, below});
      }
      case Op::kExp:
        return product(id, d);
      case Op::kLog:
        return make(Op::kDivide, {d, u});
      case Op::kTanh: {
        const NodeId square = make(Op::kMultiply, {id, id});
        return product(make(Op::kSubtract, {graph_.number(1.0), square}), d);
      }
      case Op::kSqrt:
        return product(make(Op::kDivide, {graph_.number(0.5), id}), d);
      default:
        return kNoNode;  // floor
    }
  }

  Graph& graph_;
  NodeId variable_;
  std::vector<NodeId> derivatives_;
};

}  // namespace

NodeId differentiate(Graph& graph, NodeId root, NodeId variable) {
  const NodeId derivative = Differentiator(graph, variable).of(root);
  return derivative == kNoNode ? graph.number(0.0) : derivative;
}

ScoreDerivative differentiate_by_s(const Expression& score) {
  ScoreDerivative result{score, kNoNode};
  Graph& graph = result.score.graph;
  result.by_s = differentiate(graph, score.root, graph.variable(Variable::kS));
  return result;
}

std::vector<ElementDerivative> differentiate_by_elements(Expression& score, size_t tensor) {
  const std::vector<bool> needed = needed_by(score.graph, score.root);
  std::vector<ElementDerivative> all;
  for (NodeId id = 0; id <= score.root; ++id) {
    const Node& node = score.graph[id];
    if (!needed[id] || node.op != Op::kTensor || node.tensor() != tensor || node.type != Type::kFloat)
      continue;
    all.push_back({id, differentiate(score.graph, score.root, id)});
  }
  return all;
}

bool slope_is_one(const Expression& score) {
  const ScoreDerivative derivative = differentiate_by_s(score);
  const Node& by_s = derivative.score.graph[derivative.by_s];
  return by_s.op == Op::kFloat && by_s.as_float() == 1.0;
}

}  // namespace fovea::expr
