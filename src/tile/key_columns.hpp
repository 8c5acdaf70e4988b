// Which columns of Q, K and O the lanes of a warp hold where fragments come from rows of 8 bits (warp/key_fragments.cuh), and what
// brings rows of Q to float16.
#pragma once

#include <bit>
#include <cstdint>

namespace fovea::tile {

/// Element `half` of register pair `reg` (0: a[0] and b[0], 1: a[2] and b[1]) of a step of 16 columns: its column in the step.
constexpr int column_of_step(bool bytes, int lane, int reg, int half) {
  return bytes ? lane % 4 * 4 + 2 * reg + half : lane % 4 * 2 + 8 * reg + half;
}
/// Element `e` (0 or 1 of a row) of accumulator `n` of a pair of O: its column in the pair's 16.
constexpr int column_of_pair(bool bytes, int lane, int n, int e) {
  return bytes ? lane % 4 * 4 + 2 * e + n : lane % 4 * 2 + 8 * n + e;
}

/// The power of two that brings a row whose largest element is `largest` to [2^wanted, 2^(wanted + 1)), as far as float32 has it; 1 for
/// rows of zeros, and for those with NaN or infinity.
constexpr float factor_to_exponent(float largest, int wanted) {
  constexpr int kBias = 127, kMostExponent = 254;
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(largest) >> 23 & 0xff);
  if (!(largest > 0) || exponent > kMostExponent) return 1;
  const int to = 2 * kBias + wanted - exponent;
  const int field = to > kMostExponent ? kMostExponent : to;
  return std::bit_cast<float>(static_cast<uint32_t>(field) << 23);
}
/// To the upper end of float16.
constexpr float factor_to_float16(float largest) {
  return factor_to_exponent(largest, 14);
}
/// To the upper end of float8_e4m3fn, which is 448.
constexpr float factor_to_e4m3(float largest) {
  return factor_to_exponent(largest, 7);
}

}  // namespace fovea::tile
