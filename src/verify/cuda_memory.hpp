// Device memory through the CUDA runtime. Compiled where the library's CUDA backends are.
#pragma once

#include "verify/device_memory.hpp"

namespace fovea::verify {

/// Places the tensors of later runs of CUDA backends on the GPU that FOVEA_TEST_DEVICE names (default 0).
///
/// FOVEA_TEST_EXACT=1 gives each tensor an allocation of its own that ends where the
/// tensor ends, and leaves the workspace as allocated: slower, but compute-sanitizer then sees every access outside
/// of a tensor (memcheck) and every read of a workspace before it is written (initcheck). Otherwise a thread takes
/// all from one allocation.
void use_cuda_memory();

}  // namespace fovea::verify
