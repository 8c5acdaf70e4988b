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
  // Query 16 * 2 + 5 and the one 8 behind, keys 16 * 3 + 4 * 1 and after.
  const Words cell = philox4x32<7>({7 ^ start[0], 21 ^ start[1], 3 ^ start[2], start[3]}, {0, 0});
  for (uint32_t far_query = 0; far_query < 2; ++far_query) {
    for (uint32_t far_key = 0; far_key < 2; ++far_key) {
      for (uint32_t next = 0; next < 4; ++next) {
        const uint32_t i = 37 + 8 * far_query, j = 52 + 8 * far_key + next;
        const uint32_t random = cell[2 * far_key + far_query] >> (8 * next) & 0x7f;
        EXPECT_EQ(dropout.keep(3, i, j), random >= 0x20) << i << " " << j;
      }
    }
  }
}

TEST(Philox, ThresholdsAreRoundedUpWhereTheSequenceSaysSo) {
  constexpr double kP = 3.25 / 128;
  const Dropout dropout(kP, 17, 4);
  ASSERT_EQ(dropout.threshold, 3u << 16 | 1u << 14);
  for (uint32_t head = 0; head < 5; ++head) {
    for (uint32_t row = 0; row < 16; ++row) {
      for (uint32_t column = 0; column < 64; ++column) {
        const uint32_t place = (dropout.start[3] + 53685 * column + 43977 * row + 36025 * head) % 65536;
        EXPECT_EQ(dropout.cell(head, row, column).threshold, (place < 16384 ? 4 : 3) * 0x01010101u);
      }
    }
  }
}

// The mean over all places of the sequence is p, to the last bit; and that over any 64 cells beside each other is near it.
TEST(Philox, TheMeanThresholdIsTheProbability) {
  for (const double p : {1e-6, 0.001, 0.1, 0.3, 0.77, 1 - 1e-6}) {
    const Dropout dropout(p, 99, 1);
    uint64_t sum = 0;
    for (uint32_t column = 0; column < 65536; ++column) sum += dropout.cell(1, 2, column).threshold & 0xff;
    EXPECT_EQ(sum, dropout.threshold) << p;
    for (uint32_t row = 0; row < 8; ++row) {
      uint32_t some = 0;
      for (uint32_t column = 0; column < 64; ++column) some += dropout.cell(0, row, column).threshold & 0xff;
      EXPECT_NEAR(some / 64.0, p * 128, 0.05) << p;
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
  EXPECT_NEAR(Dropout(0.1, 1, 2).keep_scale, 1 / 0.9, 2e-7);
  EXPECT_EQ(Dropout(0.1, 1, 2).threshold, 838861u);
  EXPECT_FLOAT_EQ(Dropout(0.1, 1, 2).keep_scale, 8388608.0f / (8388608 - 838861));
}

TEST(Philox, ProbabilitiesNextToZeroAndOne) {
  EXPECT_EQ(Dropout(1e-9, 1, 2).threshold, 0u);
  EXPECT_EQ(Dropout(1e-9, 1, 2).keep_scale, 1.0f);
  EXPECT_EQ(Dropout(1 - 1e-9, 1, 2).threshold, (1u << 23) - 1);
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

// Of weights of a cell: two that are dropped together share the cell's threshold, and nothing else.
TEST(Philox, WeightsOfACellAreIndependent) {
  constexpr int kCells = 40'000;
  constexpr double kP = 0.1;
  const Dropout dropout(kP, 77, 8);
  std::array<std::array<int, 16>, 16> together{};
  for (uint32_t cell = 0; cell < kCells; ++cell) {
    std::array<bool, 16> dropped{};
    const Dropout::Cell of = dropout.cell(cell / 2048, cell / 64 % 32, cell % 64);
    for (size_t x = 0; x < 16; ++x) dropped[x] = (of.kept(x / 4) >> (x % 4 * 8 + 7) & 1) == 0;
    for (size_t x = 0; x < 16; ++x) {
      for (size_t y = 0; y < x; ++y) together[x][y] += dropped[x] && dropped[y] ? 1 : 0;
    }
  }
  constexpr double kMean = kP * kP * kCells;
  for (size_t x = 0; x < 16; ++x) {
    for (size_t y = 0; y < x; ++y) EXPECT_NEAR(together[x][y], kMean, 5 * std::sqrt(kMean)) << x << " " << y;
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
