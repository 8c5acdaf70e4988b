// All kernels of this build, in the order in which they are tried.
#pragma once

#include <span>

#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

/// Sorted by kind, then family, then smaller head sizes, fewer terms, and aligned ones first; else as listed.
std::span<const Kernel* const> kernel_table();
/// Sorts any list of kernels that way (tests).
void sort_by_preference(std::span<const Kernel*> kernels);

/// "cuda_sm90" and so on; "" for kAny.
const char* backend_name(Family family);
/// "forward", "backward (preprocess)" and so on, as `fovea explain` says.
const char* name_of(KernelKind kind);

}  // namespace fovea::cuda
