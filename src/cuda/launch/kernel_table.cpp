#include "cuda/launch/kernel_table.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>
#include <tuple>
#include <vector>

#include "cuda/launch/params.hpp"
#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {
namespace {

/// Positions, edges of windows and their sums are 32-bit in kernels: two lengths and a window add up to less
/// than 2^32.
constexpr int64_t kLongestSequence = int64_t{1} << 30;

struct TermName {
  Term term;
  const char* name;
};
constexpr std::array<TermName, 9> kTermNames = {{{kTermSoftcap, "softcap"},
                                                 {kTermAlibi, "alibi"},
                                                 {kTermBias, "bias"},
                                                 {kTermMask, "mask"},
                                                 {kTermBlockMask, "block_mask"},
                                                 {kTermDropout, "dropout"},
                                                 {kTermSink, "sink"},
                                                 {kTermNegativeScale, "a scale of 0 or less"},
                                                 {kTermLse, "lse"}}};

std::string names_of_terms(uint32_t terms) {
  std::string names;
  for (const TermName& term : kTermNames) {
    if ((terms & term.term) == 0) continue;
    if (!names.empty()) names += ", ";
    names += term.name;
  }
  return names;
}

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/// A clause, and how many of the conditions before it held: the kernel that got furthest tells most.
struct Verdict {
  int passed = 0;
  std::string clause;
};

/// What FOVEA_KERNEL asks for: a pattern of names (fnmatch), for measurements and bug reports. Looked at when
/// plans are made.
const char* wanted_kernels() {
  const char* pattern = std::getenv("FOVEA_KERNEL");
  return pattern != nullptr && *pattern != '\0' ? pattern : nullptr;
}

Verdict judge(const Kernel& k, const AttentionProblem& p, const DeviceProperties& device, bool any_address) {
  int passed = 0;
  const auto fails = [&](std::string clause) { return Verdict{passed, std::move(clause)}; };

  // What takes a plan's pointers that are not aligned is another kernel, whose name nobody asks for.
  if (const char* wanted = any_address ? nullptr : wanted_kernels();
      wanted != nullptr && (k.kind == KernelKind::kForward || k.kind == KernelKind::kBackward) &&
      fnmatch(wanted, k.name, 0) != 0) {
    return fails("is not of the name that the environment asks for (FOVEA_KERNEL=" + std::string(wanted) +
                 ")");
  }
  ++passed;

  if (device.capability < k.min_capability) {
    return fails("needs compute capability " + capability_text(k.min_capability) +
                 " or newer, cuda:" + std::to_string(device.id) + " (" + device.name + ") has " +
                 capability_text(device.capability));
  }
  if (k.max_capability != 0 && device.capability > k.max_capability) {
    return fails("needs compute capability " + capability_text(k.max_capability) +
                 " or older, cuda:" + std::to_string(device.id) + " (" + device.name + ") has " +
                 capability_text(device.capability));
  }
  ++passed;
  if (!k.any_dtype && k.dtype != p.dtype) {
    return fails("computes " + std::string(name_of(k.dtype)) + ", this problem is " +
                 std::string(name_of(p.dtype)));
  }
  ++passed;
  if (std::max(p.seqlen_q, p.seqlen_k) > kLongestSequence) {
    return fails("takes sequences up to " + std::to_string(kLongestSequence) + ", this problem has " +
                 std::to_string(std::max(p.seqlen_q, p.seqlen_k)));
  }
  ++passed;
  if (k.head_dim != 0 && p.head_dim > k.head_dim) {
    return fails("takes head sizes of q up to " + std::to_string(k.head_dim) + ", this problem has " +
                 std::to_string(p.head_dim));
  }
  if (k.head_dim_v != 0 && p.head_dim_v > k.head_dim_v) {
    return fails("takes head sizes of v up to " + std::to_string(k.head_dim_v) + ", this problem has " +
                 std::to_string(p.head_dim_v));
  }
  ++passed;
  if (const uint32_t missing = terms_of(p) & ~k.terms)
    return fails("does not know " + names_of_terms(missing));
  ++passed;
  if (p.seqlen_k < k.min_keys) {
    return fails("is for " + std::to_string(k.min_keys) + " keys or more, this problem has " +
                 std::to_string(p.seqlen_k));
  }
  ++passed;
  if (k.tma) {
    if (std::string clause = tensor_maps_cannot_because(p, k.parts > 1); !clause.empty())
      return fails(std::move(clause));
  }
  ++passed;
  if (k.aligned_only) {
    const uint32_t inputs = input_bits(p.pass);
    if (any_address || (params_of(p).aligned16 & inputs) != inputs) {
      return fails("needs rows of q, k and v that start at multiples of 16 bytes");
    }
  }
  ++passed;
  if (k.shared_bytes > device.shared_per_cta) {
    return fails("needs " + std::to_string(k.shared_bytes) +
                 " bytes of shared memory, cuda:" + std::to_string(device.id) + " (" + device.name +
                 ") gives a CTA " + std::to_string(device.shared_per_cta));
  }
  ++passed;
  return {passed, ""};
}

const char* name_of(KernelKind kind) {
  switch (kind) {
    case KernelKind::kForward:
      return "forward";
    case KernelKind::kSplit:
      return "split";
    case KernelKind::kCombine:
      return "combine";
    case KernelKind::kBackward:
      return "backward";
    case KernelKind::kPrepare:
      return "backward (prepare)";
    case KernelKind::kFinish:
      return "backward (finish)";
    case KernelKind::kDBias:
      return "dbias";
    case KernelKind::kDSink:
      return "dsink";
  }
  return "?";
}

}  // namespace

