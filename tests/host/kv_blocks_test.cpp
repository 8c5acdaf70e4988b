// Compares the blocks that are visited, and those that need no mask, with every pair of every small problem.
#include "tile/kv_blocks.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

namespace fovea::tile {
namespace {

struct Problem {
  AttentionParams p;
  SequenceSpan s;

  Problem(int used_q, int used_k, int left, int right) {
    p.window_left = left;
    p.window_right = right;
    s.used_q = used_q;
    s.used_k = used_k;
  }
  /// The band as the header of the library states it, and the ends of the sequence.
  bool sees(int i, int j) const {
    if (i < 0 || i >= s.used_q || j < 0 || j >= s.used_k) return false;
    const int position = i + s.used_k - s.used_q;
    return (p.window_left < 0 || j >= position - p.window_left) &&
           (p.window_right < 0 || j <= position + p.window_right);
  }
  std::string text() const {
    return "used_q=" + std::to_string(s.used_q) + " used_k=" + std::to_string(s.used_k) +
           " left=" + std::to_string(p.window_left) + " right=" + std::to_string(p.window_right);
  }
};

void expect_ordered(const KvBlocks& blocks, const std::string& text) {
  ASSERT_LE(0, blocks.begin) << text;
  ASSERT_LE(blocks.begin, blocks.full_begin) << text;
  ASSERT_LE(blocks.full_begin, blocks.full_end) << text;
  ASSERT_LE(blocks.full_end, blocks.end) << text;
}

/// A block is visited if and only if it has a visible pair, and full if and only if all its pairs are visible.
void check_kv(const Problem& problem, int begin, int end, int tile_n) {
  const KvBlocks blocks = kv_blocks(problem.p, problem.s, begin, end, tile_n);
  const std::string text = problem.text() + " queries [" + std::to_string(begin) + ", " +
                           std::to_string(end) + ") tile_n=" + std::to_string(tile_n);
  expect_ordered(blocks, text);
  for (int block = 0; block <= problem.s.used_k / tile_n + 1; ++block) {
    bool any = false, all = begin < end;
    for (int i = begin; i < end; ++i) {
      for (int j = block * tile_n; j < (block + 1) * tile_n; ++j) {
        any |= problem.sees(i, j);
        all &= problem.sees(i, j);
      }
    }
    ASSERT_EQ(blocks.begin <= block && block < blocks.end, any) << text << " block " << block;
    ASSERT_EQ(blocks.is_full(block), all) << text << " block " << block;
  }
  if (problem.p.window_left < 0) {
    ASSERT_EQ(blocks.full_begin, blocks.begin) << text;
  }
}

void check_q(const Problem& problem, int begin, int end, int tile_m, int group) {
  const KvBlocks blocks = q_blocks(problem.p, problem.s, begin, end, tile_m, group);
  const std::string text = problem.text() + " keys [" + std::to_string(begin) + ", " + std::to_string(end) +
                           ") tile_m=" + std::to_string(tile_m) + " group=" + std::to_string(group);
  expect_ordered(blocks, text);
  for (int block = 0; block <= problem.s.used_q * group / tile_m + 1; ++block) {
    bool any = false, all = begin < end;
    for (int row = block * tile_m; row < (block + 1) * tile_m; ++row) {
      for (int j = begin; j < end; ++j) {
        any |= problem.sees(row / group, j);
        all &= problem.sees(row / group, j);
      }
    }
    ASSERT_EQ(blocks.begin <= block && block < blocks.end, any) << text << " block " << block;
    ASSERT_EQ(blocks.is_full(block), all) << text << " block " << block;
  }
  if (problem.p.window_right < 0) {
    ASSERT_EQ(blocks.full_begin, blocks.begin) << text;
  }
}

TEST(KvBlocks, EverySmallProblem) {
  for (int used_q = 0; used_q <= 7; ++used_q) {
    for (int used_k = 0; used_k <= 7; ++used_k) {
      for (int left = -1; left <= 8; ++left) {
        for (int right = -1; right <= 8; ++right) {
          const Problem problem(used_q, used_k, left, right);
          for (int tile = 1; tile <= 4; ++tile) {
            for (int begin = 0; begin <= used_q; ++begin) {
              for (int end = begin; end <= used_q; ++end) check_kv(problem, begin, end, tile);
            }
            for (int begin = 0; begin <= used_k; ++begin) {
              for (int end = begin; end <= used_k; ++end) {
                for (int group = 1; group <= 3; ++group) check_q(problem, begin, end, tile, group);
              }
            }
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

/// Sizes of real kernels.
TEST(KvBlocks, RandomProblems) {
  std::mt19937 random(20261121);
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 400; ++round) {
    const auto edge = [&] { return between(0, 2) == 0 ? between(0, 700) : between(0, 1) - 1; };
    const Problem problem(between(1, 500), between(1, 500), edge(), edge());
    const int tile_m = 16 << between(0, 3), tile_n = 16 * between(1, 11), group = between(1, 8);
    const int tile_begin = between(0, (problem.s.used_q - 1) / tile_m) * tile_m;
    check_kv(problem, tile_begin, std::min(tile_begin + tile_m, problem.s.used_q), tile_n);
    const int keys_begin = between(0, (problem.s.used_k - 1) / tile_n) * tile_n;
    check_q(problem, keys_begin, std::min(keys_begin + tile_n, problem.s.used_k), tile_m, group);
    if (HasFatalFailure()) return;
  }
}

/// Tiles that pack the query heads of a group: rows of a tile are the queries [first row / group, ceil(end
/// row / group)).
TEST(KvBlocks, PackedGroups) {
  for (int group = 1; group <= 5; ++group) {
    for (int used_q = 1; used_q <= 6; ++used_q) {
      for (int tile_m = 1; tile_m <= 8; ++tile_m) {
        for (int left = -1; left <= 3; ++left) {
          for (int right = -1; right <= 3; ++right) {
            const Problem problem(used_q, 8, left, right);
            for (int row = 0; row < used_q * group; row += tile_m) {
              const int end = std::min(row + tile_m, used_q * group);
              const KvBlocks blocks = kv_blocks(problem.p, problem.s, row / group, ceil_div(end, group), 3);
              for (int block = 0; block < 4; ++block) {
                bool any = false, all = true;
                for (int r = row; r < end; ++r) {
                  for (int j = block * 3; j < block * 3 + 3; ++j) {
                    any |= problem.sees(r / group, j);
                    all &= problem.sees(r / group, j);
                  }
                }
                ASSERT_EQ(blocks.begin <= block && block < blocks.end, any) << problem.text();
                ASSERT_EQ(blocks.is_full(block), all) << problem.text();
              }
            }
          }
        }
      }
    }
  }
}

TEST(KvBlocks, CausalByHand) {
  const Problem causal(256, 256, -1, 0);
  const KvBlocks third = kv_blocks(causal.p, causal.s, 128, 192, 64);
  EXPECT_EQ(third.begin, 0);
  EXPECT_EQ(third.full_begin, 0);
  EXPECT_EQ(third.full_end, 2);  // the block on the diagonal needs a mask
  EXPECT_EQ(third.end, 3);
  EXPECT_EQ(third.count(), 3);
  const KvBlocks queries = q_blocks(causal.p, causal.s, 128, 192, 64);
  EXPECT_EQ(queries.begin, 2);
  EXPECT_EQ(queries.full_begin, 3);
  EXPECT_EQ(queries.full_end, 4);
  EXPECT_EQ(queries.end, 4);
  EXPECT_TRUE(kv_blocks(causal.p, causal.s, 64, 64, 64).empty());
  EXPECT_EQ(KvBlocks{}.count(), 0);
  // More queries than keys: the first of them see nothing.
  const Problem longer(300, 100, -1, 0);
  EXPECT_TRUE(kv_blocks(longer.p, longer.s, 0, 128, 64).empty());
  EXPECT_EQ(kv_blocks(longer.p, longer.s, 128, 256, 64).end, 1);
}

}  // namespace
}  // namespace fovea::tile
