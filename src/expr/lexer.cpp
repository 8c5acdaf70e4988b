// Spaces, numbers, names and symbols.
#include "expr/lexer.hpp"

#include <array>

namespace fovea::expr {
namespace {

/// Longer ones first: "<=" is not "<" and "=".
constexpr std::array<std::string_view, 19> kSymbols = {"<=", ">=", "==", "!=", "&&", "||", "+", "-", "*", "/",
                                                       "%",  "<",  ">",  "!",  "(",  ")",  "[", "]", ","};

size_t end_of_digits(std::string_view text, size_t at) {
  while (at < text.size() && is_digit(text[at])) ++at;
  return at;
}

/// Digits, a point with digits on at least one side, an exponent.
Token number_at(std::string_view text, size_t begin) {
  TokenKind kind = TokenKind::kInt;
  size_t end = end_of_digits(text, begin);
  if (end < text.size() && text[end] == '.') {
    kind = TokenKind::kFloat;
    end = end_of_digits(text, end + 1);
  }
  if (end < text.size() && (text[end] == 'e' || text[end] == 'E')) {
    size_t digits = end + 1;
    if (digits < text.size() && (text[digits] == '+' || text[digits] == '-')) ++digits;
    const size_t exponent_end = end_of_digits(text, digits);
    if (exponent_end > digits) {
      kind = TokenKind::kFloat;
      end = exponent_end;
    }
  }
  const size_t number_end = end;
  while (end < text.size() && (is_name_part(text[end]) || text[end] == '.')) ++end;
  return {end > number_end ? TokenKind::kUnknown : kind, begin, text.substr(begin, end - begin)};
}

}  // namespace

Token next_token(std::string_view text, size_t position) {
  while (position < text.size() && (text[position] == ' ' || text[position] == '\t' ||
                                    text[position] == '\n' || text[position] == '\r')) {
    ++position;
  }
  if (position >= text.size()) return {TokenKind::kEnd, text.size(), {}};
  const char first = text[position];
  const bool point = first == '.' && position + 1 < text.size() && is_digit(text[position + 1]);
  if (is_digit(first) || point) return number_at(text, position);
  if (is_name_start(first)) {
    size_t end = position;
    while (end < text.size() && is_name_part(text[end])) ++end;
    return {TokenKind::kName, position, text.substr(position, end - position)};
  }
  const std::string_view rest = text.substr(position);
  for (const std::string_view symbol : kSymbols) {
    if (rest.starts_with(symbol)) return {TokenKind::kSymbol, position, rest.substr(0, symbol.size())};
  }
  // All bytes of a character outside ASCII, so that a message shows it whole.
  size_t end = position + 1;
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) ++end;
  return {TokenKind::kUnknown, position, text.substr(position, end - position)};
}

}  // namespace fovea::expr
