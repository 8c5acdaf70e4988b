// Softmax block by block against softmax at once, over every order of special values.
#include "tile/online_softmax.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace fovea::tile {
namespace {

struct HostMath {
  static float exp2(float x) { return std::exp2(x); }
  static float log2(float x) { return std::log2(x); }
  static float max(float a, float b) { return std::fmax(a, b); }
};
using Row = SoftmaxRow<HostMath>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Result {
  double output = 0, lse2 = 0;
};

/// Row of one column, at once, in double. Keys of score -inf are left out, whatever their value.
Result direct(const std::vector<float>& scores, const std::vector<float>& values) {
  double max = -INFINITY;
  bool nan = false;
  for (const float s : scores) {
    nan |= std::isnan(s) || s == kInfinity;
    max = std::fmax(max, s);
  }
  if (nan) return {NAN, NAN};
  if (max == -INFINITY) return {0, -INFINITY};
  double sum = 0, output = 0;
  for (size_t j = 0; j < scores.size(); ++j) {
    if (scores[j] == -kInfinity) continue;
    const double weight = std::exp2(static_cast<double>(scores[j]) - max);
    sum += weight;
    output += weight * static_cast<double>(values[j]);
  }
  return {output / sum, max + std::log2(sum)};
}

struct Part {
  Row row;
  float output = 0;  ///< not normalised
};

/// Adds the keys [begin, end) as one block, the way a kernel does.
void add_block(Part& part, const std::vector<float>& scores, const std::vector<float>& values, size_t begin,
               size_t end) {
  float block_max = -kInfinity;
  for (size_t j = begin; j < end; ++j) block_max = HostMath::max(block_max, scores[j]);
  part.output *= part.row.raise_max(block_max);
  float block_sum = 0;
  for (size_t j = begin; j < end; ++j) {
    const float weight = part.row.weight(scores[j]);
    block_sum += weight;
    part.output += weight * values[j];
  }
  part.row.sum += block_sum;
}

void merge_into(Part& part, const Part& other) {
  const MergeFactors factors = merge(part.row, other.row);
  part.output = part.output * factors.mine + other.output * factors.other;
}

void expect_same(double got, double expected, double tolerance, const std::string& text) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(got)) << text << ": " << got;
  } else if (std::isinf(expected)) {
    EXPECT_EQ(got, expected) << text;
  } else {
    EXPECT_NEAR(got, expected, tolerance) << text;
  }
}

/// 17 keys, some roundings each, values up to 4. `by_lse`: parts met by their lse2, whose last bit is a
/// relative error of every weight.
void check(const Part& part, const Result& expected, const std::string& text, bool by_lse = false) {
  constexpr double kRounding = 1.0 / (1 << 24);
  const double of_sums = 64 * kRounding;
  const double of_lse =
      by_lse && std::isfinite(expected.lse2) ? 2 * kRounding * std::fabs(expected.lse2) : 0.0;
  expect_same(static_cast<double>(part.output * part.row.inverse_sum()), expected.output,
              4 * (of_sums + of_lse), text + " output");
  expect_same(static_cast<double>(part.row.lse2()), expected.lse2,
              of_sums + 4 * kRounding * std::fmax(1.0, std::fabs(expected.lse2)), text + " lse2");
}

/// All ways to cut the keys into blocks of `block`, and to merge the halves.
void check_row(const std::vector<float>& scores, const std::vector<float>& values, const std::string& text) {
  const Result expected = direct(scores, values);
  for (size_t block = 1; block <= scores.size(); ++block) {
    Part part;
    for (size_t j = 0; j < scores.size(); j += block) {
      add_block(part, scores, values, j, std::min(j + block, scores.size()));
    }
    check(part, expected, text + " blocks of " + std::to_string(block));
  }
  for (size_t cut = 0; cut <= scores.size(); ++cut) {
    Part first, second;
    add_block(first, scores, values, 0, cut);
    add_block(second, scores, values, cut, scores.size());
    // Normalised, as the parts of split keys are stored.
    Row row;
    float output = 0;
    for (const Part* part : {&first, &second}) {
      const MergeFactors factors = merge_normalised(row, part->row.lse2());
      output = output * factors.mine + part->output * part->row.inverse_sum() * factors.other;
    }
    check({row, output}, expected, text + " normalised, cut at " + std::to_string(cut), true);
    merge_into(first, second);
    check(first, expected, text + " cut at " + std::to_string(cut));
  }
}

