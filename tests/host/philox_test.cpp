// The random stream of dropout: known answers, and the properties on which backends rely.
#include "tile/philox.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <utility>

#include "core/dropout_place.hpp"

namespace fovea::tile {
namespace {

using Words = std::array<uint32_t, 4>;

// The known answers for philox4x32-10 that come with the authors' Random123.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32<10>({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32<10>({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32<10>({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, DropoutUsesTheDocumentedCounter) {
  constexpr uint64_t kSeed = 0x1122334455667788, kOffset = 0x99aabbccddeeff00;
  const Dropout dropout(0.25, kSeed, kOffset);
  const Words start = philox4x32<10>({0x55667788, 0x11223344, 0xddeeff00, 0x99aabbcc}, {0, 0});
  // Query 16 * 2 + 8 + 5 and its neighbour 8 before, keys 16 * 3 + 2 * 1 and after.
  const Words cell = philox4x32<7>({13 ^ start[0], 21 ^ start[1], 3 ^ start[2], start[3]}, {0, 0});
  for (uint32_t far_query = 0; far_query < 2; ++far_query) {
    for (uint32_t far_key = 0; far_key < 2; ++far_key) {
      const uint32_t i = 37 + 8 * far_query, j = 50 + 8 * far_key, word = cell[2 * far_key + far_query];
      EXPECT_EQ(dropout.keep(3, i, j), (word & 0x7fff) >= 0x2000) << i << " " << j;
      EXPECT_EQ(dropout.keep(3, i, j + 1), (word >> 16 & 0x7fff) >= 0x2000) << i << " " << j + 1;
    }
  }
}

TEST(Philox, PartsShareTheStreamOfTheWhole) {
  const Dropout whole(0.4, 7, 9);
  constexpr uint32_t kMultiple = DropoutPlace::kMultiple;
  for (const auto& [query, key] : {std::pair{0u, kMultiple}, {kMultiple, 0u}, {4096u, 1u << 30}}) {
    Dropout part = whole;
    part.begin_at(query, key);
    for (uint32_t i = 0; i < 40; ++i) {
      for (uint32_t j = 0; j < 40; ++j)
        ASSERT_EQ(part.keep(3, i, j), whole.keep(3, query + i, key + j)) << i << " " << j;
    }
  }
}

TEST(Philox, KeepScaleKeepsTheMean) {
  EXPECT_EQ(Dropout(0.5, 1, 2).keep_scale, 2.0f);
  EXPECT_EQ(Dropout(0.75, 1, 2).keep_scale, 4.0f);
  EXPECT_NEAR(Dropout(0.1, 1, 2).keep_scale, 1 / 0.9, 2e-5);
  EXPECT_EQ(Dropout(0.1, 1, 2).threshold, 3277u);
  EXPECT_FLOAT_EQ(Dropout(0.1, 1, 2).keep_scale, 32768.0f / (32768 - 3277));
}

TEST(Philox, ProbabilitiesNextToZeroAndOne) {
  EXPECT_EQ(Dropout(1e-9, 1, 2).threshold, 0u);
  EXPECT_EQ(Dropout(1e-9, 1, 2).keep_scale, 1.0f);
  EXPECT_EQ(Dropout(1 - 1e-9, 1, 2).threshold, 32767u);
}

TEST(Philox, ZeroProbabilityKeepsEverything) {
  const Dropout dropout(0.0, 42, 0);
  for (uint32_t j = 0; j < 1000; ++j) ASSERT_TRUE(dropout.keep(0, 0, j));
}

TEST(Philox, TheShareOfDroppedWeightsIsTheProbability) {
  constexpr int64_t kCount = 200'000;
  for (const double p : {0.01, 0.1, 0.5, 0.9}) {
    const Dropout dropout(p, 1234, 5);
    int64_t dropped = 0;
    for (uint32_t x = 0; x < kCount; ++x) dropped += dropout.keep(x % 7, x / 700, x % 700) ? 0 : 1;
    const double deviation = std::sqrt(p * (1 - p) * static_cast<double>(kCount));
    EXPECT_NEAR(static_cast<double>(dropped), p * static_cast<double>(kCount), 5 * deviation) << p;
  }
}

TEST(Philox, EveryCoordinateAndSeedMatters) {
  const auto decisions = [](uint64_t seed, uint64_t offset, uint32_t head, uint32_t i) {
    uint64_t bits = 0;
    const Dropout dropout(0.5, seed, offset);
    for (uint32_t j = 0; j < 64; ++j) bits = bits << 1 | (dropout.keep(head, i, j) ? 1u : 0u);
    return bits;
  };
  const uint64_t base = decisions(1, 2, 3, 4);
  EXPECT_EQ(base, decisions(1, 2, 3, 4));
  EXPECT_NE(base, decisions(2, 2, 3, 4));
  EXPECT_NE(base, decisions(1 + (uint64_t{1} << 32), 2, 3, 4));
  EXPECT_NE(base, decisions(1, 3, 3, 4));
  EXPECT_NE(base, decisions(1, 2 + (uint64_t{1} << 32), 3, 4));
  EXPECT_NE(base, decisions(1, 2, 4, 4));
  EXPECT_NE(base, decisions(1, 2, 3, 5));
}

}  // namespace
}  // namespace fovea::tile
