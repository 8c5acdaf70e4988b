// Sums in integers: exact for the unit, the same in any order, and never out of range.
#include "tile/fixed_sum.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace fovea_test {
namespace {

using fovea::tile::FixedSum;

uint32_t bits_of(float x) {
  return std::bit_cast<uint32_t>(x);
}
uint32_t peak_of(const std::vector<float>& numbers) {
  uint32_t peak = 0;
  for (const float x : numbers) peak = std::max(peak, FixedSum::magnitude(bits_of(x)));
  return peak;
}
/// Of as many numbers as the format is for.
int64_t sum_of(const FixedSum& format, const std::vector<float>& numbers) {
  const uint32_t peak = peak_of(numbers);
  int64_t sum = 0;
  for (const float x : numbers) sum += format.units(bits_of(x), peak);
  return sum;
}
double value_of(const FixedSum& format, const std::vector<float>& numbers) {
  return std::ldexp(static_cast<double>(sum_of(format, numbers)), format.unit(peak_of(numbers)));
}

constexpr FixedSum kOne{0}, kMost{FixedSum::kMostLog2Count};
static_assert(kOne.units(0x3f800000, 0x3f800000) == int64_t{1} << 61, "1.0 of a peak of 1.0");
static_assert(kOne.units(0xbf800000, 0x3f800000) == -(int64_t{1} << 61));
static_assert(kMost.units(0x3f800000, 0x3f800000) == 1 << 23, "the unit is the last place of the peak");

TEST(FixedSum, HoldsEachNumberToHalfAUnit) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200'000; ++i) {
    const auto bits = static_cast<uint32_t>(random());
    const auto peak = static_cast<uint32_t>(random()) & 0x7fffffff;
    if (peak >= FixedSum::kInfinity || FixedSum::magnitude(bits) > peak) continue;
    const FixedSum format{static_cast<int>(random() % (FixedSum::kMostLog2Count + 1))};
    const auto x = static_cast<double>(std::bit_cast<float>(bits));
    const double unit = std::ldexp(1.0, format.unit(peak));
    const double error = static_cast<double>(format.units(bits, peak)) - x / unit;
    ASSERT_LE(std::abs(error), 0.5) << x << " of a peak of " << std::bit_cast<float>(peak);
  }
}

TEST(FixedSum, AsManyPeaksAsThereMayBeFit) {
  const uint32_t largest = bits_of(std::numeric_limits<float>::max());
  for (const uint32_t peak : {largest, bits_of(1.0f), bits_of(1.999999f), uint32_t{1}, uint32_t{0x7fffff}}) {
    for (int log2_count = 0; log2_count <= FixedSum::kMostLog2Count; ++log2_count) {
      const FixedSum format{log2_count};
      EXPECT_LE(format.units(peak, peak), (int64_t{1} << 62) >> log2_count);
      EXPECT_GT(format.units(peak, peak), 0);
    }
  }
}

TEST(FixedSum, IsThatOfTheNumbers) {
  std::mt19937_64 random(2);
  std::normal_distribution<double> normal;
  const FixedSum format{12};
  for (int i = 0; i < 50; ++i) {
    std::vector<float> numbers(4096);
    double exact = 0;
    for (float& x : numbers) {
      x = static_cast<float>(normal(random) * std::exp(4 * normal(random)));
      exact += x;
    }
    const double peak = std::bit_cast<float>(peak_of(numbers));
    EXPECT_NEAR(value_of(format, numbers), exact, peak * 0x1p-36);
  }
}

TEST(FixedSum, OfSubnormalNumbersIsExact) {
  const std::vector<float> numbers = {0x1p-149f, -0x1p-148f, 0x1.8p-127f, 0x1p-149f};
  EXPECT_EQ(value_of(FixedSum{2}, numbers), 0x1.8p-127);
}

}  // namespace
}  // namespace fovea_test
