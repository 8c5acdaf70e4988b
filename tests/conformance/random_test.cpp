// Random problems from a printed seed. FOVEA_TEST_SEED sets the seed, FOVEA_TEST_PROBLEMS the number of problems, and
// FOVEA_TEST_THREADS how many run at a time on GPUs. FOVEA_TEST_INDEX (with FOVEA_TEST_BACKEND) picks one problem.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <thread>

#include "conformance/expectations.hpp"
#include "verify/random_problem.hpp"

namespace fovea::conformance {
namespace {

constexpr uint64_t kShards = 12;

struct Stream {
  const char* filter;
  int64_t work;
  uint64_t seed, first, end;
  bool only_one;
  HeadSizes sizes;

  ProblemSpec problem(uint64_t index) const { return random_problem(seed, index, work, sizes); }

  std::string reproduction(uint64_t index) const {
    return "FOVEA_TEST_SEED=" + std::to_string(seed) + " FOVEA_TEST_INDEX=" + std::to_string(index) +
           " test_conformance --gtest_filter='" + filter + "'";
  }
};

Stream stream(const char* filter, int64_t work, uint64_t problems, HeadSizes sizes = HeadSizes::kAny) {
  Stream s{filter, work, environment_number("FOVEA_TEST_SEED", 20250), 0, problems, false, sizes};
  s.end = environment_number("FOVEA_TEST_PROBLEMS", problems);
  s.only_one = !environment("FOVEA_TEST_INDEX", "").empty();
  if (s.only_one) {
    s.first = environment_number("FOVEA_TEST_INDEX", 0);
    s.end = s.first + 1;
  }
  return s;
}

/// Runs one problem on one backend after the other, until `enough(passes)`. Returns the failures, one text each.
template <class Enough>
std::vector<std::string> check_problem(const Stream& s, uint64_t index,
                                       const std::vector<std::string>& backends, int* ran, Enough&& enough) {
  const ProblemSpec spec = s.problem(index);
  const std::string how = s.reproduction(index);
  announce(how + "   " + describe(spec));
  OwnedProblem problem(spec);
  CheckOptions options;
  options.threads = {static_cast<int32_t>(1 + index % 5), static_cast<int32_t>(1 + index / 5 % 5)};
  if (index % 7 == 3) options.num_splits = static_cast<int32_t>(1 + index / 7 % 4);
  options.batch_invariant = index % 7 == 5;
  Checker checker(problem, options);
  std::vector<std::string> failures;
  for (const std::string& backend : backends) {
    announce("FOVEA_TEST_BACKEND=" + backend + " " + how + "   " + describe(spec));
    int done = 0;
    const std::string failure = check_and_count(checker, backend, &done);
    *ran += done;
    if (!failure.empty()) {
      failures.push_back(failure + "\n    reproduce: FOVEA_TEST_BACKEND=" + backend + " " + how +
                         "\n    problem: " + describe(spec));
    }
    if (enough(done > 0 || !failure.empty())) break;
  }
  return failures;
}

class RandomProblems : public testing::TestWithParam<uint64_t> {};

TEST_P(RandomProblems, Conform) {
  Stream s = stream("*/RandomProblems*", kHostWork, 3000);
  if (s.only_one && s.first % kShards != GetParam()) return;
  if (!s.only_one) s.first = GetParam();

  const std::vector<std::string> backends = backends_under_test();
  int ran = 0;
  for (uint64_t index = s.first; index < s.end; index += kShards) {
    // Each problem runs on one backend: the first that can do it, beginning at a place that moves with the index.
    std::vector<std::string> in_turn = backends;
    const auto start = static_cast<std::ptrdiff_t>((index / kShards + index % kShards) % backends.size());
    std::rotate(in_turn.begin(), in_turn.begin() + start, in_turn.end());
    for (const std::string& failure : check_problem(s, index, in_turn, &ran, [](bool did) { return did; })) {
      ADD_FAILURE() << failure;
    }
  }
  std::printf("seed %llu: shard %llu ran %d passes\n", static_cast<unsigned long long>(s.seed),
              static_cast<unsigned long long>(GetParam()), ran);
  EXPECT_TRUE(ran > 0 || s.first >= s.end || only_one_backend()) << "no backend did any problem";
}

INSTANTIATE_TEST_SUITE_P(Shard, RandomProblems, testing::Range(uint64_t{0}, kShards));

/// The same on GPUs: each problem runs on every CUDA backend that can do it. The oracle on the host takes most of
/// the time, so several problems run at a time, and their kernels meet on the device in any order.
void expect_conformance_on_gpus(const Stream& s) {
  const std::vector<std::string> backends = cuda_backends_under_test();
  if (backends.empty()) GTEST_SKIP() << why_no_cuda_backend();
  const uint64_t processors = std::max(std::thread::hardware_concurrency(), 1u);
  const uint64_t count = std::min(environment_number("FOVEA_TEST_THREADS", processors), s.end - s.first);

  std::atomic<uint64_t> next{s.first}, nobody{0};
  std::mutex mutex;
  std::vector<std::string> failures;
  const auto work = [&] {
    for (uint64_t index = next++; index < s.end; index = next++) {
      int ran = 0;
      std::vector<std::string> found = check_problem(s, index, backends, &ran, [](bool) { return false; });
      if (ran == 0 && found.empty()) {
        ++nobody;
        const ProblemSpec spec = s.problem(index);
        if (!only_one_backend() && !spec.has_expressions() && !spec.has_lists())
          found.push_back("no CUDA backend can do " + s.reproduction(index));
      }
      const std::lock_guard lock(mutex);
      failures.insert(failures.end(), found.begin(), found.end());
    }
    announce("");
  };
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < count; ++t) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();

  // Prints the first failures and the number of the others.
  constexpr size_t kShown = 40;
  for (size_t i = 0; i < std::min(failures.size(), kShown); ++i) ADD_FAILURE() << failures[i];
  EXPECT_TRUE(failures.empty()) << failures.size() << " failures";
  std::printf(
      "seed %llu: %llu random problems on %llu threads, %llu of which none of these backends can do\n",
      static_cast<unsigned long long>(s.seed), static_cast<unsigned long long>(s.end - s.first),
      static_cast<unsigned long long>(count), static_cast<unsigned long long>(nobody.load()));
}

TEST(CudaRandomProblems, Conform) {
  expect_conformance_on_gpus(stream("CudaRandomProblems*", kDeviceWork, 6000));
}
TEST(CudaRandomWideHeads, Conform) {
  expect_conformance_on_gpus(stream("CudaRandomWideHeads*", kDeviceWork, 1000, HeadSizes::kAbove256));
}

}  // namespace
}  // namespace fovea::conformance
