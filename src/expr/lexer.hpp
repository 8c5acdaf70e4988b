// Text into tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace fovea::expr {

enum class TokenKind : uint8_t { kEnd, kInt, kFloat, kName, kSymbol, kUnknown };

struct Token {
  TokenKind kind = TokenKind::kEnd;
  size_t position = 0;    ///< of its first character
  std::string_view text;  ///< empty at the end of the text

  bool is(std::string_view symbol) const { return kind == TokenKind::kSymbol && text == symbol; }
};

/// The token at or behind `position`. A number that letters, digits or points follow is one unknown token, so that an
/// error shows all of it.
Token next_token(std::string_view text, size_t position);

constexpr bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
constexpr bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
constexpr bool is_name_part(char c) {
  return is_name_start(c) || is_digit(c);
}

}  // namespace fovea::expr
