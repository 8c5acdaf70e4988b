// Constants are folded, and operations that change nothing are dropped. Every rule here holds bit for bit: for NaN,
// infinities and -0.0, for ints that wrap around, and for operands that are not valid.
//
// So these are not here: x + 0.0 (changes -0.0), 0.0 * x (NaN and infinities), x - x and 0 * x (an int may not be valid),
// where(c, x, x) (c may not be valid), and !(a < b) of floats (NaN).
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "expr/graph.hpp"
#include "expr/scalar.hpp"

namespace fovea::expr {
namespace {

/// Every int of at most this size is a float64.
constexpr int64_t kExactInts = int64_t{1} << 53;

bool is_int(const Node& node, int64_t value) {
  return node.op == Op::kInt && node.payload == value;
}
/// Equal in bits: 0.0 is not -0.0.
bool is_float(const Node& node, double value) {
  return node.op == Op::kFloat && node.payload == std::bit_cast<int64_t>(value);
}
bool is_bool(const Node& node, bool value) {
  return node.op == Op::kBool && (node.payload != 0) == value;
}
bool is_one(const Node& node) {
  return is_int(node, 1) || is_float(node, 1.0);
}

}  // namespace

NodeId Graph::folded(const Node& node) {
  std::array<Value, kMaxRank> values;
  for (size_t i = 0; i < node.operand_count; ++i) {
    const Node& operand = nodes_[node.operand[i]];
    if (!is_constant(operand.op)) return kNoNode;
    if (operand.type == Type::kFloat) {
      values[i].number = operand.as_float();
    } else {
      values[i].integer = operand.payload;
    }
  }
  const Type type = nodes_[node.operand[node.op == Op::kWhere ? 1 : 0]].type;
  const bool inexact = node.op == Op::kToFloat && std::abs(values[0].integer) > kExactInts;
  const Value value = apply(node.op, type, {values.data(), node.operand_count});
  // What no literal can write stays an operation, so that the tree can be printed.
  if (!value.valid || inexact) return kNoNode;
  if (node.type == Type::kBool) return boolean(value.integer != 0);
  if (node.type == Type::kFloat) return std::isfinite(value.number) ? number(value.number) : kNoNode;
  return value.integer == std::numeric_limits<int64_t>::min() ? kNoNode : integer(value.integer);
}

NodeId Graph::simplified(const Node& node) {
  const NodeId constant = folded(node);
  if (constant != kNoNode) return constant;
  const NodeId a = node.operand[0], b = node.operand[1];
  // Copies: making a node moves the others.
  const Node x = nodes_[a], y = node.operand_count > 1 ? nodes_[b] : Node{};
  switch (node.op) {
    case Op::kAdd:  // x + 0 of ints; x + -0.0 is x for every float, 0.0 + -0.0 being 0.0
      if (is_int(y, 0) || is_float(y, -0.0)) return a;
      if (is_int(x, 0) || is_float(x, -0.0)) return b;
      break;
    case Op::kSubtract:  // -0.0 - 0.0 is -0.0
      if (is_int(y, 0) || is_float(y, 0.0)) return a;
      break;
    case Op::kMultiply:
      if (is_one(y)) return a;
      if (is_one(x)) return b;
      break;
    case Op::kDivide:
      if (is_one(y)) return a;
      break;
    case Op::kNegate:
      if (x.op == Op::kNegate) return x.operand[0];
      break;
    case Op::kAbs:
      if (x.op == Op::kAbs) return a;
      if (x.op == Op::kNegate) return make(Op::kAbs, {x.operand[0]});
      break;
    case Op::kFloor:
      if (x.op == Op::kFloor || x.op == Op::kToFloat) return a;
      break;
    case Op::kMin:
    case Op::kMax:
      if (a == b) return a;
      break;
    case Op::kNot:
      if (x.op == Op::kNot) return x.operand[0];
      if (x.op == Op::kEqual || x.op == Op::kNotEqual ||
          (is_comparison(x.op) && nodes_[x.operand[0]].type == Type::kInt))
        return make(opposite(x.op), x.operands());
      break;
    case Op::kAnd:  // `x && false` is not false where x is not valid
      if (is_bool(x, false) || is_bool(y, true) || a == b) return a;
      if (is_bool(x, true)) return b;
      break;
    case Op::kOr:
      if (is_bool(x, true) || is_bool(y, false) || a == b) return a;
      if (is_bool(x, false)) return b;
      break;
    case Op::kWhere:
      if (x.op == Op::kBool) return is_bool(x, true) ? b : node.operand[2];
      break;
    default:
      break;
  }
  return kNoNode;
}

}  // namespace fovea::expr
