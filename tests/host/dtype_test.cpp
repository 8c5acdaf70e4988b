// Conversions of the types of 16 and 8 bits, over all of their values, in both directions.
#include "core/dtype.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace fovea {
namespace {

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();

/// The value of a binary floating-point pattern, from the definition.
double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1u ? -1.0 : 1.0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == (1u << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN()
                    : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign *
         std::ldexp(mantissa + (1u << mantissa_bits), static_cast<int>(exponent) - bias - mantissa_bits);
}

template <class T>
struct Format;
template <>
struct Format<F16> {
  static constexpr int exponent_bits = 5, mantissa_bits = 10;
  static constexpr uint32_t infinity = 0x7c00;
};
template <>
struct Format<Bf16> {
  static constexpr int exponent_bits = 8, mantissa_bits = 7;
  static constexpr uint32_t infinity = 0x7f80;
};

template <class T>
T pattern(uint32_t bits) {
  return T{static_cast<uint16_t>(bits)};
}

template <class T>
class SixteenBits : public testing::Test {};
using SixteenBitTypes = testing::Types<F16, Bf16>;
TYPED_TEST_SUITE(SixteenBits, SixteenBitTypes);

TYPED_TEST(SixteenBits, EveryValueWidensExactly) {
  using F = Format<TypeParam>;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = value_of(bits, F::exponent_bits, F::mantissa_bits);
    const float widened = to_float(pattern<TypeParam>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(widened)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(widened), expected) << bits;
      ASSERT_EQ(std::signbit(widened), std::signbit(expected)) << bits;
    }
  }
}

TYPED_TEST(SixteenBits, EveryValueComesBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float widened = to_float(pattern<TypeParam>(bits));
    const TypeParam back = from_float<TypeParam>(widened);
    if (std::isnan(widened)) {
      ASSERT_TRUE(std::isnan(to_float(back))) << bits;
      ASSERT_EQ(back.bits >> 15, bits >> 15) << bits;
    } else {
      ASSERT_EQ(back.bits, bits);
    }
  }
}

/// Rounds between each two neighbouring values: below the midpoint, at it (to even) and above it. The last neighbour is
/// infinity.
TYPED_TEST(SixteenBits, RoundsToNearestEven) {
  using F = Format<TypeParam>;
  for (uint32_t sign : {0u, 0x8000u}) {
    for (uint32_t magnitude = 0; magnitude < F::infinity; ++magnitude) {
      const double low = value_of(magnitude, F::exponent_bits, F::mantissa_bits);
      // The value after the largest finite one, if exponents continued.
      const double high = magnitude + 1 == F::infinity
                              ? low + (low - value_of(magnitude - 1, F::exponent_bits, F::mantissa_bits))
                              : value_of(magnitude + 1, F::exponent_bits, F::mantissa_bits);
      const auto midpoint = static_cast<float>((low + high) / 2);
      ASSERT_EQ(static_cast<double>(midpoint), (low + high) / 2) << "the midpoint is a float";
      const auto rounded = [&](float x) { return from_float<TypeParam>(sign ? -x : x).bits; };
      const uint32_t even = magnitude % 2 == 0 ? magnitude : magnitude + 1;
      ASSERT_EQ(rounded(midpoint), sign | even) << magnitude;
      ASSERT_EQ(rounded(std::nextafter(midpoint, 0.0f)), sign | magnitude) << magnitude;
      ASSERT_EQ(rounded(std::nextafter(midpoint, kFloatInfinity)), sign | (magnitude + 1)) << magnitude;
    }
  }
}

TYPED_TEST(SixteenBits, InfinityAndNan) {
  using F = Format<TypeParam>;
  EXPECT_EQ(from_float<TypeParam>(kFloatInfinity).bits, F::infinity);
  EXPECT_EQ(from_float<TypeParam>(-kFloatInfinity).bits, F::infinity | 0x8000u);
  EXPECT_EQ(from_float<TypeParam>(std::numeric_limits<float>::max()).bits, F::infinity);
  // A NaN whose payload lies in bits that are dropped must not become infinite.
  for (const uint32_t payload : {0x7f800001u, 0x7f801fffu, 0x7fc00000u, 0xff800001u, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(to_float(from_float<TypeParam>(std::bit_cast<float>(payload))))) << payload;
  }
}

TYPED_TEST(SixteenBits, FromDoubleRoundsToo) {
  EXPECT_EQ(to_float(from_double<TypeParam>(0.5)), 0.5f);
  EXPECT_EQ(to_float(from_double<TypeParam>(-1.0)), -1.0f);
  EXPECT_TRUE(std::isinf(to_float(from_double<TypeParam>(1e300))));
}

TEST(EightBits, EveryValueWidensExactlyAndComesBack) {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const float widened = to_float(E4M3{static_cast<uint8_t>(bits)});
    const uint8_t back = from_float<E4M3>(widened).bits;
    EXPECT_EQ(back, bits);
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(widened));
      continue;
    }
    const int exponent = static_cast<int>(bits >> 3 & 15), mantissa = static_cast<int>(bits & 7);
    const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(mantissa + 8, exponent - 10);
    EXPECT_EQ(static_cast<double>(widened), bits & 0x80 ? -size : size) << bits;
    EXPECT_EQ(std::signbit(widened), bits >= 128) << bits;
  }
}

TEST(EightBits, RoundToNearestEvenAndEndAtTheLargest) {
  for (uint32_t magnitude = 0; magnitude < 0x7e; ++magnitude) {
    const float low = to_float(E4M3{static_cast<uint8_t>(magnitude)}),
                high = to_float(E4M3{static_cast<uint8_t>(magnitude + 1)}), midpoint = (low + high) / 2;
    const uint32_t even = magnitude % 2 == 0 ? magnitude : magnitude + 1;
    for (const uint32_t sign : {0u, 0x80u}) {
      const auto rounded = [&](float x) { return from_float<E4M3>(sign ? -x : x).bits; };
      ASSERT_EQ(rounded(midpoint), sign | even) << magnitude;
      ASSERT_EQ(rounded(std::nextafter(midpoint, 0.0f)), sign | magnitude) << magnitude;
      ASSERT_EQ(rounded(std::nextafter(midpoint, kFloatInfinity)), sign | (magnitude + 1)) << magnitude;
    }
  }
  for (const float x : {448.0f, 463.9f, 480.0f, 1e30f, kFloatInfinity}) {
    EXPECT_EQ(from_float<E4M3>(x).bits, 0x7e) << x;
    EXPECT_EQ(from_float<E4M3>(-x).bits, 0xfe) << x;
  }
  EXPECT_TRUE(std::isnan(to_float(from_float<E4M3>(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kE4M3), 1);
  EXPECT_EQ(name_of(DType::kE4M3), "float8_e4m3fn");
  EXPECT_EQ(size_of(DType::kF64), 8);
  EXPECT_EQ(size_of(DType::kF32), 4);
  EXPECT_EQ(size_of(DType::kF16), 2);
  EXPECT_EQ(size_of(DType::kBF16), 2);
  EXPECT_EQ(size_of(DType::kI64), 8);
  EXPECT_EQ(size_of(DType::kI32), 4);
  EXPECT_EQ(size_of(DType::kU8), 1);
  EXPECT_EQ(size_of(DType::kBool), 1);
  EXPECT_EQ(name_of(DType::kBF16), "bfloat16");
  EXPECT_EQ(name_of(DType::kF64), "float64");
}

}  // namespace
}  // namespace fovea
