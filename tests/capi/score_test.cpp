// Expressions by C++ operators: the text that they write, what the library makes of it, and the blocks that are seen.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "fovea/fovea.hpp"

namespace {

using fovea::symbols::Kind;
using fovea::symbols::Symbol;

template <class Function>
std::string score(const Function& function) {
  return fovea::score(function).text;
}
template <class Function>
std::string sees(const Function& function) {
  return fovea::sees(function).text;
}

constexpr float* kNoData = nullptr;
constexpr int32_t* kNoInts = nullptr;

TEST(Score, WritesTheGrammar) {
  EXPECT_EQ(score([](auto p) { return p.s - (p.q - (p.k - 1)) * 2; }), "s - (q - (k - 1)) * 2");
  EXPECT_EQ(score([](auto p) { return -(p.s + 1) / -2.5 - -p.s; }), "-(s + 1) / -2.5 - -s");
  EXPECT_EQ(score([](auto p) { return where(p.q > p.k, min(p.s, 1), max(p.s, -1.5)); }),
            "where(q > k, min(s, 1), max(s, -1.5))");
  EXPECT_EQ(score([](auto p) { return exp(log(tanh(sqrt(floor(abs(p.s)))))); }),
            "exp(log(tanh(sqrt(floor(abs(s))))))");
  EXPECT_EQ(score([](auto p) { return clamp(p.s, p.b, p.hk) + to_float(p.nq % p.nk); }),
            "clamp(s, b, hk) + float(nq % nk)");
  EXPECT_EQ(sees([](auto p) { return !(p.q < p.k || p.q == 3) && (p.k != 1 || true); }),
            "!(q < k || q == 3) && (k != 1 || true)");
}

TEST(Score, TakesFunctionsOfSymbols) {
  EXPECT_EQ(score([](auto s, auto b, auto h, auto q, auto k) { return s + b + h + q + k; }),
            "s + b + h + q + k");
  EXPECT_EQ(sees([](auto b, auto h, auto q, auto k) { return b + h <= q + k; }), "b + h <= q + k");
}

TEST(Score, NumbersReadBackExactly) {
  for (const double number : {0.1, 1e300, 5e-324, 1.0, 1e16, 12345678.0, 3.14159265358979}) {
    const std::string text = score([&](auto p) { return p.s * number; }).substr(4);
    EXPECT_EQ(std::strtod(text.c_str(), nullptr), number) << text;
    EXPECT_NE(text.find_first_of(".e"), std::string::npos) << text;
  }
  EXPECT_EQ(score([](auto p) { return p.s * 0.1f; }), "s * 0.10000000149011612");
  EXPECT_EQ(score([](auto p) { return p.s * -std::numeric_limits<float>::infinity(); }), "s * (-1.0 / 0.0)");
  EXPECT_EQ(score([](auto p) { return p.s + INT64_MIN; }), "s + (-9223372036854775807 - 1)");
  EXPECT_EQ(score([](auto p) { return p.s + uint8_t{200} - int64_t{1} * p.q; }), "s + 200 - 1 * q");
}

TEST(Score, KnowsTypesWhereItCan) {
  const fovea::symbols::Pair p;
  const auto ints = fovea::named("x", kNoInts, {4});
  const auto floats = fovea::named("y", kNoData, {4});
  const auto unknown = fovea::named("z", fovea::Tensor(kNoData, {4}));
  EXPECT_TRUE((std::is_same_v<decltype(p.q + 1), Symbol<Kind::integer>>));
  EXPECT_TRUE((std::is_same_v<decltype(p.q + 1.0), Symbol<Kind::real>>));
  EXPECT_TRUE((std::is_same_v<decltype(ints[p.q] + 1), Symbol<Kind::integer>>));
  EXPECT_TRUE((std::is_same_v<decltype(floats[p.q]), Symbol<Kind::real>>));
  EXPECT_TRUE((std::is_same_v<decltype(unknown[p.q] + 1), Symbol<Kind::number>>));
  EXPECT_TRUE((std::is_same_v<decltype(p.q < 1), Symbol<Kind::boolean>>));
  EXPECT_FALSE((std::is_constructible_v<bool, Symbol<Kind::boolean>>));
}

TEST(Score, CollectsTensorsOnce) {
  const auto table = fovea::named("table", kNoData, {2, 3});
  const auto bucket = fovea::named("bucket", kNoInts, {8});
  const fovea::Expression made =
      fovea::score([&](auto p) { return p.s + table(p.h, bucket[abs(p.q - p.k)]) - table(p.h, 0); });
  EXPECT_EQ(made.text, "s + table[h, bucket[abs(q - k)]] - table[h, 0]");
  ASSERT_EQ(made.named.size(), 2u);
  EXPECT_EQ(made.named[0].name, "table");
  EXPECT_EQ(made.named[1].name, "bucket");

  fovea::Problem problem;
  problem.named = {{"other", fovea::Tensor(kNoData, {1}), {}}};
  problem.score = made;
  problem.sees = fovea::sees([&](auto p) { return bucket[p.q] == 1; });
  std::string names;
  for (const fovea::NamedTensor& tensor : problem.all_named()) names += tensor.name + " ";
  EXPECT_EQ(names, "other table bucket ");
}

/// A problem of one head of 4 queries and keys.
struct Small {
  std::vector<float> q = wave(0.3f), k = wave(0.7f), v = wave(1.1f), o = std::vector<float>(32),
                     lse = std::vector<float>(4);
  std::vector<float> dq = o, dk = o, dv = o, d_o = std::vector<float>(32, 1.0f);

