// A problem on one family of kernels: chosen and laid out once, launched by every run.
#pragma once

#include <cuda.h>

#include <string>
#include <vector>

#include "core/backend.hpp"
#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {

class CudaPlan final : public Prepared {
 public:
  /// "" when the family can do the problem on the device of its tensors, else the first clause that fails.
  static std::string cannot_because(Family family, const AttentionProblem& problem);

  CudaPlan(Family family, const AttentionProblem& problem, bool deterministic);

  /// Checks the pointers and the stream, then launches. No allocation, lock, synchronisation; may be captured
  /// in a graph.
  void run(const Buffers& buffers) const;

 private:
  struct Launch {
    const Kernel* kernel;
    CUfunction function;
    unsigned x, y, z;
  };
  struct Memory {
    Role role;
    const char* name;
  };

  void prepare_forward(Family family, const AttentionProblem& problem);
  void prepare_backward(Family family, const AttentionProblem& problem, bool deterministic);
  void check_memory(const char* name, const void* pointer) const;
  void check_stream(CUstream stream) const;
  template <class Args>
  void launch(Args args, const Buffers& buffers) const;
  template <class Args>
  void add(const Kernel& kernel, const Args& args);

  Pass pass_;
  int device_;
  CUcontext context_;
  std::vector<Launch> launches_;  ///< in order
  std::vector<Memory> memory_;    ///< tensors that have any
  ForwardArgs forward_;           ///< without pointers
  BackwardArgs backward_;
  int64_t part_o_ = 0, part_lse_ = 0, lse_log2_ = 0, delta_ = 0, dq_sum_ = 0;  ///< offsets in the workspace
  /// Packed problems without sequences run as one empty sequence: all their rows follow it, and get their
  /// zeros. Its bounds lie here in the workspace. -1: there are sequences.
  int64_t no_sequences_ = -1;
  bool writes_rng_state_ = false;
};

}  // namespace fovea::cuda
