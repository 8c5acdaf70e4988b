// Trees as text: the fewest parentheses, and the same tree when it is read again.
#include "expr/print.hpp"

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <string_view>
#include <variant>

#include "expr/differentiate.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

TEST(Print, ByHand) {
  const auto score = [](std::string_view text) { return print(parsed(text, Use::kScore)); };
  EXPECT_EQ(score("s-slope[h]*abs(q+nk-nq-k)"), "s - slope[h] * abs(q + nk - nq - k)");
  EXPECT_EQ(score("30*tanh(s/30)"), "30.0 * tanh(s / 30.0)");
  EXPECT_EQ(score("((s - (s + 1.5))) * (s)"), "(s - (s + 1.5)) * s");
  EXPECT_EQ(score("(s / s) / (s / s)"), "s / s / (s / s)");
  EXPECT_EQ(score("-(s * 2.)"), "-(s * 2.0)");
  EXPECT_EQ(score("(-s) * -(-s + -3.0)"), "-s * -(-s + -3.0)");
  EXPECT_EQ(score("q"), "q");
  EXPECT_EQ(score("q * 1.0 + k * 1.0"), "float(q) + k");
  EXPECT_EQ(score("exp(float(q)) + float(k)"), "exp(q) + k");
  EXPECT_EQ(score("where(q < k, float(q), float(k))"), "where(q < k, float(q), k)");
  EXPECT_EQ(score("s * 1e300"), "s * 1e+300");
  const auto sees = [](std::string_view text) { return print(parsed(text, Use::kSees)); };
  EXPECT_EQ(sees("(q < 1 || k < 1) && !(q < 2 && k < 3)"), "(q < 1 || k < 1) && !(q < 2 && k < 3)");
  EXPECT_EQ(sees("(q / 16 - k / 16) % 4 == 0"), "(q / 16 - k / 16) % 4 == 0");
}

/// Whether any pair of parentheses could be left out without a change of the tree.
bool has_needless_parentheses(const std::string& text, const Expression& tree, bool simplify) {
  for (size_t open = text.find('('); open != std::string::npos; open = text.find('(', open + 1)) {
    if (open > 0 && std::isalnum(static_cast<unsigned char>(text[open - 1]))) continue;  // of a call
    size_t close = open;
    for (int depth = 0; close < text.size(); ++close) {
      depth += text[close] == '(' ? 1 : text[close] == ')' ? -1 : 0;
      if (depth == 0) break;
    }
    std::string without = text;
    without[open] = without[close] = ' ';
    const auto result = parse(without, tree.use, kTensors, {simplify});
    if (std::holds_alternative<Expression>(result) && std::get<Expression>(result) == tree) return true;
  }
  return false;
}

TEST(Print, RandomTreesAreReadAgain) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const Use use = seed % 2 ? Use::kSees : Use::kScore;
    const bool simplify = seed % 4 < 2;
    RandomText random(seed, use);
    const std::string text = random.of(use == Use::kSees ? Type::kBool : Type::kFloat, 1 + random.below(4));
    const Expression tree = parsed(text, use, simplify);
    const std::string printed = print(tree);
    if (printed.size() > kMaxTextLength) continue;
    ASSERT_EQ(parsed(printed, use, simplify), tree) << text << "\n" << printed;
    ASSERT_FALSE(seed % 8 < 4 && has_needless_parentheses(printed, tree, simplify)) << printed;
  }
}

TEST(Print, RandomDerivativesAreReadAgain) {
  int compared = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    const std::string text = RandomText(seed, Use::kScore).of(Type::kFloat, 3);
    ScoreDerivative d = differentiate_by_s(parsed(text, Use::kScore));
    d.score.root = d.by_s;
    const Expression tree = compact(d.score);
    const std::string printed = print(tree);
    if (printed.size() > kMaxTextLength) continue;
    const auto result = parse(printed, Use::kScore, kTensors);
    if (!std::holds_alternative<Expression>(result)) continue;  // nested too deeply for a text
    ASSERT_EQ(std::get<Expression>(result), tree) << printed;
    ++compared;
  }
  EXPECT_GT(compared, 900);
}

TEST(Print, CutsLongTexts) {
  const Expression e = parsed("s + s + s + s", Use::kScore);
  EXPECT_EQ(print(e, e.root, 5), "s + s...");
}

}  // namespace
}  // namespace fovea::expr
