// The kernels that a problem takes on a device: the main one, and what is launched before and after it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/launch/device_properties.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

struct KernelSet {
  const Kernel* main = nullptr;
  /// In the order of their launches: each reads what those before it wrote.
  std::vector<const Kernel*> before, after;
  std::string clause;  ///< what is missing; "" when the set is complete

  /// The problem as the main kernel takes it: some take terms as parts of the expression.
  AttentionProblem problem;
  /// What the main kernel, those of other gradients beside it, and those that find its blocks, are compiled for; "" for a kernel
  /// that the library holds.
  std::string main_text;
  /// The same of the other kernels: they take terms as arguments, and the user's expression alone.
  std::string user_text;

  bool main_adds_dbias = false;  ///< dS to the gradient of the bias, which holds zeros at first

  /// What a kernel of the set is compiled for.
  const std::string& text_of(const Kernel& kernel) const;
  /// All of them, in the order of their launches.
  std::vector<const Kernel*> in_order() const;
  /// Whether a forward may divide keys among CTAs: builds without a combine kernel cannot.
  bool can_combine() const { return !after.empty() && after.front()->kind == KernelKind::kCombine; }
};

/// Whether the tensor has any bytes: a dimension of size 0 leaves none, unless it is never stepped along.
bool occupies_memory(const TensorDesc& t);

/// As the kernels see it: a packed batch without sequences is one empty sequence, whose rows all follow it and get
/// their zeros.
AttentionProblem with_a_sequence(const AttentionProblem& problem);
/// Why no kernels can do the problem, whichever they are; "" when some may.
std::string never_because(const AttentionProblem& problem, bool deterministic);

struct SetRequest {
  bool values_in_keys = false;         ///< v is the first columns of k
  bool any_address = false;            ///< for pointers that are no multiples of 16 bytes
  const char* name_pattern = nullptr;  ///< see KernelRequest
  double flops = 0;                    ///< of the problem: whether terms are worth a kernel compiled for them
  KeySplits splits = {};
  bool deterministic = false;
  int sm_margin = 0;  ///< taken off the GPU that holds the tensors
};

/// The code of a kernel where it is to run.
struct KernelCode {
  std::string clause;   ///< why it cannot run there; "" when it can
  int local_bytes = 0;  ///< of a thread: registers that it spills
};
/// Where kernels are to run.
struct KernelTarget {
  const DeviceProperties& device;
  /// Makes code ready, compiled for `text` (that of KernelSet::text_of) where there is one.
  std::function<KernelCode(const Kernel& kernel, const std::string& text)> code;
};
/// Kernels of `family` (and those that serve every family).
KernelSet choose_kernels(Family family, const AttentionProblem& problem, const SetRequest& request,
                         const KernelTarget& target);
/// Code that is compiled at run time.
struct NeededCode {
  const Kernel* kernel;
  std::string text;
};
/// What a plan needs, for aligned pointers and for any, if the first choice of each kernel fits its registers. Compiles nothing.
std::vector<NeededCode> expected_code(Family family, const AttentionProblem& problem, SetRequest request,
                                      const DeviceProperties& device);
/// Calls compile(i) for each index below `count`, each in a thread of its own. What they throw is lost.
void compile_at_once(size_t count, const std::function<void(size_t)>& compile);
/// The kernels of a set, loaded on the device of the problem's tensors.
KernelSet choose_kernels(Family family, const AttentionProblem& problem, const SetRequest& request);

}  // namespace fovea::cuda
