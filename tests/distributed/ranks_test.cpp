// Problems over several ranks against the oracle of the whole problem, with the bound that one device has. FOVEA_TEST_SEED sets the
// seed, FOVEA_TEST_PROBLEMS the number of problems.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <utility>

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

/// `reason` gets what the plan of the last pass says of itself. `change` may write to the inputs.
void expect_right(
    const ProblemSpec& spec, const Division& division, bool backward, const std::string& name,
    std::string* reason = nullptr, const std::function<void(OwnedProblem&)>& change = [](OwnedProblem&) {}) {
  OwnedProblem problem(spec);
  change(problem);
  CheckOptions options;
  options.backward = backward;
  Checker checker(problem, options);
  for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) {
    if (pass == FOVEA_BACKWARD && !backward) break;
    LocalRanks ranks(problem, division);
    std::string failure = ranks.run(pass);
    if (reason != nullptr) *reason = ranks.reason();
    if (may_be_left_out(spec, division, failure)) return;
    if (failure.empty()) failure = checker.check_outputs(pass);
    ASSERT_EQ(failure, "") << name << (pass == FOVEA_FORWARD ? " forward " : " backward ") << division.ranks
                           << " ranks, " << division.heads_ranks << " share heads, " << division.stages
                           << " stages\n"
                           << describe(spec) << '\n'
                           << ranks.reason();
    const bool copied = ranks.reason().find("copied between the memories of ranks") != std::string::npos;
    ASSERT_TRUE(copied || division.peer_copies <= 0 || division.ranks == 1) << ranks.reason();
  }
}

/// Random problems over some of `ranks` (both ends included), each divided as `change` leaves it. FOVEA_TEST_PROBLEMS sets their number.
template <class Change>
void expect_random_problems(uint64_t usual_seed, uint64_t usual_problems, std::pair<int, int> ranks,
                            Change&& change) {
  const uint64_t seed = number_of("FOVEA_TEST_SEED", usual_seed),
                 problems = number_of("FOVEA_TEST_PROBLEMS", usual_problems);
  for (uint64_t index = number_of("FOVEA_TEST_INDEX", 0); index < problems; ++index) {
    Random random(seed * 1'000'003 + index);
    const bool same_axis = random.chance(0.6);
    const ProblemSpec spec = random_spec(random, same_axis);
    Division division =
        random_division(random, spec, same_axis, static_cast<int>(random.between(ranks.first, ranks.second)));
    change(spec, division);
    expect_right(spec, division, true,
                 "FOVEA_TEST_SEED=" + std::to_string(seed) + " FOVEA_TEST_INDEX=" + std::to_string(index));
    if (testing::Test::HasFatalFailure()) return;
  }
}
/// A GPU for each rank, as long as there are some; then several ranks on one.
void put_on_gpus(const ProblemSpec& spec, Division& division, int devices) {
  // Lists aside, one device fixes that order; ranks are not asked to here.
  if (spec.score && spec.named_gradients) division.deterministic = false;
  for (int rank = 0; rank < division.ranks; ++rank)
    division.devices.push_back({FOVEA_CUDA, static_cast<int32_t>(rank % devices)});
}

TEST(Ranks, RandomProblems) {
  expect_random_problems(2026, 300, {1, 7}, [](const ProblemSpec&, Division&) {});
}

/// Ranks that reach each other's memory, and send no messages.
TEST(RanksByCopies, RandomProblems) {
  expect_random_problems(2027, 200, {2, 7},
                         [](const ProblemSpec&, Division& division) { division.peer_copies = 1; });
}

/// Ranks on the GPUs of this machine, several on one.
TEST(CudaRanks, RandomProblems) {
  const int devices = fovea_cuda_device_count();
  if (devices == 0) GTEST_SKIP() << "no GPU here: " << fovea_cuda();
  expect_random_problems(2026, 150, {1, 7}, [&](const ProblemSpec& spec, Division& division) {
    put_on_gpus(spec, division, devices);
  });
}

