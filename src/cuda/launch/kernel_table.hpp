// The table of kernels: what was compiled, what each kernel can do, and the one predicate that decides
// support and choice and is what `fovea explain` prints.
//
// Contract with the generated translation units (tools/make_instances.py), one for each family, element type
// and head size. A unit includes the family's header from cuda/kernels, and defines one function that lists
// its kernels:
//
//   namespace fovea::cuda {
//   std::span<const Kernel> kernels_fwd_sm80_bf16_d128() {
//     static const Kernel kernels[] = {
//         {.name = "fwd_sm80_bf16_d128", .kind = KernelKind::kForward, .family = Family::kMmaSm80, .dtype =
//         DType::kBF16,
//          .entry = reinterpret_cast<const void*>(&forward_mma<kConfig>), ...},
//     };
//     return kernels;
//   }
//   }
//
// One further generated unit (plain C++) lists the functions: it defines kernel_units(). A build without CUDA
// has no units and takes the empty kernel_units() of no_kernels.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/problem.hpp"
#include "cuda/kernels/args.hpp"

namespace fovea::cuda {

/// A family becomes a backend: kSm90 is "cuda_sm90", kMmaSm80 "cuda_sm80", kTf32 "cuda_tf32", kMmaSm75
/// "cuda_sm75", kSimt "cuda_simt". kAny: kernels that serve every family (combine, dsink, ...). The order is
/// that of preference.
enum class Family : uint8_t { kSm90, kMmaSm80, kTf32, kMmaSm75, kSimt, kAny };
inline constexpr int kFamilyCount = 5;  ///< without kAny

enum class KernelKind : uint8_t {
  kForward,   ///< (ForwardArgs): o and lse, or the parts of splits
  kSplit,     ///< (ForwardArgs): operands in parts, before kForward
  kCombine,   ///< (ForwardArgs): merges the parts of splits
  kBackward,  ///< (BackwardArgs): dk, dv, sums of dq
  kPrepare,   ///< (BackwardArgs): row statistics; zeros where sums are accumulated
  kFinish,    ///< (BackwardArgs): dq from its sums
  kDBias,     ///< (BackwardArgs): dbias
  kDSink,     ///< (BackwardArgs): dsink
};

/// Terms that a kernel must know about to be right; those that no kernel can go without (window, causal,
/// groups of heads, packed and partly used sequences, lse, dlse, any strides) have no bit.
enum Term : uint32_t {
  kTermSoftcap = 1u << 0,
  kTermAlibi = 1u << 1,
  kTermBias = 1u << 2,
  kTermMask = 1u << 3,
  kTermBlockMask = 1u << 4,
  kTermDropout = 1u << 5,
  kTermSink = 1u << 6,
  kTermNegativeScale = 1u << 7,  ///< scale <= 0 in float32
  kTermLse = 1u << 8,            ///< lse is asked for, or parts are to be merged by it
};
inline constexpr uint32_t kNoTerms = 0;
/// Free in nearly every kernel: they only enter the end of a row.
inline constexpr uint32_t kPlainTerms = kTermSink | kTermLse;
inline constexpr uint32_t kAllTerms = (1u << 9) - 1;

/// CTAs of a launch. Any of them 0: nothing is launched.
struct Grid {
  int64_t x = 0, y = 1, z = 1;
};

struct Kernel {
  const char* name = "";  ///< "fwd_sm80_bf16_d128"; unique, and what errors and `fovea explain` say
  KernelKind kind = KernelKind::kForward;
  Family family = Family::kAny;
  DType dtype = DType::kF32;  ///< of q, k, v
  bool any_dtype = false;     ///< reads no tensor of the problem's type (combine of parts, dsink)
  /// The __global__ function. Null only in tests of the table.
  const void* entry = nullptr;
  /// CTAs of a launch, a host function that the family's header gives beside the kernel. It is asked once,
  /// when a plan is made: sizes, pack_group and num_splits of the arguments are set, pointers are not.
  /// Forward kinds fill in the first, backward kinds the second.
  Grid (*forward_grid)(const ForwardArgs& args) = nullptr;
  Grid (*backward_grid)(const BackwardArgs& args) = nullptr;
  int head_dim = 0;    ///< largest head size of q and k that it does (it pads to this); 0: any
  int head_dim_v = 0;  ///< likewise of v and o; 0: any
  /// Columns of v and o that one CTA computes; 0: all. The grid is larger by ceil(head_dim_v / value_slice).
  int value_slice = 0;
  uint32_t terms = kAllTerms;  ///< which terms it knows
  bool can_split = true;       ///< forward: num_splits > 1
  bool can_pack = true;        ///< forward: pack_group
  /// Reads q, k, v and d_o in vectors of 16 bytes only. Plans then hold a second kernel, for runs whose
  /// pointers are no multiples of 16.
  bool aligned_only = false;
  /// Copies by TMA: its arguments are a TmaForwardArgs, with boxes of tile_n keys.
  bool tma = false;
  int parts = 1;               ///< forward: of an operand, made by a kSplit kernel before
  bool writes_dq = false;      ///< backward: dq is complete, with no sums to finish
  int tile_m = 0, tile_n = 0;  ///< rows of queries and keys of one tile
  int threads = 0;
  size_t shared_bytes = 0;  ///< dynamic shared memory of one CTA
  int64_t min_keys = 0;     ///< longest sequence of keys below which kernels of smaller tiles are faster
  /// Percent of the rate that the fastest of the kernels of the same head sizes reaches on large problems.
  /// Those that have one are chosen by the time that their tiles would take: large tiles waste less, small
  /// ones fill more SMs.
  int rate = 0;
  int min_capability = 75;  ///< 10 * major + minor
  int max_capability = 0;   ///< 0: no limit
};

using KernelUnit = std::span<const Kernel> (*)();
/// Generated: every unit of this build.
std::span<const KernelUnit> kernel_units();

/// What the predicate and the heuristics need to know of a GPU. Plain data, so that tests make up their own.
struct DeviceProperties {
  int id = 0;
  std::string name;
  int capability = 0;  ///< 10 * major + minor
  int sm_count = 0;
  size_t shared_per_sm = 0;
  size_t shared_per_cta = 0;  ///< after opting in
  int threads_per_sm = 0;
  size_t memory_bytes = 0, l2_bytes = 0;
};

/// "" when the kernel can do its share of the problem on the device, else the first clause that fails. Looks
/// at all but kind and family.
/// With `any_address` for pointers that are multiples of the size of their elements only.
std::string cannot_because(const Kernel& kernel, const AttentionProblem& problem,
                           const DeviceProperties& device, bool any_address = false);

/// The terms that a problem has. A forward that is to write rng_state counts as one with dropout: only
/// kernels that know dropout write it.
uint32_t terms_of(const AttentionProblem& problem);

/// All kernels of this build, in order of preference: by kind, family, fewer terms, smaller head sizes, as
/// listed.
std::span<const Kernel* const> kernel_table();
/// The same order for a list of one's own (tests).
void sort_by_preference(std::span<const Kernel*> kernels);

struct Choice {
  const Kernel* kernel = nullptr;
  std::string clause;  ///< why there is none: what rules out the kernel that comes closest
};
/// The first kernel of this kind and family (or of every family) that can.
Choice choose_kernel(std::span<const Kernel* const> table, KernelKind kind, Family family,
                     const AttentionProblem& problem, const DeviceProperties& device,
                     bool any_address = false);

const char* backend_name(Family family);

}  // namespace fovea::cuda
