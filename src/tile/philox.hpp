// The random stream of dropout: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11). Counter-based: the decision for a (batch, head, query, key) is a pure function of its coordinates,
// so every backend, tile size and thread count keeps the same weights, and the backward repeats the forward.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fovea::tile {

/// Ten rounds of Philox4x32.
constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

/// Drops attention weights with probability p: weight (batch, head, i, j) is kept when its 32 random bits are at least
/// p * 2^32, and then scaled by 1 / (1 - p). `i` and `j` count within the sequence.
struct Dropout {
  uint32_t threshold = 0;
  float keep_scale = 1;
  std::array<uint32_t, 2> key{};
  uint32_t offset_low = 0;

  constexpr Dropout() = default;
  constexpr Dropout(double p, uint64_t seed, uint64_t offset)
      : threshold(static_cast<uint32_t>(p * 4294967296.0)),
        keep_scale(static_cast<float>(1.0 / (1.0 - p))),
        key{static_cast<uint32_t>(seed),
            static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32)},
        offset_low(static_cast<uint32_t>(offset)) {}

  /// The four words that decide keys 4 * quad_index .. 4 * quad_index + 3 of query i.
  /// `head` = batch index * heads_q + query head.
  constexpr std::array<uint32_t, 4> quad(int64_t head, int64_t i, int64_t quad_index) const {
    return philox4x32({static_cast<uint32_t>(quad_index), static_cast<uint32_t>(i),
                       static_cast<uint32_t>(head), offset_low},
                      key);
  }
  constexpr bool keep(int64_t head, int64_t i, int64_t j) const {
    return quad(head, i, j >> 2)[static_cast<size_t>(j & 3)] >= threshold;
  }
};

}  // namespace fovea::tile
