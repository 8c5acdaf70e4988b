// Collects the kernels of a pass: main, and those before and after it.
#include "cuda/launch/kernel_set.hpp"

#include <algorithm>
#include <thread>

#include "cuda/launch/device.hpp"
#include "cuda/launch/expression_text.hpp"
#include "cuda/launch/kernel_choice.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "cuda/launch/runtime_kernel.hpp"
#include "cuda/launch/schedule.hpp"
#include "expr/pair_expressions.hpp"
#include "expr/problem_terms.hpp"
#include "tile/fixed_sum.hpp"

namespace fovea::cuda {
namespace {

/// The family of kernels for pointers that are no multiples of 16 bytes: TMA copies no others at all.
Family family_for(Family family, const AttentionProblem& p, bool any_address) {
  if (!any_address) return family;
  if (p.has(Role::kQV) || p[Role::kK].dtype == DType::kE4M3) return Family::kSimt;
  return family == Family::kSm90 ? Family::kMmaSm80 : family;
}

/// Work from which on it pays to compile a kernel for terms that the library has a slower kernel for: a third of a millisecond
/// there, of which four fifths are saved, against some seconds once.
constexpr double kWorthCompiling = 2e10;

/// What a problem keeps as terms when they become parts of its expression.
constexpr uint32_t kTermsOfExpressions =
    kTermSoftcap | kTermWideSoftcap | kTermAlibi | kTermBias | kTermMask | kTermBlockMask;

bool knows_every_term(const Kernel& kernel) {
  return (kernel.terms & kAllTerms) == kAllTerms;
}
/// Whether it takes all terms as parts of the expression: others have the user's beside the terms.
bool is_compiled_for_all(const Kernel& kernel) {
  return (kernel.terms & kTermExpressions) != 0;
}

/// Finds the kernels of one set.
class Collector {
 public:
  Collector(Family family, const AttentionProblem& problem, const SetRequest& request,
            const KernelTarget& target)
      : family_(family_for(family, problem, request.any_address)), asked_(request), target_(target) {
    set_.problem = problem;
    if (problem.expressions) set_.user_text = expression_text(problem);
  }

  KernelSet run() {
    const bool forward = set_.problem.pass == Pass::kForward;
    choose_main(forward ? KernelKind::kForward : KernelKind::kBackward);
    if (set_.main == nullptr) return std::move(set_);
    if (forward) {
      collect_forward();
    } else {
      collect_backward();
    }
    return std::move(set_);
  }

 private:
  const AttentionProblem& p() const { return set_.problem; }

  KernelRequest request_of(const AttentionProblem& problem) const {
    KernelRequest request(problem, target_.device, asked_.any_address, asked_.name_pattern, asked_.splits);
    request.same_bits = asked_.deterministic;
    request.values_in_keys = asked_.values_in_keys;
    request.terms_in_expression = !set_.main_text.empty();
    return request;
  }
  /// The first kernel that can, loads and spills no register; where all spill, the one that spills least.
  Choice find(KernelKind kind, KernelRequest& request) {
    Choice least;
    int least_bytes = kMostSpilledBytes + 1;
    while (true) {
      Choice choice = choose_kernel(kernel_table(), kind, family_, request);
      if (choice.kernel == nullptr) {
        if (least.kernel != nullptr) return least;
        return request.excluded.empty() ? choice : Choice{nullptr, last_clause_};
      }
      const std::string& text = set_.text_of(*choice.kernel);
      const KernelCode code = target_.code(*choice.kernel, text);
      last_clause_ = code.clause;
      if (code.clause.empty() && code.local_bytes == 0) return choice;
      // A kernel that the library holds has no variants that need less.
      if (text.empty()) return {nullptr, last_clause_};
      if (code.clause.empty() && code.local_bytes < least_bytes) {
        least = choice;
        least_bytes = code.local_bytes;
      }
      request.excluded.push_back(choice.kernel);
    }
  }
  Choice find(KernelKind kind) {
    KernelRequest request = request_of(p());
    return find(kind, request);
  }

