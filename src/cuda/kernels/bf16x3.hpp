// bf16x3: a float32 operand as a sum of three bfloat16 parts, so that tensor cores multiply it with nearly all its bits.
#pragma once

namespace fovea::cuda {

/// bfloat16 values that stand for one float32 in bf16x3.
inline constexpr int kBf16x3Parts = 3;

/// How many products of parts of A and B make one product of A and B. For bf16x3 six of the nine, the smallest
/// first: the three left out are below 2^-24 of the whole.
constexpr int products_of_parts(int parts) {
  return parts == kBf16x3Parts ? 6 : 1;
}
struct PartPair {
  int a, b;
};
constexpr PartPair part_pair(int parts, int i) {
  // (0, 2) (2, 0) (1, 1) (0, 1) (1, 0) (0, 0), a hexadecimal digit each: an array would lie in local memory.
  return parts == kBf16x3Parts ? PartPair{0x010120 >> 4 * i & 3, 0x001102 >> 4 * i & 3} : PartPair{0, 0};
}

}  // namespace fovea::cuda
