// Recognises forms in trees.
#include "cpu/score_form.hpp"

#include <vector>

#include "cpu/lowering.hpp"

namespace fovea::cpu {
namespace {

using expr::Node, expr::NodeId, expr::Op, expr::Variable;

/// Distances of so many positions and more are no exact floats, or no 32-bit ints, at pairs that do not exist.
constexpr int64_t kMostPositions = int64_t{1} << 22;

bool is_name(const Node& node, Variable name) {
  return node.op == Op::kVariable && node.variable() == name;
}

/// By how much an int grows when q and k both grow by 1; nothing where that differs from pair to pair. What is no int, or no sum, either
/// stays as it is or is not known.
std::optional<int64_t> growth_of(const expr::Graph& graph, NodeId id,
                                 const std::vector<std::optional<int64_t>>& known) {
  const Node& node = graph[id];
  if (node.op == Op::kVariable) {
    if (node.variable() == Variable::kS) return std::nullopt;
    return node.variable() == Variable::kQ || node.variable() == Variable::kK ? 1 : 0;
  }
  const auto operand = [&](size_t i) { return known[node.operand[i]]; };
  const bool sum = node.type == expr::Type::kInt && (node.op == Op::kAdd || node.op == Op::kSubtract);
  if (sum && operand(0) && operand(1))
    return node.op == Op::kAdd ? *operand(0) + *operand(1) : *operand(0) - *operand(1);
  for (size_t i = 0; i < node.operand_count; ++i)
    if (operand(i) != 0) return std::nullopt;
  return 0;
}

/// Elements that k alone indexes in one dimension, one behind the other, and other names or constants in the others; all of them exist.
std::optional<KeyElements> elements_of(const AttentionProblem& p, const expr::Graph& graph,
                                       const Node& node) {
  if (node.op != Op::kTensor) return std::nullopt;
  const TensorDesc& t = p.named[node.tensor()].tensor;
  KeyElements found{node.tensor(), t.dtype};
  bool by_key = false;
  for (size_t d = 0; d < node.operand_count; ++d) {
    const Node& index = graph[node.operand[d]];
    int64_t last = 0;
    if (index.op == Op::kInt && index.payload >= 0) {
      last = index.payload;
      found.offset += index.payload * t.stride[d];
    } else if (index.op != Op::kVariable) {
      return std::nullopt;
    } else {
      switch (index.variable()) {
        case Variable::kB:
          last = p.batch - 1;
          found.b += t.stride[d];
          break;
        case Variable::kH:
          last = p.heads_q - 1;
          found.h += t.stride[d];
          break;
        case Variable::kHk:
          last = p.heads_kv - 1;
          found.hk += t.stride[d];
          break;
        case Variable::kQ:
          last = p.seqlen_q - 1;
          found.q += t.stride[d];
          break;
        case Variable::kK:
          if (by_key || t.stride[d] != 1) return std::nullopt;
          last = p.seqlen_k - 1;
          by_key = true;
          break;
        default:
          return std::nullopt;
      }
    }
    if (last >= t.shape[d]) return std::nullopt;
  }
  return by_key ? std::optional(found) : std::nullopt;
}

/// A score taken apart into s and what is added to it.
class Parts {
 public:
  Parts(const AttentionProblem& p, const expr::Expression& score) : p_(p), rest_(score) {
    const expr::Graph& graph = score.graph;
    known_.resize(graph.size());
    for (NodeId id = 0; id < graph.size(); ++id) known_[id] = growth_of(graph, id, known_);
  }

  std::optional<ScoreForm> form() {
    if (p_.seqlen_q + p_.seqlen_k >= kMostPositions || !take(rest_.root, true)) return std::nullopt;
    ScoreForm form{std::nullopt, elements_};
    if (distance_ != expr::kNoNode) {
      rest_.root = distance_;
      form.of_distance = expr::compact(rest_);
    }
    return form;
  }

 private:
  bool take(NodeId id, bool holds_s) {
    const Node node = rest_.graph[id];
    if (holds_s && is_name(node, Variable::kS)) return true;
    if (!holds_s && id < known_.size() && known_[id] == 0) return add_distance(id, false);
    if (!holds_s) return take_elements(node);
    if (node.op != Op::kAdd && node.op != Op::kSubtract) return false;
    if (take(node.operand[0], true)) {
      if (node.op == Op::kAdd) return take(node.operand[1], false);
      return known_[node.operand[1]] == 0 && add_distance(node.operand[1], true);
    }
    return node.op == Op::kAdd && take(node.operand[1], true) && take(node.operand[0], false);
  }
  bool add_distance(NodeId id, bool negative) {
    expr::Graph& graph = rest_.graph;
    if (distance_ == expr::kNoNode) {
      distance_ = negative ? graph.make(Op::kNegate, {id}) : id;
    } else {
      distance_ = graph.make(negative ? Op::kSubtract : Op::kAdd, {distance_, id});
    }
    return true;
  }
  bool take_elements(const Node& node) {
    if (elements_ || node.op != Op::kTensor || !expr::is_float(p_.named[node.tensor()].tensor.dtype))
      return false;
    elements_ = elements_of(p_, rest_.graph, node);
    return elements_.has_value();
  }

  const AttentionProblem& p_;
  expr::Expression rest_;
  std::vector<std::optional<int64_t>> known_;
  NodeId distance_ = expr::kNoNode;
  std::optional<KeyElements> elements_;
};

}  // namespace

std::optional<ScoreForm> form_of_score(const AttentionProblem& problem, const expr::Expression& score) {
  return Parts(problem, score).form();
}

std::optional<KeyElements> form_of_sees(const AttentionProblem& problem, const expr::Expression& sees) {
  const Node& root = sees.graph[sees.root];
  if (root.op != Op::kNotEqual) return std::nullopt;
  const Node &element = sees.graph[root.operand[0]], &zero = sees.graph[root.operand[1]];
  if (zero.op != Op::kInt || zero.payload != 0) return std::nullopt;
  const auto found = elements_of(problem, sees.graph, element);
  return found && size_of(found->dtype) == 1 ? found : std::nullopt;
}

}  // namespace fovea::cpu