  /// A kernel that the library holds; else, or where that knows every term and is slow for it, one that is compiled for all terms
  /// as one expression.
  void choose_main(KernelKind kind) {
    const bool compiles = family_ == Family::kSm90 || family_ == Family::kMmaSm80;
    if (!compiles || !p().expressions) {
      choose_held(kind);
      const bool slow = set_.main == nullptr || knows_every_term(*set_.main);
      if (!compiles || !slow || asked_.flops < kWorthCompiling) return;
    }
    choose_compiled(kind);
    if (set_.main == nullptr && family_ != Family::kSm90) choose_held(kind);
  }
  /// One that knows the terms, and takes the user's expression beside them where it knows every term.
  void choose_held(KernelKind kind) {
    Choice choice = find(kind);
    set_.main = choice.kernel;
    set_.clause = std::move(choice.clause);
  }
  void choose_compiled(KernelKind kind) {
    const auto composed = expr::with_terms_in_expressions(p());
    if (!composed || !composed->expressions) return;
    KernelRequest request = request_of(*composed);
    request.terms &= ~kTermsOfExpressions;
    set_.main_text = expression_text(*composed);
    Choice choice = find(kind, request);
    if (choice.kernel == nullptr) {
      if (set_.main == nullptr) set_.clause = std::move(choice.clause);
    } else if (is_compiled_for_all(*choice.kernel)) {
      set_.main = choice.kernel;
      set_.clause.clear();
      set_.problem = *composed;
      return;
    }
    set_.main_text.clear();
  }

  void add(std::vector<const Kernel*>& to, KernelKind kind) {
    if (!set_.clause.empty()) return;
    Choice choice = find(kind);
    set_.clause = std::move(choice.clause);
    if (choice.kernel != nullptr) to.push_back(choice.kernel);
  }

  /// One that computes another gradient than the main kernel, by the same text.
  void add_gradient(KernelKind kind) {
    if (!set_.clause.empty()) return;
    KernelRequest request = request_of(p());
    if (!set_.main_text.empty()) request.terms &= ~kTermsOfExpressions;
    Choice choice = find(kind, request);
    set_.clause = std::move(choice.clause);
    if (choice.kernel != nullptr) set_.after.push_back(choice.kernel);
  }

  bool walks_over_seen_blocks() const {
    return set_.main->seen_blocks && p().expressions && p().expressions->sees;
  }

  void collect_forward() {
    if (set_.main->bf16x3) add(set_.before, KernelKind::kBf16x3);
    if (set_.main->e4m3_operands) add(set_.before, KernelKind::kTransposeValues);
    if (walks_over_seen_blocks()) add(set_.before, KernelKind::kSeenBlocks);
    if (may_have_reach(p(), *set_.main)) add(set_.before, KernelKind::kAlibiNorms);
    if (set_.main->persistent && !set_.main->stream_k) add(set_.before, KernelKind::kClearCounter);
    if (!set_.clause.empty()) return;
    // Without one, keys are not split.
    if (const Kernel* combine = find(KernelKind::kCombine).kernel) set_.after.push_back(combine);
  }

  void collect_backward() {
    add(set_.before, KernelKind::kPreprocess);
    const bool named = std::any_of(p().named.begin(), p().named.end(),
                                   [](const NamedTensor& t) { return occupies_memory(t.gradient); });
    const bool adds = adds_to_named(p()), same_bits = adds && asked_.deterministic;
    if (named && !same_bits) add(set_.before, KernelKind::kNamedZeros);
    collect_before_lists();
    if (set_.main->bf16x3) add(set_.before, KernelKind::kBackwardBf16x3);
    if (walks_over_seen_blocks()) add(set_.before, KernelKind::kBackwardSeenBlocks);
    if (may_have_reach(p(), *set_.main)) add(set_.before, KernelKind::kBackwardAlibiNorms);
    if (set_.main->dk_alone) {
      add_gradient(KernelKind::kBackwardDv);
      add_gradient(KernelKind::kBackwardDq);
    }
    if (!set_.main->writes_dq && !set_.main->last_writes) add(set_.after, KernelKind::kPostprocess);
    if (p().has(Role::kKeys))
      add(set_.after, asked_.deterministic ? KernelKind::kListKeys : KernelKind::kListGradients);
    if (occupies_memory(p()[Role::kDBias])) {
      set_.main_adds_dbias = can_add_dbias(*set_.main, p(), asked_.deterministic);
      if (!set_.main_adds_dbias) add(set_.after, KernelKind::kDBias);
    }
    if (p().has(Role::kDSink)) add(set_.after, KernelKind::kDSink);
    if (same_bits) {
      for (const KernelKind kind :
           {KernelKind::kNamedPeaks, KernelKind::kNamedSums, KernelKind::kNamedResults})
        add(set_.after, kind);
    } else if (adds && !p().has(Role::kKeys)) {
      // The main kernel for lists looks at each pair once, and adds itself.
      add(set_.after, KernelKind::kNamedGradients);
    }
  }

  void collect_before_lists() {
    if (!p().has(Role::kKeys)) return;
    add(set_.before, KernelKind::kListZeros);
    if (!asked_.deterministic) return;
    for (const KernelKind kind :
         {KernelKind::kListCounts, KernelKind::kListOffsets, KernelKind::kListInverse})
      add(set_.before, kind);
  }

