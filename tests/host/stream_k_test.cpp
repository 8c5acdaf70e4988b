// tile/stream_k.hpp: every unit is in one share, shares are equal, and parts of a tile are found again.
#include "tile/stream_k.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace fovea::tile {
namespace {

/// Units of sequences of `heads` tiles of so many units each.
struct Units {
  std::vector<int> before = {0};
  int heads;

  Units(const std::vector<int>& of_tile, int h) : heads(h) {
    for (const int units : of_tile) before.push_back(before.back() + units * heads);
  }
  StreamK stream(int ctas) const { return {before.data(), static_cast<int>(before.size()) - 1, heads, ctas}; }
};

/// Walks over all shares as the kernel does, and checks what stream_k.hpp promises.
void check(const Units& units, int ctas) {
  const StreamK stream = units.stream(ctas);
  ASSERT_LE(stream.shares(), ctas);
  int next = 0;
  std::set<int> parts;
  std::map<std::pair<int, int>, std::vector<int>> parts_of_tile;  // in the order of units
  for (int share = 0; share < stream.shares(); ++share) {
    ASSERT_EQ(stream.first_unit(share), next);
    int left = stream.first_unit(share + 1) - next;
    EXPECT_GE(left, stream.total() / stream.shares());
    EXPECT_LE(left, stream.total() / stream.shares() + 1);
    StreamTile tile = stream.first_tile(share);
    while (true) {
      ASSERT_LT(tile.begin, tile.end);
      ASSERT_EQ(tile.units, stream.units_of_tile(tile.batch));
      const int first = units.before[static_cast<size_t>(tile.batch)] + tile.head * tile.units;
      EXPECT_EQ(first + tile.begin, next);
      EXPECT_EQ(stream.share_of(next), share);
      if (!tile.whole()) {
        const int part = StreamK::part(share, tile);
        EXPECT_TRUE(parts.insert(part).second) << "part " << part << " is written twice";
        EXPECT_LT(part, 2 * ctas);
        std::vector<int>& of_tile = parts_of_tile[{tile.batch, tile.head}];
        of_tile.push_back(part);
        if (tile.end == tile.units) {
          const int first_share = stream.share_of(first);
          std::vector<int> found;
          for (int n = 0; n <= share - first_share; ++n)
            found.push_back(StreamK::part_of_tile(first_share, 1, n));
          EXPECT_EQ(found, of_tile);
          EXPECT_EQ(stream.share_of(first + tile.units - 1), share);
        }
      }
      next += tile.end - tile.begin;
      left -= tile.end - tile.begin;
      if (left == 0) break;
      tile = stream.next_tile(tile, left);
    }
  }
  EXPECT_EQ(next, stream.total());
}

TEST(StreamK, SharesCoverEveryUnitOnce) {
  uint32_t state = 1;
  const auto random = [&](int most) {
    state = state * 1664525 + 1013904223;
    return static_cast<int>(state >> 8) % most;
  };
  for (int problem = 0; problem < 3000; ++problem) {
    std::vector<int> of_tile(static_cast<size_t>(1 + random(6)));
    const int most = 1 + random(30);
    for (int& units : of_tile) units = random(most);  // 0: a sequence without queries
    const Units units(of_tile, 1 + random(4));
    if (units.before.back() == 0) continue;
    for (const int ctas : {1, 2, 7, 132}) check(units, ctas);
  }
}

TEST(StreamK, CountsBeyond32BitsDoNotOverflow) {
  const Units units({1 << 20, 1 << 20}, 500);
  for (const int ctas : {132, 264}) {
    const StreamK stream = units.stream(ctas);
    for (int share = 0; share < ctas; ++share) {
      EXPECT_EQ(stream.share_of(stream.first_unit(share)), share);
      EXPECT_EQ(stream.share_of(stream.first_unit(share + 1) - 1), share);
    }
  }
}

TEST(StreamK, UnitsAreBlocksOfTheTile) {
  const KvBlocks all = {3, 4, 9, 10};
  const KvBlocks cut = units_of(all, 2, 5);
  EXPECT_EQ(cut.begin, 5);
  EXPECT_EQ(cut.full_begin, 5);
  EXPECT_EQ(cut.full_end, 8);
  EXPECT_EQ(cut.end, 8);
  EXPECT_EQ(stream_units(all, 3), 21);
  EXPECT_EQ(stream_units({}, 3), 3) << "somebody writes rows without keys";
  EXPECT_TRUE(units_of({}, 0, 1).empty());
}

}  // namespace
}  // namespace fovea::tile
