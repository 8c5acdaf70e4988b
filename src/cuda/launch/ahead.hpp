// Compiles the kernels of a problem ahead of time, for a chip that need not be here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"

namespace fovea::cuda {

struct AheadRequest {
  std::string chip;     ///< "sm_90"
  int64_t num_sms = 0;  ///< of the GPU, which decides among tile sizes; 0: those of the chip's usual GPU
  const char* folder = nullptr;   ///< of the cache, an absolute path; null: the user's
  const char* backend = nullptr;  ///< null: the first that can
  bool deterministic = false;
  double flops = 0;  ///< of the problem, or of one sequence where the batch takes no part in the choice
  KeySplits splits = {};
  int sm_margin = 0;
};

struct AheadKernel {
  std::string name, file;
  int registers = -1, local_bytes = -1;  ///< of a thread; -1: not known
  double seconds = 0;                    ///< to compile, or to find
  bool from_disk = false;                ///< it was there
};

/// Compiles and keeps every kernel that a plan for the problem would compile on such a chip, those for pointers of any alignment
/// among them. The device of the tensors means nothing. Throws RequestError: kInvalidArgument naming chip, num_sms, folder or
/// backend; kUnsupported where no backend of GPUs can do the problem, or NVRTC is missing and some kernel is not in the folder.
std::vector<AheadKernel> compile_ahead(const AttentionProblem& problem, const AheadRequest& request);

}  // namespace fovea::cuda
