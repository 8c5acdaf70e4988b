// tile/key_rows.hpp and cached_span: where keys of a cache lie, by the definition of docs/semantics.md.
#include "tile/key_rows.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

namespace fovea::tile {
namespace {

/// Two sequences over a pool of five pages of three rows.
struct Pool {
  std::vector<int32_t> table = {4, 0, 2, 1, 1, 3};
  std::array<int32_t, 2> used = {8, 5};
  AttentionParams p;

  Pool() {
    p.batch = 2;
    p.seqlen_k = 9;
    p.caches = 5;
    p.cache_rows = 3;
    p.page_table = {table.data(), 3};
    p.seqused_k = used.data();
    p.k.batch = 1000;
    p.k.row = 100;
    p.k.head = 10;
  }
  int64_t offset(int b, int j) {
    const KeyRows rows = key_rows(p, p.k, cached_span(p, b), b, 2, 2);
    return (rows.data - p.k.data + rows.offset(j)) / 2;
  }
};

TEST(KeyRows, FollowTheTable) {
  Pool pool;
  for (int b = 0; b < 2; ++b) {
    for (int j = 0; j < 9; ++j) {
      const int page = pool.table[static_cast<size_t>(3 * b + j / 3)];
      EXPECT_EQ(pool.offset(b, j), 1000 * page + 100 * (j % 3) + 20) << b << ", " << j;
    }
  }
}

TEST(KeyRows, BeginBehindThePadding) {
  Pool pool;
  const std::array<int32_t, 2> pads = {2, 5};
  pool.p.leftpad_k = pads.data();
  EXPECT_EQ(pool.offset(0, 0), 4000 + 200 + 20);
  EXPECT_EQ(pool.offset(0, 1), 0 + 20);
  EXPECT_EQ(cached_span(pool.p, 0).used_k, 6);
  EXPECT_EQ(cached_span(pool.p, 1).used_k, 0);
}

TEST(KeyRows, StayInThePoolWhateverTheTableHolds) {
  Pool pool;
  pool.table = {-1, 5, 1 << 30, 0, 0, 0};
  for (const int j : {0, 3, 8}) EXPECT_EQ(pool.offset(0, j), 100 * (j % 3) + 20);
  pool.used = {10, -4};
  EXPECT_EQ(cached_span(pool.p, 0).used_k, 9);
  EXPECT_EQ(cached_span(pool.p, 1).used_k, 0);
  const std::array<int32_t, 2> pads = {-3, 100};
  pool.p.leftpad_k = pads.data();
  EXPECT_EQ(cached_span(pool.p, 0).used_k, 9);
  EXPECT_EQ(cached_span(pool.p, 1).used_k, 0);
  pool.p.caches = 0;
  EXPECT_EQ(cached_span(pool.p, 0).used_k, 0);
}

TEST(KeyRows, OfChosenSequences) {
  Pool pool;
  const std::array<int32_t, 2> chosen = {3, 5};
  pool.p.page_table = {};
  pool.p.cache_batch = chosen.data();
  EXPECT_EQ(pool.offset(0, 7), 3000 + 700 + 20);
  EXPECT_EQ(cached_span(pool.p, 0).used_k, 8);
  EXPECT_EQ(cached_span(pool.p, 1).used_k, 0) << "k has no sequence 5";
}

TEST(KeyRows, OfPackedQueriesWithoutPackedKeys) {
  Pool pool;
  const std::array<int32_t, 3> starts = {0, 4, 6};
  pool.p.cu_seqlens_q = starts.data();
  pool.p.total_q = 7;
  const SequenceSpan span = cached_span(pool.p, 1);
  EXPECT_EQ(span.row_q, 4);
  EXPECT_EQ(span.used_q, 2);
  EXPECT_EQ(span.length_q, 3);
  EXPECT_EQ(span.row_k, 0);
  EXPECT_EQ(span.used_k, 5);
}

}  // namespace
}  // namespace fovea::tile
