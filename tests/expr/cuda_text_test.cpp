// CUDA texts, compiled for the host, against the oracle: random pairs, random tensors.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "expr/differentiate.hpp"
#include "expr/print.hpp"
#include "point_ranges.hpp"
#include "text_cases.hpp"
#include "text_memory.hpp"

namespace fovea::expr {
namespace {

class RandomPairs {
 public:
  RandomPairs(uint64_t seed, bool small, int64_t positions) : random_(seed), most_(small ? 16 : positions) {}

  Pair next() {
    static constexpr std::array<double, 6> kSpecial = {0.0, -0.0, 0x1p99, HUGE_VAL, -HUGE_VAL, NAN};
    Pair pair;
    pair.s = below(6) == 0 ? kSpecial[static_cast<size_t>(below(6))]
                           : static_cast<float>(static_cast<double>(below(4000)) / 500 - 4);
    pair.b = below(2);
    pair.h = below(2);
    pair.hk = below(2);
    // Mostly small, where most is to be seen; else anything.
    const int64_t limit = below(4) == 0 ? most_ : 16;
    pair.nq = 1 + below(limit);
    pair.nk = 1 + below(limit);
    pair.q = below(below(2) == 0 ? std::min<int64_t>(limit, 6) : limit);
    pair.k = below(3) == 0 ? std::min(limit - 1, pair.q + below(3)) : below(limit);
    return pair;
  }

 private:
  int64_t below(int64_t limit) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit)); }

  std::mt19937_64 random_;
  int64_t most_;
};

std::string describe(const Pair& p) {
  return " at s " + std::to_string(p.s) + " b " + std::to_string(p.b) + " h " + std::to_string(p.h) + " hk " +
         std::to_string(p.hk) + " q " + std::to_string(p.q) + " k " + std::to_string(p.k) + " nq " +
         std::to_string(p.nq) + " nk " + std::to_string(p.nk);
}

/// What is compared of how many texts.
struct Counts {
  int exact = 0, close = 0, nan = 0, invalid = 0, gradients = 0, seen = 0, not_seen = 0, undecided = 0;
};
Counts counts;

/// Whether float32 may give `got` for the node of the last range.
bool agrees(const Range& range, bool undecided, float got) {
  if (undecided) {
    ++counts.undecided;
    return true;  // another choice may have any value
  }
  if (range.invalid) {
    ++counts.invalid;
    return std::isnan(got);
  }
  if (std::isnan(got)) {
    ++counts.nan;
    return range.number.nan;
  }
  const double width = range.number.highest - range.number.lowest;
  ++(width == 0 ? counts.exact : counts.close);
  return got >= range.number.lowest && got <= range.number.highest;
}

class CudaText : public testing::Test {
 protected:
  void compare(const TextCase& of, const CompiledText& text, TextMemory& memory, uint64_t seed) {
    std::optional<Expression> score, sees;
    if (!of.score.empty()) score = text_expression(of.score, Use::kScore);
    if (!of.sees.empty()) sees = text_expression(of.sees, Use::kSees);
    EXPECT_EQ(text.has_score, score.has_value());
    EXPECT_EQ(text.has_sees, sees.has_value());
    const CudaTextInput input = text_input(of, nullptr, nullptr);
    RandomPairs pairs(seed, text.reads_by_position, input.positions);
    for (int i = 0; i < 60; ++i) {
      const Pair pair = pairs.next();
      if (sees) compare_sees(*sees, text, memory, pair);
      if (!score) continue;
      compare_score(*score, text, memory, pair);
      if (i % 3 == 0) compare_gradients(*score, text, memory, pair);
      if (HasFailure()) return;
    }
  }

 private:
  static void compare_sees(const Expression& sees, const CompiledText& text, TextMemory& memory,
                           const Pair& pair) {
    PointRanges ranges(sees, memory);
    const Range range = ranges.range(sees.root, pair);
    if (ranges.undecided(sees.root)) {
      ++counts.undecided;
      return;
    }
    const bool expected = !range.invalid && range.may_be_true();
    EXPECT_EQ(Evaluator(sees, &memory).sees(pair), expected);
    EXPECT_EQ(text.sees(memory.tensors(), pair), expected) << print(sees) << describe(pair);
    ++(expected ? counts.seen : counts.not_seen);
  }

