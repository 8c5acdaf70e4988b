// Sums of positions and lengths, comparisons of them as ends of an interval, and their products with slopes.
#include "expr/windows.hpp"

#include <algorithm>
#include <vector>

#include "expr/scalar.hpp"

namespace fovea::expr {
namespace {

/// An int as a sum: q, k, nq and nk times factors, and a number. As ints of 64 bits wrap around alike on every way to a sum, a tree that
/// comes to it has its value.
struct LinearSum {
  int64_t q = 0, k = 0, nq = 0, nk = 0, number = 0;

  bool is_number() const { return q == 0 && k == 0 && nq == 0 && nk == 0; }
  /// Whether no positions and lengths, which have 32 bits, let the sum wrap around, nor its difference with another.
  bool is_small() const {
    constexpr int64_t kMostFactor = int64_t{1} << 20, kMostNumber = int64_t{1} << 60;
    const auto within = [](int64_t x, int64_t most) { return -most <= x && x <= most; };
    return within(q, kMostFactor) && within(k, kMostFactor) && within(nq, kMostFactor) &&
           within(nk, kMostFactor) && within(number, kMostNumber);
  }
};

/// a + factor b, where that is small.
std::optional<LinearSum> sum(const LinearSum& a, int64_t factor, const LinearSum& b) {
  LinearSum result;
  bool wraps = false;
  const auto add = [&](int64_t x, int64_t y) {
    int64_t product = 0, total = 0;
    wraps =
        __builtin_mul_overflow(factor, y, &product) || __builtin_add_overflow(x, product, &total) || wraps;
    return total;
  };
  result = {add(a.q, b.q), add(a.k, b.k), add(a.nq, b.nq), add(a.nk, b.nk), add(a.number, b.number)};
  if (wraps || !result.is_small()) return std::nullopt;
  return result;
}

std::optional<LinearSum> linear(const Graph& graph, NodeId id);

std::optional<LinearSum> product(const LinearSum& a, const LinearSum& b) {
  if (b.is_number()) return sum({}, b.number, a);
  return a.is_number() ? sum({}, a.number, b) : std::nullopt;
}

std::optional<LinearSum> of_variable(Variable name) {
  switch (name) {
    case Variable::kQ:
      return LinearSum{.q = 1};
    case Variable::kK:
      return LinearSum{.k = 1};
    case Variable::kNq:
      return LinearSum{.nq = 1};
    case Variable::kNk:
      return LinearSum{.nk = 1};
    default:
      return std::nullopt;
  }
}

std::optional<LinearSum> linear(const Graph& graph, NodeId id) {
  const Node& node = graph[id];
  if (node.op == Op::kVariable) return of_variable(node.variable());
  if (node.op == Op::kInt) return sum({}, 1, {.number = node.payload});
  const bool is_sum = node.op == Op::kAdd || node.op == Op::kSubtract;
  if (node.type != Type::kInt || !(is_sum || node.op == Op::kMultiply || node.op == Op::kNegate))
    return std::nullopt;
  const std::optional<LinearSum> a = linear(graph, node.operand[0]);
  if (!a) return std::nullopt;
  if (node.op == Op::kNegate) return sum({}, -1, *a);
  const std::optional<LinearSum> b = linear(graph, node.operand[1]);
  if (!b) return std::nullopt;
  if (node.op == Op::kMultiply) return product(*a, *b);
  return sum(*a, node.op == Op::kAdd ? 1 : -1, *b);
}

/// factor d + number, with the distance d.
struct OfDistance {
  int64_t factor, number;
};

std::optional<OfDistance> of_distance(const LinearSum& s, const std::optional<KnownLengths>& lengths) {
  if (s.k == 0 || s.q != -s.k) return std::nullopt;
  if (!lengths) return s.nq == s.k && s.nk == -s.k ? std::optional(OfDistance{s.k, s.number}) : std::nullopt;
  return OfDistance{s.k, s.number + (s.nq - s.k) * lengths->nq + (s.nk + s.k) * lengths->nk};
}

/// Where factor d + number <= 0.
KeyWindow at_most_zero(const OfDistance& x) {
  // -number rounded towards the inside of the window.
  if (x.factor > 0) return {.highest = floor_quotient(-x.number, x.factor)};
  return {.lowest = -floor_quotient(-x.number, -x.factor)};
}
KeyWindow both(const KeyWindow& a, const KeyWindow& b) {
  return {std::max(a.lowest, b.lowest), std::min(a.highest, b.highest)};
}
OfDistance negated(const OfDistance& x) {
  return {-x.factor, -x.number};
}

/// Where factor d + number compares with 0 like that; nothing where that is no interval.
std::optional<KeyWindow> compared_with_zero(const OfDistance& x, Op comparison) {
  switch (comparison) {
    case Op::kLess:
      return at_most_zero({x.factor, x.number + 1});
    case Op::kLessEqual:
      return at_most_zero(x);
    case Op::kGreater:
      return at_most_zero({-x.factor, 1 - x.number});
    case Op::kGreaterEqual:
      return at_most_zero(negated(x));
    case Op::kEqual:
      return both(at_most_zero(x), at_most_zero(negated(x)));
    default:
      return std::nullopt;
  }
}

class Splitter {
 public:
  Splitter(const Expression& sees, const std::optional<KnownLengths>& lengths)
      : rest_(sees), lengths_(lengths) {}

