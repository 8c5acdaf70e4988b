// Formats numbers, sizes and tables: the definitions of text.hpp.
#include "cli/terminal/text.hpp"

#include <fmt/core.h>
#include <charconv>

#include <algorithm>
#include <array>
#include <cmath>

#include "io/array.hpp"

namespace fovea::cli {

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.2f} {}", bytes, kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

std::string shape_text(std::span<const int64_t> shape) {
  return io::shape_text(shape);
}

std::string safe_text(std::string_view text) {
  std::string safe(text);
  for (char& c : safe) {
    if (c < ' ' || c > '~') c = '?';
  }
  return safe;
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

void print_json(const Json& json) {
  // A replacement instead of an exception for paths that are not UTF-8.
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

std::string Table::text() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line = indent_;
    for (size_t column = 0; column < row.size(); ++column) {
      if (column == 0) {
        line += fmt::format("{:<{}}", row[column], widths[column]);
      } else {
        line += fmt::format("  {:>{}}", row[column], widths[column]);
      }
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace fovea::cli
