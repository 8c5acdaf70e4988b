// Blocks against the definition of their formats; float16 and bfloat16 by their bits.
#include "integrations/ggml/blocks.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/ggml/block_formats.hpp"

namespace fovea_ggml {
namespace {

struct Scale {
  uint16_t half;
  float value;
};
// Normal, subnormal, zero, negative, the largest.
constexpr Scale kScales[] = {{0x3c00, 1.0f},  {0x2e66, 0.0999755859375f}, {0x0001, 0x1p-24f}, {0x0000, 0.0f},
                             {0xb800, -0.5f}, {0x7bff, 65504.0f}};

// Blocks of the type, one for each scale; where they have leasts, those are scales as well, in turn from the third on.
Scale least_of(size_t block) {
  return kScales[(block + 2) % std::size(kScales)];
}

std::vector<uint8_t> blocks_with(BlockType type) {
  const int64_t bytes = block_bytes(type);
  std::vector<uint8_t> blocks;
  for (size_t block = 0; block < std::size(kScales); ++block) {
    const Scale& scale = kScales[block];
    const size_t begin = blocks.size();
    for (int64_t i = 0; i < bytes; ++i) blocks.push_back(static_cast<uint8_t>(37 * i + scale.half));
    std::memcpy(&blocks[begin], &scale.half, sizeof(scale.half));
    const Scale least = least_of(block);
    if (has_least(type)) std::memcpy(&blocks[begin + 2], &least.half, sizeof(least.half));
  }
  return blocks;
}

struct Format {
  BlockType type;
  const char* name;
  int64_t bytes;
};
constexpr Format kFormats[] = {{BlockType::kQ8_0, "Q8_0", 34}, {BlockType::kQ4_0, "Q4_0", 18},
                               {BlockType::kQ4_1, "Q4_1", 20}, {BlockType::kQ5_0, "Q5_0", 22},
                               {BlockType::kQ5_1, "Q5_1", 24}, {BlockType::kIq4Nl, "IQ4_NL", 18}};
static_assert(std::size(kFormats) == kBlockTypes);

class GgmlBlocks : public testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, GgmlBlocks, testing::ValuesIn(kFormats),
                         [](const auto& format) { return std::string(format.param.name); });

TEST_P(GgmlBlocks, Elements) {
  const auto [type, name, bytes] = GetParam();
  ASSERT_EQ(block_bytes(type), bytes);
  const std::vector<uint8_t> blocks = blocks_with(type);
  std::vector<float> out(std::size(kScales) * kBlockElements);
  conversions().blocks[static_cast<int>(type)](blocks.data(), out.data(), static_cast<int64_t>(out.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t block = i / kBlockElements;
    const int number = number_in(type, &blocks[block * static_cast<size_t>(bytes)],
                                 static_cast<int64_t>(i % kBlockElements));
    const float least = has_least(type) ? least_of(block).value : 0.0f;
    // The product, of 11 bits and 8, is exact: the sum rounds once, whether instructions are fused or not.
    EXPECT_EQ(out[i], kScales[block].value * static_cast<float>(number) + least) << i;
  }
}

TEST_P(GgmlBlocks, AScaleOrALeastThatIsNoNumber) {
  const auto [type, name, bytes] = GetParam();
  std::vector<float> out(kBlockElements);
  for (const size_t place : {size_t{0}, size_t{2}}) {
    if (place == 2 && !has_least(type)) continue;
    for (const uint16_t half : {uint16_t{0x7c00}, uint16_t{0x7e00}}) {
      std::vector<uint8_t> block(static_cast<size_t>(bytes), 0x11);
      std::memcpy(&block[place], &half, sizeof(half));
      conversions().blocks[static_cast<int>(type)](block.data(), out.data(), kBlockElements);
      EXPECT_EQ(std::isnan(out[5]), half == 0x7e00);
      EXPECT_FALSE(std::isfinite(out[5]));
    }
  }
}

TEST(GgmlConversions, Float16) {
  std::vector<uint16_t> halves;
  for (int i = 0; i < 41; ++i) halves.push_back(kScales[static_cast<size_t>(i) % std::size(kScales)].half);
  halves[40] = 0xfc00;
  std::vector<float> out(halves.size());
  conversions().f16(halves.data(), out.data(), static_cast<int64_t>(out.size()));
  for (size_t i = 0; i + 1 < out.size(); ++i) EXPECT_EQ(out[i], kScales[i % std::size(kScales)].value) << i;
  EXPECT_EQ(out[40], -INFINITY);
}

TEST(GgmlConversions, Bfloat16) {
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

TEST(GgmlConversions, BlocksAsBfloat16RoundOnce) {
  int tested = 0;
  for (const Format& format : kFormats) {
    const ToBfloat16 to_bf16 = conversions().bf16_of_blocks[static_cast<int>(format.type)];
    if (to_bf16 == nullptr) continue;
    const std::vector<uint8_t> blocks = blocks_with(format.type);
    std::vector<float> between(std::size(kScales) * kBlockElements);
    std::vector<uint16_t> expected(between.size()), out(between.size());
    const auto count = static_cast<int64_t>(out.size());
    conversions().blocks[static_cast<int>(format.type)](blocks.data(), between.data(), count);
    conversions().from_float(between.data(), expected.data(), count);
    to_bf16(blocks.data(), out.data(), count);
    EXPECT_EQ(out, expected) << format.name;
    ++tested;
  }
  if (tested == 0) GTEST_SKIP() << "this processor has no instructions for bfloat16";
}

}  // namespace
}  // namespace fovea_ggml
