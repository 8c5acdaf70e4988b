// Sums of float32 numbers with the same bits in any order: in 64-bit integers.
//
// All numbers of a sum become multiples of one unit, a power of 2 that follows from the largest magnitude among them (the peak)
// and from how many there may be, so that the sum never overflows. Each is rounded to the unit once; additions of integers are exact.
// With at most 2^38 numbers the unit is no more than the last place of the peak as a float32, with 2^(38 - n) of them 2^n times finer.
#pragma once

#include <cstdint>

namespace fovea::tile {

struct FixedSum {
  /// There are at most 2^log2_count numbers.
  int log2_count = 0;

  static constexpr int kMostLog2Count = 38;
  static constexpr uint32_t kInfinity = 0x7f800000;
  /// What stands in the place of the sum where the peak is infinite: which infinities there are.
  static constexpr uint64_t kPositive = 1, kNegative = 2;

  /// The bits of |x|. They compare as the magnitudes do, and NaN is above all.
  static constexpr uint32_t magnitude(uint32_t bits) { return bits & 0x7fffffff; }

  /// A finite number of these bits, not above the peak, in units.
  constexpr int64_t units(uint32_t bits, uint32_t peak) const {
    const uint32_t fraction = bits & 0x7fffff;
    const int64_t mantissa = (magnitude(bits) >> 23) == 0 ? fraction : fraction | 0x800000;
    const int shift = exponent_of(bits) - exponent_of(peak) + kMostLog2Count - log2_count;
    int64_t count = 0;
    if (shift >= 0) {
      count = mantissa << shift;
    } else if (shift > -kMantissaBits - 1) {
      count = (mantissa + (int64_t{1} << (-shift - 1))) >> -shift;
    }
    return bits >> 31 != 0 ? -count : count;
  }
  /// The unit is 2 to this power.
  constexpr int unit(uint32_t peak) const { return exponent_of(peak) - kBias - kMostLog2Count + log2_count; }

 private:
  static constexpr int kMantissaBits = 24;
  static constexpr int kBias = 150;  ///< a float32 is its mantissa, an integer, times 2^(exponent - 150)
  /// Subnormal numbers have the exponent of the smallest normal ones.
  static constexpr int exponent_of(uint32_t bits) {
    const auto exponent = static_cast<int>(magnitude(bits) >> 23);
    return exponent == 0 ? 1 : exponent;
  }
};

}  // namespace fovea::tile
