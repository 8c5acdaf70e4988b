// Parts of a text as messages show them: always valid UTF-8, without control characters.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fovea::expr {

/// The text in quotes, cut where it is long; bytes that no line can show as \x1f.
std::string quoted(std::string_view text);

/// The line around the position, at most 50 characters before and behind it, and a caret under it.
std::string excerpt_of(std::string_view text, size_t position);

}  // namespace fovea::expr
