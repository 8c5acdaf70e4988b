// Tiles of the forward on CPUs: their order, their heights, and when threads that take them end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "cpu/ops.hpp"
#include "cpu/tile_order.hpp"

namespace fovea::cpu {
namespace {

TEST(CpuTileOrder, TakesEachTileOnce) {
  for (const int64_t groups : {1, 3, 8, 40}) {
    for (const int64_t tiles : {1, 2, 7}) {
      for (const int64_t threads : {1, 2, 16}) {
        const TileOrder order(groups, tiles, threads);
        std::set<std::pair<int64_t, int64_t>> taken;
        for (int64_t index = 0; index < order.count(); ++index) {
          const TileOrder::Place place = order.at(index);
          EXPECT_TRUE(place.group >= 0 && place.group < groups && place.tile >= 0 && place.tile < tiles);
          taken.emplace(place.group, place.tile);
        }
        EXPECT_EQ(static_cast<int64_t>(taken.size()), groups * tiles);
      }
    }
  }
}

TEST(CpuTileOrder, TilesDivideThePanels) {
  for (int64_t panels = 0; panels < 40; ++panels) {
    for (int64_t tiles = 1; tiles <= std::max<int64_t>(1, panels); ++tiles) {
      int64_t next = 0;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const tile::Range of_tile = panels_of_tile(panels, tiles, tile);
        EXPECT_EQ(of_tile.begin, next);
        EXPECT_LE(of_tile.size(), ceil_div(panels, tiles));
        EXPECT_GE(of_tile.size(), panels / tiles);
        next = of_tile.end;
      }
      EXPECT_EQ(next, panels);
    }
  }
}

AttentionProblem square_problem(int64_t heads, int64_t tokens, bool causal) {
  AttentionProblem p;
  p.batch = 1;
  p.heads_q = p.heads_kv = heads;
  p.seqlen_q = p.seqlen_k = tokens;
  if (causal) p.window_right = 0;
  return p;
}

/// Work of threads that take the tiles of a causal problem in their order, in panels times keys: of the one that ends last over the mean.
double unevenness(int64_t heads, int64_t tokens, int64_t threads, int64_t most) {
  const AttentionProblem p = square_problem(heads, tokens, true);
  const int64_t all_panels = ceil_div(tokens, kPanel);
  const int64_t panels = panels_of_tiles({p, heads, 1, tokens, {kPanel, 12}}, most, threads);
  const TileOrder order(heads, ceil_div(all_panels, panels), threads);
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> ends;
  for (int64_t i = 0; i < threads; ++i) ends.push(0);
  int64_t last = 0, sum = 0;
  for (int64_t index = 0; index < order.count(); ++index) {
    const tile::Range of_tile = panels_of_tile(all_panels, order.tiles, order.at(index).tile);
    int64_t work = 0;
    for (int64_t panel = of_tile.begin; panel < of_tile.end; ++panel)
      work += std::min(tokens, (panel + 1) * kPanel);
    sum += work;
    const int64_t end = ends.top() + work;
    ends.pop();
    ends.push(end);
    last = std::max(last, end);
  }
  return static_cast<double>(last * threads) / static_cast<double>(sum);
}

TEST(CpuTileOrder, ThreadsEndTogether) {
  for (const auto& [heads, tokens] : std::vector<std::pair<int64_t, int64_t>>{
           {4, 1024}, {4, 1536}, {8, 768}, {8, 2048}, {16, 2048}, {1, 4096}})
    EXPECT_LT(unevenness(heads, tokens, 16, 8), 1.25) << heads << " heads of " << tokens << " tokens";
  EXPECT_LT(unevenness(8, 2048, 2, 8), 1.05);
}

TEST(CpuTileOrder, TilesAreLowerWhereThereAreMoreThreads) {
  const AttentionProblem p = square_problem(4, 1024, false);
  int64_t higher = 8;
  for (const int64_t threads : {1, 2, 4, 8, 16, 32, 64}) {
    const int64_t panels = panels_of_tiles({p, 4, 1, 1024, {kPanel, 12}}, 8, threads);
    EXPECT_GE(panels, 1);
    EXPECT_LE(panels, higher) << threads << " threads";
    higher = panels;
  }
  EXPECT_LE(higher, 2);
  const AttentionProblem large = square_problem(32, 16384, true);
  EXPECT_EQ(panels_of_tiles({large, 32, 1, 16384, {kPanel, 12}}, 8, 16), 8);
  const AttentionProblem empty = square_problem(4, 0, true);
  EXPECT_EQ(panels_of_tiles({empty, 4, 1, 0, {kPanel, 12}}, 8, 16), 1);
}

}  // namespace
}  // namespace fovea::cpu
