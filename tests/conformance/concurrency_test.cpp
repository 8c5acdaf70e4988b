// One plan, run by several threads at the same time.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

void threads_share_a_plan(const ProblemSpec& spec, fovea_pass pass, Role result) {
  constexpr size_t kThreads = 4;
  for (const std::string& backend : backends_under_test()) {
    std::vector<std::unique_ptr<OwnedProblem>> problems;
    for (size_t t = 0; t < kThreads; ++t) {
      problems.push_back(std::make_unique<OwnedProblem>(spec));
      if (pass == FOVEA_BACKWARD) {
        ASSERT_EQ(run_pass(*problems[t], FOVEA_FORWARD, {kOracle}).failure, "");
      }
    }
    RunMemory memory_of_plan(*problems[0], pass, backend);
    const auto description = memory_of_plan.description();
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.backend = backend.c_str();
    options.num_threads = 2;
    options.deterministic = 1;
    fovea_plan* plan = nullptr;
    const fovea_status planned = fovea_plan_create(&description->problem, &options, &plan);
    if (planned == FOVEA_UNSUPPORTED) continue;
    ASSERT_EQ(planned, FOVEA_OK) << backend << ": " << fovea_last_error();
    const size_t workspace_size = fovea_plan_workspace_size(plan);

    std::vector<std::string> failures(kThreads);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        RunMemory memory(*problems[t], pass, backend);
        for (int repeat = 0; repeat < 5 && failures[t].empty(); ++repeat) {
          failures[t] = memory.run(plan, workspace_size, kPattern);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    fovea_plan_destroy(plan);
    const std::vector<unsigned char> first = (*problems[0])[result].bytes();
    for (size_t t = 0; t < kThreads; ++t) {
      EXPECT_EQ(failures[t], "") << backend << " thread " << t;
      EXPECT_EQ((*problems[t])[result].bytes(), first) << backend << " thread " << t;
    }
  }
}

ProblemSpec causal_problem() {
  ProblemSpec spec;
  spec.heads_q = spec.heads_kv = 2;
  spec.seqlen_q = spec.seqlen_k = 90;
  spec.head_dim = spec.head_dim_v = 32;
  spec.causal = true;
  return spec;
}

TEST(Concurrency, ThreadsShareAPlan) {
  threads_share_a_plan(causal_problem(), FOVEA_FORWARD, Role::kO);
}
TEST(Concurrency, ThreadsShareAPlanWithExpressions) {
  ProblemSpec spec = causal_problem();
  spec.score = known(known_scores(), "relative_positions");
  spec.sees = known(known_masks(), "documents");
  spec.named_gradients = true;
  threads_share_a_plan(spec, FOVEA_FORWARD, Role::kO);
  threads_share_a_plan(spec, FOVEA_BACKWARD, gradient_role(0));
}

}  // namespace
}  // namespace fovea::conformance
