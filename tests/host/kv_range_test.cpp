// Compares ranges of keys and queries with the formula, over every small problem.
#include "tile/kv_range.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fovea::tile {
namespace {

/// The band as defined in fovea.h.
bool sees(const Window& w, int64_t i, int64_t j) {
  const int64_t position = i + w.seqlen_k - w.seqlen_q;
  return (w.left < 0 || j >= position - w.left) && (w.right < 0 || j <= position + w.right);
}

std::vector<Window> small_windows() {
  std::vector<Window> windows;
  for (int64_t sq = 0; sq <= 7; ++sq) {
    for (int64_t sk = 0; sk <= 7; ++sk) {
      for (int64_t left = -1; left <= 9; ++left) {
        for (int64_t right = -1; right <= 9; ++right) windows.push_back({sq, sk, left, right});
      }
    }
  }
  return windows;
}

std::string describe(const Window& w) {
  return "sq=" + std::to_string(w.seqlen_q) + " sk=" + std::to_string(w.seqlen_k) +
         " left=" + std::to_string(w.left) + " right=" + std::to_string(w.right);
}

TEST(KvRange, KeysOfAQuery) {
  for (const Window& w : small_windows()) {
    for (int64_t i = 0; i < w.seqlen_q; ++i) {
      int64_t seen = 0;
      for (int64_t j = 0; j < w.seqlen_k; ++j) {
        ASSERT_EQ(w.keys_of(i).contains(j), sees(w, i, j)) << describe(w) << " i=" << i << " j=" << j;
        seen += sees(w, i, j) ? 1 : 0;
      }
      ASSERT_EQ(w.keys_of(i).size(), seen) << describe(w) << " i=" << i;
    }
  }
}

TEST(KvRange, TheDiagonalIsAlwaysInside) {
  for (const Window& w : small_windows()) {
    for (int64_t i = 0; i < w.seqlen_q; ++i) {
      const int64_t j = w.diagonal(i);
      if (0 <= j && j < w.seqlen_k) {
        ASSERT_TRUE(w.keys_of(i).contains(j)) << describe(w) << " i=" << i;
      }
    }
  }
}

TEST(KvRange, KeysOfABlockOfQueries) {
  for (const Window& w : small_windows()) {
    for (int64_t begin = 0; begin < w.seqlen_q; ++begin) {
      for (int64_t end = begin + 1; end <= w.seqlen_q; ++end) {
        for (int64_t j = 0; j < w.seqlen_k; ++j) {
          bool any = false, all = true;
          for (int64_t i = begin; i < end; ++i) {
            any |= sees(w, i, j);
            all &= sees(w, i, j);
          }
          ASSERT_EQ(w.keys_of_all(begin, end).contains(j), all)
              << describe(w) << " block [" << begin << ", " << end << ") j=" << j;
          if (any) {
            ASSERT_TRUE(w.keys_of_any(begin, end).contains(j))
                << describe(w) << " block [" << begin << ", " << end << ") j=" << j;
          }
        }
      }
    }
  }
}

/// The range is tight: its first and last keys are seen, unless the band lies outside the keys.
TEST(KvRange, KeysOfABlockAreTight) {
  for (const Window& w : small_windows()) {
    for (int64_t begin = 0; begin < w.seqlen_q; ++begin) {
      for (int64_t end = begin + 1; end <= w.seqlen_q; ++end) {
        const Range range = w.keys_of_any(begin, end);
        if (range.empty()) continue;
        for (const int64_t j : {range.begin, range.end - 1}) {
          bool any = false;
          for (int64_t i = begin; i < end; ++i) any |= sees(w, i, j);
          ASSERT_TRUE(any) << describe(w) << " block [" << begin << ", " << end << ") j=" << j;
        }
      }
    }
  }
}

TEST(KvRange, QueriesOfABlockOfKeys) {
  for (const Window& w : small_windows()) {
    for (int64_t begin = 0; begin < w.seqlen_k; ++begin) {
      for (int64_t end = begin + 1; end <= w.seqlen_k; ++end) {
        const Range range = w.queries_of_any(begin, end);
        for (int64_t i = 0; i < w.seqlen_q; ++i) {
          bool any = false;
          for (int64_t j = begin; j < end; ++j) any |= sees(w, i, j);
          ASSERT_EQ(range.contains(i), any)
              << describe(w) << " keys [" << begin << ", " << end << ") i=" << i;
        }
      }
    }
  }
}

TEST(KvRange, KeptPairs) {
  for (const Window& w : small_windows()) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < w.seqlen_q; ++i) {
      for (int64_t j = 0; j < w.seqlen_k; ++j) pairs += sees(w, i, j) ? 1 : 0;
    }
    ASSERT_EQ(w.kept_pairs(), static_cast<double>(pairs)) << describe(w);
  }
}

TEST(KvRange, EmptyRange) {
  EXPECT_TRUE((Range{3, 3}).empty());
  EXPECT_TRUE((Range{4, 3}).empty());
  EXPECT_EQ((Range{4, 3}).size(), 0);
  EXPECT_EQ((Range{1, 3}).size(), 2);
  EXPECT_FALSE((Range{1, 3}).contains(3));
  EXPECT_TRUE((Range{1, 3}).contains(1));
}

}  // namespace
}  // namespace fovea::tile
