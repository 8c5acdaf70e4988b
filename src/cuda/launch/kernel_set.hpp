// The kernels that a problem takes on a device: the main one, and what is launched before and after it.
#pragma once

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

struct KernelSet {
  const Kernel* main = nullptr;
  /// In the order of their launches: each reads what those before it wrote.
  std::vector<const Kernel*> before, after;
  std::string clause;  ///< what is missing; "" when the set is complete

  /// Whether a forward may divide keys among CTAs: builds without a combine kernel cannot.
  bool can_combine() const { return !after.empty() && after.front()->kind == KernelKind::kCombine; }
};

/// Whether the tensor has any bytes: a dimension of size 0 leaves none, unless it is never stepped along.
bool occupies_memory(const TensorDesc& t);

/// Kernels of `family` (and those that serve every family), loaded on the device of the problem's tensors.
/// `any_address`: for pointers that are no multiples of 16 bytes.
/// `name_pattern`: see KernelRequest.
KernelSet choose_kernels(Family family, const AttentionProblem& problem, bool any_address,
                         const char* name_pattern);

}  // namespace fovea::cuda