uint32_t terms_of(const AttentionProblem& p) {
  uint32_t terms = 0;
  if (p.softcap > 0) terms |= kTermSoftcap;
  if (p.has(Role::kAlibi)) terms |= kTermAlibi;
  if (p.has(Role::kBias)) terms |= kTermBias;
  if (p.has(Role::kMask)) terms |= kTermMask;
  if (p.has(Role::kBlockMask)) terms |= kTermBlockMask;
  if (p.dropout > 0 || (p.pass == Pass::kForward && p.has(Role::kRngState))) terms |= kTermDropout;
  if (p.has(Role::kSink)) terms |= kTermSink;
  if (!(static_cast<float>(p.scale) > 0)) terms |= kTermNegativeScale;
  if (p.pass == Pass::kForward && p.has(Role::kLse)) terms |= kTermLse;
  return terms;
}

std::string cannot_because(const Kernel& kernel, const AttentionProblem& problem,
                           const DeviceProperties& device, bool any_address) {
  return judge(kernel, problem, device, any_address).clause;
}

void sort_by_preference(std::span<const Kernel*> kernels) {
  const auto any_last = [](int size) { return size == 0 ? 1 << 30 : size; };
  const auto rank = [&](const Kernel* k) {
    return std::tuple(k->kind, k->family, any_last(k->head_dim), any_last(k->head_dim_v),
                      __builtin_popcount(k->terms), !k->aligned_only);
  };
  std::stable_sort(kernels.begin(), kernels.end(),
                   [&](const Kernel* a, const Kernel* b) { return rank(a) < rank(b); });
}

std::span<const Kernel* const> kernel_table() {
  static const std::vector<const Kernel*> table = [] {
    std::vector<const Kernel*> all;
    for (const KernelUnit unit : kernel_units()) {
      for (const Kernel& kernel : unit()) all.push_back(&kernel);
    }
    sort_by_preference(all);
    return all;
  }();
  return table;
}

Choice choose_kernel(std::span<const Kernel* const> table, KernelKind kind, Family family,
                     const AttentionProblem& problem, const DeviceProperties& device, bool any_address) {
  const auto serves = [&](const Kernel& k) {
    return k.kind == kind && (k.family == family || k.family == Family::kAny);
  };
  Choice choice;
  Verdict closest{-1, ""};
  for (const Kernel* k : table) {
    if (!serves(*k)) continue;
    Verdict verdict = judge(*k, problem, device, any_address);
    if (verdict.clause.empty()) {
      choice.kernel = k;
      if (k->rate == 0) return choice;
      double shortest = time_of_tiles(problem, *k, device);
      for (const Kernel* other : table) {
        if (other->rate == 0 || !serves(*other) || other->head_dim != k->head_dim ||
            other->head_dim_v != k->head_dim_v ||
            !judge(*other, problem, device, any_address).clause.empty()) {
          continue;
        }
        const double time = time_of_tiles(problem, *other, device);
        if (time < shortest) {
          shortest = time;
          choice.kernel = other;
        }
      }
      return choice;
    }
    // Of those that get equally far the last one says most: the table rises to the largest head sizes.
    if (verdict.passed >= closest.passed) closest = std::move(verdict);
  }
  choice.clause =
      closest.passed >= 0 ? closest.clause : std::string("has no ") + name_of(kind) + " kernel in this build";
  return choice;
}

const char* backend_name(Family family) {
  switch (family) {
    case Family::kSm90:
      return "cuda_sm90";
    case Family::kMmaSm80:
      return "cuda_sm80";
    case Family::kTf32:
      return "cuda_tf32";
    case Family::kMmaSm75:
      return "cuda_sm75";
    case Family::kSimt:
      return "cuda_simt";
    case Family::kAny:
      break;
  }
  return "";
}

}  // namespace fovea::cuda
