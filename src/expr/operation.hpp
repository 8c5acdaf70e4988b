// What an expression is made of: types, names of a pair, operations, and the rules of their types.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fovea::expr {

enum class Type : uint8_t { kFloat, kInt, kBool };
std::string_view name_of(Type type);

/// What an expression is for. A score is a float and may use s; `sees` is a bool and is decided before any score exists.
enum class Use : uint8_t { kScore, kSees };
constexpr std::string_view name_of(Use use) {
  return use == Use::kScore ? "score" : "sees";
}

/// The names that every expression knows. All but s are ints.
enum class Variable : uint8_t { kS, kB, kH, kHk, kQ, kK, kNq, kNk };
inline constexpr std::array<std::string_view, 8> kVariableNames = {"s", "b", "h", "hk", "q", "k", "nq", "nk"};
constexpr Type type_of(Variable v) {
  return v == Variable::kS ? Type::kFloat : Type::kInt;
}
std::optional<Variable> variable_named(std::string_view name);

enum class Op : uint8_t {
  kFloat,
  kInt,
  kBool,
  kVariable,
  kTensor,
  kToFloat,
  kNegate,
  kNot,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kRemainder,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kEqual,
  kNotEqual,
  kAnd,
  kOr,
  kWhere,
  kAbs,
  kMin,
  kMax,
  kClamp,
  kExp,
  kLog,
  kTanh,
  kSqrt,
  kFloor
};

/// How operations are written: those of C, with C's precedence, or calls.
enum class Form : uint8_t { kLeaf, kPrefix, kInfix, kCall };

struct OpInfo {
  Op op;
  std::string_view text;  ///< the symbol, or the name of the function
  Form form;
  int operands;
  int precedence;  ///< of prefix and infix operators; higher binds tighter
};
inline constexpr int kPrefixPrecedence = 7, kPrimaryPrecedence = 8;
const OpInfo& info_of(Op op);
std::optional<Op> infix_named(std::string_view symbol);
std::optional<Op> function_named(std::string_view name);
/// "where, abs, min, ..." for messages.
std::string function_list();

constexpr bool is_constant(Op op) {
  return op == Op::kFloat || op == Op::kInt || op == Op::kBool;
}
constexpr bool is_comparison(Op op) {
  return op >= Op::kLess && op <= Op::kNotEqual;
}
/// The comparison of ints that is true where this one is false. Of floats, which may be NaN, it is so for == and != alone.
constexpr Op opposite(Op comparison) {
  switch (comparison) {
    case Op::kLess:
      return Op::kGreaterEqual;
    case Op::kLessEqual:
      return Op::kGreater;
    case Op::kGreater:
      return Op::kLessEqual;
    case Op::kGreaterEqual:
      return Op::kLess;
    case Op::kEqual:
      return Op::kNotEqual;
    default:
      return Op::kEqual;
  }
}

/// What is wrong with the types of an operation, and with which operand.
struct TypeFault {
  size_t operand;
  std::string got, expected, remedy;
};
std::optional<TypeFault> type_fault(Op op, std::span<const Type> operands);

/// The type to which an int operand of the operation is converted: float where another operand is one, or where the
/// operation exists for floats alone.
Type operand_type(Op op, std::span<const Type> operands, size_t operand);
/// The type of the result. Operands are of the right types.
Type result_type(Op op, std::span<const Type> operands);

}  // namespace fovea::expr
