// What a backend is to the plan: one predicate, a workspace and a run.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/problem.hpp"

namespace fovea {

struct Plan;

/// What a backend works out once for a plan: which kernels, how they are launched. Immutable.
struct Prepared {
  Prepared() = default;
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  virtual ~Prepared() = default;

  size_t workspace_size = 0;
  std::string summary;  ///< what `fovea explain` says behind "chosen"
};

/// Memory of GPUs, for calls that bring no workspace of their own.
struct DeviceMemory {
  /// In the order of a stream: for one call.
  void* (*allocate)(int device, size_t bytes, void* stream);
  void (*release)(int device, void* memory, void* stream) noexcept;
};

/// One way of computing attention. `cannot_because` is the only place that knows what the backend can do: it
/// decides support, choice and what `fovea explain` prints.
struct Backend {
  const char* name;
  /// "" when this machine has what the backend needs, else the missing piece.
  std::string (*unavailable_because)();
  /// "" when the backend can do the problem, else the clause that fails.
  std::string (*cannot_because)(const AttentionProblem& problem);
  /// Bytes of workspace of one run. Not asked of a backend that prepares.
  size_t (*workspace_size)(const AttentionProblem& problem, int num_threads);
  /// Computes. The buffers are checked already; allocates nothing.
  void (*run)(const Plan& plan, const Buffers& buffers);
  /// Where the tensors must lie.
  DeviceType device = DeviceType::kCpu;
  /// Null for backends that have nothing to work out.
  std::unique_ptr<const Prepared> (*prepare)(const AttentionProblem& problem, bool deterministic) = nullptr;
  const DeviceMemory* memory = nullptr;  ///< null: that of the host
};

/// A problem with the backend that will do it. Immutable, so any number of threads may run it.
struct Plan {
  AttentionProblem problem;
  const Backend* backend = nullptr;
  int num_threads = 1;
  bool deterministic = false;
  size_t workspace_size = 0;
  double flops = 0;
  std::string reason;                        ///< a line for each backend of the list
  std::shared_ptr<const Prepared> prepared;  ///< of the backend, if it prepares
};

}  // namespace fovea
