// What a run refuses before it launches anything: pointers and streams of elsewhere.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace fovea::cuda {

/// Throw RequestError(kInvalidArgument) for a pointer, or a stream, that is not of the device. `owner`: what else is there, for
/// the message ("the plan's tensors").
void check_memory(const char* name, const void* pointer, int device, const char* owner, const char* remedy);
void check_stream(CUstream stream, int device, CUcontext context, const char* owner);

class RunChecks {
 public:
  RunChecks(const AttentionProblem& problem, CUcontext context);

  /// Throws RequestError(kInvalidArgument) for a pointer or a stream that is not of the problem's device.
  void check(const Buffers& buffers, bool uses_workspace) const;

 private:
  int device_;
  CUcontext context_;
  struct Tensor {
    size_t place;
    std::string name;
  };
  std::vector<Tensor> tensors_;  ///< those that have memory
};

}  // namespace fovea::cuda
