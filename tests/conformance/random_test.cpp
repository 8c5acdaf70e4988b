// Random problems, from a printed seed. FOVEA_TEST_SEED sets the seed, FOVEA_TEST_PROBLEMS how many problems,
// and FOVEA_TEST_INDEX (with FOVEA_TEST_BACKEND) picks one.
#include <gtest/gtest.h>

#include <cstdio>

#include "conformance/expectations.hpp"
#include "conformance/random_problem.hpp"

namespace fovea::conformance {
namespace {

constexpr uint64_t kShards = 12;

class RandomProblems : public testing::TestWithParam<uint64_t> {};

TEST_P(RandomProblems, Conform) {
  const uint64_t seed = environment_number("FOVEA_TEST_SEED", 20250);
  const uint64_t problems = environment_number("FOVEA_TEST_PROBLEMS", 3000);
  const bool only_one = !environment("FOVEA_TEST_INDEX", "").empty();
  const uint64_t first = only_one ? environment_number("FOVEA_TEST_INDEX", 0) : GetParam();
  const uint64_t end = only_one ? first + 1 : problems;
  if (only_one && first % kShards != GetParam()) return;

  const std::vector<std::string> backends = backends_under_test();
  int ran = 0;
  for (uint64_t index = first; index < end; index += kShards) {
    const ProblemSpec spec = random_problem(seed, index);
    const std::string how = "FOVEA_TEST_SEED=" + std::to_string(seed) +
                            " FOVEA_TEST_INDEX=" + std::to_string(index) +
                            " test_conformance --gtest_filter='*RandomProblems*'";
    announce(how + "   " + describe(spec));
    OwnedProblem problem(spec);
    CheckOptions options;
    options.threads = {static_cast<int32_t>(1 + index % 5), static_cast<int32_t>(1 + index / 5 % 5)};
    Checker checker(problem, with_margins(options));
    // Each problem goes through one backend, in turn: the first that can do it, from a start that moves with
    // the index.
    for (size_t step = 0; step < backends.size(); ++step) {
      const std::string& backend = backends[(index / kShards + index % kShards + step) % backends.size()];
      announce("FOVEA_TEST_BACKEND=" + backend + " " + how + "   " + describe(spec));
      int done = 0;
      const std::string failure = checker.check(backend, &done);
      if (!failure.empty()) {
        ADD_FAILURE() << failure << "\n    reproduce: FOVEA_TEST_BACKEND=" << backend << " " << how
                      << "\n    problem: " << describe(spec);
      }
      ran += done;
      if (done > 0 || !failure.empty()) break;
    }
  }
  std::printf("seed %llu: shard %llu ran %d passes\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(GetParam()), ran);
  EXPECT_TRUE(ran > 0 || first >= end || only_one_backend()) << "no backend did any problem";
}

INSTANTIATE_TEST_SUITE_P(Shard, RandomProblems, testing::Range(uint64_t{0}, kShards));

}  // namespace
}  // namespace fovea::conformance
