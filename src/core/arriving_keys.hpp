// Keys and values that lie elsewhere than the others of a problem, and may still be on their way while it is computed: the first
// `AttentionProblem::arriving_keys` of each sequence.
#pragma once

#include <array>
#include <cstdint>

namespace fovea {

/// How many parts the keys of a head come in: halves, the last one first, as kernels go through keys from the last to the first.
constexpr int arriving_key_parts(int64_t keys) {
  constexpr int64_t kWholeBlocks = 256;  // two blocks of keys of any kernel
  return keys % kWholeBlocks == 0 ? 2 : 1;
}

/// Where a run of such a problem finds them. Addresses and strides are multiples of 16 bytes. k and v of the run begin with the first key
/// behind these.
struct ArrivingKeys {
  const void *k = nullptr, *v = nullptr;
  std::array<int64_t, 3> k_stride{}, v_stride{};  ///< in elements: batch, row, head
  /// Words that say what is there: for so many key heads at a time as AttentionProblem::arriving_heads one for each of
  /// arriving_key_parts, which is whole once the word has come to `number` (both go round). Words are in memory of the device that
  /// computes.
  const uint32_t* words = nullptr;
  uint32_t number = 0;
};

}  // namespace fovea
