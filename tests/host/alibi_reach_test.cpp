// The reach of slopes against weights in float32, and the blocks in reach against every pair of every small problem.
#include "tile/alibi_reach.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>

namespace fovea::tile {
namespace {

TEST(AlibiReach, NoWeightLiesBeyondIt) {
  for (const float slope : {1e-4f, 0.0039f, 0.1f, 0.7071f, 1.0f, 3.0f}) {
    for (const float most : {0.0f, 1.0f, 16.9f, 300.0f}) {
      const int reach = alibi_reach(slope, most);
      // The key at distance 0 has the least score, the one beyond the most.
      const double beyond = 2.0 * most - static_cast<double>(slope) * (reach + 1);
      EXPECT_LT(std::exp(beyond), std::ldexp(1.0, -126)) << slope << " " << most;
      const double within = 2.0 * most - static_cast<double>(slope) * (0.95 * reach - 2);
      EXPECT_GT(std::exp(within), std::ldexp(1.0, -137))
          << slope << " " << most << ": longer than it must be";
    }
  }
}

TEST(AlibiReach, IsEverywhereWhereNothingIsKnown) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float slope : {0.0f, -0.5f, kNan, 1e-30f})
    EXPECT_EQ(alibi_reach(slope, 1), kEverywhere) << slope;
  for (const float most : {kInfinity, kNan}) EXPECT_EQ(alibi_reach(0.5f, most), kEverywhere) << most;
}

bool sees(const AttentionParams& p, const SequenceSpan& s, int i, int j) {
  const Span32 keys = keys_of(p, s, i);
  return keys.begin <= j && j < keys.end;
}

/// Every block with a pair that is seen and in reach is there, at full as before, and the first and last block have rows in reach of any.
void check(const AttentionParams& p, const SequenceSpan& s, int begin, int end, int reach, int tile,
           bool of_keys) {
  const KvBlocks all = of_keys ? kv_blocks(p, s, begin, end, tile) : q_blocks(p, s, begin, end, tile);
  const KvBlocks near = of_keys ? keys_in_reach(all, s, begin, end, reach, tile)
                                : queries_in_reach(all, s, begin, end, reach, tile);
  const std::string text = std::to_string(s.used_q) + " x " + std::to_string(s.used_k) + " [" +
                           std::to_string(begin) + ", " + std::to_string(end) + ") reach " +
                           std::to_string(reach) + " left " + std::to_string(p.window_left) + " right " +
                           std::to_string(p.window_right) + (of_keys ? " keys" : " queries");
  ASSERT_TRUE(all.begin <= near.begin && near.begin <= near.full_begin && near.full_begin <= near.full_end &&
              near.full_end <= near.end && near.end <= all.end)
      << text;
  for (int block = all.begin; block < all.end; ++block) {
    bool needed = false, in_reach = false;
    for (int row = block * tile; row < (block + 1) * tile; ++row) {
      for (int own = begin; own < end; ++own) {
        const int i = of_keys ? own : row, j = of_keys ? row : own;
        const bool close = std::abs(i + s.used_k - s.used_q - j) <= reach;
        in_reach |= close;
        needed |= close && i < s.used_q && sees(p, s, i, j);
      }
    }
    const bool there = near.begin <= block && block < near.end;
    ASSERT_TRUE(there || !needed) << text << " block " << block;
    ASSERT_TRUE(in_reach || !there || !sees_own_position(s)) << text << " block " << block;
    ASSERT_EQ(near.is_full(block), there && all.is_full(block)) << text << " block " << block;
  }
}

TEST(AlibiReach, BlocksInReachHaveEveryPairInReach) {
  AttentionParams p;
  for (const int left : {-1, 0, 3}) {
    for (const int right : {-1, 0, 2}) {
      p.window_left = left;
      p.window_right = right;
      for (int used_q = 1; used_q <= 9; ++used_q) {
        for (int used_k = 1; used_k <= 13; ++used_k) {
          SequenceSpan s;
          s.used_q = used_q;
          s.used_k = used_k;
          for (const int reach : {0, 1, 2, 5, 40, kEverywhere}) {
            for (int begin = 0; begin < used_q; begin += 2)
              check(p, s, begin, std::min(begin + 3, used_q), reach, 2, true);
            for (int begin = 0; begin < used_k; begin += 2)
              check(p, s, begin, std::min(begin + 3, used_k), reach, 2, false);
          }
        }
      }
    }
  }
}

/// Sequences as long as GPUs can hold.
TEST(AlibiReach, LongSequencesStayInRange) {
  SequenceSpan s;
  s.used_q = s.used_k = kEverywhere;
  const KvBlocks all{0, 0, kEverywhere / 64, kEverywhere / 64};
  const KvBlocks keys = keys_in_reach(all, s, kEverywhere - 64, kEverywhere, kEverywhere, 64),
                 queries = queries_in_reach(all, s, 0, 64, 1000, 64);
  EXPECT_EQ(keys.begin, 0);
  EXPECT_EQ(keys.end, kEverywhere / 64);
  EXPECT_EQ(queries.end, (64 + 1000 + 63) / 64);
}

}  // namespace
}  // namespace fovea::tile
