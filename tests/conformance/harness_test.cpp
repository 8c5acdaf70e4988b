// Tests of the suite itself: it must find every kind of wrong result that it looks for.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"
#include "verify/random_problem.hpp"

namespace fovea::conformance {
namespace {

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
  for (const double wrong :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_NE(verdict(GetParam(), [&](OwnedTensor& o) { o.set({0, 20, 0, 3}, wrong); }), "");
  }
}
TEST_P(Harness, RefusesAnythingInARowWithoutKeys) {
  EXPECT_NE(verdict(GetParam(), [&](OwnedTensor& o) { o.set({0, 9, 1, 15}, 1e-6); }), "");
}
INSTANTIATE_TEST_SUITE_P(Type, Harness, testing::Values(Type::kF32, Type::kF16, Type::kBF16),
                         [](const auto& parameter) { return std::string(name_of(parameter.param)); });

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

}  // namespace
}  // namespace fovea::conformance
