// The table of operations, and the rules of types.
#include "expr/operation.hpp"

#include <algorithm>

namespace fovea::expr {
namespace {

/// In the order of Op.
constexpr std::array<OpInfo, 31> kOps = {{{Op::kFloat, "", Form::kLeaf, 0, kPrimaryPrecedence},
                                          {Op::kInt, "", Form::kLeaf, 0, kPrimaryPrecedence},
                                          {Op::kBool, "", Form::kLeaf, 0, kPrimaryPrecedence},
                                          {Op::kVariable, "", Form::kLeaf, 0, kPrimaryPrecedence},
                                          {Op::kTensor, "", Form::kLeaf, 0, kPrimaryPrecedence},
                                          {Op::kToFloat, "float", Form::kCall, 1, kPrimaryPrecedence},
                                          {Op::kNegate, "-", Form::kPrefix, 1, kPrefixPrecedence},
                                          {Op::kNot, "!", Form::kPrefix, 1, kPrefixPrecedence},
                                          {Op::kAdd, "+", Form::kInfix, 2, 5},
                                          {Op::kSubtract, "-", Form::kInfix, 2, 5},
                                          {Op::kMultiply, "*", Form::kInfix, 2, 6},
                                          {Op::kDivide, "/", Form::kInfix, 2, 6},
                                          {Op::kRemainder, "%", Form::kInfix, 2, 6},
                                          {Op::kLess, "<", Form::kInfix, 2, 4},
                                          {Op::kLessEqual, "<=", Form::kInfix, 2, 4},
                                          {Op::kGreater, ">", Form::kInfix, 2, 4},
                                          {Op::kGreaterEqual, ">=", Form::kInfix, 2, 4},
                                          {Op::kEqual, "==", Form::kInfix, 2, 3},
                                          {Op::kNotEqual, "!=", Form::kInfix, 2, 3},
                                          {Op::kAnd, "&&", Form::kInfix, 2, 2},
                                          {Op::kOr, "||", Form::kInfix, 2, 1},
                                          {Op::kWhere, "where", Form::kCall, 3, kPrimaryPrecedence},
                                          {Op::kAbs, "abs", Form::kCall, 1, kPrimaryPrecedence},
                                          {Op::kMin, "min", Form::kCall, 2, kPrimaryPrecedence},
                                          {Op::kMax, "max", Form::kCall, 2, kPrimaryPrecedence},
                                          {Op::kClamp, "clamp", Form::kCall, 3, kPrimaryPrecedence},
                                          {Op::kExp, "exp", Form::kCall, 1, kPrimaryPrecedence},
                                          {Op::kLog, "log", Form::kCall, 1, kPrimaryPrecedence},
                                          {Op::kTanh, "tanh", Form::kCall, 1, kPrimaryPrecedence},
                                          {Op::kSqrt, "sqrt", Form::kCall, 1, kPrimaryPrecedence},
                                          {Op::kFloor, "floor", Form::kCall, 1, kPrimaryPrecedence}}};

constexpr bool in_order() {
  for (size_t i = 0; i < kOps.size(); ++i) {
    if (static_cast<size_t>(kOps[i].op) != i) return false;
  }
  return static_cast<size_t>(Op::kFloor) + 1 == kOps.size();
}
static_assert(in_order());

std::optional<Op> op_named(std::string_view text, Form form) {
  for (const OpInfo& info : kOps) {
    if (info.form == form && info.text == text) return info.op;
  }
  return std::nullopt;
}

constexpr bool takes_bools(Op op) {
  return op == Op::kAnd || op == Op::kOr || op == Op::kNot;
}

constexpr bool is_for_floats(Op op) {
  return op == Op::kToFloat || (op >= Op::kExp && op <= Op::kFloor);
}

std::string with_article(Type type) {
  return std::string(type == Type::kInt ? "an " : "a ").append(name_of(type));
}

}  // namespace

std::string_view name_of(Type type) {
  switch (type) {
    case Type::kFloat:
      return "float";
    case Type::kInt:
      return "int";
    case Type::kBool:
      return "bool";
  }
  return "";
}

std::optional<Variable> variable_named(std::string_view name) {
  const auto* found = std::find(kVariableNames.begin(), kVariableNames.end(), name);
  if (found == kVariableNames.end()) return std::nullopt;
  return static_cast<Variable>(found - kVariableNames.begin());
}

const OpInfo& info_of(Op op) {
  return kOps[static_cast<size_t>(op)];
}

std::optional<Op> infix_named(std::string_view symbol) {
  return op_named(symbol, Form::kInfix);
}

std::optional<Op> function_named(std::string_view name) {
  return op_named(name, Form::kCall);
}

std::string function_list() {
  std::string list;
  for (const OpInfo& info : kOps) {
    if (info.form == Form::kCall) list.append(list.empty() ? "" : ", ").append(info.text);
  }
  return list;
}

std::optional<TypeFault> type_fault(Op op, std::span<const Type> operands) {
  const auto fault = [&](size_t i, std::string expected, std::string remedy) {
    return TypeFault{i, with_article(operands[i]), std::move(expected), std::move(remedy)};
  };
  const std::string symbol(info_of(op).text);
  const std::string of = info_of(op).form == Form::kCall ? " in " + symbol : " beside " + symbol;
  if (op == Op::kWhere) {
    if (operands[0] != Type::kBool)
      return fault(0, "a bool as condition of where", "compare it, as in x != 0");
    if ((operands[1] == Type::kBool) != (operands[2] == Type::kBool)) {
      return fault(2,
                   operands[1] == Type::kBool ? "a bool, as the other choice is one"
                                              : "a number, as the other choice is one",
                   "give where two numbers or two bools to choose from");
    }
    return std::nullopt;
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    if (takes_bools(op)) {
      if (operands[i] != Type::kBool) return fault(i, "a bool" + of, "compare it, as in x != 0");
    } else if (operands[i] == Type::kBool) {
      const bool equality = op == Op::kEqual || op == Op::kNotEqual;
      return fault(
          i, "a number" + of,
          equality ? "combine bools with &&, || and !" : "choose a number with where(condition, a, b)");
    } else if (op == Op::kRemainder && operands[i] != Type::kInt) {
      return fault(i, "an int" + of, "write x - floor(x / y) * y for floats");
    }
  }
  return std::nullopt;
}

Type operand_type(Op op, std::span<const Type> operands, size_t operand) {
  if (operands[operand] == Type::kBool) return Type::kBool;
  if (is_for_floats(op)) return Type::kFloat;
  const size_t first = op == Op::kWhere ? 1 : 0;
  const bool any_float = std::find(operands.begin() + static_cast<std::ptrdiff_t>(first), operands.end(),
                                   Type::kFloat) != operands.end();
  return any_float ? Type::kFloat : operands[operand];
}

Type result_type(Op op, std::span<const Type> operands) {
  if (is_comparison(op) || takes_bools(op)) return Type::kBool;
  return operand_type(op, operands, op == Op::kWhere ? 1 : 0);
}

}  // namespace fovea::expr
