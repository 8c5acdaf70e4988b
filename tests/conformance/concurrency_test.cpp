// One plan, run by several threads at the same time.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "conformance/expectations.hpp"

namespace fovea::conformance {
namespace {

TEST(Concurrency, ThreadsShareAPlan) {
  ProblemSpec spec;
  spec.heads_q = spec.heads_kv = 2;
  spec.seqlen_q = spec.seqlen_k = 90;
  spec.head_dim = spec.head_dim_v = 32;
  spec.causal = true;
  constexpr size_t kThreads = 4;
  for (const std::string& backend : backends_under_test()) {
    std::vector<std::unique_ptr<OwnedProblem>> problems;
    for (size_t t = 0; t < kThreads; ++t) problems.push_back(std::make_unique<OwnedProblem>(spec));
    const auto description = problems[0]->description(FOVEA_FORWARD);
    fovea_options options = FOVEA_OPTIONS_INIT;
    options.backend = backend.c_str();
    options.num_threads = 2;
    fovea_plan* plan = nullptr;
    const fovea_status planned = fovea_plan_create(&description->problem, &options, &plan);
    if (planned == FOVEA_UNSUPPORTED) continue;
    ASSERT_EQ(planned, FOVEA_OK) << backend << ": " << fovea_last_error();
    const size_t workspace_size = fovea_plan_workspace_size(plan);

    std::vector<fovea_status> statuses(kThreads, FOVEA_INTERNAL);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        const Memory workspace(workspace_size, 0, Placement::kGuarded);
        fovea_buffers buffers = problems[t]->buffers(FOVEA_FORWARD);
        buffers.workspace = workspace_size > 0 ? workspace.data() : nullptr;
        buffers.workspace_size = workspace_size;
        statuses[t] = FOVEA_OK;
        for (int repeat = 0; repeat < 5 && statuses[t] == FOVEA_OK; ++repeat) {
          problems[t]->operator[](Role::kO).poison();
          statuses[t] = fovea_run(plan, &buffers);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    fovea_plan_destroy(plan);
    const std::vector<unsigned char> first = (*problems[0])[Role::kO].bytes();
    for (size_t t = 0; t < kThreads; ++t) {
      EXPECT_EQ(statuses[t], FOVEA_OK) << backend;
      EXPECT_EQ((*problems[t])[Role::kO].check_written(), "") << backend;
      EXPECT_EQ((*problems[t])[Role::kO].bytes(), first) << backend << " thread " << t;
    }
  }
}

}  // namespace
}  // namespace fovea::conformance
