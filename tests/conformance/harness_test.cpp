// Tests of the suite itself: it must find every kind of wrong result that it looks for.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"
#include "verify/random_problem.hpp"

namespace fovea::conformance {
namespace {

constexpr double kQuietNan = std::numeric_limits<double>::quiet_NaN();

ProblemSpec small(Type type) {
  ProblemSpec spec;
  spec.type = type;
  spec.heads_q = spec.heads_kv = 2;
  spec.seqlen_q = 40;  // rows 0 to 9 see no key
  spec.seqlen_k = 30;
  spec.causal = true;
  spec.head_dim = spec.head_dim_v = 16;
  spec.layout = Layout::kPadded;
  return spec;
}

/// The text of compare() for o when `tamper` changes the oracle's own rounded result.
std::string verdict(Type type, const std::function<void(OwnedTensor&)>& tamper) {
  const OwnedProblem x(small(type));
  const OwnedProblem exact = x.in_float64();
  EXPECT_EQ(run_pass(exact, FOVEA_FORWARD, {kOracle}).failure, "");
  Plain plain(x);
  plain.forward();
  x[Role::kO].assign(exact[Role::kO].values());
  tamper(x[Role::kO]);
  return compare(Role::kO, type, x[Role::kO], exact[Role::kO].values(), plain);
}

class Harness : public testing::TestWithParam<Type> {};

TEST_P(Harness, AcceptsTheRoundedOracle) {
  EXPECT_EQ(verdict(GetParam(), [](OwnedTensor&) {}), "");
}
TEST_P(Harness, RefusesOneWrongElement) {
  const double step = (GetParam() == Type::kF32 ? 64 : 16) * unit_roundoff(GetParam());
  const std::string said = verdict(GetParam(), [&](OwnedTensor& o) {
    o.set({0, 30, 1, 7}, o.get({0, 30, 1, 7}) + 4 * step);  // the values of o are below 4
  });
  EXPECT_NE(said.find("error"), std::string::npos) << said;
}
TEST_P(Harness, RefusesManyElementsThatAreALittleWrong) {
  const double factor = 1 + (GetParam() == Type::kF32 ? 200 : 12) * unit_roundoff(GetParam());
  const std::string said = verdict(GetParam(), [&](OwnedTensor& o) {
    std::vector<double> values = o.values();
    for (double& value : values) value *= factor;
    o.assign(values);
  });
  EXPECT_NE(said, "");
}
TEST_P(Harness, RefusesSwappedRows) {
  const std::string said = verdict(GetParam(), [](OwnedTensor& o) {
    for (int64_t c = 0; c < 16; ++c) {
      const double first = o.get({0, 38, 0, c});
      o.set({0, 38, 0, c}, o.get({0, 39, 0, c}));
      o.set({0, 39, 0, c}, first);
    }
  });
  EXPECT_NE(said, "");
}
TEST_P(Harness, RefusesNanAndInfinity) {
  for (const double wrong : {kQuietNan, std::numeric_limits<double>::infinity()}) {
    EXPECT_NE(verdict(GetParam(), [&](OwnedTensor& o) { o.set({0, 20, 0, 3}, wrong); }), "");
  }
}
TEST_P(Harness, RefusesAnythingInARowWithoutKeys) {
  EXPECT_NE(verdict(GetParam(), [&](OwnedTensor& o) { o.set({0, 9, 1, 15}, 1e-6); }), "");
}
INSTANTIATE_TEST_SUITE_P(Type, Harness, testing::Values(Type::kF32, Type::kF16, Type::kBF16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

/// The text of compare() for the gradient of a table when `tamper` changes the oracle's own.
std::string verdict_of_gradient(const std::function<void(OwnedTensor&)>& tamper) {
  ProblemSpec spec = small(Type::kF32);
  spec.score = known(known_scores(), "relative_positions");
  spec.named_gradients = true;
  spec.named_spare = 1;
  const OwnedProblem x(spec), exact = x.in_float64();
  for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD})
    EXPECT_EQ(run_pass(exact, pass, {kOracle}).failure, "");
  Plain plain(x);
  plain.forward();
  plain.backward();
  const Role gradient = gradient_role(0);
  x[gradient].assign(exact[gradient].values());
  tamper(x[gradient]);
  return compare(gradient, Type::kF32, x[gradient], exact[gradient].values(), plain);
}
TEST(HarnessParts, RefusesWrongGradientsOfNamedTensors) {
  EXPECT_EQ(verdict_of_gradient([](OwnedTensor&) {}), "");
  EXPECT_NE(verdict_of_gradient([](OwnedTensor& g) { g.set({1, 12}, g.get({1, 12}) + 1e-3); }), "");
  EXPECT_NE(verdict_of_gradient([](OwnedTensor& g) { g.set({1, 12}, kQuietNan); }), "");
  // No query of this causal problem sees a key that is behind it; and there is no third head.
  EXPECT_NE(verdict_of_gradient([](OwnedTensor& g) { g.set({0, 32}, 1e-9); }), "");
  EXPECT_NE(verdict_of_gradient([](OwnedTensor& g) { g.set({2, 0}, 1e-9); }), "");
}

TEST(HarnessParts, SeesWhatWasNotWritten) {
  for (const Placement placement : {Placement::kGuarded, Placement::kPageEnd}) {
    OwnedTensor t(Type::kF16, {2, 3, 5}, {40, 7, 1}, placement, 3);
    EXPECT_NE(t.check_written(), "");
    t.assign(std::vector<double>(30, 1.5));
    EXPECT_EQ(t.check_written(), "");
    std::memset(t.address({1, 2, 4}), kPattern, 2);
    EXPECT_NE(t.check_written().find("first at 29"), std::string::npos) << t.check_written();
  }
}
TEST(HarnessParts, SeesWhatWasWrittenOutside) {
  for (const std::ptrdiff_t byte : {std::ptrdiff_t{-1}, std::ptrdiff_t{10}, std::ptrdiff_t{117}}) {
    OwnedTensor t(Type::kF16, {2, 3, 5},
                  {40, 7, 1});  // 59 elements: a gap after each row of 5, guards from byte 118
    t.assign(std::vector<double>(30, 1.5));
    const bool in_element = byte == 117;
    static_cast<unsigned char*>(t.data())[byte + (in_element ? 1 : 0)] = 0;
    EXPECT_NE(t.check_written().find("outside"), std::string::npos) << byte;
  }
}

TEST(HarnessParts, ElementsRoundToNearestEven) {
  EXPECT_EQ(rounded(1.0 + 0x1p-8, Type::kBF16), 1.0);
  EXPECT_EQ(rounded(1.0 + 3 * 0x1p-8, Type::kBF16), 1.0 + 0x1p-6);
  EXPECT_EQ(rounded(0x1p-25, Type::kF16), 0.0);
  EXPECT_EQ(rounded(0x1.8p-24, Type::kF16), 0x1p-23);
  EXPECT_EQ(rounded(65519.0, Type::kF16), 65504.0);
  EXPECT_TRUE(std::isinf(rounded(65520.0, Type::kF16)));
  for (uint32_t code = 0; code < 0x7c00; ++code) {
    ASSERT_EQ(encode(decode(static_cast<uint16_t>(code), kF16Format), kF16Format), code);
  }
  for (uint32_t code = 0; code < 0x7f80; ++code) {
    ASSERT_EQ(encode(decode(static_cast<uint16_t>(code), kBF16Format), kBF16Format), code);
  }
}

TEST(HarnessParts, ProblemsOfASeedStayTheSame) {
  EXPECT_EQ(describe(random_problem(1, 2)), describe(random_problem(1, 2)));
  EXPECT_NE(describe(random_problem(1, 2)), describe(random_problem(1, 3)));
  EXPECT_NE(describe(random_problem(1, 2)), describe(random_problem(2, 2)));
  const OwnedProblem first(random_problem(1, 2)), second(random_problem(1, 2));
  EXPECT_EQ(first[Role::kQ].bytes(), second[Role::kQ].bytes());
}
TEST(HarnessParts, ExpressionsLeaveTheOtherTensorsOfASeedAsTheyAre) {
  ProblemSpec spec = random_problem(1, 2);
  spec.list_size = -1;  // lists are drawn behind the tensors of expressions
  spec.score = spec.sees = nullptr;
  const OwnedProblem without(spec);
  spec.score = known(known_scores(), "looked_up_distance");
  spec.sees = known(known_masks(), "documents");
  spec.named_gradients = true;
  const OwnedProblem with(spec);
  EXPECT_EQ(with.named().size(), 3u);
  for (size_t i = 0; i < kFirstNamed; ++i) {
    const auto role = static_cast<Role>(i);
    ASSERT_EQ(with.has(role), without.has(role));
    if (!with.has(role)) continue;
    EXPECT_EQ(with[role].bytes(), without[role].bytes()) << name_of(role);
    EXPECT_EQ(with[role].strides(), without[role].strides()) << name_of(role);
  }
}
/// Enough problems of the stream have lists, caches and expressions, and every known one is among them.
TEST(HarnessParts, RandomProblemsHaveListsCachesAndExpressions) {
  std::set<std::string> names;
  int with_expressions = 0, with_lists = 0, with_caches = 0, with_pages = 0;
  for (uint64_t index = 0; index < 2000; ++index) {
    const ProblemSpec spec = random_problem(1, index);
    with_expressions += spec.has_expressions() ? 1 : 0;
    with_lists += spec.has_lists() ? 1 : 0;
    with_caches += spec.has_cache() ? 1 : 0;
    with_pages += spec.page_size > 0 ? 1 : 0;
    if (spec.score) names.insert(std::string("score ") + spec.score->name);
    if (spec.sees) names.insert(std::string("sees ") + spec.sees->name);
  }
  EXPECT_NEAR(with_expressions, 400, 60);
  EXPECT_NEAR(with_lists, 240, 50);
  EXPECT_NEAR(with_caches, 290, 60);
  EXPECT_NEAR(with_pages, 150, 40);
  EXPECT_EQ(names.size(), known_scores().size() + known_masks().size());
}

/// An expression whose meaning nobody wrote by hand, with a tensor that is given: the bound comes from the oracle alone. It is met, and
/// errors have a share of it that shows; a gradient that is 0 but for roundings has a bound, too.
TEST(HarnessParts, GivenExpressions) {
  const std::vector<double> slopes = {0.5, 0.25, 0.125, 0.0625};
  for (const char* text : {"s - slope[h] * abs(q - k)", "s + slope[h]"}) {
    const KnownExpression given = {.name = "given",
                                   .text = text,
                                   .tensors = {{.name = "slope",
                                                .elements = Elements::kReal,
                                                .extents = {4},
                                                .given = &slopes,
                                                .given_type = Type::kF32}}};
    for (const Type type : {Type::kF32, Type::kBF16}) {
      ProblemSpec spec;
      spec.type = type;
      spec.batch = 2;
      spec.heads_q = spec.heads_kv = 4;
      spec.seqlen_q = spec.seqlen_k = 48;
      spec.head_dim = spec.head_dim_v = 32;
      spec.score = &given;
      spec.named_gradients = spec.dlse = true;
      ASSERT_FALSE(spec.has_meaning());
      OwnedProblem problem(spec);
      EXPECT_EQ(problem[problem.named("slope")].values(), slopes);
      std::map<Role, Margin> margins;
      CheckOptions how;
      how.margins = &margins;
      Checker checker(problem, how);
      EXPECT_EQ(checker.check("cpu_generic"), "") << text;
      for (const Role role : {Role::kO, Role::kDQ, Role::kDK, Role::kDV}) {
        EXPECT_LE(margins[role].largest, 1) << text << " " << name_of(role);
        EXPECT_GE(margins[role].largest, 0.005) << text << " " << name_of(role);
      }
    }
  }
}

}  // namespace
}  // namespace fovea::conformance
