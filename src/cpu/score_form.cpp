// Recognises forms in trees.
#include "cpu/score_form.hpp"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "cpu/lowering.hpp"
#include "expr/differentiate.hpp"
#include "expr/pair_expressions.hpp"

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

/// Elements that names or constants index, k one dimension at most, in which they lie one behind the other; all of them exist. `by_key` tells
/// whether k does.
std::optional<KeyElements> indexed_elements(const AttentionProblem& p, const expr::Graph& graph,
                                            const Node& node, const TensorDesc& t, bool& by_key) {
  KeyElements found{node.tensor(), t.dtype};
  by_key = false;
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
  return found;
}

/// The same of those that k indexes.
std::optional<KeyElements> elements_of(const AttentionProblem& p, const expr::Graph& graph, const Node& node,
                                       const TensorDesc& t) {
  bool by_key = false;
  const auto found = indexed_elements(p, graph, node, t, by_key);
  return by_key ? found : std::nullopt;
}

/// A score taken apart into s and what is added to it.
class Parts {
 public:
  Parts(const AttentionProblem& p, const expr::Expression& score) : p_(p), rest_(score) {
    const expr::Graph& graph = score.graph;
    known_.resize(graph.size());
    by_head_.resize(graph.size());
    for (NodeId id = 0; id < graph.size(); ++id) {
      known_[id] = growth_of(graph, id, known_);
      by_head_[id] = is_by_head(graph[id]);
    }
  }

  std::optional<ScoreForm> form() {
    if (p_.seqlen_q + p_.seqlen_k >= kMostPositions || !take(rest_.root)) return std::nullopt;
    return ScoreForm{part(distance_), elements_, part(factor_)};
  }

 private:
  /// Whether a node has one value for all pairs of a head.
  bool is_by_head(const Node& node) const {
    if (is_name(node, Variable::kS) || is_name(node, Variable::kQ) || is_name(node, Variable::kK))
      return false;
    const auto operands = node.operands();
    return std::all_of(operands.begin(), operands.end(), [&](NodeId id) { return by_head_[id]; });
  }
  std::optional<expr::Expression> part(NodeId root) {
    if (root == expr::kNoNode) return std::nullopt;
    rest_.root = root;
    return expr::compact(rest_);
  }
  /// Of a sum that holds s.
  bool take(NodeId id) {
    const Node node = rest_.graph[id];
    if (is_name(node, Variable::kS)) return true;
    if (node.op != Op::kAdd && node.op != Op::kSubtract) return false;
    if (take(node.operand[0])) return add(node.operand[1], node.op == Op::kSubtract);
    return node.op == Op::kAdd && take(node.operand[1]) && add(node.operand[0], false);
  }
  bool add(NodeId id, bool negative) {
    return known_[id] == 0 ? add_distance(id, negative) : add_elements(id, negative);
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
  bool add_elements(NodeId id, bool negative) {
    expr::Graph& graph = rest_.graph;
    if (elements_) return false;
    if (graph[id].op == Op::kNegate) return add_elements(graph[id].operand[0], !negative);
    if (graph[id].op == Op::kMultiply) {
      const auto [a, b] = std::pair(graph[id].operand[0], graph[id].operand[1]);
      if (!by_head_[a] && !by_head_[b]) return false;
      factor_ = by_head_[a] ? a : b;
      id = by_head_[a] ? b : a;
    }
    const Node node = graph[id];
    if (node.op != Op::kTensor || !expr::is_float(p_.named[node.tensor()].tensor.dtype)) return false;
    elements_ = elements_of(p_, graph, node, p_.named[node.tensor()].tensor);
    if (negative) factor_ = factor_ == expr::kNoNode ? graph.number(-1) : graph.make(Op::kNegate, {factor_});
    return elements_.has_value();
  }

  const AttentionProblem& p_;
  expr::Expression rest_;
  std::vector<std::optional<int64_t>> known_;
  std::vector<bool> by_head_;
  NodeId distance_ = expr::kNoNode, factor_ = expr::kNoNode;
  std::optional<KeyElements> elements_;
};

bool is_zero(const Node& node) {
  return (node.op == Op::kInt && node.payload == 0) || (node.op == Op::kFloat && node.as_float() == 0);
}

}  // namespace

std::optional<ScoreForm> form_of_score(const AttentionProblem& problem, const expr::Expression& score) {
  return Parts(problem, score).form();
}

std::optional<KeyElements> form_of_gradient(const AttentionProblem& p, const expr::Expression& score,
                                            size_t tensor) {
  const auto form = form_of_score(p, score);
  if (!form || !form->elements || form->elements->tensor != tensor || form->factor) return std::nullopt;
  expr::Expression with_derivatives = score;
  const auto read = expr::differentiate_by_elements(with_derivatives, tensor);
  if (read.size() != 1) return std::nullopt;
  const expr::Graph& graph = with_derivatives.graph;
  const Node& element = graph[read[0].element];
  const TensorDesc& t = p.named[tensor].gradient;
  // Names that have no dimension of their own yet.
  std::map<Variable, int64_t> names = {{Variable::kB, p.batch},
                                       {Variable::kH, p.heads_q},
                                       {Variable::kQ, p.seqlen_q},
                                       {Variable::kK, p.seqlen_k}};
  for (size_t d = 0; d < element.operand_count; ++d) {
    const auto name = expr::index_name(graph, element, d);
    const auto size = name ? names.extract(*name) : decltype(names)::node_type{};
    if (t.shape[d] != (size ? size.mapped() : 1) || (t.shape[d] > 1 && t.stride[d] == 0)) return std::nullopt;
  }
  if (std::any_of(names.begin(), names.end(), [](const auto& name) { return name.second != 1; }))
    return std::nullopt;
  return elements_of(p, graph, element, t);
}

std::optional<SeenElements> form_of_sees(const AttentionProblem& problem, const expr::Expression& sees) {
  const Node& root = sees.graph[sees.root];
  if (root.op != Op::kNotEqual && root.op != Op::kEqual) return std::nullopt;
  const Node &a = sees.graph[root.operand[0]], &b = sees.graph[root.operand[1]];
  if (!is_zero(a) && !is_zero(b)) return std::nullopt;
  const Node& element = is_zero(b) ? a : b;
  if (element.op != Op::kTensor) return std::nullopt;
  const auto elements = elements_of(problem, sees.graph, element, problem.named[element.tensor()].tensor);
  if (!elements) return std::nullopt;
  return SeenElements{*elements, root.op == Op::kEqual};
}

std::optional<SeenClasses> classes_of_sees(const AttentionProblem& problem, const expr::Expression& sees) {
  const Node& root = sees.graph[sees.root];
  if (root.op != Op::kEqual) return std::nullopt;
  std::optional<KeyElements> queries, keys;
  for (size_t i = 0; i < 2; ++i) {
    const Node& node = sees.graph[root.operand[i]];
    if (node.op != Op::kTensor) return std::nullopt;
    const TensorDesc& t = problem.named[node.tensor()].tensor;
    bool by_key = false;
    const auto found = indexed_elements(problem, sees.graph, node, t, by_key);
    if (!found || t.dtype != DType::kI32 || found->h != 0 || (by_key && found->q != 0)) return std::nullopt;
    (by_key ? keys : queries) = found;
  }
  if (!queries || !keys) return std::nullopt;
  return SeenClasses{*queries, *keys};
}

}  // namespace fovea::cpu
