// The random stream of dropout: known answers, and the properties on which backends rely.
#include "tile/philox.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>

namespace fovea::tile {
namespace {

using Words = std::array<uint32_t, 4>;

// The known answers for philox4x32-10 that come with the authors' Random123.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, DropoutUsesTheDocumentedCounterAndKey) {
  constexpr uint64_t kSeed = 0x1122334455667788, kOffset = 0x99aabbccddeeff00;
  const Dropout dropout(0.25, kSeed, kOffset);
  const Words expected = philox4x32({7, 5, 3, 0xddeeff00}, {0x55667788, 0x11223344u ^ 0x99aabbccu});
  EXPECT_EQ(dropout.quad(3, 5, 7), expected);
  for (int64_t lane = 0; lane < 4; ++lane) {
    EXPECT_EQ(dropout.keep(3, 5, 28 + lane), expected[static_cast<size_t>(lane)] >= 0x40000000u);
  }
}

TEST(Philox, KeepScaleKeepsTheMean) {
  EXPECT_EQ(Dropout(0.5, 1, 2).keep_scale, 2.0f);
  EXPECT_EQ(Dropout(0.75, 1, 2).keep_scale, 4.0f);
  EXPECT_FLOAT_EQ(Dropout(0.1, 1, 2).keep_scale, 1.0f / 0.9f);
}

TEST(Philox, ZeroProbabilityKeepsEverything) {
  const Dropout dropout(0.0, 42, 0);
  for (int64_t j = 0; j < 1000; ++j) ASSERT_TRUE(dropout.keep(0, 0, j));
}

TEST(Philox, TheShareOfDroppedWeightsIsTheProbability) {
  constexpr int64_t kCount = 200'000;
  for (const double p : {0.01, 0.1, 0.5, 0.9}) {
    const Dropout dropout(p, 1234, 5);
    int64_t dropped = 0;
    for (int64_t x = 0; x < kCount; ++x) dropped += dropout.keep(x % 7, x / 700, x % 700) ? 0 : 1;
    const double deviation = std::sqrt(p * (1 - p) * static_cast<double>(kCount));
    EXPECT_NEAR(static_cast<double>(dropped), p * static_cast<double>(kCount), 5 * deviation) << p;
  }
}

TEST(Philox, EveryCoordinateAndSeedMatters) {
  const auto decisions = [](uint64_t seed, uint64_t offset, int64_t head, int64_t i) {
    uint64_t bits = 0;
    const Dropout dropout(0.5, seed, offset);
    for (int64_t j = 0; j < 64; ++j) bits = bits << 1 | (dropout.keep(head, i, j) ? 1u : 0u);
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