  WindowAndRest run() {
    take(rest_.root, false);
    if (rest_terms_.empty()) return {window_, std::nullopt};
    rest_.root = rest_terms_.front();
    for (size_t i = 1; i < rest_terms_.size(); ++i)
      rest_.root = rest_.graph.make(Op::kAnd, {rest_.root, rest_terms_[i]});
    return {window_, compact(rest_)};
  }

 private:
  /// Takes a term of the conjunction, or what it is not.
  void take(NodeId id, bool is_not) {
    const Node node = rest_.graph[id];  // a copy: terms that stay may be new nodes
    if (node.op == Op::kNot) return take(node.operand[0], !is_not);
    if (node.op == (is_not ? Op::kOr : Op::kAnd)) {
      take(node.operand[0], is_not);
      return take(node.operand[1], is_not);
    }
    const std::optional<KeyWindow> window =
        is_comparison(node.op) ? compared(node, is_not ? opposite(node.op) : node.op) : std::nullopt;
    if (window && window->lowest <= 0 && window->highest >= 0) {
      window_ = both(window_, *window);
    } else {
      rest_terms_.push_back(is_not ? rest_.graph.make(Op::kNot, {id}) : id);
    }
  }

  std::optional<KeyWindow> compared(const Node& node, Op comparison) const {
    const Graph& graph = rest_.graph;
    const Node &left = graph[node.operand[0]], &right = graph[node.operand[1]];
    if (left.type != Type::kInt || right.type != Type::kInt) return std::nullopt;
    if (left.op == Op::kAbs) return absolute(left, node.operand[1], comparison);
    if (right.op == Op::kAbs) {
      // c >= |x| says |x| <= c, and so on: -|x| compared with -c.
      if (comparison == Op::kGreaterEqual) return absolute(right, node.operand[0], Op::kLessEqual);
      if (comparison == Op::kGreater) return absolute(right, node.operand[0], Op::kLess);
      return std::nullopt;
    }
    const auto a = linear(graph, node.operand[0]), b = linear(graph, node.operand[1]);
    const auto difference = a && b ? sum(*a, -1, *b) : std::nullopt;
    const auto x = difference ? of_distance(*difference, lengths_) : std::nullopt;
    return x ? compared_with_zero(*x, comparison) : std::nullopt;
  }

  /// |x| compared with a number: both x and -x are.
  std::optional<KeyWindow> absolute(const Node& abs, NodeId other, Op comparison) const {
    if (comparison != Op::kLess && comparison != Op::kLessEqual) return std::nullopt;
    const auto inside = linear(rest_.graph, abs.operand[0]), most = linear(rest_.graph, other);
    if (!inside || !most || !most->is_number()) return std::nullopt;
    const auto x = of_distance(*inside, lengths_);
    if (!x) return std::nullopt;
    const OfDistance above = {x->factor, x->number - most->number},
                     below = {-x->factor, -x->number - most->number};
    return both(*compared_with_zero(above, comparison), *compared_with_zero(below, comparison));
  }

