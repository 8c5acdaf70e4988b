// Text into an expression.
//
//   expression = or
//   or         = and { "||" and }
//   and        = equality { "&&" equality }
//   equality   = relation { ("==" | "!=") relation }
//   relation   = sum { ("<" | "<=" | ">" | ">=") sum }
//   sum        = product { ("+" | "-") product }
//   product    = prefix { ("*" | "/" | "%") prefix }
//   prefix     = ("-" | "!") prefix | primary
//   primary    = number | "true" | "false" | name | tensor [ "[" expression { "," expression } "]" ]
//              | function "(" expression { "," expression } ")" | "(" expression ")"
//
// Every operator groups from the left. An int becomes a float where a float stands beside it or a function needs one,
// and nothing else is converted.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "expr/graph.hpp"

namespace fovea::expr {

/// A parser that reads more would only serve generated texts, whose kernels no register file holds: a node is about a
/// register where it lives long, and a thread has 255.
inline constexpr size_t kMaxTextLength = 4096;
inline constexpr size_t kMaxNodes = 1024;
/// Parentheses, calls, indices and prefixes inside each other. The parser calls itself a few times for each, on the
/// stack of whatever thread plans a problem.
inline constexpr int kMaxNesting = 64;

struct ParseError {
  size_t position = 0;  ///< in the text, counted from 0
  /// "score, character 5: got ..., expected ...; remedy", where characters count from 1.
  std::string message;
  /// The line of the text and a caret under the position; empty when a declaration is at fault.
  std::string excerpt;

  std::string text() const { return excerpt.empty() ? message : message + "\n" + excerpt; }
};

struct ParseOptions {
  bool simplify = true;
};

/// Whether a tensor may be called so: letters, digits and _, no digit first, and no name of the language.
bool may_name_tensor(std::string_view name);

/// Reads `text`. The tensors that are declared are part of the expression, whether it reads them or not.
std::variant<Expression, ParseError> parse(std::string_view text, Use use,
                                           std::span<const TensorDeclaration> tensors = {},
                                           const ParseOptions& options = {});

}  // namespace fovea::expr