  static void compare_score(const Expression& score, const CompiledText& text, TextMemory& memory,
                            const Pair& pair) {
    const ScoreDerivative d = differentiate_by_s(score);
    PointRanges ranges(d.score, memory);
    const Range of_score = ranges.range(d.score.root, pair);
    const float got = text.score(memory.tensors(), pair);
    EXPECT_TRUE(agrees(of_score, ranges.undecided(d.score.root), got))
        << print(score) << describe(pair) << ": got " << got << ", expected " << of_score.number.lowest
        << " to " << of_score.number.highest << (of_score.number.nan ? " or NaN" : "")
        << (of_score.invalid ? " not valid" : "");
    const Range of_slope = ranges.range(d.by_s, pair);
    const float slope = text.slope(memory.tensors(), pair);
    EXPECT_TRUE(agrees(of_slope, ranges.undecided(d.by_s), slope))
        << print(d.score, d.by_s) << describe(pair) << ": got " << slope << ", expected "
        << of_slope.number.lowest << " to " << of_slope.number.highest;
    if (text.slope_is_one) {
      EXPECT_EQ(slope, 1.0f);
    }
  }

  /// Contributions to elements by place; nothing when float32 may choose other elements.
  using Contributions = std::map<int64_t, std::vector<Range>>;
  static std::optional<Contributions> contributions(Expression& score, TextMemory& memory, size_t tensor,
                                                    const Pair& pair) {
    Contributions all;
    const auto elements = differentiate_by_elements(score, tensor);
    PointRanges ranges(score, memory);
    for (const ElementDerivative& element : elements) {
      ranges.range(std::max(element.derivative, element.element), pair);
      if (ranges.undecided(element.derivative) || ranges.undecided(element.element)) return std::nullopt;
      std::vector<int64_t> index;
      bool valid = true;
      for (const NodeId operand : score.graph[element.element].operands()) {
        valid = valid && !ranges.of_last(operand).invalid;
        index.push_back(ranges.of_last(operand).integer.lowest);
      }
      const int64_t place = valid ? memory.place(tensor, index) : -1;
      if (place >= 0) all[place].push_back(ranges.of_last(element.derivative));
    }
    return all;
  }

  static void compare_gradients(Expression score, const CompiledText& text, TextMemory& memory,
                                const Pair& pair) {
    for (auto& gradient : memory.gradients()) std::fill(gradient.begin(), gradient.end(), 0.0f);
    text.add_gradients(memory.tensors(), pair, 2.0f);
    for (size_t tensor = 0; tensor < kTextTensors.size(); ++tensor) {
      const auto expected = contributions(score, memory, tensor, pair);
      if (!expected) continue;
      const std::vector<float>& gradient = memory.gradients()[tensor];
      for (size_t i = 0; i < gradient.size(); ++i) {
        const auto found = expected->find(static_cast<int64_t>(i));
        if (found == expected->end()) {
          EXPECT_EQ(gradient[i], 0) << print(score) << describe(pair);
          continue;
        }
        Range sum = Range::of_float(0, 0, false);
        bool invalid = false;
        for (const Range& range : found->second) {
          invalid = invalid || range.invalid;
          const std::array operands = {sum, range};
          sum = apply(Op::kAdd, Type::kFloat, operands);
        }
        sum.invalid = invalid;
        EXPECT_TRUE(agrees(sum, false, gradient[i] / 2))
            << print(score) << describe(pair) << ": " << kTextTensors[tensor].name << " got "
            << gradient[i] / 2 << ", expected " << sum.number.lowest << " to " << sum.number.highest;
        ++counts.gradients;
      }
    }
  }
};

TEST_F(CudaText, AgreesWithTheOracle) {
  const std::vector<TextCase> cases = text_cases();
  const std::vector<CompiledText> texts = compiled_texts();
  ASSERT_EQ(cases.size(), texts.size());
  for (uint64_t seed = 0; seed < 4; ++seed) {
    TextMemory sparse(seed, false), dense(seed, true);
    for (size_t i = 0; i < cases.size(); ++i) {
      SCOPED_TRACE("text " + std::to_string(i));
      compare(cases[i], texts[i], cases[i].facts == Facts::kAll ? dense : sparse, seed * 1000 + i);
      if (HasFailure()) return;
    }
  }
  std::printf("exact %d, close %d, NaN %d, not valid %d, gradients %d, seen %d, not seen %d, undecided %d\n",
              counts.exact, counts.close, counts.nan, counts.invalid, counts.gradients, counts.seen,
              counts.not_seen, counts.undecided);
  EXPECT_GT(counts.exact, 5000);
  EXPECT_GT(counts.close, 20000);
  EXPECT_GT(counts.nan, 1000);
  EXPECT_GT(counts.invalid, 2000);
  EXPECT_GT(counts.gradients, 5000);
  EXPECT_LT(counts.undecided, counts.close / 4);
}

}  // namespace
}  // namespace fovea::expr
