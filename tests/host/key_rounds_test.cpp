// The order of additions against a list of it, for every pair of blocks of every small problem.
#include "tile/key_rounds.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tile/alibi_reach.hpp"

namespace fovea::tile {
namespace {

std::vector<int> order_of(const KeyRounds& rounds, int blocks) {
  std::vector<int> order;
  for (int place = 0; place < blocks; ++place) order.push_back(rounds.block_at(place, blocks));
  return order;
}

TEST(KeyRounds, TakeEveryBlockOnce) {
  for (int rounds = 1; rounds <= 5; ++rounds) {
    for (int blocks = 1; blocks <= 40; ++blocks) {
      std::vector<int> order = order_of({rounds}, blocks);
      for (size_t i = 1; i < order.size(); ++i) {
        // Within a round every rounds-th, between rounds the next one's first.
        const bool same_round = order[i] % rounds == order[i - 1] % rounds;
        EXPECT_EQ(order[i], same_round ? order[i - 1] + rounds : order[i - 1] % rounds + 1);
      }
      std::sort(order.begin(), order.end());
      for (int block = 0; block < blocks; ++block) EXPECT_EQ(order[static_cast<size_t>(block)], block);
    }
  }
}

/// Whom each block waits for, if the grid was planned for `blocks`, as many as the keys have or more.
void check(const AttentionParams& p, const SequenceSpan& s, int tile_m, int tile_n, int blocks, int reach,
           const KeyRounds& rounds) {
  const auto queries_of = [&](int block) {
    const int begin = block * tile_n, end = std::min(begin + tile_n, s.used_k);
    if (begin >= end) return KvBlocks{};
    const KvBlocks queries = q_blocks(p, s, begin, end, tile_m);
    if (queries.empty()) return KvBlocks{};
    return queries_in_reach(queries, s, begin, end, reach, tile_m);
  };
  const std::vector<int> order = order_of(rounds, blocks);
  for (int n = 0; n * tile_m < s.used_q; ++n) {
    const int row = n * tile_m, end = std::min(row + tile_m, s.used_q);
    const int last = keys_in_reach(kv_blocks(p, s, row, end, tile_n), s, row, end, reach, tile_n).end - 1;
    int before = -1;
    for (const int block : order) {
      const KvBlocks queries = queries_of(block);
      if (n < queries.begin || n >= queries.end) continue;
      ASSERT_EQ(rounds.before(block, n, last, queries_of), before)
          << s.used_q << " x " << s.used_k << " tiles " << tile_m << " x " << tile_n << " left "
          << p.window_left << " right " << p.window_right << " reach " << reach << " rounds " << rounds.rounds
          << " block " << block << " queries " << n;
      before = block;
    }
    if (p.window_left >= 0 || reach != kEverywhere) continue;
    for (const int block : order) {
      const KvBlocks queries = queries_of(block), after = queries_of(rounds.behind(block));
      if (n < queries.begin || n >= queries.end) continue;
      ASSERT_EQ(after.empty() || n < after.begin, block == before)
          << s.used_q << " x " << s.used_k << " tiles " << tile_m << " x " << tile_n << " right "
          << p.window_right << " rounds " << rounds.rounds << " block " << block << " queries " << n
          << ": whether it is the last";
    }
  }
}

TEST(KeyRounds, EachBlockKnowsWhoAddsBeforeItAndWhetherItIsTheLast) {
  struct Tiles {
    int m, n;
  };
  for (const Tiles tiles : {Tiles{1, 1}, Tiles{1, 2}, Tiles{2, 2}, Tiles{3, 2}}) {
    for (int rounds = 1; rounds <= 4; ++rounds) {
      for (int used_q = 1; used_q <= 13; used_q += 3) {
        for (int used_k = 1; used_k <= 17; ++used_k) {
          for (const int left : {-1, 0, 1, 2, 5}) {
            for (const int right : {-1, 0, 1, 4}) {
              for (const int reach : {kEverywhere, 0, 3}) {
                AttentionParams p;
                p.window_left = left, p.window_right = right;
                SequenceSpan s;
                s.used_q = used_q, s.used_k = used_k;
                const int blocks = ceil_div(used_k, tiles.n);
                for (const int more : {0, 3}) check(p, s, tiles.m, tiles.n, blocks + more, reach, {rounds});
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace fovea::tile
