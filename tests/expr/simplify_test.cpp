// Simplification changes no value: not of NaN, infinities and -0.0, and not which pairs are valid.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <string_view>

#include "expr/evaluate.hpp"
#include "expr/print.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

TEST(Simplify, ByHand) {
  const auto score = [](std::string_view text) { return print(parsed(text, Use::kScore)); };
  EXPECT_EQ(score("s * 1 / 1.0 - 0"), "s");
  EXPECT_EQ(score("s + 0.0"), "s + 0.0");  // -0.0 + 0.0 is 0.0
  EXPECT_EQ(score("s + -0.0"), "s");
  EXPECT_EQ(score("0 * s"), "0.0 * s");
  EXPECT_EQ(score("- -s"), "s");
  EXPECT_EQ(score("abs(-abs(s))"), "abs(s)");
  EXPECT_EQ(score("1 / 3 + 7 % 4 + 0.5"), "3.5");
  EXPECT_EQ(score("1.0 / 0"), "1.0 / 0.0");  // no literal is infinite
  EXPECT_EQ(score("1 / 0"), "1 / 0");
  EXPECT_EQ(score("where(2 < 1, 1 / 0, s)"), "s");
  EXPECT_EQ(score("floor(q) + floor(floor(s))"), "q + floor(s)");
  const auto sees = [](std::string_view text) { return print(parsed(text, Use::kSees)); };
  EXPECT_EQ(sees("!(q < k) && true"), "q >= k");
  EXPECT_EQ(sees("!(slope[h] < 1.0)"), "!(slope[h] < 1.0)");  // NaN
  EXPECT_EQ(sees("!(slope[h] == 1.0)"), "slope[h] != 1.0");
  EXPECT_EQ(sees("q / k < 1 && false"), "q / k < 1 && false");  // q / 0
  EXPECT_EQ(sees("false && q / k < 1"), "false");
  EXPECT_EQ(sees("k < q || k < q"), "k < q");
}

bool same_bits(const Value& a, const Value& b) {
  if (a.valid != b.valid) return false;
  if (!a.valid || (std::isnan(a.number) && std::isnan(b.number))) return true;
  return a.integer == b.integer && std::bit_cast<uint64_t>(a.number) == std::bit_cast<uint64_t>(b.number);
}

TEST(Simplify, RandomTreesKeepTheirValues) {
  const MadeUpTensors tensors(true);
  constexpr std::array<double, 8> kScores = {0.0, -0.0, 1.0, -0.75, 1e-310, 1e30, HUGE_VAL, -HUGE_VAL};
  int fewer = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    const Use use = seed % 2 ? Use::kSees : Use::kScore;
    const std::string text = RandomText(seed, use).of(use == Use::kSees ? Type::kBool : Type::kFloat,
                                                      1 + static_cast<int>(seed % 4));
    const Expression plain = parsed(text, use, false), simple = parsed(text, use, true);
    fewer += simple.graph.size() < plain.graph.size();
    Evaluator a(plain, &tensors), b(simple, &tensors);
    for (int64_t i = 0; i < 40; ++i) {
      const double s = i == 39 ? std::nan("") : kScores[static_cast<size_t>(i) % 8];
      const Pair pair{s, i % 2, i / 2 % 2, 0, i * 5 % 16, i * 7 % 17, 16, 12};
      ASSERT_TRUE(same_bits(a.value(pair), b.value(pair))) << text << "\n" << print(simple);
    }
  }
  EXPECT_GT(fewer, 1000);
}

}  // namespace
}  // namespace fovea::expr
