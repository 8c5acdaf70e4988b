// The tree of an expression. Equal subtrees are one node, so that a kernel computes each of them once.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/dtype.hpp"
#include "expr/operation.hpp"

namespace fovea::expr {

/// As many as a tensor (b, h, q, k) has dimensions; no operation has more operands.
inline constexpr int kMaxRank = 4;

/// A node's place in its graph.
using NodeId = uint32_t;
inline constexpr NodeId kNoNode = ~NodeId{0};

/// A tensor that expressions may read. Its extents and values belong to a run, so that the same tree serves all lengths.
struct TensorDeclaration {
  std::string name;
  DType dtype = DType::kF32;
  int rank = 0;
  friend bool operator==(const TensorDeclaration&, const TensorDeclaration&) = default;
};
constexpr bool is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

struct Node {
  Op op = Op::kInt;
  Type type = Type::kInt;
  uint8_t operand_count = 0;
  std::array<NodeId, kMaxRank> operand{};
  /// The value of an int or a bool, the bits of a float, the Variable, or the place of the tensor among the declarations.
  int64_t payload = 0;

  std::span<const NodeId> operands() const { return {operand.data(), operand_count}; }
  double as_float() const { return std::bit_cast<double>(payload); }
  Variable variable() const { return static_cast<Variable>(payload); }
  size_t tensor() const { return static_cast<size_t>(payload); }
  /// Floats are equal when their bits are, so that -0.0 and 0.0 are different nodes.
  friend bool operator==(const Node&, const Node&) = default;
};

/// Nodes in one vector. Operands stand before the nodes that use them, so that one pass in the order of ids visits
/// operands first.
class Graph {
 public:
  explicit Graph(bool simplifying = true) : simplifying_(simplifying) {}

  const Node& operator[](NodeId id) const { return nodes_[id]; }
  size_t size() const { return nodes_.size(); }
  const std::vector<Node>& nodes() const { return nodes_; }
  bool simplifying() const { return simplifying_; }

  /// A node as it is; its operands are nodes of this graph.
  NodeId add(const Node& node);

  NodeId number(double value);
  NodeId integer(int64_t value);
  NodeId boolean(bool value);
  NodeId variable(Variable v);
  NodeId tensor(size_t place, DType dtype, std::span<const NodeId> index);
  /// An operation over operands whose types it accepts (type_fault). Converts ints to float where it has to, and
  /// simplifies unless the graph was made without.
  NodeId make(Op op, std::span<const NodeId> operands);
  NodeId make(Op op, std::initializer_list<NodeId> operands) {
    return make(op, std::span<const NodeId>(operands.begin(), operands.size()));
  }
  /// The node itself when it is no int.
  NodeId to_float(NodeId id);

 private:
  /// A node that has the same value for every pair, NaN and infinities included, or kNoNode (simplify.cpp).
  NodeId simplified(const Node& node);
  NodeId folded(const Node& node);

  struct Hash {
    size_t operator()(const Node& node) const;
  };
  bool simplifying_;
  std::vector<Node> nodes_;
  std::unordered_map<Node, NodeId, Hash> places_;
};

/// An expression: its nodes, and which of them is the whole.
struct Expression {
  Use use = Use::kScore;
  std::vector<TensorDeclaration> tensors;
  Graph graph;
  NodeId root = kNoNode;

  /// Equal texts up to spaces, parentheses and what simplification does. Both sides are compact.
  friend bool operator==(const Expression& a, const Expression& b) {
    return a.use == b.use && a.tensors == b.tensors && a.root == b.root && a.graph.nodes() == b.graph.nodes();
  }
};

/// The same expression without the nodes that its root does not need, in the order of a walk that visits operands
/// first: equal trees have equal vectors.
Expression compact(const Expression& expression);
/// For each node, whether `root` depends on it or is it.
std::vector<bool> needed_by(const Graph& graph, NodeId root);

}  // namespace fovea::expr
