// The walks over the blocks that an expression lets a tile see, against a list of flags.
#include "tile/seen_blocks.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace fovea::tile {
namespace {

TEST(SeenBlocks, WithoutBitsEveryBlockIsWalked) {
  const SeenBlocks blocks;
  EXPECT_EQ(blocks.before(7, 2), 6);
  EXPECT_EQ(blocks.from(7, 9), 7);
  EXPECT_EQ(blocks.from(9, 9), 9);
  EXPECT_EQ(blocks.count(2, 9), 7);
  EXPECT_EQ(blocks.count(9, 2), 0);
  EXPECT_TRUE(blocks.is_partial(3));
}

TEST(SeenBlocks, WalksFindTheBlocksOfAnyRange) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 2000; ++trial) {
    const int total = 1 + static_cast<int>(random() % 100), density = static_cast<int>(random() % 8);
    std::vector<uint32_t> any((static_cast<size_t>(total) + 31) / 32);
    std::vector<bool> seen;
    for (int n = 0; n < total; ++n) {
      seen.push_back(static_cast<int>(random() % 8) < density);
      if (seen.back()) any[static_cast<size_t>(n) / 32] |= 1u << (n % 32);
    }
    const SeenBlocks blocks{any.data(), any.data()};
    const int begin = static_cast<int>(random() % static_cast<unsigned>(total + 1));
    const int end = begin + static_cast<int>(random() % static_cast<unsigned>(total + 1 - begin));
    std::vector<int> forwards, backwards, expected;
    for (int n = begin; n < end; ++n)
      if (seen[static_cast<size_t>(n)]) expected.push_back(n);
    for (int n = blocks.from(begin, end); n < end; n = blocks.from(n + 1, end)) forwards.push_back(n);
    for (int n = blocks.before(end, begin); n >= begin; n = blocks.before(n, begin))
      backwards.insert(backwards.begin(), n);
    EXPECT_EQ(forwards, expected);
    EXPECT_EQ(backwards, expected);
    EXPECT_EQ(blocks.count(begin, end), static_cast<int>(expected.size()));
    for (const int n : expected) EXPECT_TRUE(blocks.is_partial(n));
  }
}

/// Of those who share blocks, each knows which are its own, and passes over the others before and after these.
TEST(SeenBlocks, OwnAmongThoseOfAll) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 4000; ++trial) {
    const int total = 1 + static_cast<int>(random() % 130);
    const int density = static_cast<int>(random() % 8), of_own = static_cast<int>(random() % 6);
    std::vector<uint32_t> any((static_cast<size_t>(total) + 31) / 32), own(any.size());
    for (int n = 0; n < total; ++n) {
      if (static_cast<int>(random() % 8) >= density) continue;
      any[static_cast<size_t>(n) / 32] |= 1u << (n % 32);
      if (static_cast<int>(random() % 6) < of_own) own[static_cast<size_t>(n) / 32] |= 1u << (n % 32);
    }
    const auto is_set = [](const std::vector<uint32_t>& words, int n) {
      return (words[static_cast<size_t>(n) / 32] >> (n % 32) & 1) != 0;
    };
    const int begin = static_cast<int>(random() % static_cast<unsigned>(total + 1));
    const int end = begin + static_cast<int>(random() % static_cast<unsigned>(total + 1 - begin));
    int first_own = -1, last_own = -1, before = 0, after = 0;
    for (int n = begin; n < end; ++n) {
      if (is_set(own, n)) last_own = n;
      if (is_set(own, n) && first_own < 0) first_own = n;
    }
    for (int n = begin; n < end; ++n) {
      if (!is_set(any, n)) continue;
      if (first_own < 0 || n > last_own) ++before;
      if (n < first_own) ++after;
    }
    const auto word_of = [](const std::vector<uint32_t>& words) {
      return [&words](int at) { return words[static_cast<size_t>(at)]; };
    };
    const OwnBlocks found = own_blocks(begin, end, word_of(any), word_of(own));
    EXPECT_EQ(found.end - found.begin, first_own < 0 ? 0 : last_own + 1 - first_own);
    EXPECT_EQ(found.begin, first_own < 0 ? begin : first_own);
    EXPECT_EQ(found.before, before);
    EXPECT_EQ(found.after, after);
  }
}

TEST(SeenBlocks, EveryTileHasWordsOfItsOwn) {
  SeenBlocksView view;
  view.batches = 4, view.heads = 3, view.tiles = 5, view.blocks = 40;
  std::vector<bool> taken(static_cast<size_t>(view.size()));
  for (int b = 0; b < 4; ++b)
    for (int h = 0; h < 3; ++h)
      for (int tile = 0; tile < 5; ++tile)
        for (int word = 0; word < 2; ++word) {
          const auto at = static_cast<size_t>(view.offset(b, h, tile) + word);
          ASSERT_LT(at, taken.size());
          EXPECT_FALSE(taken[at]);
          taken[at] = true;
        }
  view.heads = 1;
  EXPECT_EQ(view.offset(2, 7, 4), view.offset(2, 0, 4)) << "heads share what does not depend on them";
}

/// Words of pairs: heads and sequences that are alike share them, and nothing lies beyond their size.
TEST(SeenBlocks, PairsOfEveryBlock) {
  SeenBlocksView view;
  view.batches = 2, view.pair_heads = 3, view.tiles = 4, view.blocks = 5, view.tile_rows = 64,
  view.block_rows = 80;
  EXPECT_EQ(view.pair_words(), 2);
  EXPECT_EQ(view.words_of_block(), 4 * 2 * 32);
  int64_t expected = 0;
  for (int b = 0; b < 2; ++b)
    for (int h = 0; h < 3; ++h)
      for (int tile = 0; tile < 4; ++tile, expected += 5 * view.words_of_block())
        EXPECT_EQ(view.pairs_offset(b, h, tile), expected);
  view.pair_heads = 1, view.batches = 1;
  EXPECT_EQ(view.pairs_offset(7, 2, 3), view.pairs_offset(0, 0, 3));
}

}  // namespace
}  // namespace fovea::tile
