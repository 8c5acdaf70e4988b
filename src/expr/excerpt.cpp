// Messages go to terminals and to Python, which accept no broken characters.
#include "expr/excerpt.hpp"

#include <vector>

namespace fovea::expr {
namespace {

bool continues_character(char c) {
  return (static_cast<unsigned char>(c) & 0xc0u) == 0x80u;
}

/// Bytes of the character at `at`, or 0 where none begins that can be shown: control characters, broken UTF-8.
size_t character_size(std::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  if (first < 0x80) return first < 0x20 || first == 0x7f ? 0 : 1;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || at + size > text.size()) return 0;
  for (size_t i = 1; i < size; ++i) {
    if (!continues_character(text[at + i])) return 0;
  }
  // Longer than needed, surrogates, and beyond the last character.
  const auto second = static_cast<unsigned char>(text[at + 1]);
  const bool wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                     (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  // U+0080 to U+009F are control characters.
  return wrong || (first == 0xc2 && second < 0xa0) ? 0 : size;
}

}  // namespace

std::string quoted(std::string_view text) {
  constexpr size_t kLongest = 40;  // a message stays a line
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string shown = "'";
  size_t at = 0;
  while (at < text.size() && at < kLongest) {
    const size_t size = character_size(text, at);
    if (size > 0) {
      shown.append(text.substr(at, size));
      at += size;
      continue;
    }
    const auto byte = static_cast<unsigned char>(text[at++]);
    shown.append("\\x") += kDigits[byte >> 4];
    shown += kDigits[byte & 15];
  }
  return shown.append(at < text.size() ? "...'" : "'");
}

std::string excerpt_of(std::string_view text, size_t position) {
  constexpr size_t kWidth = 50;
  size_t begin = position;
  while (begin > 0 && text[begin - 1] != '\n') --begin;
  // Where the characters of the line begin, up to some behind the position.
  std::vector<size_t> starts;
  size_t before = 0;
  for (size_t at = begin; at < text.size() && text[at] != '\n' && starts.size() < before + kWidth;) {
    starts.push_back(at);
    const size_t size = character_size(text, at);
    at += size > 0 ? size : 1;
    if (at <= position) before = starts.size();
  }
  const size_t first = before > kWidth ? before - kWidth : 0;
  std::string line = "  ";
  for (size_t i = first; i < starts.size(); ++i) {
    const size_t size = character_size(text, starts[i]);
    line.append(size > 0                                             ? text.substr(starts[i], size)
                : static_cast<unsigned char>(text[starts[i]]) < 0x80 ? " "
                                                                     : "?");
  }
  return line + "\n" + std::string(2 + before - first, ' ') + "^";
}

}  // namespace fovea::expr