/// A GPU for each rank, whose copy engines bring rows. Ranks that share a GPU may wait for each other in one queue of the hardware; so
/// only the emulated device, which has none, has several (FOVEA_TEST_RANKS_OF_A_GPU).
TEST(CudaRanksByCopies, RandomProblems) {
  const int devices = fovea_cuda_device_count();
  const int most = devices * static_cast<int>(number_of("FOVEA_TEST_RANKS_OF_A_GPU", 1));
  if (most < 2) GTEST_SKIP() << "fewer than two GPUs: " << fovea_cuda();
  expect_random_problems(2028, 60, {2, std::min(most, 7)}, [&](const ProblemSpec& spec, Division& division) {
    division.peer_copies = 1;
    put_on_gpus(spec, division, devices);
  });
}

/// Whether the first GPU's backend has kernels that wait for keys.
bool waits_for_keys(const ProblemSpec& spec, const fovea_device& device) {
  Division alone;
  alone.queries = {{0, 0, spec.seqlen_q}};
  alone.keys = {{0, 0, spec.seqlen_k}};
  alone.devices = {device};
  alone.backend = "cuda_sm90";
  return LocalRanks(OwnedProblem(spec), alone).run(FOVEA_FORWARD).empty();
}

/// Two ranks with rows in a row, or early and late ones, cut anywhere or at multiples of 8; with `fits` at quarters, and rows lie as kernels
/// that wait read them.
Division two_ranks(Random& random, const ProblemSpec& spec, bool fits, int devices) {
  Division division;
  division.ranks = 2;
  division.heads_ranks = 1;
  division.stages = 2;
  division.peer_copies = 1;
  division.gap = fits ? 8 : random.one_of<int64_t>({3, 8});
  division.skew = random.one_of<size_t>({0, 0, 1});
  const int64_t multiple = random.one_of<int64_t>({1, 8, 64}), rows = spec.seqlen_q;
  const auto cut = [&](int64_t begin, int64_t end) {
    return std::clamp((begin + random.between(0, end - begin)) / multiple * multiple, begin, end);
  };
  const int64_t second = fits ? rows / 2 : cut(0, rows);
  const int64_t first = fits ? rows / 4 : cut(0, second), third = fits ? 3 * rows / 4 : cut(second, rows);
  if (fits || random.chance(0.7)) {
    division.queries = {{0, 0, first}, {1, first, second}, {1, second, third}, {0, third, rows}};
  } else {
    division.queries = {{0, 0, second}, {1, second, rows}};
  }
  division.keys = division.queries;
  put_on_gpus(spec, division, devices);
  return division;
}

/// Every second problem fits kernels that wait.
ProblemSpec spec_of_two_ranks(Random& random, bool fits) {
  ProblemSpec spec;
  spec.data_seed = random.bits();
  spec.type = fits ? Type::kBF16 : random.one_of({Type::kF16, Type::kBF16});
  spec.o_is_f32 = random.chance(0.2);
  spec.heads_kv = random.one_of<int64_t>({1, 2, 3, 4, 8});
  spec.heads_q = spec.heads_kv * random.one_of<int64_t>({1, 1, 2});
  spec.head_dim = spec.head_dim_v = random.one_of<int64_t>({16, 64, 72, 128});
  spec.batch = random.between(1, 2);
  spec.seqlen_q = spec.seqlen_k = fits ? 32 * random.between(1, 16) : random.between(2, 500);
  spec.causal = random.chance(0.8);
  if (!fits && random.chance(0.2)) spec.window_left = random.between(0, 100);
  spec.sink = random.chance(0.3);
  spec.logit = random.one_of({0.5, 1.0, 5.0, 40.0});
  return spec;
}

/// On Hopper the calls of two ranks run over keys that the other's copies bring meanwhile. Where the numbers of keys are no multiples of
/// 8, or a window cuts rectangles, parts are merged. One value in some of the problems is no number: rows that do not see it are finite.
TEST(CudaRanksByCopies, KeysArriveWhileCallsRun) {
  const int devices = fovea_cuda_device_count();
  if (devices * static_cast<int>(number_of("FOVEA_TEST_RANKS_OF_A_GPU", 1)) < 2)
    GTEST_SKIP() << "fewer than two GPUs: " << fovea_cuda();
  const uint64_t problems = number_of("FOVEA_TEST_PROBLEMS", 30);
  for (uint64_t index = number_of("FOVEA_TEST_INDEX", 0); index < problems; ++index) {
    Random random(number_of("FOVEA_TEST_SEED", 2031) * 1'000'003 + index);
    const bool fits = index % 2 == 0;
    const ProblemSpec spec = spec_of_two_ranks(random, fits);
    const Division division = two_ranks(random, spec, fits, devices);
    const int64_t key = random.between(0, spec.seqlen_k - 1);
    // Merging leaves out parts whose weight is too small for float32.
    const bool not_finite = spec.logit < 10 && random.chance(0.3);
    std::string reason;
    expect_right(spec, division, false, "FOVEA_TEST_INDEX=" + std::to_string(index), &reason,
                 [&](OwnedProblem& problem) {
                   if (not_finite)
                     problem[Role::kV].set({0, key, 0, 3}, std::numeric_limits<double>::quiet_NaN());
                 });
    if (HasFatalFailure()) return;
    const bool waited = reason.find("as-keys-arrive") != std::string::npos;
    if (!fits) continue;
    EXPECT_EQ(waited, waits_for_keys(spec, division.devices[0])) << describe(spec) << '\n' << reason;
  }
}

