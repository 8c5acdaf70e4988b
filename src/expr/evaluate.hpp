// The value of an expression for one pair, in float64: what every backend is compared with.
//
// A pair is not valid when its value needs ints that are divided by zero, or an element outside its tensor. Its score is NaN, and it is
// not seen. The choices that where, && and || do not take are not needed: `k < n && table[k] != 0` reads no element
// outside a table of n.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "expr/graph.hpp"
#include "expr/scalar.hpp"

namespace fovea::expr {

/// One query and one key. Positions and lengths are those inside their sequence.
struct Pair {
  double s = 0;
  int64_t b = 0, h = 0, hk = 0, q = 0, k = 0, nq = 0, nk = 0;
};

/// The elements of tensors. Every element type is exact in a double.
class TensorReader {
 public:
  virtual ~TensorReader() = default;
  /// Nothing when the index is outside the tensor.
  virtual std::optional<double> read(size_t tensor, std::span<const int64_t> index) const = 0;
};

/// Evaluates one expression for many pairs, without memory of its own for each. One thread at a time.
class Evaluator {
 public:
  /// Both outlive the evaluator. Without a reader every element is outside its tensor.
  explicit Evaluator(const Expression& expression, const TensorReader* tensors = nullptr);

  Value value(const Pair& pair) { return value(expression_.root, pair); }
  /// Of any node of the expression's graph, such as a derivative, which may be newer than the evaluator.
  Value value(NodeId root, const Pair& pair);
  /// NaN when the pair is not valid.
  double score(const Pair& pair) { return score(expression_.root, pair); }
  double score(NodeId root, const Pair& pair);
  /// Whether the query sees the key; false when the pair is not valid.
  bool sees(const Pair& pair);

 private:
  Value leaf(const Node& node, const Pair& pair) const;
  Value element(const Node& node) const;

  const Expression& expression_;
  const TensorReader* tensors_;
  std::vector<Value> values_;
};

}  // namespace fovea::expr
