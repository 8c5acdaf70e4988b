// Messages of file errors, and text from files made safe to print.
#include "io/file_error.hpp"

#include <utility>

namespace fovea::io {

FileError::FileError(std::string file_path, std::string file_fault)
    : std::runtime_error(file_path + ": " + file_fault),
      path(std::move(file_path)),
      fault(std::move(file_fault)) {}

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 64;
  constexpr std::string_view kHexDigits = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += "\\x";
      out += kHexDigits[byte >> 4];
      out += kHexDigits[byte & 15];
    }
  }
  return out + (text.size() > kLongest ? "...'" : "'");
}

}  // namespace fovea::io
