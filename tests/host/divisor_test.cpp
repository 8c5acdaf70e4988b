// tile/divisor.hpp: quotients are those of a division.
#include "tile/divisor.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>

namespace fovea::tile {
namespace {

constexpr uint32_t kLargest = std::numeric_limits<int>::max();

void expect_exact(const Divisor& divisor, uint32_t n) {
  const auto value = static_cast<uint32_t>(divisor.value);
  ASSERT_EQ(divisor.quotient(n), n / value) << n << " / " << value;
  ASSERT_EQ(static_cast<uint32_t>(divisor.remainder(static_cast<int>(n))), n % value) << n << " % " << value;
}

/// At and around multiples of the divisor, where a quotient that is not exact goes wrong first.
void expect_exact(int value, uint32_t multiple) {
  const Divisor divisor(value);
  const uint64_t at = uint64_t{multiple} * static_cast<uint32_t>(value);
  for (const uint64_t n : {at - 1, at, at + 1}) {
    if (n > kLargest) continue;  // at 0 also the number below
    expect_exact(divisor, static_cast<uint32_t>(n));
  }
}

TEST(Divisor, DividesAsADivision) {
  std::mt19937 random(std::random_device{}());
  for (int value = 1; value < 2000; ++value) {
    const uint32_t most = kLargest / static_cast<uint32_t>(value);
    for (uint32_t multiple = 0; multiple < 100; ++multiple) expect_exact(value, std::min(multiple, most));
    for (int i = 0; i < 100; ++i)
      expect_exact(value, std::uniform_int_distribution<uint32_t>(0, most)(random));
    expect_exact(value, most);
  }
}

TEST(Divisor, DividesByLargeNumbers) {
  for (int bits = 0; bits < 31; ++bits) {
    for (const int64_t value : {(int64_t{1} << bits) - 1, int64_t{1} << bits, (int64_t{1} << bits) + 1}) {
      if (value < 1 || value > int64_t{kLargest}) continue;
      const uint32_t most = kLargest / static_cast<uint32_t>(value);
      expect_exact(static_cast<int>(value), most);
      expect_exact(static_cast<int>(value), most / 2);
      EXPECT_EQ(Divisor(static_cast<int>(value)).quotient(kLargest), most);
    }
  }
  EXPECT_EQ(Divisor(static_cast<int>(kLargest)).quotient(kLargest), 1U);
  EXPECT_EQ(Divisor().quotient(kLargest), kLargest) << "1 where nobody says";
}

}  // namespace
}  // namespace fovea::tile