  Expression rest_;
  std::optional<KnownLengths> lengths_;
  KeyWindow window_;
  std::vector<NodeId> rest_terms_;
};

/// What is left of a node without signs, and whether they make it negative.
struct Signed {
  NodeId id;
  bool negative;
};
Signed without_signs(const Graph& graph, NodeId id) {
  bool negative = false;
  while (graph[id].op == Op::kNegate) {
    id = graph[id].operand[0];
    negative = !negative;
  }
  return {id, negative};
}

/// Takes a sum apart into s and a product.
class SlopeFinder {
 public:
  SlopeFinder(const Expression& score, const std::optional<KnownLengths>& lengths, bool causal)
      : graph_(score.graph), root_(score.root), lengths_(lengths), causal_(causal) {}

  std::optional<Slopes> run() const {
    const Node& sum = graph_[root_];
    if (sum.op != Op::kAdd && sum.op != Op::kSubtract) return std::nullopt;
    if (is_s(sum.operand[0])) return product(sum.operand[1], sum.op == Op::kSubtract);
    return sum.op == Op::kAdd && is_s(sum.operand[1]) ? product(sum.operand[0], false) : std::nullopt;
  }

 private:
  bool is_s(NodeId id) const {
    return graph_[id].op == Op::kVariable && graph_[id].variable() == Variable::kS;
  }
  std::optional<Slopes> product(NodeId id, bool negative) const {
    const Signed whole = without_signs(graph_, id);
    const Node& node = graph_[whole.id];
    if (node.op != Op::kMultiply) return std::nullopt;
    for (const size_t slope : {0u, 1u}) {
      const Signed left = without_signs(graph_, node.operand[slope]),
                   right = without_signs(graph_, node.operand[1 - slope]);
      const std::optional<Slopes> found = elements(graph_[left.id]);
      const bool falls = negative != (whole.negative != (left.negative != right.negative));
      if (found && is_distance(right.id, falls)) return found;
    }
    return std::nullopt;
  }
  std::optional<Slopes> elements(const Node& node) const {
    if (node.op != Op::kTensor) return std::nullopt;
    const auto is_name = [&](size_t d, Variable name) {
      const Node& index = graph_[node.operand[d]];
      return index.op == Op::kVariable && index.variable() == name;
    };
    if (node.operand_count == 1 && is_name(0, Variable::kH)) return Slopes{node.tensor(), false};
    if (node.operand_count == 2 && is_name(0, Variable::kB) && is_name(1, Variable::kH))
      return Slopes{node.tensor(), true};
    return std::nullopt;
  }
  /// Whether slope times the node, subtracted where it `falls` and else added, is -slope |distance|.
  bool is_distance(NodeId id, bool falls) const {
    bool absolute = false;
    while (graph_[id].op == Op::kAbs || graph_[id].op == Op::kToFloat) {
      absolute = absolute || graph_[id].op == Op::kAbs;
      id = graph_[id].operand[0];
    }
    const Signed inner = without_signs(graph_, id);
    const auto sum = linear(graph_, inner.id);
    const auto x = sum ? of_distance(*sum, lengths_) : std::nullopt;
    if (!x || x->number != 0 || (x->factor != 1 && x->factor != -1)) return false;
    if (absolute) return falls;
    // Distances are at most 0: as they are they fall with their absolute value.
    const bool is_negative = (x->factor == -1) != inner.negative;
    return causal_ && is_negative == falls;
  }

  const Graph& graph_;
  NodeId root_;
  std::optional<KnownLengths> lengths_;
  bool causal_;
};

}  // namespace

std::optional<Slopes> slopes_of(const Expression& score, const std::optional<KnownLengths>& lengths,
                                bool causal) {
  return SlopeFinder(score, lengths, causal).run();
}

WindowAndRest split_window(const Expression& sees, const std::optional<KnownLengths>& lengths) {
  return Splitter(sees, lengths).run();
}

}  // namespace fovea::expr
