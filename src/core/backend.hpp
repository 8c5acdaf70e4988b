// What a backend is to the plan: one predicate, a workspace and a run.
#pragma once

#include <cstddef>
#include <string>

#include "core/problem.hpp"

namespace fovea {

struct Plan;

/// One way of computing attention. `cannot_because` is the only place that knows what the backend can do: it
/// decides support, choice and what `fovea explain` prints.
struct Backend {
  const char* name;
  /// "" when this machine has what the backend needs, else the missing piece.
  std::string (*unavailable_because)();
  /// "" when the backend can do the problem, else the clause that fails.
  std::string (*cannot_because)(const AttentionProblem& problem);
  /// Bytes of workspace of one run.
  size_t (*workspace_size)(const AttentionProblem& problem, int num_threads);
  /// Computes. The buffers are checked already; allocates nothing.
  void (*run)(const Plan& plan, const Buffers& buffers);
};

/// A problem with the backend that will do it. Immutable, so any number of threads may run it.
struct Plan {
  AttentionProblem problem;
  const Backend* backend = nullptr;
  int num_threads = 1;
  bool deterministic = false;
  size_t workspace_size = 0;
  double flops = 0;
  std::string reason;  ///< a line for each backend of the list
};

}  // namespace fovea
