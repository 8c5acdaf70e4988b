// From the tree of an expression to the steps of its CUDA text, by the kind of a node.
#include "expr/cuda_lowering.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

namespace fovea::expr {

CudaLowering::CudaLowering(const CudaTextInput& input, const std::vector<TensorDeclaration>& tensors,
                           const Graph& graph, const std::vector<bool>& needed)
    : input_(input),
      tensors_(tensors),
      graph_(graph),
      ints_(steps_),
      values_(graph.size(), kNoStep),
      valid_(graph.size(), kNoStep),
      sums_(graph.size()) {
  for (NodeId id = 0; id < graph.size(); ++id) {
    if (needed[id]) lower(id);
  }
}

StepId CudaLowering::step(NodeId id) {
  if (values_[id] == kNoStep) values_[id] = ints_.total(sums_[id]);
  return values_[id];
}

StepId CudaLowering::score(NodeId id) {
  return steps_.choice(valid_[id], step(id),
                       steps_.add(Kind::kFloat, "__int_as_float(0x7fffffff)", {}, Range{}));
}

StepId CudaLowering::sees(NodeId id) {
  return steps_.both(valid_[id], step(id));
}

void CudaLowering::lower(NodeId id) {
  const Node& node = graph_[id];
  valid_[id] = steps_.boolean(true);
  switch (node.op) {
    case Op::kVariable:
      return lower_variable(id, node);
    case Op::kInt:
      sums_[id].constant = node.payload;
      return;
    case Op::kBool:
      values_[id] = steps_.boolean(node.payload != 0);
      return;
    case Op::kFloat:
      values_[id] = steps_.number(node.as_float());
      return;
    case Op::kTensor:
      return lower_element(id, node);
    default:
      break;
  }
  lower_validity(id, node);
  if (node.type == Type::kInt) {
    lower_int(id, node);
  } else if (node.type == Type::kBool) {
    values_[id] = condition(node);
  } else {
    lower_float(id, node);
  }
}

void CudaLowering::lower_variable(NodeId id, const Node& node) {
  const Variable v = node.variable();
  const std::string name(kVariableNames[static_cast<size_t>(v)]);
  if (v == Variable::kS) {
    Range any;
    values_[id] = steps_.add(Kind::kFloat, name, {}, any, Place::kPair);
    return;
  }
  const bool heads = v == Variable::kH || v == Variable::kHk,
             length = v == Variable::kNq || v == Variable::kNk;
  const int64_t given = v == Variable::kB ? input_.batch : heads ? input_.heads : input_.positions;
  const int64_t above = std::min<int64_t>(given, std::numeric_limits<int32_t>::max());  // kernels pass ints
  const Place place = v == Variable::kQ ? Place::kQuery : v == Variable::kK ? Place::kKey : Place::kHead;
  const StepId step = steps_.add(Kind::kInt, name, {}, Range::of_int(0, length ? above : above - 1), place);
  sums_[id] = ints_.of_term(step);
  origins_[step] = id;
}

void CudaLowering::lower_int(NodeId id, const Node& node) {
  const auto operand = [&](size_t i) -> const Sum& { return sums_[node.operand[i]]; };
  if (node.op == Op::kAdd) {
    sums_[id] = IntSteps::combined(operand(0), operand(1));
  } else if (node.op == Op::kSubtract) {
    sums_[id] = IntSteps::combined(operand(0), IntSteps::scaled(operand(1), -1));
  } else if (node.op == Op::kNegate) {
    sums_[id] = IntSteps::scaled(operand(0), -1);
  } else if (node.op == Op::kMultiply && operand(1).terms.empty()) {
    sums_[id] = IntSteps::scaled(operand(0), operand(1).constant);
  } else if (node.op == Op::kMultiply && operand(0).terms.empty()) {
    sums_[id] = IntSteps::scaled(operand(1), operand(0).constant);
  } else {
    std::vector<StepId> operands;
    for (const NodeId x : node.operands()) operands.push_back(step(x));
    const StepId result = node.op == Op::kWhere ? steps_.choice(operands[0], operands[1], operands[2])
                                                : ints_.apply(node.op, operands);
    sums_[id] = ints_.of_term(result);
    origins_.try_emplace(result, id);
  }
}

StepId CudaLowering::condition(const Node& node) {
  const NodeId a = node.operand[0], b = node.operand[1];
  switch (node.op) {
    case Op::kNot:
      return steps_.opposite(step(a));
    case Op::kAnd:
      return steps_.both(step(a), step(b));
    case Op::kOr:
      return steps_.either(step(a), step(b));
    case Op::kWhere:
      return steps_.choice(step(a), step(b), step(node.operand[2]));
    default:
      break;
  }
  if (graph_[a].type == Type::kInt) return ints_.compare(node.op, sums_[a], sums_[b]);
  const std::array ranges = {steps_[step(a)].range, steps_[step(b)].range};
  return steps_.add(Kind::kBool, "%0 " + std::string(info_of(node.op).text) + " %1", {step(a), step(b)},
                    apply(node.op, Type::kFloat, ranges));
}

/// A pair is not valid when it needs what is not; where, && and || say what they need.
void CudaLowering::lower_validity(NodeId id, const Node& node) {
  StepId valid = valid_[node.operand[0]];
  const StepId first = values_[node.operand[0]];
  if (node.op == Op::kWhere) {
    valid = steps_.both(valid, steps_.choice(first, valid_[node.operand[1]], valid_[node.operand[2]]));
  } else if (node.op == Op::kAnd) {
    valid = steps_.both(valid, steps_.either(steps_.opposite(first), valid_[node.operand[1]]));
  } else if (node.op == Op::kOr) {
    valid = steps_.both(valid, steps_.either(first, valid_[node.operand[1]]));
  } else {
    for (const NodeId operand : node.operands()) valid = steps_.both(valid, valid_[operand]);
  }
  const bool divides = node.op == Op::kRemainder || node.op == Op::kDivide;
  if (divides && node.type == Type::kInt)
    valid = steps_.both(valid, ints_.compare(Op::kNotEqual, sums_[node.operand[1]], {}));
  valid_[id] = valid;
}

// --- floats ---

void CudaLowering::lower_float(NodeId id, const Node& node) {
  if (node.op == Op::kToFloat) {
    values_[id] = to_float(node.operand[0]);
    return;
  }
  std::vector<StepId> operands;
  for (const NodeId operand : node.operands()) operands.push_back(step(operand));
  if (node.op == Op::kWhere) {
    values_[id] = steps_.choice(operands[0], operands[1], operands[2]);
  } else if (node.op == Op::kDivide) {
    values_[id] = quotient(operands[0], operands[1], node.operand[1]);
  } else {
    values_[id] = float_operation(node, operands);
  }
}

/// A division takes as long as ten products.
StepId CudaLowering::quotient(StepId a, StepId b, NodeId divisor) {
  const std::array ranges = {steps_[a].range, steps_[b].range};
  const Range range = apply(Op::kDivide, Type::kFloat, ranges);
  const Node& node = graph_[divisor];
  const double inverse = node.op == Op::kFloat ? 1.0 / node.as_float() : 0.0;
  const auto normal = [](double x) { return std::fabs(x) >= 0x1p-126 && std::fabs(x) <= 0x1p126; };
  if (normal(inverse)) return steps_.add(Kind::kFloat, "%0 * %1", {a, steps_.number(inverse)}, range);
  return steps_.add(Kind::kFloat, "%0 / %1", {a, b}, range);
}

StepId CudaLowering::float_operation(const Node& node, const std::vector<StepId>& x) {
  std::vector<Range> ranges;
  for (const StepId id : x) ranges.push_back(steps_[id].range);
  const Range range = apply(node.op, Type::kFloat, ranges);
  const auto chosen = [&](Op op, StepId a, StepId b) {
    // NaN wins; where an operand cannot be NaN, one comparison finds it.
    const bool nan_a = steps_[a].range.number.nan, nan_b = steps_[b].range.number.nan;
    const std::string name = op == Op::kMin ? "minimum" : "maximum";
    const std::array of = {steps_[a].range, steps_[b].range};
    const Range result = apply(op, Type::kFloat, of);
    const char* which = !nan_b ? "" : !nan_a ? "_of_number" : "_of_any";
    return steps_.add(Kind::kFloat, name + which + "($0, $1)", {a, b}, result);
  };
  switch (node.op) {
    case Op::kMin:
    case Op::kMax:
      return chosen(node.op, x[0], x[1]);
    case Op::kClamp:
      return chosen(Op::kMin, chosen(Op::kMax, x[0], x[1]), x[2]);
    case Op::kNegate:
      return steps_.add(Kind::kFloat, "-%0", x, range);
    case Op::kAbs:
      return steps_.add(Kind::kFloat, "fabsf($0)", x, range);
    case Op::kAdd:
    case Op::kSubtract:
    case Op::kMultiply:
      return steps_.add(Kind::kFloat, "%0 " + std::string(info_of(node.op).text) + " %1", x, range);
    default:
      return steps_.add(Kind::kFloat, std::string(info_of(node.op).text) + "f($0)", x, range);
  }
}

}  // namespace fovea::expr
