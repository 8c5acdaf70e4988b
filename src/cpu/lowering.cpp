// Nodes become values, in the order of ids.
#include "cpu/lowering.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

namespace fovea::cpu {

using expr::IntRange, expr::Node, expr::NodeId, expr::Op, expr::Range, expr::Type, expr::Variable;

// --- ranges ---

namespace {

constexpr int64_t kLowestInt = std::numeric_limits<int32_t>::min(),
                  kHighestInt = std::numeric_limits<int32_t>::max();
/// Every int of at most this size is a float32.
constexpr int64_t kExactInts = int64_t{1} << 24;

Range range_of(const AttentionProblem& p, Variable name) {
  const auto below = [](int64_t count) { return Range::of_int(0, std::max<int64_t>(0, count - 1)); };
  switch (name) {
    case Variable::kB:
      return below(p.batch);
    case Variable::kH:
      return below(p.heads_q);
    case Variable::kHk:
      return below(p.heads_kv);
    case Variable::kQ:
      return below(p.seqlen_q);
    case Variable::kK:
      return below(p.seqlen_k);
    case Variable::kNq:
      return below(p.seqlen_q + 1);
    case Variable::kNk:
      return below(p.seqlen_k + 1);
    case Variable::kS:
      break;
  }
  Range any;
  any.invalid = false;
  return any;
}

Range range_of_element(const AttentionProblem& p, const Node& node, std::span<const Range> ranges) {
  const TensorDesc& t = p.named[node.tensor()].tensor;
  Range result;
  result.invalid = false;
  if (t.dtype == DType::kU8 || t.dtype == DType::kBool) result.integer = {0, 255};
  if (t.dtype == DType::kI32) result.integer = {kLowestInt, kHighestInt};
  for (size_t d = 0; d < node.operand_count; ++d) {
    const Range& index = ranges[node.operand[d]];
    const bool inside = index.integer.lowest >= 0 && index.integer.highest < t.shape[d];
    result.invalid = result.invalid || index.invalid || !inside || t.shape[d] == 0;
  }
  return result;
}

}  // namespace

std::vector<Range> ranges_of(const AttentionProblem& p, const expr::Expression& expression) {
  const expr::Graph& graph = expression.graph;
  std::vector<Range> ranges(graph.size());
  for (NodeId id = 0; id < graph.size(); ++id) {
    const Node& node = graph[id];
    switch (node.op) {
      case Op::kFloat: {
        const Range exact = Range::of_float(node.as_float(), node.as_float(), false);
        ranges[id] = expr::apply(Op::kFloat, Type::kFloat, {&exact, 1});
        break;
      }
      case Op::kInt:
      case Op::kBool:
        ranges[id] = Range::of_int(node.payload, node.payload);
        break;
      case Op::kVariable:
        ranges[id] = range_of(p, node.variable());
        break;
      case Op::kTensor:
        ranges[id] = range_of_element(p, node, ranges);
        break;
      default: {
        std::array<Range, expr::kMaxRank> operands;
        for (size_t i = 0; i < operands.size() && i < node.operand_count; ++i)
          operands[i] = ranges[node.operand[i]];
        const Type type = graph[node.operand[0]].type;
        ranges[id] = expr::apply(node.op, type, {operands.data(), node.operand_count});
      }
    }
  }
  return ranges;
}

// --- values ---

ValueId Values::add(ValueNode node) {
  for (const ValueId operand : node.operand) {
    if (operand != kNoValue) node.shape |= nodes_[operand].shape;
  }
  const auto [place, is_new] = places_.try_emplace(node, static_cast<ValueId>(nodes_.size()));
  if (is_new) nodes_.push_back(node);
  return place->second;
}

ValueId Values::make(Code code, Kind kind, Kind result, std::initializer_list<ValueId> operands,
                     int64_t payload) {
  ValueNode node{code, kind, result};
  node.payload = payload;
  std::copy(operands.begin(), operands.end(), node.operand.begin());
  return add(node);
}

ValueId Values::number(float value) {
  return make(Code::kConstant, Kind::kFloat, {}, std::bit_cast<int32_t>(value));
}
ValueId Values::integer(Kind kind, int64_t value) {
  return make(Code::kConstant, kind, {}, value);
}
ValueId Values::tile(ProgramTile number) {
  ValueNode node{Code::kMove, Kind::kFloat, Kind::kFloat};
  node.shape = kByPair;
  node.payload = number;
  return add(node);
}

ValueId Values::converted(ValueId value, Kind kind) {
  const ValueNode& node = nodes_[value];
  if (node.result == kind) return value;
  if (node.code == Code::kConstant && kind == Kind::kWide) return integer(kind, node.payload);
  const Code code = kind == Kind::kFloat  ? Code::kToFloat
                    : kind == Kind::kWide ? Code::kToWide
                                          : Code::kToInt;
  return make(code, node.result, kind, {value});
}

ValueId Values::both(ValueId a, ValueId b) {
  if (a == kNoValue || a == b) return b;
  return b == kNoValue ? a : make(Code::kAnd, Kind::kMask, {a, b});
}
ValueId Values::either(ValueId a, ValueId b) {
  return a == kNoValue || b == kNoValue ? kNoValue : make(Code::kOr, Kind::kMask, {a, b});
}

// --- nodes ---

Lowering::Lowering(const AttentionProblem& problem, const expr::Expression& expression, bool keys_on_columns,
                   ValueId s, Values& values)
    : p_(problem),
      expression_(expression),
      graph_(expression.graph),
      keys_on_columns_(keys_on_columns),
      s_(s),
      has_steps_(has_steps()),
      values_(values),
      ranges_(ranges_of(problem, expression)),
      lowered_(expression.graph.size()) {}

/// Whether a rounding may move a value to the other side of a step.
bool Lowering::has_steps() const {
  const std::vector<bool> needed = expr::needed_by(graph_, expression_.root);
  for (NodeId id = 0; id <= expression_.root; ++id) {
    const Op op = graph_[id].op;
    const bool compares_floats =
        expr::is_comparison(op) && graph_[graph_[id].operand[0]].type == Type::kFloat;
    if (needed[id] && (op == Op::kFloor || compares_floats)) return true;
  }
  return false;
}

/// Ints without a value fit anywhere.
bool Lowering::fits(NodeId id) const {
  const IntRange& range = ranges_[id].integer;
  return range.empty() || (range.lowest >= kLowestInt && range.highest <= kHighestInt);
}

Lowered Lowering::of(NodeId root) {
  const std::vector<bool> needed = expr::needed_by(graph_, root);
  for (NodeId id = 0; id <= root; ++id) {
    if (needed[id] && lowered_[id].value == kNoValue) lowered_[id] = made(id);
  }
  return lowered_[root];
}

Lowered Lowering::made(NodeId id) {
  const Node& node = graph_[id];
  if (node.op == Op::kTensor) return element(id);
  if (node.operand_count == 0) return leaf(node);
  if (node.op == Op::kWhere || node.op == Op::kAnd || node.op == Op::kOr) return choice(id);
  if (node.op == Op::kNot)
    return {values_.negated(lowered_[node.operand[0]].value), lowered_[node.operand[0]].valid};
  if (expr::is_comparison(node.op)) return compared(node);
  if (node.op == Op::kToFloat) return as_float(node.operand[0]);
  return node.type == Type::kFloat ? of_floats(id) : of_ints(id);
}

Lowered Lowering::leaf(const Node& node) {
  if (node.op == Op::kFloat) return {values_.number(static_cast<float>(node.as_float())), kNoValue};
  if (node.op == Op::kBool) return {values_.integer(Kind::kMask, node.payload != 0 ? -1 : 0), kNoValue};
  if (node.op == Op::kInt) {
    const bool narrow = node.payload >= kLowestInt && node.payload <= kHighestInt;
    return {values_.integer(narrow ? Kind::kInt : Kind::kWide, node.payload), kNoValue};
  }
  const Variable name = node.variable();
  if (name == Variable::kS) return {s_, kNoValue};
  ValueNode value{Code::kVariable, Kind::kInt, Kind::kInt};
  value.payload = static_cast<int64_t>(name);
  const bool of_lane = name == Variable::kQ || name == Variable::kH;
  if (of_lane || name == Variable::kK) value.shape = of_lane != keys_on_columns_ ? kByColumn : kByRow;
  return {values_.add(value), kNoValue};
}

ValueId Lowering::valid_of(const Node& node) {
  ValueId valid = kNoValue;
  for (const NodeId operand : node.operands()) valid = values_.both(valid, lowered_[operand].valid);
  return valid;
}

Offsets Lowering::offsets_of(NodeId id, const TensorDesc& t) {
  const Node& node = graph_[id];
  Offsets offsets;
  offsets.valid = valid_of(node);
  int64_t extent = 0;
  for (size_t d = 0; d < node.operand_count; ++d) extent += std::abs(t.stride[d]) * (t.shape[d] - 1);
  offsets.wide = extent > kHighestInt;
  for (size_t d = 0; d < node.operand_count; ++d) {
    const ValueId index = lowered_[node.operand[d]].value;
    const IntRange& range = ranges_[node.operand[d]].integer;
    const Kind kind = values_[index].result;
    if (range.lowest < 0) {
      const ValueId zero = values_.integer(kind, 0);
      offsets.valid =
          values_.both(offsets.valid, values_.make(Code::kLessEqual, kind, Kind::kMask, {zero, index}));
    }
    if (range.highest >= t.shape[d]) {
      const ValueId size = values_.integer(kind, t.shape[d]);
      offsets.valid =
          values_.both(offsets.valid, values_.make(Code::kLess, kind, Kind::kMask, {index, size}));
    }
    if (t.stride[d] == 0) continue;
    // An index that does not fit is outside, so what is left of it counts nothing.
    const Kind wanted = offsets.wide ? Kind::kWide : Kind::kInt;
    ValueId part = values_.converted(index, wanted);
    if (t.stride[d] != 1)
      part = values_.make(Code::kMultiply, wanted, {part, values_.integer(wanted, t.stride[d])});
    const uint8_t shape = values_[part].shape;
    ValueId& sum = offsets.part[shape == kByPair ? 2 : (shape == kByRow ? 1 : 0)];
    sum = sum == kNoValue ? part : values_.make(Code::kAdd, wanted, {sum, part});
  }
  return offsets;
}

Lowered Lowering::element(NodeId id) {
  const Node& node = graph_[id];
  const TensorDesc& t = p_.named[node.tensor()].tensor;
  const bool is_float = node.type == Type::kFloat;
  for (size_t d = 0; d < node.operand_count; ++d) {
    if (t.shape[d] == 0) {  // no element at all
      return {is_float ? values_.number(0) : values_.integer(Kind::kInt, 0), values_.integer(Kind::kMask, 0)};
    }
  }
  const Offsets offsets = offsets_of(id, t);
  ValueNode load{Code::kLoad, is_float ? Kind::kFloat : Kind::kInt, is_float ? Kind::kFloat : Kind::kInt};
  load.dtype = t.dtype;
  load.wide_offsets = offsets.wide;
  load.payload = static_cast<int64_t>(node.tensor());
  load.operand = {offsets.part[0], offsets.part[1], offsets.part[2], offsets.valid};
  return {values_.add(load), offsets.valid};
}

/// where(c, a, b); `&&` is where(c, a, false) and `||` is where(c, true, b), also in what is not valid.
Lowered Lowering::choice(NodeId id) {
  const Node& node = graph_[id];
  const Lowered c = lowered_[node.operand[0]];
  if (node.op != Op::kWhere) {
    const Lowered other = lowered_[node.operand[1]];
    const bool is_and = node.op == Op::kAnd;
    const ValueId value = values_.make(is_and ? Code::kAnd : Code::kOr, Kind::kMask, {c.value, other.value});
    if (other.valid == kNoValue) return {value, c.valid};
    const ValueId not_needed = is_and ? values_.negated(c.value) : c.value;
    return {value, values_.both(c.valid, values_.either(not_needed, other.valid))};
  }
  Lowered a = lowered_[node.operand[1]], b = lowered_[node.operand[2]];
  Kind kind = values_[a.value].result;
  if (kind != values_[b.value].result) {
    kind = Kind::kWide;
    a.value = values_.converted(a.value, kind);
    b.value = values_.converted(b.value, kind);
  }
  ValueId value = values_.select(kind, c.value, a.value, b.value);
  if (kind == Kind::kWide && fits(id)) value = values_.converted(value, Kind::kInt);
  if (a.valid == kNoValue && b.valid == kNoValue) return {value, c.valid};
  const ValueId of_a = values_.either(values_.negated(c.value), a.valid),
                of_b = values_.either(c.value, b.valid);
  return {value, values_.both(c.valid, values_.both(of_a, of_b))};
}

Lowered Lowering::compared(const Node& node) {
  NodeId first = node.operand[0], second = node.operand[1];
  Op op = node.op;
  if (op == Op::kGreater || op == Op::kGreaterEqual) {
    std::swap(first, second);
    op = op == Op::kGreater ? Op::kLess : Op::kLessEqual;
  }
  ValueId a = lowered_[first].value, b = lowered_[second].value;
  Kind kind = values_[a].result;
  if (kind != values_[b].result) {
    kind = Kind::kWide;
    a = values_.converted(a, kind);
    b = values_.converted(b, kind);
  }
  const Code code = op == Op::kLess        ? Code::kLess
                    : op == Op::kLessEqual ? Code::kLessEqual
                    : op == Op::kEqual     ? Code::kEqual
                                           : Code::kNotEqual;
  return {values_.make(code, kind, Kind::kMask, {a, b}), valid_of(node)};
}

bool Lowering::is_exact_as_float(NodeId id) const {
  const IntRange& range = ranges_[id].integer;
  return !range.empty() && range.lowest >= -kExactInts && range.highest <= kExactInts;
}

/// Small ints are exact as floats, so sums of them may be computed as floats: then only what columns and rows give is
/// converted, and not each pair.
Lowered Lowering::as_float(NodeId id) {
  const Node& node = graph_[id];
  const Lowered as_int = lowered_[id];
  const auto code = [&]() -> Code {
    switch (node.op) {
      case Op::kAdd:
        return Code::kAdd;
      case Op::kSubtract:
        return Code::kSubtract;
      case Op::kAbs:
        return Code::kAbs;
      case Op::kNegate:
        return Code::kNegate;
      default:
        return Code::kMove;
    }
  }();
  bool exact = code != Code::kMove && values_[as_int.value].shape == kByPair && is_exact_as_float(id);
  for (const NodeId operand : node.operands()) exact = exact && is_exact_as_float(operand);
  if (!exact) return {values_.converted(as_int.value, Kind::kFloat), as_int.valid};
  const ValueId a = as_float(node.operand[0]).value;
  if (node.operand_count == 1) return {values_.make(code, Kind::kFloat, {a}), as_int.valid};
  return {values_.make(code, Kind::kFloat, {a, as_float(node.operand[1]).value}), as_int.valid};
}

ValueId Lowering::divided(const Node& node, Kind kind, ValueId a, ValueId b) {
  const bool divide = node.op == Op::kDivide;
  const Node& divisor = graph_[node.operand[1]];
  if (kind == Kind::kInt && divisor.op == Op::kInt && divisor.payload > 0 &&
      std::has_single_bit(static_cast<uint64_t>(divisor.payload))) {
    // Shifts round down, as division does, and the low bits are the remainder of that.
    return divide ? values_.make(Code::kShiftRight, kind, {a},
                                 std::countr_zero(static_cast<uint64_t>(divisor.payload)))
                  : values_.make(Code::kLowBits, kind, {a}, divisor.payload - 1);
  }
  return values_.make(divide ? Code::kDivide : Code::kRemainder, kind, {a, b});
}

Lowered Lowering::of_ints(NodeId id) {
  const Node& node = graph_[id];
  std::array<ValueId, 3> x = {kNoValue, kNoValue, kNoValue};
  bool wide = !fits(id);
  for (size_t i = 0; i < x.size() && i < node.operand_count; ++i) {
    x[i] = lowered_[node.operand[i]].value;
    wide = wide || values_[x[i]].result == Kind::kWide;
  }
  const Kind kind = wide ? Kind::kWide : Kind::kInt;
  for (size_t i = 0; i < x.size() && i < node.operand_count; ++i) x[i] = values_.converted(x[i], kind);
  ValueId valid = valid_of(node);
  const auto binary = [&](Code code) { return values_.make(code, kind, {x[0], x[1]}); };
  const ValueId value = [&] {
    switch (node.op) {
      case Op::kNegate:
        return values_.make(Code::kNegate, kind, {x[0]});
      case Op::kAbs:
        return values_.make(Code::kAbs, kind, {x[0]});
      case Op::kAdd:
        return binary(Code::kAdd);
      case Op::kSubtract:
        return binary(Code::kSubtract);
      case Op::kMultiply:
        return binary(Code::kMultiply);
      case Op::kMin:
        return binary(Code::kMin);
      case Op::kMax:
        return binary(Code::kMax);
      case Op::kClamp:
        return values_.make(Code::kMin, kind, {binary(Code::kMax), x[2]});
      default:
        return divided(node, kind, x[0], x[1]);
    }
  }();
  if (node.op == Op::kDivide || node.op == Op::kRemainder) {
    const IntRange& divisor = ranges_[node.operand[1]].integer;
    if (divisor.lowest <= 0 && divisor.highest >= 0) {
      const ValueId zero = values_.integer(kind, 0);
      valid = values_.both(valid, values_.make(Code::kNotEqual, kind, Kind::kMask, {x[1], zero}));
    }
  }
  return {wide && fits(id) ? values_.converted(value, Kind::kInt) : value, valid};
}

/// s is a product with the scale, which a constant factor joins.
ValueId Lowering::product(ValueId a, ValueId b) {
  for (const auto& [x, y] : {std::pair{a, b}, std::pair{b, a}}) {
    const ValueNode &factor = values_[y], &inner = values_[x];
    if (x != s_ || inner.code != Code::kMultiply || factor.code != Code::kConstant) continue;
    const auto of = [](const ValueNode& c) { return std::bit_cast<float>(static_cast<int32_t>(c.payload)); };
    const float joined = of(values_[inner.operand[1]]) * of(factor);
    const ValueId tile = inner.operand[0];
    if (std::isnormal(joined))
      return values_.make(Code::kMultiply, Kind::kFloat, {tile, values_.number(joined)});
  }
  return values_.make(Code::kMultiply, Kind::kFloat, {a, b});
}

/// Divisions are slow, so constant divisors become factors where their rounding decides nothing.
ValueId Lowering::quotient(ValueId a, ValueId b) {
  const ValueNode& divisor = values_[b];
  if (divisor.code == Code::kConstant && !has_steps_) {
    const float factor = 1 / std::bit_cast<float>(static_cast<int32_t>(divisor.payload));
    if (std::isnormal(factor)) return product(a, values_.number(factor));
  }
  return values_.make(Code::kDivide, Kind::kFloat, {a, b});
}

Lowered Lowering::of_floats(NodeId id) {
  const Node& node = graph_[id];
  std::array<ValueId, 3> x = {kNoValue, kNoValue, kNoValue};
  for (size_t i = 0; i < x.size() && i < node.operand_count; ++i) x[i] = lowered_[node.operand[i]].value;
  const auto binary = [&](Code code) { return values_.make(code, Kind::kFloat, {x[0], x[1]}); };
  const auto unary = [&](Code code) { return values_.make(code, Kind::kFloat, {x[0]}); };
  const ValueId value = [&] {
    switch (node.op) {
      case Op::kNegate:
        return unary(Code::kNegate);
      case Op::kAbs:
        return unary(Code::kAbs);
      case Op::kAdd:
        return binary(Code::kAdd);
      case Op::kSubtract:
        return binary(Code::kSubtract);
      case Op::kMultiply:
        return product(x[0], x[1]);
      case Op::kDivide:
        return quotient(x[0], x[1]);
      case Op::kMin:
        return binary(Code::kMin);
      case Op::kMax:
        return binary(Code::kMax);
      case Op::kClamp:
        return values_.make(Code::kMin, Kind::kFloat, {binary(Code::kMax), x[2]});
      case Op::kExp:
        return unary(Code::kExp);
      case Op::kLog:
        return unary(Code::kLog);
      case Op::kTanh:
        return unary(Code::kTanh);
      case Op::kSqrt:
        return unary(Code::kSqrt);
      default:
        return unary(Code::kFloor);
    }
  }();
  return {value, valid_of(node)};
}

}  // namespace fovea::cpu
