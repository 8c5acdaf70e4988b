// The kernels of a build without CUDA.
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

std::span<const KernelUnit> kernel_units() {
  return {};
}

std::span<const char* const> kernel_names() {
  return {};
}

}  // namespace fovea::cuda
