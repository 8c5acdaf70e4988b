// The order in which blocks of keys of a head add to the gradient of a block of queries, where it is fixed. Tiles of keys are taken in the
// same order, so whom a tile waits for has begun before it.
#pragma once

#include "tile/kv_blocks.hpp"

namespace fovea::tile {

/// Every `rounds`-th block from block 0 on, then every `rounds`-th from block 1 on, and so forth. Under a causal mask a block then has
/// `rounds` times as many steps fewer than the block before it as with one round. Tiles that begin together walk over the same queries and
/// follow one another at the time that a turn takes, so they end, and those behind them begin, apart by half of that difference.
struct KeyRounds {
  int rounds = 1;

  /// The block at a place in the order.
  constexpr int block_at(int place, int blocks) const {
    for (int round = 0; round + 1 < rounds; ++round) {
      const int size = blocks > round ? (blocks - round + rounds - 1) / rounds : 0;
      if (place < size) return round + place * rounds;
      place -= size;
    }
    return rounds - 1 + place * rounds;
  }

  /// Of the blocks that add after `block` where both see the same queries, and blocks before a block see all that it sees, the one that
  /// is seen by most queries. It may not exist.
  constexpr int behind(int block) const {
    const int round = block % rounds;
    return round + 1 < rounds ? round + 1 : block + rounds;
  }

  /// The block that adds before `block` to block n of queries; -1 where there is none. `queries_of`: the blocks of queries that see a
  /// block of keys; neither their begin nor their end falls from a block to the next. `last`: no block behind it sees block n.
  template <class QueriesOf>
  constexpr int before(int block, int n, int last, const QueriesOf& queries_of) const {
    for (int round = block % rounds, next = block - rounds;;) {
      for (; next >= 0; next -= rounds) {
        const KvBlocks queries = queries_of(next);
        if (queries.begin <= n && n < queries.end) return next;
        if (!queries.empty() && queries.end <= n) break;  // and those before it end no later
      }
      if (--round < 0) return -1;
      next = last - (last + rounds - round) % rounds;
    }
  }
};

}  // namespace fovea::tile