  static std::vector<float> wave(float step) {
    std::vector<float> x(32);
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(step * static_cast<float>(i));
    return x;
  }
  fovea::Problem problem() {
    const auto shape = {int64_t{1}, int64_t{4}, int64_t{1}, int64_t{8}};
    fovea::Problem p;
    p.q = {q.data(), shape};
    p.k = {k.data(), shape};
    p.v = {v.data(), shape};
    p.o = {o.data(), shape};
    p.lse = {lse.data(), {1, 1, 4}};
    return p;
  }
  fovea::Problem backward() {
    fovea::Problem p = problem();
    p.d_o = {d_o.data(), p.q.shape()};
    p.dq = {dq.data(), p.q.shape()};
    p.dk = {dk.data(), p.q.shape()};
    p.dv = {dv.data(), p.q.shape()};
    return p;
  }
};

TEST(Score, EqualsTheTermThatItSays) {
  Small one, other;
  const float slope = 0.5f;
  fovea::Problem mine = one.problem(), theirs = other.problem();
  const auto x = fovea::named("x", &slope, {1});
  mine.score = fovea::score([&](auto p) { return p.s - x[p.h] * abs(p.q - p.k); });
  mine.sees = fovea::sees([](auto p) { return p.k <= p.q; });
  theirs.alibi = {&slope, {1}};
  theirs.causal = true;
  fovea::attend(mine);
  fovea::attend(theirs);
  for (size_t i = 0; i < one.o.size(); ++i) EXPECT_NEAR(one.o[i], other.o[i], 1e-6);
}

TEST(Score, GivesTheGradientOfATensor) {
  Small data;
  const float temperature = 1.5f;
  float gradient = 0;
  const auto t = fovea::named("t", &temperature, {1});
  const auto with_gradient = fovea::named("t", &temperature, {1}, fovea::Tensor(&gradient, {1}));
  fovea::Problem forward = data.problem();
  forward.score = fovea::score([&](auto p) { return p.s * t[p.h]; });
  const auto loss = [&](float value) {
    fovea::Problem p = data.problem();
    const auto other = fovea::named("t", &value, {1});
    p.score = fovea::score([&](auto pair) { return pair.s * other[pair.h]; });
    fovea::attend(p);
    double sum = 0;
    for (const float x : data.o) sum += double{x};
    return sum;
  };
  const double expected = (loss(1.51f) - loss(1.49f)) / 0.02;
  fovea::attend(forward);
  fovea::Problem backward = data.backward();
  backward.score = fovea::score([&](auto p) { return p.s * with_gradient[p.h]; });
  fovea::attend_backward(backward);
  EXPECT_NEAR(gradient, expected, 1e-3);
}

TEST(Score, PlansPrintExpressions) {
  Small data;
  fovea::Problem problem = data.problem();
  EXPECT_EQ(fovea::Plan(problem).expressions(), "");
  const auto x = fovea::named("x", kNoData, {1});
  problem.score = fovea::score([&](auto p) { return (p.s + x[p.h]) * (1 * 2.0); });
  problem.sees = "((k) <= q)";
  EXPECT_EQ(fovea::Plan(problem).expressions(),
            "score\t(s + x[h]) * 2.0\nd score / d s\t2.0\nd score / d x[h]\t2.0\nsees\tk <= q");
}

TEST(Score, ErrorsShowThePlace) {
  Small data;
  fovea::Problem problem = data.problem();
  problem.score = "s + foo";
  try {
    fovea::attend(problem);
    FAIL();
  } catch (const fovea::Error& error) {
    EXPECT_EQ(error.argument(), "score");
    EXPECT_NE(std::string(error.what()).find("\n  s + foo\n      ^"), std::string::npos);
  }
}

TEST(Compile, RefusesWhatItCannot) {
  const auto argument = [](const fovea::Problem& problem, const char* chip,
                           const char* folder) -> std::string {
    try {
      fovea::compile(problem, chip, folder);
      return "";
    } catch (const fovea::Error& error) {
      return error.argument();
    }
  };
  Small data;
  EXPECT_EQ(argument(data.problem(), "sm_1", ""), "chip");
  fovea::Problem wrong = data.problem();
  wrong.score = "s + foo";
  EXPECT_EQ(argument(wrong, "sm_90", ""), "score");
  EXPECT_EQ(argument({}, "sm_90", ""), "q");
  const char* report = nullptr;
  EXPECT_EQ(fovea_compile(nullptr, nullptr, "sm_90", 0, nullptr, &report), FOVEA_INVALID_ARGUMENT);
  EXPECT_STREQ(report, "");
  EXPECT_EQ(fovea_compile(nullptr, nullptr, nullptr, 0, nullptr, nullptr), FOVEA_INVALID_ARGUMENT);
  EXPECT_STREQ(fovea_last_error_argument(), "chip");
}

TEST(SeenBlocks, CountTheWindowTheExpressionAndItsTensors) {
  using fovea::Seen;
  const auto shape = {int64_t{2}, int64_t{6}, int64_t{2}, int64_t{8}};
  fovea::Problem problem;
  problem.q = problem.k = problem.v = problem.o = fovea::Tensor(kNoData, shape);
  problem.window_right = 0;
  const auto found = [&](int64_t batch) {
    std::string text;
    for (const Seen seen : fovea::seen_blocks(problem, batch, 0, 2, 2, 3, 3).seen)
      text += seen == Seen::none ? '.' : seen == Seen::all ? '#' : '+';
    return text;
  };
  EXPECT_EQ(found(0), "+..#+.##+");
  problem.sees = "k >= 2";
  EXPECT_EQ(found(0), "....+..#+");
  const std::vector<int32_t> documents = {0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1};
  problem.sees = fovea::sees([&](auto p) {
    const auto doc = fovea::named("doc", documents.data(), {2, 6});
    return doc(p.b, p.q) == doc(p.b, p.k);
  });
  EXPECT_EQ(found(0), "+...+..#+");
  EXPECT_EQ(found(1), "+..++..++");
  EXPECT_THROW(found(2), fovea::Error);
  EXPECT_THROW(fovea::seen_blocks(problem, 0, 2, 2, 2, 3, 3), fovea::Error);
  EXPECT_THROW(fovea::seen_blocks(problem, 0, 0, 0, 2, 3, 3), fovea::Error);
  EXPECT_THROW(fovea::seen_blocks(problem, 0, 0, 2, 2, 3, 2), fovea::Error);
}

}  // namespace
