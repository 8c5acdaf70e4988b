// A parser by recursive descent. The first error ends it: each function then returns kNoNode up to the top.
#include "expr/parse.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "expr/excerpt.hpp"
#include "expr/lexer.hpp"

namespace fovea::expr {
namespace {

std::string shown(const Token& token) {
  return token.kind == TokenKind::kEnd ? "the end of the text" : quoted(token.text);
}

std::string plural(int64_t count, std::string_view noun) {
  return std::to_string(count).append(" ").append(noun).append(count == 1 ? "" : "s");
}

/// A part that was read: its node, and where it begins.
struct Part {
  NodeId id = kNoNode;
  size_t begin = 0;
  bool failed() const { return id == kNoNode; }
};

class Parser {
 public:
  Parser(std::string_view text, Expression& expression)
      : text_(text), expression_(expression), graph_(expression.graph), token_(next_token(text, 0)) {}

  std::optional<ParseError> run() {
    const Part whole = infix(1);
    if (whole.failed()) return error_;
    if (token_.kind != TokenKind::kEnd) {
      fail(token_, "an operator or the end of the text", "write one expression, for example s * 0.5");
      return error_;
    }
    const Type type = graph_[whole.id].type;
    const bool sees = expression_.use == Use::kSees;
    if (sees && type != Type::kBool) {
      fail(whole.begin, type == Type::kInt ? "an int" : "a float", "a bool, whether the query sees the key",
           "compare it, as in k <= q");
    } else if (!sees && type == Type::kBool) {
      fail(whole.begin, "a bool", "a float, the score", "choose a number with where(condition, a, b)");
    } else {
      expression_.root = sees ? whole.id : graph_.to_float(whole.id);
    }
    return error_;
  }

 private:
  Part fail(size_t position, std::string_view got, std::string_view expected, std::string_view remedy) {
    if (error_) return {};
    std::string message(name_of(expression_.use));
    message.append(", character ").append(std::to_string(position + 1)).append(": got ").append(got);
    message.append(", expected ").append(expected).append("; ").append(remedy);
    error_ = ParseError{position, std::move(message), excerpt_of(text_, position)};
    return {};
  }
  Part fail(const Token& at, std::string_view expected, std::string_view remedy) {
    return fail(at.position, shown(at), expected, remedy);
  }

  void advance() { token_ = next_token(text_, token_.position + token_.text.size()); }
  bool accept(std::string_view symbol) {
    if (!token_.is(symbol)) return false;
    advance();
    return true;
  }

  /// An operation over parts, with its types checked.
  Part make(Op op, std::span<const Part> parts, size_t begin) {
    std::array<NodeId, kMaxRank> ids{};
    std::array<Type, kMaxRank> types{};
    for (size_t i = 0; i < parts.size(); ++i) {
      ids[i] = parts[i].id;
      types[i] = graph_[ids[i]].type;
    }
    if (const auto fault = type_fault(op, {types.data(), parts.size()})) {
      return fail(parts[fault->operand].begin, fault->got, fault->expected, fault->remedy);
    }
    return counted({graph_.make(op, std::span<const NodeId>(ids.data(), parts.size())), begin});
  }

  Part counted(Part part) {
    if (graph_.size() <= kMaxNodes) return part;
    return fail(part.begin, "an expression of more than " + std::to_string(kMaxNodes) + " operations",
                "at most as many", "write a table as a tensor");
  }

  Part infix(int lowest) {
    Part left = prefix();
    while (!left.failed()) {
      const auto op = token_.kind == TokenKind::kSymbol ? infix_named(token_.text) : std::nullopt;
      if (!op || info_of(*op).precedence < lowest) break;
      advance();
      const Part right = infix(info_of(*op).precedence + 1);
      if (right.failed()) return right;
      left = make(*op, std::array{left, right}, left.begin);
    }
    return left;
  }

  Part prefix() {
    if (nesting_ == kMaxNesting) {
      return fail(token_.position, plural(kMaxNesting, "level") + " of parentheses, calls and prefixes",
                  "at most as many", "flatten the expression");
    }
    ++nesting_;
    const size_t begin = token_.position;
    Part part;
    if (token_.is("-") || token_.is("!")) {
      const Op op = token_.is("-") ? Op::kNegate : Op::kNot;
      advance();
      part = prefix();
      if (!part.failed()) part = make(op, std::array{part}, begin);
    } else {
      part = primary();
    }
    --nesting_;
    return part;
  }

