// Builds the trees of a problem's terms, and takes windows out of trees.
#include "expr/problem_terms.hpp"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "expr/pair_expressions.hpp"
#include "expr/windows.hpp"

namespace fovea::expr {
namespace {

/// An expression under construction.
class Builder {
 public:
  Builder(Use use, const std::vector<TensorDeclaration>& tensors, const std::vector<NamedTensor>& named)
      : named_(named) {
    built_.use = use;
    built_.tensors = tensors;
  }

  Graph& graph() { return built_.graph; }
  NodeId name(Variable v) { return graph().variable(v); }

  /// An element of the tensor in this place. Where a dimension broadcasts its index is 0, so that nothing seems to depend on
  /// what it does not.
  NodeId element(size_t tensor, std::initializer_list<NodeId> index) {
    std::vector<NodeId> at(index);
    for (size_t d = 0; d < at.size(); ++d)
      if (named_[tensor].tensor.stride[d] == 0) at[d] = graph().integer(0);
    return graph().tensor(tensor, built_.tensors[tensor].dtype, at);
  }
  NodeId of_pair(size_t tensor) {
    return element(tensor, {name(Variable::kB), name(Variable::kH), name(Variable::kQ), name(Variable::kK)});
  }

  /// The nodes of another expression over the same tensors, with `s` in the place of its s.
  NodeId append(const Expression& other, NodeId s) {
    std::vector<NodeId> places;
    for (const Node& from : other.graph.nodes()) {
      if (from.op == Op::kVariable && from.variable() == Variable::kS) {
        places.push_back(s);
        continue;
      }
      Node node = from;
      for (size_t i = 0; i < node.operand_count; ++i) node.operand[i] = places[node.operand[i]];
      places.push_back(graph().add(node));
    }
    return places[other.root];
  }

  Expression finish(NodeId root) {
    built_.root = root;
    return compact(built_);
  }

