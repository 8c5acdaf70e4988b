// What the tests share: which backends and problems to run, and the text of failures.
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

/// Whether FOVEA_TEST_BACKEND names a backend. That backend need not support every problem.
bool only_one_backend();
/// The backend that it names; all available CUDA backends for "cuda"; without it all of the CPU.
std::vector<std::string> backends_under_test();
/// The CUDA backends under test (all, unless FOVEA_TEST_BACKEND names one) that the machine has; if none, the reason.
std::vector<std::string> cuda_backends_under_test();
std::string why_no_cuda_backend();

/// Whether none of the backends under test need be able to do the problem: machines without NVRTC have no expressions on GPUs, and GPUs
/// no gradient of a bias beside lists of keys, and not all that has no backward (caches, qv, keys of 8 bits).
bool may_be_left_out(const ProblemSpec& spec);

/// Records the problem that this thread runs, for the message if the process dies.
void announce(const std::string& problem);

/// Changes the problem that was made from the spec, before anything runs.
using Tweak = std::function<void(OwnedProblem&)>;

/// Checks the problem on every backend under test that can do it; at least one must.
void expect_conformance(const ProblemSpec& spec, const CheckOptions& options = {}, const Tweak& tweak = {});
/// The same for float32, float16 and bfloat16.
void expect_conformance_of_all_types(ProblemSpec spec, const CheckOptions& options = {},
                                     const Tweak& tweak = {});

/// Checks that each backend under test that has the gradients of the problem has them with `deterministic`, too, and that four runs give
/// the same bits, whatever the workspace holds.
void expect_same_bits_each_time(const ProblemSpec& spec);

/// Checks and counts, from any thread; returns the text of checker.check().
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
