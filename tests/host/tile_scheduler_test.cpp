// Schedules: every tile exactly once, the longest first, heads that share the cache side by side.
#include "tile/tile_scheduler.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tile/kv_blocks.hpp"

namespace fovea::tile {
namespace {

using Key = std::tuple<int, int, int, int>;
Key key_of(const WorkTile& t) {
  return {t.batch, t.head, t.block, t.split};
}

TEST(TileGrid, EveryTileOnce) {
  for (int blocks = 1; blocks <= 5; ++blocks) {
    for (int heads = 1; heads <= 6; ++heads) {
      for (int batch = 1; batch <= 3; ++batch) {
        for (int splits = 1; splits <= 3; ++splits) {
          for (int section = 1; section <= heads * batch + 2; ++section) {
            for (const bool descending : {false, true}) {
              const int last = 1 + section % 4, whole = whole_sections(heads * batch, section, last);
              const TileGrid grid{blocks, heads, batch, splits, section, whole, descending, section % 2 == 0};
              std::set<Key> seen;
              for (int index = 0; index < grid.count(); ++index) {
                const WorkTile t = grid.at(index);
                ASSERT_TRUE(t.valid);
                ASSERT_TRUE(0 <= t.block && t.block < blocks && 0 <= t.head && t.head < heads &&
                            0 <= t.batch && t.batch < batch && 0 <= t.split && t.split < splits);
                ASSERT_TRUE(seen.insert(key_of(t)).second);
              }
              ASSERT_EQ(static_cast<int64_t>(seen.size()), int64_t{blocks} * heads * batch * splits);
            }
          }
        }
      }
    }
  }
}

/// What sequences share is read once where all of them are in a section of one head.
TEST(TileGrid, SequencesOfAHeadAreNeighbours) {
  const TileGrid grid{5, 6, 4, 1, 4, whole_sections(24, 4, 1), true, true};
  for (int index = 0; index < grid.count(); ++index) {
    const WorkTile t = grid.at(index);
    ASSERT_EQ(t.head, index / (4 * 5));
    ASSERT_EQ(t.batch, index % 4);
    ASSERT_EQ(t.block, 4 - index / 4 % 5);
  }
}

/// A section's heads and no others run until all of its blocks are done.
TEST(TileGrid, SectionsComeOneAfterTheOther) {
  const TileGrid grid{7, 6, 2, 2, 4, whole_sections(12, 4, 1), true};
  int last = 0;
  for (int index = 0; index < grid.count(); ++index) {
    const WorkTile t = grid.at(index);
    const int section = (t.batch * 6 + t.head) / 4;
    ASSERT_GE(section, last);
    last = section;
    ASSERT_EQ(section, index / (4 * 2 * 7));
  }
}

/// Within a section no tile has more key blocks than the one before it, for windows with a right edge only (causal) and
/// with a left edge only.
TEST(TileGrid, LongestFirst) {
  for (int used_q = 1; used_q <= 40; used_q += 3) {
    for (int used_k = 1; used_k <= 40; used_k += 3) {
      for (int edge = 0; edge <= 12; edge += 3) {
        for (const bool causal : {false, true}) {
          AttentionParams p;
          (causal ? p.window_right : p.window_left) = edge;
          SequenceSpan s;
          s.used_q = used_q;
          s.used_k = used_k;
          const int tile_m = 4, tile_n = 6;
          const TileGrid queries{ceil_div(used_q, tile_m), 2, 1, 1, 2, 0, later_queries_first(p)};
          int last = queries.count() == 0 ? 0 : used_k + 1;
          for (int index = 0; index < queries.count(); ++index) {
            const int begin = queries.at(index).block * tile_m;
            const int count = kv_blocks(p, s, begin, std::min(begin + tile_m, used_q), tile_n).count();
            ASSERT_LE(count, last) << "used_q " << used_q << " used_k " << used_k << " edge " << edge;
            last = count;
          }
        }
      }
    }
  }
}

TEST(TileGrid, TheLastSectionTakesWhatIsLeft) {
  EXPECT_EQ(whole_sections(12, 4, 1), 2);  // and four heads more
  EXPECT_EQ(whole_sections(12, 4, 4), 2);
  EXPECT_EQ(whole_sections(12, 4, 5), 1);  // eight
  EXPECT_EQ(whole_sections(12, 5, 3), 1);  // seven
  EXPECT_EQ(whole_sections(12, 1, 12), 0);
  EXPECT_EQ(whole_sections(12, 1, 50), 0);
  EXPECT_EQ(whole_sections(0, 1, 1), 0);
  const TileGrid grid{3, 7, 1, 1, 2, whole_sections(7, 2, 4), true};
  for (int index = 0; index < 6; ++index) EXPECT_LT(grid.at(index).head, 2) << index;
  for (int index = 6; index < 21; ++index) {
    EXPECT_GE(grid.at(index).head, 2) << index;
    EXPECT_EQ(grid.at(index).block, 2 - (index - 6) / 5) << index;
  }
}

std::vector<int32_t> cumulate(const std::vector<int>& lengths) {
  std::vector<int32_t> cu{0};
  for (const int length : lengths) cu.push_back(cu.back() + length);
  return cu;
}

/// Every block of every sequence has exactly one index below count(); the other indices are not valid.
void check_packed(const std::vector<int>& lengths, int spare_rows, int tile_rows, int group,
                  bool descending) {
  const std::vector<int32_t> cu = cumulate(lengths);
  const int batch = static_cast<int>(lengths.size());
  const PackedBlocks blocks{cu.data(), batch, cu.back() + spare_rows, tile_rows, group, descending};
  std::map<int, std::vector<int>> seen;  // blocks of each sequence in the order of their indices
  int valid = 0;
  for (int index = 0; index < blocks.count(); ++index) {
    const WorkTile t = blocks.at(index);
    if (!t.valid) continue;
    ++valid;
    ASSERT_TRUE(0 <= t.batch && t.batch < batch && t.head == 0 && t.split == 0);
    seen[t.batch].push_back(t.block);
  }
  int expected = 0;
  for (int b = 0; b < batch; ++b) {
    const int rows = (lengths[static_cast<size_t>(b)] + (b + 1 == batch ? spare_rows : 0)) * group;
    std::vector<int> order;
    for (int block = 0; block < ceil_div(rows, tile_rows); ++block) order.push_back(block);
    if (descending) std::reverse(order.begin(), order.end());
    expected += static_cast<int>(order.size());
    ASSERT_EQ(seen[b], order) << "sequence " << b;
  }
  ASSERT_EQ(valid, expected);
  ASSERT_LE(blocks.count() - valid, batch);  // no more spare CTAs than sequences
}

TEST(PackedBlocks, EverySmallBatch) {
  for (int a = 0; a <= 5; ++a) {
    for (int b = 0; b <= 5; ++b) {
      for (int c = 0; c <= 5; ++c) {
        for (int tile = 1; tile <= 4; ++tile) {
          for (int group = 1; group <= 3; ++group) {
            check_packed({a, b, c}, a % 3, tile, group, false);
            check_packed({a, b, c}, c % 2, tile, group, true);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(PackedBlocks, RandomBatches) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> lengths(std::uniform_int_distribution<size_t>(1, 300)(random));
    for (int& length : lengths)
      length = std::uniform_int_distribution<int>(0, round % 2 == 0 ? 3 : 700)(random);
    check_packed(lengths, round % 5 == 0 ? 200 : 0, 128, 1 + round % 4, round % 3 == 0);
    if (HasFatalFailure()) return;
  }
}

TEST(PackedBlocks, NothingToDo) {
  const std::vector<int32_t> none{0};
  EXPECT_EQ((PackedBlocks{none.data(), 0, 0, 128, 1, false}.count()), 0);
  EXPECT_FALSE((PackedBlocks{none.data(), 0, 0, 128, 1, false}.at(0).valid));
  // Beyond the end, as of a grid that is too large.
  const std::vector<int32_t> one{0, 100};
  const PackedBlocks blocks{one.data(), 1, 100, 128, 1, false};
  EXPECT_EQ(blocks.count(), 1);
  EXPECT_TRUE(blocks.at(0).valid);
  EXPECT_FALSE(blocks.at(1).valid);
}

TEST(PackedGrid, EveryTileOfEveryHeadOnce) {
  const std::vector<int> lengths{5, 0, 9, 1};
  const std::vector<int32_t> cu = cumulate(lengths);
  for (int heads = 1; heads <= 4; ++heads) {
    for (int splits = 1; splits <= 2; ++splits) {
      for (int section = 1; section <= heads; ++section) {
        const PackedGrid grid{
            {cu.data(), 4, cu.back(), 4, 1, true}, heads, splits, section, whole_sections(heads, section, 1)};
        std::set<Key> seen;
        for (int index = 0; index < grid.count(); ++index) {
          const WorkTile t = grid.at(index);
          if (t.valid) {
            ASSERT_TRUE(seen.insert(key_of(t)).second);
          }
        }
        ASSERT_EQ(seen.size(), static_cast<size_t>((2 + 0 + 3 + 1) * heads * splits));
        for (const auto& [batch, head, block, split] : seen) {
          ASSERT_LT(block * 4, lengths[static_cast<size_t>(batch)]);
          ASSERT_TRUE(head < heads && split < splits);
        }
      }
    }
  }
}

/// Splits tile the blocks in order, differ by one block at most, and know which of theirs are full.
TEST(Snake, EachIndexOnce) {
  for (const int ctas : {1, 2, 7, 132}) {
    const int turns = 5;
    std::vector<int> seen(static_cast<size_t>(turns * ctas));
    for (int turn = 0; turn < turns; ++turn) {
      for (int cta = 0; cta < ctas; ++cta) ++seen[static_cast<size_t>(snake(turn, cta, ctas))];
    }
    for (const int count : seen) EXPECT_EQ(count, 1);
  }
}

TEST(Snake, SharesFallingWorkEvenly) {
  // Causal tiles of 16 heads, the longest first: n, n - 1, ... for each head.
  for (const int blocks : {3, 22, 86}) {
    constexpr int kCtas = 132, kHeads = 16;
    std::vector<int64_t> work(kCtas);
    for (int turn = 0; turn * kCtas < blocks * kHeads; ++turn) {
      for (int cta = 0; cta < kCtas; ++cta) {
        const int index = snake(turn, cta, kCtas);
        if (index < blocks * kHeads) work[static_cast<size_t>(cta)] += blocks - index / kHeads;
      }
    }
    const auto [least, most] = std::minmax_element(work.begin(), work.end());
    EXPECT_LE(*most - *least, blocks) << blocks;  // no more than one tile
    const double whole = kHeads * 0.5 * blocks * (blocks + 1) / kCtas;
    EXPECT_LE(static_cast<double>(*most), std::max<double>(1.15 * whole, blocks)) << blocks;
  }
}

TEST(QueryTiles, OfOneLengthOrPacked) {
  const std::array<int32_t, 4> bounds = {0, 100, 100, 351};
  QueryTiles tiles;
  tiles.grid = {2, 4, 3, 1, 4, true};
  EXPECT_EQ(tiles.count(), 24);
  EXPECT_EQ(tiles.at(5), tiles.grid.at(5));
  tiles.packed = true;
  tiles.packed_grid = {{bounds.data(), 3, 351, 64, 1, true}, 4, 1, 4};
  EXPECT_EQ(tiles.count(), tiles.packed_grid.count());
  EXPECT_EQ(tiles.at(9), tiles.packed_grid.at(9));
}

TEST(SplitBlocks, TileTheBlocks) {
  for (int begin = 0; begin <= 3; ++begin) {
    for (int end = begin; end <= begin + 9; ++end) {
      for (int full_begin = begin; full_begin <= end; ++full_begin) {
        for (int full_end = full_begin; full_end <= end; ++full_end) {
          const KvBlocks all{begin, full_begin, full_end, end};
          for (int splits = 1; splits <= 12; ++splits) {
            int next = begin, least = all.count(), most = 0;
            for (int split = 0; split < splits; ++split) {
              const KvBlocks part = split_blocks(all, split, splits);
              ASSERT_EQ(part.begin, next);
              ASSERT_LE(part.begin, part.full_begin);
              ASSERT_LE(part.full_begin, part.full_end);
              ASSERT_LE(part.full_end, part.end);
              for (int block = part.begin; block < part.end; ++block)
                ASSERT_EQ(part.is_full(block), all.is_full(block));
              next = part.end;
              ASSERT_EQ(part.empty(), split >= all.count());  // only the last splits have nothing to do
              least = std::min(least, part.count());
              most = std::max(most, part.count());
            }
            ASSERT_EQ(next, end);
            ASSERT_LE(most - least, 1);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::tile
