// What the ggml backend makes of masks: bands, zeros in any order, numbers.
#include "integrations/ggml/mask.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace fovea_ggml {
namespace {

constexpr uint16_t kSeen = 0, kMinusZero = 0x8000, kUnseen = 0xfc00, kOne = 0x3c00;

struct Mask {
  std::vector<uint16_t> numbers;
  MaskView view;

  Mask(int64_t batches, int64_t queries, int64_t keys,
       const std::function<uint16_t(int64_t batch, int64_t i, int64_t j)>& number) {
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t i = 0; i < queries; ++i) {
        for (int64_t j = 0; j < keys; ++j) numbers.push_back(number(b, i, j));
      }
    }
    view = {numbers.data(), batches, 1, queries, keys, queries * keys, queries * keys, keys};
  }
  MaskSummary summary() const { return summarise(view, 1); }
};

uint16_t seen(bool is_seen) {
  return is_seen ? kSeen : kUnseen;
}

TEST(GgmlMask, None) {
  EXPECT_EQ(summarise({}, 1).kind, MaskKind::kNone);
}

TEST(GgmlMask, CausalBehindATextAndBeforeRoom) {
  const Mask mask(1, 20, 100, [](int64_t, int64_t i, int64_t j) { return seen(j <= 30 + i); });
  const MaskSummary summary = mask.summary();
  EXPECT_EQ(summary.kind, MaskKind::kBand);
  EXPECT_TRUE(summary.causal);
  EXPECT_EQ(summary.window, -1);
  EXPECT_EQ(summary.used_keys, std::vector<int32_t>{50});
}

TEST(GgmlMask, Window) {
  const Mask mask(1, 20, 100, [](int64_t, int64_t i, int64_t j) { return seen(j <= 30 + i && j > 20 + i); });
  const MaskSummary summary = mask.summary();
  EXPECT_EQ(summary.kind, MaskKind::kBand);
  EXPECT_TRUE(summary.causal);
  EXPECT_EQ(summary.window, 9);
}

TEST(GgmlMask, OneQuery) {
  const Mask first(1, 1, 70, [](int64_t, int64_t, int64_t j) { return seen(j < 33); });
  EXPECT_EQ(first.summary().kind, MaskKind::kBand);
  EXPECT_FALSE(first.summary().causal);
  EXPECT_EQ(first.summary().used_keys, std::vector<int32_t>{33});
  const Mask last(1, 1, 70, [](int64_t, int64_t, int64_t j) { return seen(j < 33 && j > 10); });
  EXPECT_EQ(last.summary().kind, MaskKind::kBand);
  EXPECT_EQ(last.summary().window, 21);
}

TEST(GgmlMask, SequencesOfDifferentLengths) {
  const Mask mask(2, 8, 64, [](int64_t b, int64_t i, int64_t j) { return seen(j <= 10 + 20 * b + i); });
  const MaskSummary summary = mask.summary();
  EXPECT_EQ(summary.kind, MaskKind::kBand);
  EXPECT_EQ(summary.used_keys, (std::vector<int32_t>{18, 38}));
}

TEST(GgmlMask, MinusZeroIsZero) {
  const Mask mask(1, 8, 64, [](int64_t, int64_t i, int64_t j) { return j <= i ? kMinusZero : kUnseen; });
  EXPECT_EQ(mask.summary().kind, MaskKind::kBand);
}

TEST(GgmlMask, OneKeyLessIsNoBand) {
  const Mask mask(1, 20, 100,
                  [](int64_t, int64_t i, int64_t j) { return seen(j <= 30 + i && !(i == 7 && j == 11)); });
  const MaskSummary summary = mask.summary();
  EXPECT_EQ(summary.kind, MaskKind::kZeros);
  ASSERT_EQ(summary.block_rows, 3);
  ASSERT_EQ(summary.block_columns, 4);
  EXPECT_EQ(summary.blocks[0], kBlockMixed);  // the key that is missing
  EXPECT_EQ(summary.blocks[4], kBlockPlain);
  EXPECT_EQ(summary.blocks[1], kBlockMixed);
  EXPECT_EQ(summary.blocks[2], kBlockUnseen);
  EXPECT_EQ(summary.blocks[3], kBlockUnseen);
  EXPECT_EQ(summary.used_keys, std::vector<int32_t>{64});
}

TEST(GgmlMask, ARowWithoutKeysIsNoBand) {
  const Mask mask(1, 4, 32, [](int64_t, int64_t i, int64_t j) { return seen(j < 20 && i != 2); });
  EXPECT_EQ(mask.summary().kind, MaskKind::kZeros);
  const Mask nothing(1, 4, 32, [](int64_t, int64_t, int64_t) { return kUnseen; });
  EXPECT_EQ(nothing.summary().kind, MaskKind::kZeros);
  EXPECT_EQ(nothing.summary().used_keys, std::vector<int32_t>{0});
}

TEST(GgmlMask, NumbersAreAdded) {
  const Mask mask(1, 9, 64,
                  [](int64_t, int64_t i, int64_t j) { return i == 8 && j == 40 ? kOne : seen(j <= 40); });
  const MaskSummary summary = mask.summary();
  EXPECT_EQ(summary.kind, MaskKind::kAdded);
  EXPECT_EQ(summary.blocks[0], kBlockPlain);
  EXPECT_EQ(summary.blocks[3], kBlockMixed);
}

}  // namespace
}  // namespace fovea_ggml
