// Blocks of Q8_0 and Q4_0 against the definition: scale * number, scale * (half byte - 8).
#include "integrations/ggml/blocks.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace fovea_ggml {
namespace {

struct Scale {
  uint16_t half;
  float value;
};
// Normal, subnormal, zero, negative, the largest.
constexpr Scale kScales[] = {{0x3c00, 1.0f},  {0x2e66, 0.0999755859375f}, {0x0001, 0x1p-24f}, {0x0000, 0.0f},
                             {0xb800, -0.5f}, {0x7bff, 65504.0f}};

std::vector<uint8_t> blocks_with(int64_t bytes) {
  std::vector<uint8_t> blocks;
  for (const Scale& scale : kScales) {
    blocks.resize(blocks.size() + static_cast<size_t>(bytes));
    uint8_t* block = &blocks[blocks.size() - static_cast<size_t>(bytes)];
    std::memcpy(block, &scale.half, sizeof(scale.half));
    for (int64_t i = 2; i < bytes; ++i) block[i] = static_cast<uint8_t>(37 * i + scale.half);
  }
  return blocks;
}

TEST(GgmlBlocks, Q8) {
  const std::vector<uint8_t> blocks = blocks_with(kQ8Bytes);
  std::vector<float> out(std::size(kScales) * kBlockElements);
  q8_0_to_float(blocks.data(), out.data(), static_cast<int64_t>(out.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t block = i / kBlockElements, place = i % kBlockElements;
    const auto number = static_cast<int8_t>(blocks[block * kQ8Bytes + 2 + place]);
    EXPECT_EQ(out[i], kScales[block].value * static_cast<float>(number)) << i;
  }
}

TEST(GgmlBlocks, Q4) {
  const std::vector<uint8_t> blocks = blocks_with(kQ4Bytes);
  std::vector<float> out(std::size(kScales) * kBlockElements);
  q4_0_to_float(blocks.data(), out.data(), static_cast<int64_t>(out.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t block = i / kBlockElements, place = i % kBlockElements;
    const uint8_t pair = blocks[block * kQ4Bytes + 2 + place % 16];
    const int number = (place < 16 ? pair & 15 : pair >> 4) - 8;
    EXPECT_EQ(out[i], kScales[block].value * static_cast<float>(number)) << i;
  }
}

TEST(GgmlBlocks, AScaleThatIsNoNumber) {
  std::vector<uint8_t> block(kQ8Bytes, 1);
  std::vector<float> out(kBlockElements);
  for (const uint16_t half : {uint16_t{0x7c00}, uint16_t{0x7e00}}) {
    std::memcpy(block.data(), &half, sizeof(half));
    q8_0_to_float(block.data(), out.data(), kBlockElements);
    EXPECT_EQ(std::isnan(out[5]), half == 0x7e00);
    EXPECT_FALSE(std::isfinite(out[5]));
  }
}

}  // namespace
}  // namespace fovea_ggml
