// Problems over several ranks against the oracle of the whole problem, with the bound that one device has. FOVEA_TEST_SEED sets the
// seed, FOVEA_TEST_PROBLEMS the number of problems.
#include <gtest/gtest.h>

#include <cstdlib>

#include "distributed/local_ranks.hpp"
#include "distributed/random_problems.hpp"
#include "verify/check.hpp"

namespace fovea::distributed_tests {
namespace {

using namespace verify;

uint64_t number_of(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : fallback;
}

/// GPUs have expressions where NVRTC is; ALiBi and block masks of cut sequences are expressions.
bool may_be_left_out(const ProblemSpec& spec, const Division& division, const std::string& failure) {
  return !division.devices.empty() && (spec.has_expressions() || spec.alibi || spec.block_mask) &&
         failure.find("none of the backends can do") != std::string::npos;
}

void expect_right(const ProblemSpec& spec, const Division& division, bool backward, const std::string& name) {
  OwnedProblem problem(spec);
  CheckOptions options;
  options.backward = backward;
  Checker checker(problem, options);
  for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
    if (pass == FOVEA_BACKWARD && !backward) break;
    LocalRanks ranks(problem, division);
    std::string failure = ranks.run(pass);
    if (may_be_left_out(spec, division, failure)) return;
    if (failure.empty()) failure = checker.check_outputs(pass);
    ASSERT_EQ(failure, "") << name << (pass == FOVEA_FORWARD ? " forward " : " backward ") << division.ranks
                           << " ranks, " << division.heads_ranks << " share heads, " << division.stages
                           << " stages\n"
                           << describe(spec) << '\n'
                           << ranks.reason();
  }
}

TEST(Ranks, RandomProblems) {
  const uint64_t seed = number_of("FOVEA_TEST_SEED", 2026), problems = number_of("FOVEA_TEST_PROBLEMS", 300);
  for (uint64_t index = number_of("FOVEA_TEST_INDEX", 0); index < problems; ++index) {
    Random random(seed * 1'000'003 + index);
    const bool same_axis = random.chance(0.6);
    const ProblemSpec spec = random_spec(random, same_axis);
    const Division division =
        random_division(random, spec, same_axis, static_cast<int>(random.between(1, 7)));
    expect_right(spec, division, true,
                 "FOVEA_TEST_SEED=" + std::to_string(seed) + " FOVEA_TEST_INDEX=" + std::to_string(index));
    if (HasFatalFailure()) return;
  }
}

/// Ranks on the GPUs of this machine, several on one. FOVEA_TEST_PROBLEMS sets the number of problems.
TEST(CudaRanks, RandomProblems) {
  const int devices = fovea_cuda_device_count();
  if (devices == 0) GTEST_SKIP() << "no GPU here: " << fovea_cuda();
  const uint64_t seed = number_of("FOVEA_TEST_SEED", 2026), problems = number_of("FOVEA_TEST_PROBLEMS", 150);
  for (uint64_t index = number_of("FOVEA_TEST_INDEX", 0); index < problems; ++index) {
    Random random(seed * 1'000'007 + index);
    const bool same_axis = random.chance(0.6);
    ProblemSpec spec = random_spec(random, same_axis);
    spec.gradients_are_f32 = false;
    Division division = random_division(random, spec, same_axis, static_cast<int>(random.between(1, 7)));
    // Unlike on CPUs, sums over calls and ranks are of gradients in the type of q.
    const bool backward = spec.type == Type::kF32 || division.heads_ranks == division.ranks;
    // Gradients of named tensors are summed in any order there.
    if (spec.score && spec.named_gradients) division.deterministic = false;
    for (int rank = 0; rank < division.ranks; ++rank)
      division.devices.push_back({FOVEA_CUDA, static_cast<int32_t>(rank % devices)});
    expect_right(spec, division, backward,
                 "FOVEA_TEST_SEED=" + std::to_string(seed) + " FOVEA_TEST_INDEX=" + std::to_string(index));
    if (HasFatalFailure()) return;
  }
}

TEST(Ranks, QueriesOnEveryRank) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed + 77);
    ProblemSpec spec = random_spec(random, false);
    if (!spec.packed()) spec.seqlen_q = random.between(1, 4);
    Division division = random_division(random, spec, false, static_cast<int>(random.between(1, 7)));
    division.queries_everywhere = true;
    division.queries.clear();
    division.heads_ranks = division.stages = 0;
    expect_right(spec, division, false, "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace fovea::distributed_tests
