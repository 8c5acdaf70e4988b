// Where the kernel that appends reads and writes: rows of packed sequences, and rows of a cache, by every wrong content.
#include <gtest/gtest.h>

#include <vector>

#include "cuda/kernels/append_args.hpp"

namespace fovea::cuda {
namespace {

TEST(AppendRows, FindTheSequenceOfEveryPackedRow) {
  for (const std::vector<int32_t>& starts :
       std::vector<std::vector<int32_t>>{{0}, {0, 0}, {0, 4}, {0, 0, 3, 3, 3, 9, 10, 10}, {0, 1, 2, 3}}) {
    const int batch = static_cast<int>(starts.size()) - 1;
    for (int row = 0; row < starts.back() + 3; ++row) {
      const SequenceRow found = sequence_row(starts.data(), batch, 0, row);
      if (row >= starts.back()) {
        EXPECT_EQ(found.batch, -1) << row;
        continue;
      }
      ASSERT_TRUE(found.batch >= 0 && found.batch < batch) << row;
      const auto at = static_cast<size_t>(found.batch);
      EXPECT_TRUE(starts[at] <= row && row < starts[at + 1]) << row;
      EXPECT_EQ(found.index, row - starts[at]);
    }
  }
}

TEST(AppendRows, FindTheSequenceOfEveryPaddedRow) {
  for (int row = 0; row < 21; ++row) {
    const SequenceRow found = sequence_row(nullptr, 3, 7, row);
    EXPECT_EQ(found.batch * 7 + found.index, row);
    EXPECT_LT(found.index, 7);
  }
}

tile::AttentionParams of_cache(int rows) {
  tile::AttentionParams p;
  p.batch = 2;
  p.seqlen_k = rows;
  return p;
}

TEST(AppendRows, GoToTheirSequence) {
  tile::AttentionParams p = of_cache(8);
  EXPECT_EQ(row_to_write(p, 1, 7).page, 1);
  EXPECT_EQ(row_to_write(p, 1, 7).row, 7);
  EXPECT_EQ(row_to_write(p, 1, 8).page, -1) << "behind the cache";
  EXPECT_EQ(row_to_write(p, 1, -1).page, -1);
  const std::vector<int32_t> chosen = {3, 4};
  p.cache_batch = chosen.data();
  p.caches = 4;
  EXPECT_EQ(row_to_write(p, 0, 2).page, 3);
  EXPECT_EQ(row_to_write(p, 1, 2).page, -1) << "no such sequence";
}

TEST(AppendRows, GoToTheirPageAndToNoOther) {
  tile::AttentionParams p = of_cache(12);
  const std::vector<int32_t> table = {5, -1, 6, 2, 0, 0x7fffffff};
  p.page_table = {table.data(), 3};
  p.caches = 6;
  p.cache_rows = 4;
  EXPECT_EQ(row_to_write(p, 0, 3).page, 5);
  EXPECT_EQ(row_to_write(p, 0, 3).row, 3);
  EXPECT_EQ(row_to_write(p, 1, 5).page, 0);
  EXPECT_EQ(row_to_write(p, 1, 5).row, 1);
  for (const int row : {4, 8}) EXPECT_EQ(row_to_write(p, 0, row).page, -1) << "no page of the pool";
  EXPECT_EQ(row_to_write(p, 1, 11).page, -1);
  EXPECT_EQ(row_to_write(p, 0, 12).page, -1) << "behind the table";
}

}  // namespace
}  // namespace fovea::cuda
