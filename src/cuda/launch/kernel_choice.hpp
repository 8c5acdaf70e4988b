// The predicate that says why a kernel cannot do a problem, and the choice of a kernel by it. `fovea explain` prints
// its clauses.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/launch/device_properties.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

/// What kernels are judged by, worked out once for all of them. Refers to the problem and the device.
struct KernelRequest {
  KernelRequest(const AttentionProblem& problem, const DeviceProperties& device, bool any_address = false,
                const char* name_pattern = nullptr, const KeySplits& splits = {});

  const AttentionProblem& problem;
  const DeviceProperties& device;
  bool any_address;          ///< for pointers that are multiples of the size of their elements only
  const char* name_pattern;  ///< of fnmatch: main kernels of other names are refused; null: none is
  KeySplits splits;
  bool values_in_keys = false;       ///< v is the first columns of k
  bool terms_in_expression = false;  ///< the main kernel is compiled for all terms as one expression
  bool same_bits = false;            ///< gradients are to have the same bits each time
  uint32_t terms;                    ///< terms_of(problem)
  /// Kernels that have shown that they cannot: they do not load, or spill what an expression needs.
  std::vector<const Kernel*> excluded;
  uint32_t aligned16;  ///< bits of tile::AlignedBit that sizes and strides allow
};

/// The pattern of the environment variable FOVEA_KERNEL, for measurements and bug reports; null when it is not set.
const char* kernel_name_pattern();

/// The terms that a problem has.
uint32_t terms_of(const AttentionProblem& problem);
/// Whether a main kernel of the backward adds dS to the gradient of the bias. `deterministic`: with the same bits each time.
bool can_add_dbias(const Kernel& main, const AttentionProblem& problem, bool deterministic);
/// Those that a kernel knows, compiled for the problem's expression where its source is at hand.
uint32_t terms_known_by(const Kernel& kernel);

/// Strides of tensors that TMA copies, in bytes, are below this (cuTensorMapEncodeTiled).
inline constexpr int64_t kTmaStrideLimit = int64_t{1} << 40;
/// "" when TMA can copy q, k and v (and d_o in the backward) as far as their sizes and strides go, else why not.
/// Alignment is not looked at: kernels that use TMA are `aligned_only`.
/// `copies`: TMA reads copies in the workspace, whose strides are of our choice.
std::string tma_cannot_because(const AttentionProblem& problem, bool copies);

/// Whether v can be the first columns of k, as far as sizes and strides go: of latent attention, absorbed. Pointers tell whether it is.
bool values_may_be_in_keys(const AttentionProblem& problem);

/// "" when the kernel can do its share of the problem on the device, else the first clause that fails. Looks at all
/// but kind and family.
std::string cannot_because(const Kernel& kernel, const KernelRequest& request);

struct Choice {
  const Kernel* kernel = nullptr;
  std::string clause;  ///< why there is none: what rules out the kernel that comes closest
};
/// The first kernel of this kind and family (or of every family) that can; where it has a rate, the one of the same
/// head sizes whose tiles would end soonest.
Choice choose_kernel(std::span<const Kernel* const> table, KernelKind kind, Family family,
                     const KernelRequest& request);

}  // namespace fovea::cuda
