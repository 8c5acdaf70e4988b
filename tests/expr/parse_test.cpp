// The grammar: what texts mean, and where and how errors are reported.
#include "expr/parse.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "expr/evaluate.hpp"
#include "expr/print.hpp"
#include "random_expression.hpp"

namespace fovea::expr {
namespace {

constexpr Pair kPair{0.5, 1, 1, 0, 7, 3, 16, 12};

TEST(Grammar, ValuesOfScores) {
  struct Row {
    std::string_view text;
    double value;
  };
  const std::vector<Row> rows = {{"s", 0.5},
                                 {"1 + 2 * 3", 7},
                                 {"(1 + 2) * 3", 9},
                                 {"10 - 4 - 3", 3},
                                 {"2 - -3", 5},
                                 {"--2", 2},
                                 {"-2 * 3", -6},
                                 {"7 / 2", 3},
                                 {"-7 / 2", -4},
                                 {"7 / -2", -4},
                                 {"-7 % 4", 1},
                                 {"7 % -4", -1},
                                 {"-8 % 4", 0},
                                 {"7 / 2.0", 3.5},
                                 {"7. / 2", 3.5},
                                 {".5 + 1e1", 10.5},
                                 {"1E-1", 0.1},
                                 {"float(7) / 2", 3.5},
                                 {"s * q", 3.5},
                                 {"q + nk - nq - k", 0},
                                 {"b + h + hk", 2},
                                 {"abs(k - q)", 4},
                                 {"abs(-0.25)", 0.25},
                                 {"min(3, 2.5)", 2.5},
                                 {"max(q, k)", 7},
                                 {"clamp(q, 0, 5)", 5},
                                 {"clamp(-q, -2, 5)", -2},
                                 {"exp(0)", 1},
                                 {"log(1)", 0},
                                 {"tanh(0)", 0},
                                 {"sqrt(16)", 4},
                                 {"floor(-0.5)", -1},
                                 {"where(q > k, 1, 2)", 1},
                                 {"where(q < k, 1, 2.5)", 2.5},
                                 {"where(k == 3 && !(q == 3), 1, 2)", 1},
                                 {"where(1 < 2 == true || true, 1, 2)", 0},
                                 {"doc[b, q]", 1},
                                 {"s - slope[h] * 0", 0.5},
                                 {"gain * 0", 0},
                                 {" 1\n+\t2 ", 3},
                                 {"where(1 + 1 < 3 && 2 > 1 || false, 1, 0)", 1},
                                 {"where(true || false && false, 1, 0)", 1}};
  const MadeUpTensors tensors;
  for (const Row& row : rows) {
    SCOPED_TRACE(row.text);
    const auto result = parse(row.text, Use::kScore, kTensors);
    if (row.text.find("2 == true") != std::string_view::npos) {  // == compares numbers
      EXPECT_TRUE(std::holds_alternative<ParseError>(result));
      continue;
    }
    ASSERT_TRUE(std::holds_alternative<Expression>(result)) << std::get<ParseError>(result).text();
    EXPECT_EQ(Evaluator(std::get<Expression>(result), &tensors).score(kPair), row.value);
  }
}

TEST(Grammar, InvalidPairs) {
  const MadeUpTensors tensors;
  for (const std::string_view text : {"q / (k - 3)", "q % (k - 3)", "slope[2]", "slope[-1]", "doc[b, q + 9]",
                                      "where(q / (k - 3) == 1, 1, 1)", "min(1, doc[2, 0])"}) {
    const Expression score = parsed(text, Use::kScore);
    EXPECT_TRUE(std::isnan(Evaluator(score, &tensors).score(kPair))) << text;
  }
  for (const std::string_view text : {"q / (k - 3) < 100", "!(doc[2, 0] == 1)", "flag[16] == 0 || true"}) {
    const Expression sees = parsed(text, Use::kSees);
    EXPECT_FALSE(Evaluator(sees, &tensors).sees(kPair)) << text;
  }
  // What is not chosen does not count.
  for (const std::string_view text : {"q < 16 || flag[q + 16] == 0", "!(q > 16 && flag[q + 16] == 0)",
                                      "where(q > 16, flag[q + 16], 1) == 1"}) {
    const Expression sees = parsed(text, Use::kSees);
    EXPECT_TRUE(Evaluator(sees, &tensors).sees(kPair)) << text;
  }
}

TEST(Grammar, IntsWrapAroundIn64Bits) {
  const Expression e = parsed("where(9223372036854775807 + q < 0, 1, 2)", Use::kScore);
  EXPECT_EQ(Evaluator(e).score(kPair), 1);
  const Expression quotient = parsed("(-9223372036854775807 - 1) / -(h * 1) % 1000", Use::kScore);
  EXPECT_EQ(Evaluator(quotient).score(kPair), 192);  // -9223372036854775808 % 1000, rounded down
}

TEST(Grammar, EqualSubtreesAreOneNode) {
  const Expression e = parsed("tanh(s * 2.0) + tanh(s * 2.0)", Use::kScore);
  EXPECT_EQ(e.graph.size(), 5u);
  EXPECT_EQ(e, parsed(" (tanh((s)*2))+tanh(s*(1+1))", Use::kScore));
}

struct Wrong {
  Use use;
  std::string_view text;
  size_t position;
  std::string_view got, expected;
};

TEST(Errors, SayWhereAndWhat) {
  const Use score = Use::kScore, sees = Use::kSees;
  const std::vector<Wrong> rows = {
      {score, "", 0, "the end of the text", "a number, a name"},
      {score, "s +", 3, "the end of the text", "a number, a name"},
      {score, "s s", 2, "'s'", "an operator or the end"},
      {score, "s + * 2", 4, "'*'", "a number, a name"},
      {score, "(s", 2, "the end of the text", "')'"},
      {score, "s)", 1, "')'", "an operator or the end"},
      {score, "()", 1, "')'", "a number, a name"},
      {score, "s = 2", 2, "'='", "an operator"},
      {score, "1 + =", 4, "'='", "an operator"},
      {score, "s $ 2", 2, "'$'", "an operator"},
      {score, "$", 0, "'$'", "a number, a name"},
      {score, "s + \xc3\xa4", 4, "'\xc3\xa4'", "a number, a name"},
      {score, "2x", 0, "'2x'", "a number such as"},
      {score, "1.2.3", 0, "'1.2.3'", "a number such as"},
      {score, "1e", 0, "'1e'", "a number such as"},
      {score, "9223372036854775808", 0, "'9223372036854775808'", "an int of 64 bits"},
      {score, "1e400", 0, "'1e400'", "float64"},
      {score, "s + foo", 4, "'foo'", "s, b, h, hk, q, k, nq, nk, slope, bias, doc, flag, gain"},
      {score, "foo(s)", 0, "'foo'", "float, where, abs"},
      {score, "q(s)", 0, "'q'", "one of the functions"},
      {score, "abs", 3, "the end of the text", "'(' and the 1 argument of abs"},
      {score, "abs()", 4, "')'", "a number, a name"},
      {score, "abs(s, s)", 5, "','", "')' after the 1 argument of abs"},
      {score, "min(s)", 5, "')'", "',' and more, the 2 arguments of min"},
      {score, "min(s s)", 6, "'s'", "an operator, ',' or ')'"},
      {score, "s[0]", 1, "'['", "no tensor"},
      {score, "slope", 5, "the end of the text", "'[' and the index of slope"},
      {score, "slope + 1", 6, "'+'", "'[' and the index of slope"},
      {score, "doc[b]", 5, "']'", "the 2 indices of doc"},
      {score, "doc[b, q, k]", 8, "','", "']' after the 2 indices of doc"},
      {score, "doc[b, q", 8, "the end of the text", "']'"},
      {score, "slope[1.5]", 6, "a float", "an int, an index of slope"},
      {score, "slope[q < 1]", 6, "a bool", "an int, an index of slope"},
      {score, "gain[0]", 4, "'['", "no dimensions"},
      {score, "q < k", 0, "a bool", "a float, the score"},
      {score, "s + (q < k)", 4, "a bool", "a number beside +"},
      {score, "!s", 1, "a float", "a bool beside !"},
      {score, "where(s, 1, 2)", 6, "a float", "a bool as condition"},
      {score, "where(q < k, 1, q < k)", 16, "a bool", "a number, as the other"},
      {score, "where(q < k, true, 1)", 19, "an int", "a bool, as the other"},
      {score, "s % 2", 0, "a float", "an int beside %"},
      {score, "exp(q < k)", 4, "a bool", "a number in exp"},
      {sees, "q < k < nq", 0, "a bool", "a number beside <"},
      {sees, "q && k < 1", 0, "an int", "a bool beside &&"},
      {sees, "k < 1 & q < 1", 6, "'&'", "an operator"},
      {sees, "(q < k) == (k < q)", 0, "a bool", "a number beside =="},
      {sees, "k - q", 0, "an int", "a bool, whether"},
      {sees, "gain", 0, "a float", "a bool, whether"},
      {sees, "s < 1.0", 0, "'s'", "before there are scores"},
      {sees, "k <= x", 5, "'x'", "one of b, h, hk, q, k, nq, nk, slope"}};
  for (const Wrong& row : rows) {
    SCOPED_TRACE(row.text);
    const auto result = parse(row.text, row.use, kTensors);
    ASSERT_TRUE(std::holds_alternative<ParseError>(result)) << print(std::get<Expression>(result));
    const ParseError& error = std::get<ParseError>(result);
    EXPECT_EQ(error.position, row.position) << error.text();
    const std::string begin = std::string(name_of(row.use)) + ", character " +
                              std::to_string(row.position + 1) + ": got " + std::string(row.got);
    EXPECT_TRUE(error.message.starts_with(begin)) << error.text();
    const size_t expected = error.message.find(", expected ");
    ASSERT_NE(expected, std::string::npos) << error.text();
    EXPECT_NE(error.message.find(row.expected, expected), std::string::npos) << error.text();
    EXPECT_NE(error.message.find("; ", expected), std::string::npos) << error.text();
  }
}

TEST(Errors, PutACaretUnderThePosition) {
  const auto excerpt = [](std::string_view text) {
    return std::get<ParseError>(parse(text, Use::kScore)).excerpt;
  };
  EXPECT_EQ(excerpt("s + foo"), "  s + foo\n      ^");
  EXPECT_EQ(excerpt("s +\n\tfoo *\n2"), "   foo *\n   ^");
  EXPECT_EQ(excerpt("s +"), "  s +\n     ^");
  const std::string spaces(200, ' ');
  EXPECT_EQ(excerpt(spaces + "x" + spaces),
            "  " + spaces.substr(0, 50) + "x" + spaces.substr(0, 49) + "\n  " + spaces.substr(0, 50) + "^");
}

TEST(Errors, AreTextWhateverTheTextIs) {
  const auto text = [](std::string_view given) {
    return std::get<ParseError>(parse(given, Use::kScore)).text();
  };
  EXPECT_NE(text("s \x01").find("got '\\x01'"), std::string::npos);
  EXPECT_NE(text("s \xff").find("got '\\xff', expected"), std::string::npos);
  EXPECT_TRUE(text("s \xff").ends_with("  s ?\n    ^")) << text("s \xff");
  EXPECT_TRUE(text("\xc3\xa4").ends_with("  \xc3\xa4\n  ^"));
  EXPECT_TRUE(text("s + \xc3").ends_with("  s + ?\n      ^"));
  const std::string nul("s + \0 x", 7);
  EXPECT_NE(text(nul).find("got '\\x00'"), std::string::npos);
}

std::string repeated(std::string_view text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Errors, Limits) {
  const auto fails = [](const std::string& text) {
    return std::holds_alternative<ParseError>(parse(text, Use::kScore));
  };
  EXPECT_FALSE(fails(std::string(kMaxTextLength - 1, ' ') + "s"));
  EXPECT_TRUE(fails(std::string(kMaxTextLength, ' ') + "s"));
  const auto nested = [](size_t levels) { return repeated("(", levels) + "s" + repeated(")", levels); };
  EXPECT_FALSE(fails(nested(kMaxNesting - 1)));
  EXPECT_TRUE(fails(nested(kMaxNesting)));
  EXPECT_TRUE(fails(repeated("-", kMaxNesting) + "s"));
  EXPECT_TRUE(fails(repeated("(", kMaxTextLength)));
  EXPECT_TRUE(fails(repeated("abs(", kMaxTextLength / 4)));
  // The longest sums, which make the deepest trees.
  EXPECT_FALSE(fails("s" + repeated("+s", kMaxNodes - 1)));
  EXPECT_TRUE(fails("s" + repeated("+s", kMaxNodes)));
  const std::string longest = "s" + repeated(" + s", kMaxNodes - 1);
  const Expression sum = parsed(longest, Use::kScore);
  EXPECT_EQ(print(sum), longest);
  EXPECT_EQ(Evaluator(sum).score(kPair), 0.5 * static_cast<double>(kMaxNodes));
}

TEST(Errors, Declarations) {
  const auto message = [](const std::vector<TensorDeclaration>& tensors) {
    return std::get<ParseError>(parse("s", Use::kScore, tensors)).text();
  };
  EXPECT_NE(message({{"2x", DType::kF32, 1}}).find("got '2x', expected letters"), std::string::npos);
  EXPECT_NE(message({{"", DType::kF32, 1}}).find("got ''"), std::string::npos);
  for (const char* name : {"s", "nk", "abs", "float", "true"}) {
    EXPECT_NE(message({{name, DType::kF32, 1}}).find("does not use"), std::string::npos);
  }
  EXPECT_NE(message({{"x", DType::kF32, 1}, {"x", DType::kI32, 1}}).find("'x' twice"), std::string::npos);
  EXPECT_NE(message({{"x", DType::kF64, 1}}).find("tensor x: got float64"), std::string::npos);
  EXPECT_NE(message({{"x", DType::kF32, 5}}).find("got 5 dimensions, expected 0 to 4"), std::string::npos);
}

}  // namespace
}  // namespace fovea::expr
