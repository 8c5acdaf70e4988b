// Derivatives against central differences.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "expr/differentiate.hpp"
#include "expr/evaluate.hpp"
#include "expr/print.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

std::string by_s(std::string_view text) {
  const ScoreDerivative d = differentiate_by_s(parsed(text, Use::kScore));
  return print(d.score, d.by_s);
}

TEST(Derivative, ByHand) {
  EXPECT_EQ(by_s("s"), "1.0");
  EXPECT_EQ(by_s("bias[b, h, q, k]"), "0.0");
  EXPECT_EQ(by_s("s - slope[h] * abs(q + nk - nq - k)"), "1.0");
  EXPECT_EQ(by_s("s * q + s * k"), "float(q) + k");
  EXPECT_EQ(by_s("s * s"), "s + s");
  EXPECT_EQ(by_s("exp(s) - s"), "exp(s) - 1.0");
  EXPECT_EQ(by_s("log(s)"), "1.0 / s");
  EXPECT_EQ(by_s("sqrt(s)"), "0.5 / sqrt(s)");
  EXPECT_EQ(by_s("where(k < q, s, 1)"), "where(k < q, 1.0, 0.0)");
  EXPECT_EQ(by_s("floor(s)"), "0.0");
  EXPECT_EQ(by_s("1 / s"), "-(1.0 / s * (1.0 / s))");
}

TEST(Derivative, AtKinks) {
  const auto at = [](std::string_view text, double s) {
    const ScoreDerivative d = differentiate_by_s(parsed(text, Use::kScore));
    return Evaluator(d.score).score(d.by_s, Pair{s});
  };
  EXPECT_EQ(at("abs(s)", 0), 0);
  EXPECT_EQ(at("abs(s)", -2), -1);
  EXPECT_EQ(at("abs(s)", 2), 1);
  EXPECT_EQ(at("min(s, 2)", 2), 1);
  EXPECT_EQ(at("min(2, s)", 2), 0);
  EXPECT_EQ(at("max(s, 2)", 2), 1);
  EXPECT_EQ(at("max(2, s)", 2), 0);
  EXPECT_EQ(at("clamp(s, 1, 2)", 1), 1);
  EXPECT_EQ(at("clamp(s, 1, 2)", 2), 1);
  EXPECT_EQ(at("clamp(s, 1, 2)", 2.5), 0);
  EXPECT_EQ(at("clamp(1.5, s, 2)", 1.75), 1);
  EXPECT_EQ(at("clamp(3, 1, s)", 2), 1);
  EXPECT_EQ(at("where(s > 0, sqrt(s), 0)", -1), 0);  // not NaN
}

/// The slope of `value` at x, when differences with two steps agree: there is no kink or step between.
template <class Function>
std::optional<double> slope_at(const Function& value, double x) {
  const auto difference = [&](double step) { return (value(x + step) - value(x - step)) / (2 * step); };
  const double wide = difference(2e-4), narrow = difference(1e-4),
               extrapolated = narrow + (narrow - wide) / 3;
  const double scale = 1 + std::fabs(narrow);
  if (!std::isfinite(narrow) || !std::isfinite(wide) || std::fabs(value(x)) > 1e3 * scale)
    return std::nullopt;
  if (std::fabs(wide - narrow) > 1e-5 * scale) return std::nullopt;
  // A kink at x itself has the mean of both slopes.
  if (std::fabs((value(x + 1e-4) - 2 * value(x) + value(x - 1e-4)) / 1e-4) > 1e-2 * scale)
    return std::nullopt;
  return extrapolated;
}

TEST(Derivative, OfRandomScoresByS) {
  const MadeUpTensors tensors;
  int compared = 0, not_finite = 0;  // tanh(s / 0.0): the factors of the chain rule are 0 and infinite
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    const std::string text =
        RandomText(seed, Use::kScore, true).of(Type::kFloat, 2 + static_cast<int>(seed % 3));
    const ScoreDerivative d = differentiate_by_s(parsed(text, Use::kScore));
    Evaluator evaluator(d.score, &tensors);
    for (int64_t i = 0; i < 3; ++i) {
      Pair pair{0.37 + static_cast<double>(i) * 0.71, i % 2, 1, 0, 3 + i, 2 * i, 16, 12};
      const auto value = [&](double s) {
        pair.s = s;
        return evaluator.score(pair);
      };
      const double at = pair.s;
      const auto expected = slope_at(value, at);
      pair.s = at;
      if (!expected) continue;
      const double got = evaluator.score(d.by_s, pair);
      not_finite += !std::isfinite(got);
      if (!std::isfinite(got)) continue;
      ++compared;
      ASSERT_NEAR(got, *expected, 1e-5 * (1 + std::fabs(*expected)))
          << text << "\n"
          << print(d.score, d.by_s) << "\ns = " << at;
    }
  }
  EXPECT_GT(compared, 4000);
  EXPECT_LT(not_finite, compared / 50);
}

/// Another value at one element of a tensor.
class ChangedTensors : public MadeUpTensors {
 public:
  double gain = 0.4;
  std::optional<double> read(size_t tensor, std::span<const int64_t> index) const override {
    return kTensors[tensor].name == "gain" ? gain : MadeUpTensors::read(tensor, index);
  }
};

TEST(Derivative, OfRandomScoresByAScalar) {
  ChangedTensors tensors;
  const Pair pair{0.7, 1, 1, 0, 5, 3, 16, 12};
  int compared = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    Expression score =
        parsed("gain * 0.5 * " + RandomText(seed, Use::kScore, true).of(Type::kFloat, 3), Use::kScore);
    const auto all = differentiate_by_elements(score, 4);
    if (all.empty()) continue;
    ASSERT_EQ(all.size(), 1u);  // a scalar is one element
    Evaluator evaluator(score, &tensors);
    const auto value = [&](double x) {
      tensors.gain = x;
      return evaluator.score(pair);
    };
    const auto expected = slope_at(value, 0.4);
    tensors.gain = 0.4;
    if (!expected) continue;
    const double got = evaluator.score(all[0].derivative, pair);
    if (!std::isfinite(got)) continue;
    ++compared;
    ASSERT_NEAR(got, *expected, 1e-5 * (1 + std::fabs(*expected))) << print(score);
  }
  EXPECT_GT(compared, 1500);
}

TEST(Derivative, ByEachElementThatIsRead) {
  Expression score = parsed("s + slope[h] * slope[h + 1] + slope[h]", Use::kScore);
  const auto all = differentiate_by_elements(score, 0);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(print(score, all[0].element), "slope[h]");
  EXPECT_EQ(print(score, all[0].derivative), "slope[h + 1] + 1.0");
  EXPECT_EQ(print(score, all[1].derivative), "slope[h]");
  EXPECT_TRUE(differentiate_by_elements(score, 1).empty());
}

}  // namespace
}  // namespace fovea::expr
