// Division by a number that the host knows, for kernels: a product and a shift in place of about thirty dependent instructions.
#pragma once

#include <cstdint>

namespace fovea::tile {

/// A positive int by which numbers below 2^31 are divided. With s the least such that value <= 2^s, and factor = ceil(2^(31 + s) / value),
/// n * factor / 2^(31 + s) exceeds n / value by less than 1 / value (T. Granlund, P. L. Montgomery, "Division by invariant integers
/// using multiplication", 1994, theorem 4.2).
struct Divisor {
  int value = 1, shift = 31;
  uint32_t factor = uint32_t{1} << 31;

  constexpr Divisor() = default;
  constexpr Divisor(int value_) : value(value_) {  // implicit: a Divisor is the number
    while ((int64_t{1} << (shift - 31)) < value) ++shift;
    const uint64_t divisor = static_cast<uint64_t>(value);
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  constexpr uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{n} * factor) >> shift);
  }
  constexpr int remainder(int n) const {
    return n - static_cast<int>(quotient(static_cast<uint32_t>(n))) * value;
  }
};

}  // namespace fovea::tile
