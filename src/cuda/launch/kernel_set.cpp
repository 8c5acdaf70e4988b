// Collects the kernels of a pass: main, and those before and after it.
#include "cuda/launch/kernel_set.hpp"

#include <algorithm>

#include "cuda/launch/device.hpp"
#include "cuda/launch/kernel_choice.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "expr/pair_expressions.hpp"

namespace fovea::cuda {
namespace {

/// The family of kernels for pointers that are no multiples of 16 bytes: TMA copies no others at all.
Family family_for(Family family, bool any_address) {
  return family == Family::kSm90 && any_address ? Family::kMmaSm80 : family;
}

}  // namespace

bool occupies_memory(const TensorDesc& t) {
  for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
    if (t.shape[i] == 0 && t.stride[i] != 0) return false;
  }
  return t.present;
}

KernelSet choose_kernels(Family wanted, const AttentionProblem& p, bool any_address,
                         const char* name_pattern) {
  const Family family = family_for(wanted, any_address);
  const DeviceProperties& device = properties_of(p[Role::kQ].device_id);
  const KernelRequest request(p, device, any_address, name_pattern);
  KernelSet set;
  const auto find = [&](KernelKind kind) -> Choice {
    Choice choice = choose_kernel(kernel_table(), kind, family, request);
    if (choice.kernel == nullptr) return choice;
    const std::string& clause = loaded(*choice.kernel, device.id).clause;
    return clause.empty() ? choice : Choice{nullptr, clause};
  };
  const auto require = [&](KernelKind kind) -> const Kernel* {
    if (!set.clause.empty()) return nullptr;
    Choice choice = find(kind);
    set.clause = std::move(choice.clause);
    return choice.kernel;
  };
  const auto add = [&](std::vector<const Kernel*>& to, KernelKind kind) {
    if (const Kernel* kernel = require(kind)) to.push_back(kernel);
  };

  const bool sees = p.expressions && p.expressions->sees;
  if (p.pass == Pass::kForward) {
    set.main = require(KernelKind::kForward);
    if (set.main != nullptr && set.main->bf16x3) add(set.before, KernelKind::kBf16x3);
    if (sees && set.main != nullptr && set.main->seen_blocks) add(set.before, KernelKind::kSeenBlocks);
    if (!set.clause.empty()) return set;
    // Without one, keys are not split.
    if (const Kernel* combine = find(KernelKind::kCombine).kernel) set.after.push_back(combine);
    return set;
  }
  set.main = require(KernelKind::kBackward);
  add(set.before, KernelKind::kPreprocess);
  const bool named = std::any_of(p.named.begin(), p.named.end(),
                                 [](const NamedTensor& t) { return occupies_memory(t.gradient); });
  if (named) add(set.before, KernelKind::kNamedZeros);
  if (set.main != nullptr && set.main->bf16x3) add(set.before, KernelKind::kBackwardBf16x3);
  if (sees && set.main != nullptr && set.main->seen_blocks) add(set.before, KernelKind::kBackwardSeenBlocks);
  if (set.main != nullptr && !set.main->writes_dq) add(set.after, KernelKind::kPostprocess);
  if (occupies_memory(p[Role::kDBias])) add(set.after, KernelKind::kDBias);
  if (p.has(Role::kDSink)) add(set.after, KernelKind::kDSink);
  if (named && p.expressions->score) add(set.after, KernelKind::kNamedGradients);
  return set;
}

}  // namespace fovea::cuda
