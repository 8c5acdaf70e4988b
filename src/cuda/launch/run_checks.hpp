// What a run refuses before it launches anything: pointers and streams of elsewhere.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace fovea::cuda {

class RunChecks {
 public:
  RunChecks(const AttentionProblem& problem, CUcontext context);

  /// Throws RequestError(kInvalidArgument) for a pointer or a stream that is not of the problem's device.
  void check(const Buffers& buffers, bool uses_workspace) const;

 private:
  void check_memory(const char* name, const void* pointer, const char* remedy) const;
  void check_stream(CUstream stream) const;

  int device_;
  CUcontext context_;
  struct Tensor {
    size_t place;
    std::string name;
  };
  std::vector<Tensor> tensors_;  ///< those that have memory
};

}  // namespace fovea::cuda
