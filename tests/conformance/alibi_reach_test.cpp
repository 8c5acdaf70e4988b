// ALiBi over sequences that are so long that steep slopes leave far keys no weight, which backends may pass over: what they pass over must be
// nothing, whatever the scores.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

bool on_gpu() {
  const std::vector<std::string> backends = backends_under_test();
  return std::any_of(backends.begin(), backends.end(),
                     [](const std::string& name) { return name.starts_with("cuda"); });
}

/// As many as backends ask for, which find it worth while from 256 queries and 1,024 keys on, on GPUs from 1,024 and 2,048.
ProblemSpec long_problem(int64_t head_dim) {
  const bool gpu = on_gpu();
  ProblemSpec spec;
  spec.type = Type::kBF16;
  spec.seqlen_q = gpu ? 1100 : 270;
  spec.seqlen_k = gpu ? 2100 : 1050;
  spec.heads_q = spec.heads_kv = 2;
  spec.head_dim = spec.head_dim_v = head_dim;
  spec.alibi = true;
  return spec;
}

/// One slope for each head, which are from steep (a reach of some hundred keys) to flat.
Tweak slopes(Role role, double steep, double flat) {
  return [=](OwnedProblem& x) {
    for (int64_t h = 0; h < x.spec.heads_q; ++h) x[role].set({h}, h % 2 == 0 ? steep : flat);
  };
}
Tweak slopes(double steep, double flat) {
  return slopes(Role::kAlibi, steep, flat);
}
Tweak both(const Tweak& first, const Tweak& second) {
  return [=](OwnedProblem& x) {
    first(x);
    second(x);
  };
}

/// `key` meets queries with a score of `height`, in head 0: column 0 of all other keys is 0, that of queries 1.
Tweak one_key_stands_out(int64_t key, double height) {
  return [=](OwnedProblem& x) {
    for (int64_t i = 0; i < x.spec.seqlen_q; ++i) x[Role::kQ].set({0, i, 0, 0}, 1);
    for (int64_t j = 0; j < x.spec.seqlen_k; ++j) x[Role::kK].set({0, j, 0, 0}, j == key ? height : 0.0);
  };
}

TEST(AlibiReach, SteepAndFlatSlopes) {
  expect_conformance(long_problem(64), {}, slopes(0.5, 0.02));
}
TEST(AlibiReach, CudaHeadSizes) {
  if (!on_gpu()) GTEST_SKIP() << "of CUDA kernels alone";
  for (const int64_t head_dim : {128, 256}) expect_conformance(long_problem(head_dim), {}, slopes(0.5, 0.02));
}

TEST(AlibiReach, Causal) {
  ProblemSpec spec = long_problem(64);
  spec.type = Type::kF16;
  spec.causal = true;
  spec.sink = spec.dsink = spec.dlse = true;
  expect_conformance(spec, {}, slopes(0.3, 0.1));
}

TEST(AlibiReach, WindowsWiderAndNarrowerThanIt) {
  ProblemSpec spec = long_problem(128);
  spec.window_left = 400;
  spec.window_right = 90;
  expect_conformance(spec, {}, slopes(1.0, 0.1));
}

TEST(AlibiReach, HeadsOfAGroupHaveTheirOwn) {
  ProblemSpec spec = long_problem(64);
  spec.heads_q = 4;
  expect_conformance(spec, {}, slopes(0.04, 1.0));
}

/// Some have as many keys as queries, some more, and the last fewer: the first of its queries have no key at distance 0.
TEST(AlibiReach, PackedSequences) {
  ProblemSpec spec = long_problem(64);
  spec.batch = 4;
  const auto q = static_cast<int32_t>(spec.seqlen_q), k = static_cast<int32_t>(spec.seqlen_k);
  spec.lengths_q = {q, q / 4, 0, q / 2};
  spec.lengths_k = {k, q / 4, 50, q / 3};
  expect_conformance(spec, {}, slopes(0.7, 0.2));
  spec.causal = true;
  expect_conformance(spec, {}, slopes(0.7, 0.2));
}

TEST(AlibiReach, PartlyUsedSequences) {
  ProblemSpec spec = long_problem(128);
  spec.batch = 2;
  spec.used_q = {static_cast<int32_t>(spec.seqlen_q), static_cast<int32_t>(spec.seqlen_q / 2)};
  spec.used_k = {static_cast<int32_t>(spec.seqlen_k * 3 / 4), static_cast<int32_t>(spec.seqlen_k - 99)};
  expect_conformance(spec, {}, slopes(0.5, 0.05));
}

/// A far key outweighs all near ones.
TEST(AlibiReach, FarKeysThatStandOut) {
  ProblemSpec spec = long_problem(64);
  spec.scale = 1;
  for (const int64_t key : {int64_t{3}, spec.seqlen_k - 10}) {
    expect_conformance(spec, {}, both(slopes(0.25, 0.1), one_key_stands_out(key, 600)));
  }
}

/// NaN in the k of a key reaches every query that sees it, however far.
TEST(AlibiReach, FarKeysThatAreNotFinite) {
  for (const double value :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
        -std::numeric_limits<double>::infinity()}) {
    expect_conformance(long_problem(64), forward_only(),
                       both(slopes(0.5, 0.3), one_key_stands_out(3, value)));
  }
}

TEST(AlibiReach, SlopesWithoutAny) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double slope : {0.0, -0.3, kInfinity, std::numeric_limits<double>::quiet_NaN()})
    expect_conformance(long_problem(64), forward_only(), slopes(slope, 0.5));
}

/// The slopes of a text, and their gradient.
TEST(AlibiReach, SlopesThatLearn) {
  ProblemSpec spec = long_problem(64);
  spec.alibi = false;
  spec.score = known(known_scores(), "alibi");
  ASSERT_NE(spec.score, nullptr);
  spec.named_gradients = true;
  expect_conformance(spec, {}, slopes(named_role(0), 0.5, 0.02));
}

TEST(AlibiReach, TheSameBitsEachTime) {
  expect_same_bits_each_time([] {
    ProblemSpec spec = long_problem(64);
    spec.causal = true;
    return spec;
  }());
}

}  // namespace
}  // namespace fovea::conformance
