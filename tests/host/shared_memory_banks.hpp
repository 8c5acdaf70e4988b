// Simulates the banks of shared memory: 32 of 4 bytes each. Hardware serves an access of a warp in phases of as many lanes
// as ask for 128 bytes together. Within a phase each bank gives one word a cycle, to all lanes that ask for that word.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fovea::tile {

/// Cycles that an access takes beyond one a phase. `addresses` has one a lane, in bytes, multiples of `access_bytes`.
inline int bank_conflicts(const std::vector<int>& addresses, int access_bytes) {
  const size_t lanes_of_phase = static_cast<size_t>(std::min(32, 128 / access_bytes));
  int conflicts = 0;
  for (size_t first = 0; first < addresses.size(); first += lanes_of_phase) {
    std::array<std::vector<int>, 32> words;  // distinct ones, of each bank
    const size_t end = std::min(addresses.size(), first + lanes_of_phase);
    for (size_t lane = first; lane < end; ++lane) {
      for (int word = addresses[lane] / 4; word <= (addresses[lane] + access_bytes - 1) / 4; ++word) {
        std::vector<int>& of_bank = words[static_cast<size_t>(word % 32)];
        if (std::find(of_bank.begin(), of_bank.end(), word) == of_bank.end()) of_bank.push_back(word);
      }
    }
    size_t cycles = 1;
    for (const auto& of_bank : words) cycles = std::max(cycles, of_bank.size());
    conflicts += static_cast<int>(cycles) - 1;
  }
  return conflicts;
}

}  // namespace fovea::tile