  Part primary() {
    const Token token = token_;
    switch (token.kind) {
      case TokenKind::kInt:
      case TokenKind::kFloat:
        return number();
      case TokenKind::kName:
        return name();
      case TokenKind::kUnknown:
        return unknown();
      default:
        break;
    }
    if (!accept("(")) return fail(token, "a number, a name, a function or '('", "complete the expression");
    Part inner = infix(1);
    if (inner.failed()) return inner;
    if (!accept(")"))
      return fail(token_, "an operator or ')'",
                  "close the '(' of character " + std::to_string(token.position + 1));
    return {inner.id, token.position};
  }

  Part unknown() {
    if (is_digit(token_.text[0]) || token_.text[0] == '.') {
      return fail(token_, "a number such as 16, 0.5 or 1e-3", "put an operator between a number and a name");
    }
    const bool single = token_.text == "=" || token_.text == "&" || token_.text == "|";
    return fail(token_, single ? "an operator" : "a number, a name, a function or '('",
                single ? "double it: " + std::string(2, token_.text[0])
                       : "use + - * / % < <= > >= == != && || ! and functions");
  }

  Part number() {
    const Token token = token_;
    const char* const begin = token.text.data();
    const char* const end = begin + token.text.size();
    advance();
    if (token.kind == TokenKind::kInt) {
      int64_t value = 0;
      if (std::from_chars(begin, end, value).ec != std::errc()) {
        return fail(token, "an int of 64 bits", "write a float, with a point");
      }
      return counted({graph_.integer(value), token.position});
    }
    double value = 0;
    if (std::from_chars(begin, end, value).ec != std::errc()) {
      return fail(token, "a number in the range of float64", "give a number nearer to 1");
    }
    return counted({graph_.number(value), token.position});
  }

  Part name() {
    const Token token = token_;
    advance();
    if (const auto function = function_named(token.text)) return call(*function, token);
    if (token_.is("(")) {
      return fail(token, "one of the functions " + function_list(),
                  "choose one of these, or put an operator before '('");
    }
    if (token.text == "true" || token.text == "false") {
      return counted({graph_.boolean(token.text == "true"), token.position});
    }
    if (const auto variable = variable_named(token.text)) {
      if (*variable == Variable::kS && expression_.use == Use::kSees) {
        return fail(token,
                    "positions, lengths, heads and tensors, as keys are chosen before there are scores",
                    "put what depends on s into the score");
      }
      if (token_.is("["))
        return fail(token_, "an operator, as " + quoted(token.text) + " is no tensor", "leave out the index");
      return counted({graph_.variable(*variable), token.position});
    }
    const auto& tensors = expression_.tensors;
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const TensorDeclaration& t) { return t.name == token.text; });
    if (found == tensors.end()) {
      return fail(token, "one of " + known_names(), "correct the name, or declare a tensor of this name");
    }
    return element(static_cast<size_t>(found - tensors.begin()), token);
  }

  std::string known_names() const {
    std::string list;
    const auto add = [&](std::string_view name) { list.append(list.empty() ? "" : ", ").append(name); };
    for (const std::string_view name : kVariableNames) {
      if (name != "s" || expression_.use == Use::kScore) add(name);
    }
    constexpr size_t kShown = 16;  // a message stays readable
    for (size_t i = 0; i < std::min(expression_.tensors.size(), kShown); ++i)
      add(expression_.tensors[i].name);
    if (expression_.tensors.size() > kShown) add("...");
    return list;
  }

  /// Expressions up to the closing symbol, exactly as many as expected; the opening symbol is read.
  bool list(std::string_view close, int expected, const std::string& of, std::vector<Part>& parts) {
    while (true) {
      parts.push_back(infix(1));
      if (parts.back().failed()) return false;
      const int count = static_cast<int>(parts.size());
      if (token_.is(",") && count == expected) {
        fail(token_, quoted(close) + " after " + of, "leave out what follows");
        return false;
      }
      if (accept(",")) continue;
      if (token_.is(close) && count == expected) break;
      if (token_.is(close)) {
        fail(token_, "',' and more, " + of, "add " + std::to_string(expected - count));
      } else {
        fail(token_, "an operator, ',' or " + quoted(close), "close the list of " + of);
      }
      return false;
    }
    advance();
    return true;
  }