  Family family_;
  const SetRequest& asked_;
  const KernelTarget& target_;
  KernelSet set_;
  std::string last_clause_;
};

}  // namespace

const std::string& KernelSet::text_of(const Kernel& kernel) const {
  static const std::string kNone;
  switch (kernel.kind) {
    case KernelKind::kForward:
    case KernelKind::kBackward:
    case KernelKind::kBackwardDv:
    case KernelKind::kBackwardDq:
    case KernelKind::kListKeys:
    case KernelKind::kDBias:
      return is_compiled_for_all(kernel) ? main_text : user_text;
    case KernelKind::kSeenBlocks:
    case KernelKind::kBackwardSeenBlocks:
      return main_text;
    case KernelKind::kNamedGradients:
    case KernelKind::kNamedPeaks:
    case KernelKind::kNamedSums:
      return user_text;
    default:
      return kNone;
  }
}

std::vector<const Kernel*> KernelSet::in_order() const {
  std::vector<const Kernel*> all = before;
  if (main != nullptr) all.push_back(main);
  all.insert(all.end(), after.begin(), after.end());
  return all;
}

bool occupies_memory(const TensorDesc& t) {
  for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
    if (t.shape[i] == 0 && t.stride[i] != 0) return false;
  }
  return t.present;
}

AttentionProblem with_a_sequence(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  if (p.packed && p.batch == 0) p.batch = 1;
  return p;
}

std::string never_because(const AttentionProblem& problem, bool deterministic) {
  if (!deterministic || problem.pass == Pass::kForward) return "";
  if (problem.has(Role::kKeys) && !can_invert_lists(problem))
    return "adds up gradients of keys that 2^31 or more entries of a head's lists name in any order, not the "
           "same bits each time";
  if (adds_to_named(problem) && log2_of_named_count(problem) > tile::FixedSum::kMostLog2Count) {
    return "adds up more than 2^" + std::to_string(tile::FixedSum::kMostLog2Count) +
           " numbers to a gradient of a named tensor in any order, not the same bits each time";
  }
  return "";
}

KernelSet choose_kernels(Family family, const AttentionProblem& problem, const SetRequest& request,
                         const KernelTarget& target) {
  return Collector(family, problem, request, target).run();
}

std::vector<NeededCode> expected_code(Family family, const AttentionProblem& problem, SetRequest request,
                                      const DeviceProperties& device) {
  const KernelTarget anything{device, [](const Kernel&, const std::string&) { return KernelCode{}; }};
  std::vector<NeededCode> all;
  for (const bool any_address : {false, true}) {
    request.any_address = any_address;
    const KernelSet set = choose_kernels(family, problem, request, anything);
    if (!set.clause.empty()) return {};
    for (const Kernel* kernel : set.in_order()) {
      const std::string& text = set.text_of(*kernel);
      const bool known = std::any_of(all.begin(), all.end(), [&](const NeededCode& other) {
        return other.kernel == kernel && other.text == text;
      });
      if (!known && (!text.empty() || kernel->entry == nullptr)) all.push_back({kernel, text});
    }
    if (!set.main->aligned_only) break;
  }
  return all;
}

void compile_at_once(size_t count, const std::function<void(size_t)>& compile) {
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&compile, i] {
      try {
        compile(i);
      } catch (...) {
        // Whoever needs the code asks again, and is told.
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

namespace {

/// Compiles what a plan is going to ask for, so that a first call takes as long as the slowest kernel. Code that the
/// process has costs nothing.
void compile_expected(Family family, const AttentionProblem& problem, const SetRequest& request,
                      const DeviceProperties& device) {
  if (!nvrtc().missing.empty()) return;
  const std::vector<NeededCode> code = expected_code(family, problem, request, device);
  if (code.size() < 2) return;
  compile_at_once(code.size(),
                  [&](size_t i) { compile_kernel(*code[i].kernel, code[i].text, device.capability); });
}

}  // namespace

KernelSet choose_kernels(Family family, const AttentionProblem& problem, const SetRequest& request) {
  const int id = problem[Role::kQ].device_id;
  const DeviceProperties device = properties_of(id).without_sms(request.sm_margin);
  return choose_kernels(family, problem, request,
                        {device, [&](const Kernel& kernel, const std::string& text) {
                           if (!text.empty() && !is_compiled(kernel, text, device.capability))
                             compile_expected(family, problem, request, device);
                           const LoadedKernel& code = loaded(kernel, id, text);
                           return KernelCode{code.clause, code.local_bytes};
                         }});
}

}  // namespace fovea::cuda
