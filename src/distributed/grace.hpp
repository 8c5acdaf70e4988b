// How much longer than its deadline a rank waits.
#pragma once

#include <algorithm>
#include <chrono>

namespace fovea::distributed {

/// For a rank that only waits until others take its messages: who takes none waits for a third rank, as a rule, and names that one at
/// its own deadline.
constexpr std::chrono::milliseconds grace_of(std::chrono::milliseconds deadline) {
  return std::min(deadline / 4, std::chrono::milliseconds{2000});
}

}  // namespace fovea::distributed
