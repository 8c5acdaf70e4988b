// Products of a panel whose lanes end at different keys, and which table comes first for bfloat16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "cpu/panel.hpp"
#include "cpu_tables.hpp"

namespace fovea::cpu {
namespace {

/// Words as a table reads them: a float, or two bfloat16.
std::vector<float> random_words(std::mt19937_64& generator, int64_t count, int word_elements) {
  std::normal_distribution<float> normal;
  std::vector<float> words(static_cast<size_t>(count));
  for (float& word : words) {
    word = normal(generator);
    if (word_elements == 1) continue;
    uint32_t low = 0, high = 0;
    const float other = normal(generator);
    std::memcpy(&low, &other, sizeof low);
    std::memcpy(&high, &word, sizeof high);
    const uint32_t pair = low >> 16 | (high & 0xffff0000u);
    std::memcpy(&word, &pair, sizeof word);
  }
  return words;
}

/// Ends that do not fall, the last of them `all`, of so many wanted lanes.
LaneEnds random_ends(std::mt19937_64& generator, int64_t all, int64_t wanted) {
  LaneEnds ends;
  for (int64_t& end : ends.of) end = std::uniform_int_distribution<int64_t>(0, all)(generator);
  std::sort(std::begin(ends.of), std::end(ends.of));
  *(std::end(ends.of) - 1) = all;
  ends.wanted = wanted;
  return ends;
}

int64_t end_of_lane(const LaneEnds& ends, int64_t lane) {
  return ends.of[lane / kLaneStep];
}

/// b without the words that lie behind the ends of its lanes.
void clear_behind_ends(const LaneEnds& ends, int64_t k, std::vector<float>& b) {
  for (int64_t step = 0; step < k; ++step)
    for (int64_t lane = 0; lane < kPanel; ++lane)
      if (step >= end_of_lane(ends, lane)) b[static_cast<size_t>(step * kPanel + lane)] = 0;
}

/// All lanes, one, and around the ends of vectors of 4, 8 and 16.
constexpr int64_t kWanted[] = {kPanel, 1, 4, 5, 16, 17, 31, 33, 47};

/// The first `wanted` lanes of rows of a panel.
std::vector<float> wanted_lanes(const std::vector<float>& rows, int64_t wanted) {
  std::vector<float> lanes;
  for (size_t row = 0; row < rows.size(); row += kPanel) {
    const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(row);
    lanes.insert(lanes.end(), begin, begin + wanted);
  }
  return lanes;
}

TEST(CpuProducts, ScoresUpToTheEndsOfLanes) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 generator(seed);
  for (const Ops* ops : tables_of_this_machine()) {
    for (const int64_t steps : {1, 3, 8, 21}) {
      const int64_t rows = steps * ops->row_multiple, k = 5 * ops->k_multiple;
      SCOPED_TRACE(std::string(ops->name) + ", " + std::to_string(rows) + " rows");
      const std::vector<float> a = random_words(generator, rows * k, ops->word_elements),
                               b = random_words(generator, k * kPanel, ops->word_elements);
      std::vector<float> expected(static_cast<size_t>(rows * kPanel));
      ops->scores({a.data(), k, 1}, b.data(), rows, k, expected.data(), nullptr, nullptr);
      for (const int64_t wanted : kWanted) {
        SCOPED_TRACE(std::to_string(wanted) + " lanes");
        const LaneEnds ends = random_ends(generator, rows, wanted);
        std::vector<float> got(expected.size());
        ops->scores({a.data(), k, 1}, b.data(), rows, k, got.data(), nullptr, &ends);
        for (int64_t lane = 0; lane < wanted; ++lane) {
          for (int64_t row = 0; row < end_of_lane(ends, lane); ++row) {
            const auto at = static_cast<size_t>(row * kPanel + lane);
            ASSERT_EQ(got[at], expected[at]) << row << ", " << lane;
          }
        }
      }
    }
  }
}

TEST(CpuProducts, SumsUpToTheEndsOfLanes) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 generator(seed);
  for (const Ops* ops : tables_of_this_machine()) {
    for (const int64_t k : {1, 2, 7, 24, 64}) {
      const int64_t rows = 14 * ops->row_multiple;
      SCOPED_TRACE(std::string(ops->name) + ", " + std::to_string(k) + " words");
      const std::vector<float> a = random_words(generator, rows * k, ops->word_elements),
                               alpha = random_words(generator, kPanel, 1),
                               before = random_words(generator, rows * kPanel, 1),
                               words = random_words(generator, k * kPanel, ops->word_elements);
      for (const int64_t wanted : kWanted) {
        SCOPED_TRACE(std::to_string(wanted) + " lanes");
        const LaneEnds ends = random_ends(generator, k, wanted);
        std::vector<float> b = words;
        clear_behind_ends(ends, k, b);
        for (const float* factors : {alpha.data(), static_cast<const float*>(nullptr)}) {
          std::vector<float> expected = before, got = before;
          ops->accumulate({a.data(), 1, rows}, b.data(), rows, k, expected.data(), factors, nullptr);
          ops->accumulate({a.data(), 1, rows}, b.data(), rows, k, got.data(), factors, &ends);
          ASSERT_EQ(wanted_lanes(got, wanted), wanted_lanes(expected, wanted));
        }
        if (ops->word_elements == 2) continue;
        std::vector<float> expected = before, got = before;
        ops->accumulate_strided({a.data(), 1, rows}, b.data(), kPanel, rows, k, expected.data(), nullptr);
        ops->accumulate_strided({a.data(), 1, rows}, b.data(), kPanel, rows, k, got.data(), &ends);
        ASSERT_EQ(wanted_lanes(got, wanted), wanted_lanes(expected, wanted));
      }
    }
  }
}

