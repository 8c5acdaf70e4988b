// What float32 may make of an expression for one pair: ints as they are, floats as ranges that contain every rounding.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "expr/evaluate.hpp"
#include "expr/graph.hpp"
#include "expr/range.hpp"

namespace fovea::expr {

class PointRanges {
 public:
  PointRanges(const Expression& expression, const TensorReader& tensors)
      : expression_(expression), tensors_(tensors), exact_(expression, &tensors) {}

  /// A range that is `invalid` is certain to be, unless a comparison is undecided.
  Range range(NodeId root, const Pair& pair) {
    const Graph& graph = expression_.graph;
    ranges_.assign(graph.size(), Range{});
    undecided_.assign(graph.size(), false);
    exact_.value(root, pair);
    for (NodeId id = 0; id <= root; ++id) {
      ranges_[id] = of(id, pair);
      for (const NodeId operand : graph[id].operands())
        undecided_[id] = undecided_[id] || undecided_[operand];
      if (graph[id].type != Type::kFloat && ranges_[id].integer.lowest != ranges_[id].integer.highest)
        undecided_[id] = true;
    }
    return ranges_[root];
  }
  /// Whether float32 may take another choice than float64, below the node of the last call.
  bool undecided(NodeId id) const { return undecided_[id]; }
  const Range& of_last(NodeId id) const { return ranges_[id]; }

 private:
  static Range invalid() {
    Range range = Range::of_float(0, 0, false);
    range.integer = {0, 0};
    range.invalid = true;
    return range;
  }

  Range of_value(const Node& node, const Value& value) const {
    if (!value.valid) return invalid();
    if (node.type != Type::kFloat) return Range::of_int(value.integer, value.integer);
    if (std::isnan(value.number)) return {{}, {HUGE_VAL, -HUGE_VAL, true}, false};
    return Range::of_float(value.number, value.number, false);
  }

  Range of(NodeId id, const Pair& pair) {
    const Node& node = expression_.graph[id];
    if (node.op == Op::kTensor) return element(node);
    if (node.operand_count == 0) {
      const Range range = of_value(node, exact_.value(id, pair));
      return node.op == Op::kFloat ? apply(Op::kFloat, Type::kFloat, {&range, 1}) : range;
    }
    std::array<Range, kMaxRank> operands;
    std::array<Value, kMaxRank> values;
    const bool chooses = node.op == Op::kWhere || node.op == Op::kAnd || node.op == Op::kOr;
    bool points = true;
    for (size_t i = 0; i < node.operand_count; ++i) {
      const Range& range = ranges_[node.operand[i]];
      if (range.invalid && !chooses) return invalid();
      const bool is_float = expression_.graph[node.operand[i]].type == Type::kFloat;
      points = points && !is_float && range.integer.lowest == range.integer.highest;
      operands[i] = range;
      values[i] = {range.integer.lowest, 0, true};
    }
    const Type type = expression_.graph[node.operand[0]].type;
    const size_t count = node.operand_count;
    if (!chooses && points && node.op != Op::kToFloat)
      return of_value(node, apply(node.op, type, {values.data(), count}));
    return apply(node.op, type, {operands.data(), count});
  }

  Range element(const Node& node) const {
    std::array<int64_t, kMaxRank> index{};
    for (size_t i = 0; i < node.operand_count; ++i) {
      const Range& range = ranges_[node.operand[i]];
      if (range.invalid) return invalid();
      if (range.integer.lowest != range.integer.highest) return {};
      index[i] = range.integer.lowest;
    }
    const auto read = tensors_.read(node.tensor(), {index.data(), node.operand_count});
    if (!read) return invalid();
    return of_value(node, node.type == Type::kFloat ? Value{0, *read} : Value{static_cast<int64_t>(*read)});
  }

  const Expression& expression_;
  const TensorReader& tensors_;
  Evaluator exact_;
  std::vector<Range> ranges_;
  std::vector<bool> undecided_;
};

}  // namespace fovea::expr
