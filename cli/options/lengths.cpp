// The definitions of lengths.hpp.
#include "cli/options/lengths.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include "cli/terminal/failure.hpp"

namespace fovea::cli {
namespace {

std::optional<int64_t> number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

}  // namespace

PackedLengths parse_lengths(const std::vector<std::string>& texts) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  PackedLengths lengths;
  for (const std::string& text : texts) {
    const size_t times = text.find('x');
    const auto count = times == std::string::npos ? 1 : number(std::string_view(text).substr(0, times));
    const auto length = number(std::string_view(text).substr(times == std::string::npos ? 0 : times + 1));
    if (!count || !length || *count == 0)
      throw Failure(Exit::usage, "--lengths: got '" + text + "', expected LENGTH or COUNTxLENGTH, as 4x1024");
    if (*count > kMost || *length > (kMost - lengths.total()) / *count)
      throw Failure(Exit::usage, "--lengths: got more than 2147483647 rows; give fewer or shorter sequences");
    for (int64_t i = 0; i < *count; ++i)
      lengths.starts.push_back(lengths.starts.back() + static_cast<int32_t>(*length));
    lengths.longest = std::max(lengths.longest, *length);
  }
  return lengths;
}

}  // namespace fovea::cli
