// One pass over the nodes with ranges for values.
#include "expr/blocks.hpp"

#include <array>
#include <limits>

namespace fovea::expr {

BlockAnalysis::BlockAnalysis(const Expression& sees, const TensorRanges* tensors)
    : expression_(sees), tensors_(tensors), own_(sees.graph.size()), ranges_(own_) {}

BlockAnalysis::BlockAnalysis(const Expression& sees, const TensorRanges* tensors, std::span<Range> memory)
    : expression_(sees), tensors_(tensors), ranges_(memory) {}

Range BlockAnalysis::leaf(const Node& node, const Block& block) const {
  if (node.op == Op::kFloat) {
    const Range exact = Range::of_float(node.as_float(), node.as_float(), false);
    return apply(Op::kFloat, Type::kFloat, {&exact, 1});
  }
  if (node.op != Op::kVariable) return Range::of_int(node.payload, node.payload);
  const auto constant = [](int64_t value) { return Range::of_int(value, value); };
  switch (node.variable()) {
    case Variable::kS:
      break;
    case Variable::kB:
      return constant(block.b);
    case Variable::kH:
      return constant(block.h);
    case Variable::kHk:
      return constant(block.hk);
    case Variable::kQ:
      return Range::of_int(block.q0, block.q1 - 1);
    case Variable::kK:
      return Range::of_int(block.k0, block.k1 - 1);
    case Variable::kNq:
      return constant(block.nq);
    case Variable::kNk:
      return constant(block.nk);
  }
  Range any;
  any.invalid = false;
  return any;
}

Range BlockAnalysis::element(const Node& node) const {
  std::array<IntRange, kMaxRank> index;
  bool invalid = false, empty = false;
  for (size_t i = 0; i < node.operand_count; ++i) {
    index[i] = ranges_[node.operand[i]].integer;
    invalid = invalid || ranges_[node.operand[i]].invalid;
    empty = empty || index[i].empty();
  }
  Range result;
  const DType dtype = expression_.tensors[node.tensor()].dtype;
  if (dtype == DType::kU8) result.integer = {0, 255};
  if (dtype == DType::kI32) {
    result.integer = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  }
  if (tensors_ && !empty) {
    const auto known = tensors_->range(node.tensor(), {index.data(), node.operand_count});
    if (known) result = *known;
  }
  result.invalid = result.invalid || invalid;
  return result;
}

Seen BlockAnalysis::seen(const Block& block) {
  if (block.q0 >= block.q1 || block.k0 >= block.k1) return Seen::kNone;
  const Graph& graph = expression_.graph;
  for (NodeId id = 0; id <= expression_.root; ++id) {
    const Node& node = graph[id];
    if (node.op == Op::kTensor) {
      ranges_[id] = element(node);
    } else if (node.operand_count == 0) {
      ranges_[id] = leaf(node, block);
    } else {
      std::array<Range, kMaxRank> operands;
      for (size_t i = 0; i < operands.size() && i < node.operand_count; ++i) {
        operands[i] = ranges_[node.operand[i]];
      }
      const Type type = graph[node.operand[0]].type;
      ranges_[id] = apply(node.op, type, {operands.data(), node.operand_count});
    }
  }
  const Range& result = ranges_[expression_.root];
  if (!result.may_be_true()) return Seen::kNone;
  return result.may_be_false() || result.invalid ? Seen::kSome : Seen::kAll;
}

}  // namespace fovea::expr
