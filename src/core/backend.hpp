// The protocol of backends: a backend prepares a problem or says why it cannot; what it prepared runs.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/problem.hpp"

namespace fovea {

/// A problem that a backend has taken, with all that depends on the problem alone worked out: kernels, grids, schedules,
/// the layout of the workspace. Immutable, so any number of threads may run it at the same time.
class Prepared {
 public:
  Prepared() = default;
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  virtual ~Prepared() = default;

  /// Computes. The buffers are checked already (BufferRules); allocates nothing, takes no lock, reads no environment.
  virtual void run(const Buffers& buffers) const = 0;

  size_t workspace_size = 0;  ///< bytes that each run needs
  std::string summary;        ///< what `fovea explain` says behind "chosen"; "" for nothing
};

/// How a problem is to be computed.
struct PrepareOptions {
  int num_threads = 1;  ///< CPU
  bool deterministic = false;
  double flops = 0;  ///< of the problem, as far as its lengths are known: small ones take fewer threads
  KeySplits splits = {};
  double flops_of_sequence = 0;  ///< of one sequence as long as the longest: the same in any batch
  int sm_margin = 0;             ///< CUDA: multiprocessors left to others
  bool is_part = false;          ///< see PlanOptions
};

/// The prepared problem, or the clause that fails ("computes float16, this problem is float32").
struct Preparation {
  std::unique_ptr<const Prepared> prepared;
  std::string clause;
};

/// What comes before attention where a problem appends (k_new): writes the new rows to k and v, rotates q, and tells the
/// lengths that result. Immutable, like Prepared.
class AppendStep {
 public:
  AppendStep() = default;
  AppendStep(const AppendStep&) = delete;
  AppendStep& operator=(const AppendStep&) = delete;
  virtual ~AppendStep() = default;

  /// `lengths`: (batch) int32, gets the keys of each sequence with the new ones; where the problem rotates, `q` gets the rotated
  /// q, compact: (batch, seqlen_q, heads_q, head_dim), packed (total_q, heads_q, head_dim). Both in memory of the backend. The
  /// buffers are checked already. Allocates nothing, takes no lock.
  virtual void run(const Buffers& buffers, int32_t* lengths, void* q) const = 0;
};

/// Memory of GPUs, for calls that bring no workspace of their own.
struct DeviceMemory {
  /// In the order of a stream: for one call.
  void* (*allocate)(int device, size_t bytes, void* stream);
  void (*release)(int device, void* memory, void* stream) noexcept;
};

/// One way of computing attention.
struct Backend {
  const char* name;
  /// "" when this machine has what the backend needs, else the missing piece.
  /// Nothing else is asked of a backend that is unavailable.
  std::string (*unavailable_because)();
  /// The only place that knows what the backend can do: it decides support, choice and what `fovea explain` prints.
  /// The problem appends nothing: what comes before is that of prepare_append.
  Preparation (*try_prepare)(const AttentionProblem& problem, const PrepareOptions& options);
  std::unique_ptr<const AppendStep> (*prepare_append)(const AttentionProblem& problem,
                                                      const PrepareOptions& options);
  DeviceType device = DeviceType::kCpu;  ///< where the tensors must lie
  const DeviceMemory* memory = nullptr;  ///< null: that of the host
  /// Whether it wants `sees` as it was asked. The others get windows in it as windows; this is what they are compared with.
  bool as_asked = false;
};

/// A problem with the backend that does it. Immutable.
struct Plan {
  AttentionProblem problem;
  const Backend* backend = nullptr;
  std::unique_ptr<const Prepared> prepared;
  double flops = 0;
  bool check_contents = false;  ///< of a GPU's lengths and tables, too
  std::string reason;           ///< a line for each backend of the list
};

}  // namespace fovea