/// Gradients of 16 bits to which many calls and ranks add are sums of float32 that are rounded once: those of one rank, which writes
/// float32, rounded, but for few that lie between two numbers. On a backend that rounds no weights: which kernels do so depends on
/// strides and sizes.
void expect_one_rounding(Type type, int devices) {
  constexpr int kRanks = 7;
  ProblemSpec spec;
  spec.type = type;
  spec.heads_q = 4;
  spec.heads_kv = 2;
  spec.head_dim = spec.head_dim_v = 64;
  spec.seqlen_q = spec.seqlen_k = 48 * kRanks;
  ProblemSpec in_f32 = spec;
  in_f32.gradients_are_f32 = true;
  const OwnedProblem many(spec), one(in_f32), rounded(spec);
  Division division;
  division.ranks = kRanks;
  division.heads_ranks = 1;
  division.stages = kRanks;
  division.backend = devices > 0 ? "cuda_simt" : "cpu_generic";
  for (int rank = 0; rank < kRanks; ++rank) {
    division.queries.push_back({rank, int64_t{48} * rank, int64_t{48} * (rank + 1)});
    if (devices > 0) division.devices.push_back({FOVEA_CUDA, static_cast<int32_t>(rank % devices)});
  }
  division.keys = division.queries;
  LocalRanks ranks(many, division);
  for (const fovea_pass pass : {FOVEA_FORWARD, FOVEA_BACKWARD}) ASSERT_EQ(ranks.run(pass), "");
  for (const Role role : {Role::kO, Role::kLse}) one[role].assign(many[role].values());
  Division alone;
  alone.backend = division.backend;
  alone.queries = alone.keys = {{0, 0, spec.seqlen_q}};
  if (devices > 0) alone.devices = {division.devices[0]};
  ASSERT_EQ(LocalRanks(one, alone).run(FOVEA_BACKWARD), "");
  for (const Role role : {Role::kDQ, Role::kDK, Role::kDV}) {
    rounded[role].assign(one[role].values());
    const std::vector<double> got = many[role].values(), expected = rounded[role].values();
    size_t others = 0;
    for (size_t i = 0; i < got.size(); ++i) others += got[i] != expected[i] ? 1 : 0;
    EXPECT_LT(others * 20, got.size())
        << name_of(role) << ": of " << got.size() << " elements " << others << " are others";
  }
}

TEST(Ranks, GradientsOfManyAreRoundedOnce) {
  for (const Type type : {Type::kBF16, Type::kF16}) ASSERT_NO_FATAL_FAILURE(expect_one_rounding(type, 0));
}

TEST(CudaRanks, GradientsOfManyAreRoundedOnce) {
  const int devices = fovea_cuda_device_count();
  if (devices == 0) GTEST_SKIP() << "no GPU here: " << fovea_cuda();
  for (const Type type : {Type::kBF16, Type::kF16})
    ASSERT_NO_FATAL_FAILURE(expect_one_rounding(type, devices));
}

TEST(Ranks, QueriesOnEveryRank) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed + 77);
    ProblemSpec spec = random_spec(random, false);
    if (!spec.packed()) spec.seqlen_q = random.between(1, 4);
    Division division = random_division(random, spec, false, static_cast<int>(random.between(1, 7)));
    division.queries_everywhere = true;
    division.peer_copies = seed % 2 == 0 ? 1 : -1;
    division.queries.clear();
    division.heads_ranks = division.stages = 0;
    expect_right(spec, division, false, "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace fovea::distributed_tests
