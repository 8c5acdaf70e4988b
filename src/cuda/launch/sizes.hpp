// Arithmetic of sizes that may not fit 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
/// a * b, or kTooMuch. Neither is negative.
constexpr int64_t saturating_product(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? Parts::kTooMuch : std::min(product, Parts::kTooMuch);
}

}  // namespace fovea::cuda