  Part call(Op op, const Token& token) {
    const int count = info_of(op).operands;
    const std::string of = "the " + plural(count, "argument") + " of " + std::string(token.text);
    if (!accept("(")) return fail(token_, "'(' and " + of, "call the function");
    std::vector<Part> parts;
    if (!list(")", count, of, parts)) return {};
    return make(op, parts, token.position);
  }

  Part element(size_t place, const Token& token) {
    const TensorDeclaration& tensor = expression_.tensors[place];
    std::array<NodeId, kMaxRank> index{};
    if (tensor.rank == 0) {
      if (token_.is("["))
        return fail(token_, "an operator, as " + quoted(tensor.name) + " has no dimensions",
                    "leave out the index");
    } else {
      const std::string indices = tensor.rank == 1
                                      ? "the index of " + tensor.name
                                      : "the " + std::to_string(tensor.rank) + " indices of " + tensor.name;
      if (!accept("[")) return fail(token_, "'[' and " + indices, "say which element");
      std::vector<Part> parts;
      if (!list("]", tensor.rank, indices, parts)) return {};
      for (size_t i = 0; i < parts.size(); ++i) {
        index[i] = parts[i].id;
        const Type type = graph_[parts[i].id].type;
        if (type == Type::kInt) continue;
        return fail(parts[i].begin, type == Type::kBool ? "a bool" : "a float",
                    "an int, an index of " + tensor.name, "index with ints, such as q or k / 16");
      }
    }
    const std::span<const NodeId> span(index.data(), static_cast<size_t>(tensor.rank));
    return counted({graph_.tensor(place, tensor.dtype, span), token.position});
  }

  std::string_view text_;
  Expression& expression_;
  Graph& graph_;
  Token token_;
  int nesting_ = 0;
  std::optional<ParseError> error_;
};

bool is_name(std::string_view name) {
  return !name.empty() && is_name_start(name[0]) && std::all_of(name.begin(), name.end(), is_name_part);
}

bool is_element(DType dtype) {
  return is_float(dtype) || dtype == DType::kI32 || dtype == DType::kU8;
}

std::optional<ParseError> declaration_fault(Use use, std::span<const TensorDeclaration> tensors) {
  const auto fault = [&](std::string_view of, const std::string& got, std::string_view expected,
                         std::string_view remedy) {
    std::string message(name_of(use));
    message.append(", ").append(of).append(": got ").append(got).append(", expected ").append(expected);
    return ParseError{0, message.append("; ").append(remedy), ""};
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorDeclaration& t = tensors[i];
    if (!is_name(t.name)) {
      return fault("name of a tensor", quoted(t.name), "letters, digits and _, no digit first", "rename it");
    }
    if (!may_name_tensor(t.name)) {
      return fault("name of a tensor", quoted(t.name), "a name that the language does not use", "rename it");
    }
    const auto same = [&](const TensorDeclaration& other) { return other.name == t.name; };
    if (std::any_of(tensors.begin(), tensors.begin() + static_cast<std::ptrdiff_t>(i), same)) {
      return fault("name of a tensor", quoted(t.name) + " twice", "each name once", "rename one of them");
    }
    const std::string of = "tensor " + t.name;
    if (!is_element(t.dtype)) {
      return fault(of, std::string(name_of(t.dtype)), "float32, float16, bfloat16, int32 or uint8",
                   "convert it");
    }
    if (t.rank < 0 || t.rank > kMaxRank) {
      return fault(of, plural(t.rank, "dimension"), "0 to " + std::to_string(kMaxRank), "reshape it");
    }
  }
  return std::nullopt;
}

}  // namespace

bool may_name_tensor(std::string_view name) {
  return is_name(name) && !variable_named(name) && !function_named(name) && name != "true" && name != "false";
}

std::variant<Expression, ParseError> parse(std::string_view text, Use use,
                                           std::span<const TensorDeclaration> tensors,
                                           const ParseOptions& options) {
  if (auto fault = declaration_fault(use, tensors)) return std::move(*fault);
  if (text.size() > kMaxTextLength) {
    const std::string limit = std::to_string(kMaxTextLength);
    return ParseError{kMaxTextLength,
                      std::string(name_of(use)) + ": got a text of " + std::to_string(text.size()) +
                          " characters, expected at most " + limit + "; write a table as a tensor",
                      excerpt_of(text, kMaxTextLength)};
  }
  Expression expression{use, {tensors.begin(), tensors.end()}, Graph(options.simplify), kNoNode};
  if (auto error = Parser(text, expression).run()) return std::move(*error);
  return compact(expression);
}

}  // namespace fovea::expr
