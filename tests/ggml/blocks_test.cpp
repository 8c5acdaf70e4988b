// Blocks of Q8_0 and Q4_0 against the definition: scale * number, scale * (half byte - 8); float16 and bfloat16 by their bits.
#include "integrations/ggml/blocks.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
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
  conversions().q8_0(blocks.data(), out.data(), static_cast<int64_t>(out.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t block = i / kBlockElements, place = i % kBlockElements;
    const auto number = static_cast<int8_t>(blocks[block * kQ8Bytes + 2 + place]);
    EXPECT_EQ(out[i], kScales[block].value * static_cast<float>(number)) << i;
  }
}

TEST(GgmlBlocks, Q4) {
  const std::vector<uint8_t> blocks = blocks_with(kQ4Bytes);
  std::vector<float> out(std::size(kScales) * kBlockElements);
  conversions().q4_0(blocks.data(), out.data(), static_cast<int64_t>(out.size()));
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
    conversions().q8_0(block.data(), out.data(), kBlockElements);
    EXPECT_EQ(std::isnan(out[5]), half == 0x7e00);
    EXPECT_FALSE(std::isfinite(out[5]));
  }
}

TEST(GgmlBlocks, Float16) {
  std::vector<uint16_t> halves;
  for (int i = 0; i < 41; ++i) halves.push_back(kScales[static_cast<size_t>(i) % std::size(kScales)].half);
  halves[40] = 0xfc00;
  std::vector<float> out(halves.size());
  conversions().f16(halves.data(), out.data(), static_cast<int64_t>(out.size()));
  for (size_t i = 0; i + 1 < out.size(); ++i) EXPECT_EQ(out[i], kScales[i % std::size(kScales)].value) << i;
  EXPECT_EQ(out[40], -INFINITY);
}

TEST(GgmlBlocks, Bfloat16) {
  // Ties to even, carries into the exponent, infinity, and a NaN whose payload would be cut off.
  const std::vector<std::pair<uint32_t, uint16_t>> rounded = {
      {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81},
      {0x3fffffff, 0x4000}, {0xbf7fff00, 0xbf80}, {0x7f7fffff, 0x7f80}, {0xff800000, 0xff80},
      {0x7f800001, 0x7fc0}, {0x00000001, 0x0000}};
  std::vector<float> in;
  for (size_t i = 0; i < 4 * rounded.size() + 3; ++i)
    in.push_back(std::bit_cast<float>(rounded[i % rounded.size()].first));
  std::vector<uint16_t> out(in.size());
  conversions().from_float(in.data(), out.data(), static_cast<int64_t>(in.size()));
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], rounded[i % rounded.size()].second) << i;
}

void expect_one_rounding(int64_t bytes, ToFloat to_float, ToBfloat16 to_bf16) {
  if (to_bf16 == nullptr) GTEST_SKIP() << "this processor has no instructions for bfloat16";
  const std::vector<uint8_t> blocks = blocks_with(bytes);
  std::vector<float> between(std::size(kScales) * kBlockElements);
  std::vector<uint16_t> expected(between.size()), out(between.size());
  const auto count = static_cast<int64_t>(out.size());
  to_float(blocks.data(), between.data(), count);
  conversions().from_float(between.data(), expected.data(), count);
  to_bf16(blocks.data(), out.data(), count);
  EXPECT_EQ(out, expected);
}

TEST(GgmlBlocks, Q8AsBfloat16) {
  expect_one_rounding(kQ8Bytes, conversions().q8_0, conversions().bf16_of_q8_0);
}

TEST(GgmlBlocks, Q4AsBfloat16) {
  expect_one_rounding(kQ4Bytes, conversions().q4_0, conversions().bf16_of_q4_0);
}

}  // namespace
}  // namespace fovea_ggml
