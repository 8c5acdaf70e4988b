// Formats of quantised caches, and conversions in vectors of the types that caches are usually kept in.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fovea_ggml {

/// ggml's formats of a cache: blocks of 32 elements, element = scale * number, and + least in those that end in _1. A block has its float16
/// scale, then its float16 least, if any, and
///   Q8_0     32 bytes with a sign
///   Q4_0     16 bytes: element i is the low half of byte i, element 16 + i its high half; the number is 8 less
///   Q4_1     the same without the 8
///   Q5_0     4 bytes, whose bit i is bit 4 of element i, then halves as in Q4_0; the number is 16 less
///   Q5_1     the same without the 16
///   IQ4_NL   halves as in Q4_0, each a place in kIq4Numbers
enum class BlockType : uint8_t { kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kIq4Nl };
inline constexpr int kBlockTypes = 6;
inline constexpr int64_t kBlockElements = 32;
inline constexpr int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                           1,    13,   25,  38,  53,  69,  89,  113};

constexpr bool has_least(BlockType type) {
  return type == BlockType::kQ4_1 || type == BlockType::kQ5_1;
}
constexpr bool has_fifth_bits(BlockType type) {
  return type == BlockType::kQ5_0 || type == BlockType::kQ5_1;
}
/// How much less a number is than its bits.
constexpr int middle_of(BlockType type) {
  return type == BlockType::kQ4_0 ? 8 : type == BlockType::kQ5_0 ? 16 : 0;
}
/// Where in a block its fifth bits are, and its bytes or halves.
constexpr int64_t fifths_at(BlockType type) {
  return has_least(type) ? 4 : 2;
}
constexpr int64_t numbers_at(BlockType type) {
  return fifths_at(type) + (has_fifth_bits(type) ? 4 : 0);
}
constexpr int64_t block_bytes(BlockType type) {
  return numbers_at(type) + (type == BlockType::kQ8_0 ? 32 : 16);
}

/// call(a constant of the type).
template <class Call>
auto with_block_type(BlockType type, Call&& call) {
  switch (type) {
    case BlockType::kQ4_0:
      return call(std::integral_constant<BlockType, BlockType::kQ4_0>());
    case BlockType::kQ4_1:
      return call(std::integral_constant<BlockType, BlockType::kQ4_1>());
    case BlockType::kQ5_0:
      return call(std::integral_constant<BlockType, BlockType::kQ5_0>());
    case BlockType::kQ5_1:
      return call(std::integral_constant<BlockType, BlockType::kQ5_1>());
    case BlockType::kIq4Nl:
      return call(std::integral_constant<BlockType, BlockType::kIq4Nl>());
    case BlockType::kQ8_0:
      break;
  }
  return call(std::integral_constant<BlockType, BlockType::kQ8_0>());
}

/// `count` elements; of blocks whole ones.
using ToFloat = void (*)(const void* in, float* out, int64_t count);
/// The same, rounded to nearest even.
using ToBfloat16 = void (*)(const void* in, uint16_t* out, int64_t count);

struct Conversions {
  ToFloat f16;
  ToFloat blocks[kBlockTypes];  ///< by BlockType
  ToBfloat16 from_float;
  ToBfloat16 bf16_of_blocks[kBlockTypes];  ///< in one step, or null
};

/// The fastest of this processor.
const Conversions& conversions();

}  // namespace fovea_ggml