/// Every row of five keys whose scores are among these.
TEST(OnlineSoftmax, SpecialScores) {
  const std::vector<float> kScores = {-kInfinity, -3.0f, 2.5f, kInfinity, kNan};
  const std::vector<float> values = {1.0f, -2.0f, 0.5f, 3.0f, -1.5f};
  std::vector<float> scores(5);
  for (int code = 0; code < 5 * 5 * 5 * 5 * 5; ++code) {
    int rest = code;
    std::string text = "scores";
    for (float& s : scores) {
      s = kScores[static_cast<size_t>(rest % 5)];
      rest /= 5;
      text += " " + std::to_string(s);
    }
    check_row(scores, values, text);
    if (HasFailure()) return;
  }
}

TEST(OnlineSoftmax, RandomRows) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int round = 0; round < 200; ++round) {
    const float spread = round % 4 == 0 ? 60.0f : 3.0f, shift = round % 3 == 0 ? 3000.0f : 0.0f;
    std::vector<float> scores(17), values(17);
    for (float& s : scores) s = spread * normal(random) - shift;
    for (float& v : values) v = normal(random);
    if (round % 5 == 0) scores[static_cast<size_t>(round % 17)] = -kInfinity;
    check_row(scores, values, "round " + std::to_string(round));
    if (HasFailure()) return;
  }
}

/// Rows of huge scores neither overflow nor lose their order.
TEST(OnlineSoftmax, HugeScores) {
  check_row({3e38f, -3e38f, 3e38f}, {1, 5, 3}, "huge");
  check_row({-3e38f, -3e38f}, {1, 3}, "hugely negative");
}

TEST(OnlineSoftmax, RowsWithoutKeys) {
  const Row row;
  EXPECT_EQ(row.inverse_sum(), 0.0f);
  EXPECT_EQ(row.lse2(), -kInfinity);
  Part part;
  add_block(part, {}, {}, 0, 0);
  EXPECT_EQ(part.output, 0.0f);
  EXPECT_EQ(part.row.lse2(), -kInfinity);
}

/// The first block multiplies what was before by 0, so nothing needs to be initialised but finite.
TEST(OnlineSoftmax, Factors) {
  Row row;
  EXPECT_EQ(row.raise_max(5.0f), 0.0f);
  EXPECT_EQ(row.raise_max(4.0f), 1.0f);
  EXPECT_EQ(row.raise_max(7.0f), 0.25f);
  EXPECT_EQ(row.max, 7.0f);
}

// The same functions run at compile time, where Math can.
struct ConstantMath {
  static constexpr float exp2(float x) {
    if (x == -kInfinity) return 0.0f;
    float result = 1.0f;
    for (; x >= 1.0f; x -= 1.0f) result *= 2.0f;
    for (; x <= -1.0f; x += 1.0f) result *= 0.5f;
    return result;  // of whole numbers
  }
  static constexpr float max(float a, float b) { return a > b ? a : b; }
};
constexpr float sum_at_compile_time() {
  SoftmaxRow<ConstantMath> row;
  for (const float score : {1.0f, 3.0f, -kInfinity, 2.0f}) {
    row.raise_max(score);
    row.sum += row.weight(score);
  }
  return row.sum;
}
static_assert(sum_at_compile_time() == 0.25f + 1.0f + 0.5f);

}  // namespace
}  // namespace fovea::tile
