// --lengths: packed sequences of different lengths, for problems that are described by sizes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fovea::cli {

struct PackedLengths {
  std::vector<int32_t> starts = {0};  ///< where each sequence begins, and the end
  int64_t longest = 0;

  int64_t sequences() const { return static_cast<int64_t>(starts.size()) - 1; }
  int64_t total() const { return starts.back(); }
};

/// Each text is LENGTH or COUNTxLENGTH. Throws a Failure for others, and for more rows than int32 counts.
PackedLengths parse_lengths(const std::vector<std::string>& texts);

}  // namespace fovea::cli
