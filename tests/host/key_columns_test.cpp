// tile/key_columns.hpp: the columns that lanes hold where fragments come from rows of 8 bits, and the power of two of a row of Q.
#include "tile/key_columns.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tile/fragment_map.hpp"

namespace fovea::tile {
namespace {

/// Rows of 16 bits: the columns are those that mma has.
TEST(KeyColumns, OfSixteenBitsAreThoseOfTheInstruction) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int reg = 0; reg < 2; ++reg) {
      for (int half = 0; half < 2; ++half) {
        EXPECT_EQ(column_of_step(false, lane, reg, half), MmaM16N8K16::a(lane, 2 * reg, half).col);
        EXPECT_EQ(column_of_pair(false, lane, reg, half), 8 * reg + AccumulatorM16N8::at(lane, half).col);
      }
    }
  }
}

/// Rows of 8 bits: ldmatrix gives lane l bytes 4 (l % 4) to 4 (l % 4) + 3 of a row of 16, of which A and B take two and two; the four
/// lanes of a row have every column once, and what A and B multiply is the same column.
TEST(KeyColumns, OfEightBitsAreEachThereOnce) {
  for (int row = 0; row < 8; ++row) {
    std::array<int, 16> of_step{}, of_pair{};
    for (int t = 0; t < 4; ++t) {
      for (int i = 0; i < 4; ++i) {
        const int lane = 4 * row + t, byte = 4 * t + i;
        EXPECT_EQ(column_of_step(true, lane, i / 2, i % 2), byte);
        ++of_step[static_cast<size_t>(column_of_step(true, lane, i / 2, i % 2))];
        ++of_pair[static_cast<size_t>(column_of_pair(true, lane, i / 2, i % 2))];
      }
    }
    for (const int count : of_step) EXPECT_EQ(count, 1);
    for (const int count : of_pair) EXPECT_EQ(count, 1);
  }
}

/// V by ldmatrix.trans: lane l has columns 2 (l / 4) and 2 (l / 4) + 1 of a row of 16 bytes. The even ones are operand B of the pair's
/// first product, so column n of its accumulator is column 2 n of the pair.
TEST(KeyColumns, OfAPairAreEvenAndOddOnes) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int n = 0; n < 2; ++n) {
      for (int e = 0; e < 2; ++e)
        EXPECT_EQ(column_of_pair(true, lane, n, e), 2 * AccumulatorM16N8::at(lane, e).col + n);
    }
  }
}

TEST(FactorToFloat16, BringsTheLargestElementNearTheEnd) {
  for (const float x : {1.0f, 1.9999999f, 2.0f, 3e-5f, 7e20f, 65504.0f, 3.3e38f, 1e-30f}) {
    const float factor = factor_to_float16(x);
    EXPECT_EQ(std::bit_cast<uint32_t>(factor) & 0x7fffffu, 0u) << "a power of two";
    EXPECT_GE(x * factor, 16384.0f) << x;
    EXPECT_LT(x * factor, 32768.0f) << x;
  }
  for (const float x : {1.2e-38f, 1e-40f, 1e-45f}) {  // as far as float32 has powers of two
    EXPECT_EQ(factor_to_float16(x), 0x1p127f) << x;
  }
  for (const float x :
       {0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    EXPECT_EQ(factor_to_float16(x), 1.0f);
}

/// Below 448 with a bit to spare, so that what a row's pieces leave is representable.
TEST(KeyColumns, FactorsTakeRowsToTheEndOfFloat8) {
  for (const float x : {1e-30f, 0.7f, 1.0f, 447.0f, 3e38f}) {
    const float largest = x * factor_to_e4m3(x);
    EXPECT_GE(largest, 128) << x;
    EXPECT_LT(largest, 256) << x;
  }
  EXPECT_EQ(factor_to_e4m3(0), 1);
}

}  // namespace
}  // namespace fovea::tile