TEST(CpuProducts, EndsAreThoseOfTheLastKeysThatLanesSee) {
  Lanes lanes;
  for (int lane = 0; lane < kPanel; ++lane) lanes.end[lane] = 100 + lane;
  const auto of = [&](int64_t first, int64_t n, int64_t pair) {
    const LaneEnds ends = ends_of(lanes, KeyPositions(first), n, pair);
    return std::vector<int64_t>(std::begin(ends.of), std::end(ends.of));
  };
  EXPECT_EQ(of(0, 147, 1), (std::vector<int64_t>{115, 131, 147}));
  EXPECT_EQ(of(64, 83, 1), (std::vector<int64_t>{51, 67, 83}));
  EXPECT_EQ(of(64, 83, 2), (std::vector<int64_t>{26, 34, 42}));
  EXPECT_EQ(of(0, 64, 1), (std::vector<int64_t>{64, 64, 64}));
  EXPECT_EQ(of(128, 32, 1), (std::vector<int64_t>{0, 3, 32}));
  const int32_t list[] = {7, 200, 3};
  const LaneEnds ends = ends_of(lanes, KeyPositions(list), 3);
  EXPECT_EQ(ends.of[0], 3);
}

TEST(CpuBackends, IntelMultipliesFloatsBeforePairs) {
  std::ifstream about("/proc/cpuinfo");
  std::string line;
  while (std::getline(about, line) && line.rfind("vendor_id", 0) != 0) continue;
  if (line.rfind("vendor_id", 0) != 0) GTEST_SKIP() << "no /proc/cpuinfo that names a maker";
  const auto place_of = [](const std::string& name) {
    const auto list = backends();
    return std::find_if(list.begin(), list.end(), [&](const Backend* b) { return name == b->name; }) -
           list.begin();
  };
  const bool is_intel = line.find("GenuineIntel") != std::string::npos;
  EXPECT_EQ(place_of("cpu_avx512") < place_of("cpu_avx512_bf16"), is_intel);
  EXPECT_EQ(place_of("cpu_amx_bf16"), 0);
}

}  // namespace
}  // namespace fovea::cpu
