// The definitions of lengths.hpp.
#include "cli/options/lengths.hpp"

#include <algorithm>
#include <limits>
#include <string_view>

#include "cli/terminal/failure.hpp"
#include "cli/terminal/text.hpp"

namespace fovea::cli {
PackedLengths parse_lengths(const std::vector<std::string>& texts) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  PackedLengths lengths;
  for (const std::string& text : texts) {
    const size_t times = text.find('x');
    const auto count = times == std::string::npos ? 1 : whole_number(std::string_view(text).substr(0, times));
    const auto length =
        whole_number(std::string_view(text).substr(times == std::string::npos ? 0 : times + 1));
    if (!count || !length || *count <= 0 || *length < 0)
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
