// What the tests share: which backends and problems to run, and how failures read.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "verify/check.hpp"

namespace fovea::conformance {

using namespace verify;

/// Text of an environment variable, or `fallback`.
std::string environment(const char* name, const std::string& fallback);
/// The same as a number; anything else ends the program with a message.
uint64_t environment_number(const char* name, uint64_t fallback);

/// Whether FOVEA_TEST_BACKEND names a backend, which then may do less than all.
bool only_one_backend();
/// That one; or all of GPUs that are available where it is "cuda"; or all of the CPU.
std::vector<std::string> backends_under_test();
/// The CUDA backends that FOVEA_TEST_BACKEND leaves (all unless it names one), those that the machine has;
/// and where there are none, why.
std::vector<std::string> cuda_backends_under_test();
std::string why_no_cuda_backend();

/// Names the problem that this thread is running, for the case that it ends the process.
void announce(const std::string& problem);

/// Changes what the spec made, before anything runs.
using Tweak = std::function<void(OwnedProblem&)>;

/// The problem through every backend under test that can do it; at least one must.
void expect_conformance(const ProblemSpec& spec, const CheckOptions& options = {}, const Tweak& tweak = {});
/// The same for float32, float16 and bfloat16.
void expect_conformance_of_all_types(ProblemSpec spec, const CheckOptions& options = {},
                                     const Tweak& tweak = {});

/// Checks and counts, from any thread: what checker.check() says.
std::string check_and_count(Checker& checker, const std::string& backend, int* ran);

inline CheckOptions forward_only() {
  CheckOptions options;
  options.backward = false;
  return options;
}
inline CheckOptions many_threads() {
  CheckOptions options;
  options.threads = {3, 1, 2, 5};
  return options;
}

}  // namespace fovea::conformance
