// The numbers of ggml's blocks by the definition of each format, for tests: the library's own knowledge of formats is not used.
#pragma once

#include <cstdint>

#include "integrations/ggml/blocks.hpp"

namespace fovea_ggml {

/// The number of element `place`, 0 to 31, of a block.
inline int number_in(BlockType type, const uint8_t* block, int64_t place) {
  const auto half_in = [&](const uint8_t* halves) {
    return place < 16 ? halves[place] & 15 : halves[place - 16] >> 4;
  };
  const auto fifth_in = [&](const uint8_t* bits) { return bits[place / 8] >> (place % 8) & 1; };
  constexpr int kTable[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  switch (type) {
    case BlockType::kQ8_0:
      return static_cast<int8_t>(block[2 + place]);
    case BlockType::kQ4_0:
      return half_in(block + 2) - 8;
    case BlockType::kQ4_1:
      return half_in(block + 4);
    case BlockType::kQ5_0:
      return half_in(block + 6) + 16 * fifth_in(block + 2) - 16;
    case BlockType::kQ5_1:
      return half_in(block + 8) + 16 * fifth_in(block + 4);
    case BlockType::kIq4Nl:
      return kTable[half_in(block + 2)];
  }
  return 0;
}

}  // namespace fovea_ggml
