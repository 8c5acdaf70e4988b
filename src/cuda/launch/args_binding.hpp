// How a kernel whose parameter is more than ForwardArgs or BackwardArgs (tensor maps, say) gets it.
//
// Such a parameter has a file of its own, which defines one ArgsBinding; the row `args` of instances.toml names it. To
// add one: the struct in cuda/kernels, its binding here in launch/ (tma_forward.cpp is the example), the row.
#pragma once

#include <cstddef>

#include "cuda/launch/kernel.hpp"
#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {

/// What the parameter of one launch is made from.
template <class Layout>
struct LaunchInput {
  const Kernel& kernel;
  const Layout& layout;               ///< of the plan: offsets in the workspace
  const typename Layout::Args& args;  ///< with the pointers of this run
  char* workspace;
  void* stream;
  const ArrivingKeys& arriving;  ///< of a problem that has some
};

/// Bytes of a parameter at most: what every version of CUDA passes to a kernel.
inline constexpr size_t kMaxArgsBytes = 4096;

struct ArgsBinding {
  /// Writes the parameter to `args`, which is kMaxArgsBytes large and aligned to 64 bytes (as a CUtensorMap needs);
  /// may put memsets of the workspace, and of outputs that the kernel adds to, on the stream. Throws RequestError(kCudaError) in the name of the kernel.
  /// Kernels of forward kinds have the first, those of backward kinds the second.
  void (*forward)(const LaunchInput<ForwardLayout>& launch, void* args) = nullptr;
  void (*backward)(const LaunchInput<BackwardLayout>& launch, void* args) = nullptr;
};

}  // namespace fovea::cuda