 private:
  Expression built_;
  const std::vector<NamedTensor>& named_;
};

/// Adds a tensor of the problem to its named tensors; its place among them.
size_t add_tensor(AttentionProblem& p, Role role) {
  NamedTensor named;
  named.name = name_of(role);
  named.tensor = p[role];
  named.place = index_of(role);
  p.named.push_back(named);
  return p.named.size() - 1;
}

/// The score before the user's.
NodeId add_score_terms(Builder& to, const AttentionProblem& p, std::optional<size_t> alibi,
                       std::optional<size_t> bias) {
  Graph& g = to.graph();
  NodeId s = to.name(Variable::kS);
  if (p.softcap > 0) {
    const NodeId cap = g.number(p.softcap);
    s = g.make(Op::kMultiply, {cap, g.make(Op::kTanh, {g.make(Op::kDivide, {s, cap})})});
  }
  if (alibi) {
    const NodeId position =
        g.make(Op::kSubtract,
               {g.make(Op::kAdd, {to.name(Variable::kQ), to.name(Variable::kNk)}), to.name(Variable::kNq)});
    const NodeId distance = g.make(Op::kAbs, {g.make(Op::kSubtract, {position, to.name(Variable::kK)})});
    const NodeId slope = to.element(*alibi, {to.name(Variable::kB), to.name(Variable::kH)});
    s = g.make(Op::kSubtract, {s, g.make(Op::kMultiply, {slope, distance})});
  }
  if (bias) s = g.make(Op::kAdd, {s, to.of_pair(*bias)});
  return s;
}

NodeId add_sees_terms(Builder& to, const AttentionProblem& p, std::optional<size_t> mask,
                      std::optional<size_t> block_mask) {
  Graph& g = to.graph();
  const auto is_set = [&](NodeId element) { return g.make(Op::kNotEqual, {element, g.integer(0)}); };
  NodeId sees = g.boolean(true);
  if (mask) sees = g.make(Op::kAnd, {sees, is_set(to.of_pair(*mask))});
  if (block_mask) {
    const NodeId row = g.make(Op::kDivide, {to.name(Variable::kQ), g.integer(p.block_q)});
    const NodeId column = g.make(Op::kDivide, {to.name(Variable::kK), g.integer(p.block_k)});
    const NodeId element =
        to.element(*block_mask, {to.name(Variable::kB), to.name(Variable::kH), row, column});
    sees = g.make(Op::kAnd, {sees, is_set(element)});
  }
  return sees;
}

/// The closer one of two ends of a window, of which the first may be -1, none. One as far as the sequence is long is none.
int64_t closer_end(int64_t window, int64_t end, int64_t length) {
  if (end >= length) return window;
  return window < 0 ? end : std::min(window, end);
}

/// Of all sequences, where they are the same.
std::optional<KnownLengths> known_lengths(const AttentionProblem& p) {
  const bool differ = p.packed || p.packed_k || p.appends() || p.has(Role::kSeqUsedQ) ||
                      p.has(Role::kSeqUsedK) || p.has(Role::kLeftPadK);
  if (differ) return std::nullopt;
  return KnownLengths{p.seqlen_q, p.seqlen_k};
}

}  // namespace

std::optional<AttentionProblem> with_terms_in_expressions(const AttentionProblem& problem,
                                                          size_t most_tensors) {
  AttentionProblem p = problem;
  const auto add = [&](Role role) -> std::optional<size_t> {
    if (!p.has(role)) return std::nullopt;
    return add_tensor(p, role);
  };
  const auto alibi = add(Role::kAlibi), bias = add(Role::kBias), mask = add(Role::kMask),
             block_mask = add(Role::kBlockMask);
  const bool has_score = p.softcap > 0 || alibi || bias, has_sees = mask || block_mask;
  if (!has_score && !has_sees) return p;
  if (p.named.size() > most_tensors) return std::nullopt;
  std::vector<TensorDeclaration> tensors;
  for (NamedTensor& named : p.named) {
    if (named.tensor.dtype == DType::kBool) named.tensor.dtype = DType::kU8;  // expressions know bytes
    tensors.push_back({named.name, named.tensor.dtype, named.tensor.ndim});
  }
  PairExpressions all;
  if (problem.expressions) all = *problem.expressions;
  const auto compose = [&](std::optional<Expression>& user, Use use, auto&& add_terms, bool has) {
    if (user) user->tensors = tensors;
    if (!has) return;
    Builder to(use, tensors, p.named);
    NodeId root = add_terms(to);
    if (user) {
      const NodeId theirs = to.append(*user, root);
      root = use == Use::kScore ? theirs : to.graph().make(Op::kAnd, {root, theirs});
    }
    user = to.finish(root);
  };
  compose(
      all.score, Use::kScore, [&](Builder& to) { return add_score_terms(to, p, alibi, bias); }, has_score);
  compose(
      all.sees, Use::kSees, [&](Builder& to) { return add_sees_terms(to, p, mask, block_mask); }, has_sees);
  all.has_terms = true;
  p.expressions = std::make_shared<const PairExpressions>(std::move(all));
  return p;
}

AttentionProblem with_windows(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  if (!p.expressions || !p.expressions->sees) return p;
  WindowAndRest split = split_window(*p.expressions->sees, known_lengths(p));
  if (split.window == KeyWindow{}) return p;
  p.window_left = closer_end(p.window_left, -split.window.lowest, p.seqlen_k);
  p.window_right = closer_end(p.window_right, split.window.highest, p.seqlen_q);
  auto expressions = std::make_shared<PairExpressions>(*p.expressions);
  expressions->sees = std::move(split.rest);
  p.expressions = expressions->sees || expressions->score ? std::move(expressions) : nullptr;
  return p;
}

AttentionProblem with_slopes(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  if (!p.expressions || !p.expressions->score || p.expressions->sees || p.has(Role::kAlibi) ||
      p.has(Role::kBias))
    return p;
  const auto slopes = slopes_of(*p.expressions->score, known_lengths(p), p.window_right == 0);
  if (!slopes) return p;
  const NamedTensor& named = p.named[slopes->tensor];
  const size_t heads = slopes->by_batch ? 1 : 0;
  const bool learns = std::any_of(p.named.begin(), p.named.end(),
                                  [](const NamedTensor& tensor) { return tensor.gradient.present; });
  // A dimension of one element stands for all; one of fewer than there are indices is read outside of.
  const auto serves = [&](size_t d, int64_t count) {
    return named.tensor.shape[d] == 1 || named.tensor.shape[d] >= count;
  };
  if (named.tensor.dtype != DType::kF32 || learns || !serves(heads, p.heads_q) ||
      (slopes->by_batch && !serves(0, p.batch)))
    return p;
  const auto stride_of = [&](size_t d) { return named.tensor.shape[d] == 1 ? 0 : named.tensor.stride[d]; };
  TensorDesc& alibi = p.tensors[index_of(Role::kAlibi)];
  alibi = named.tensor;
  alibi.ndim = 2;
  alibi.shape = {p.batch, p.heads_q};
  alibi.stride = {slopes->by_batch ? stride_of(0) : 0, stride_of(heads)};
  p.named_slopes = static_cast<int>(slopes->tensor);
  p.expressions = nullptr;
  return p;
}

}  // namespace fovea::expr
