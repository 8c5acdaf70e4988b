// Prepares a problem on one family of kernels, and runs it: the definitions of cuda_plan.hpp.
#include "cuda/launch/cuda_plan.hpp"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "cuda/launch/args_binding.hpp"
#include "cuda/launch/decode_clusters.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/kernel_choice.hpp"
#include "cuda/launch/kernel_set.hpp"
#include "cuda/launch/params.hpp"
#include "cuda/launch/run_checks.hpp"
#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {
namespace {

// --- what the two passes do differently ---

template <class Layout>
Layout make_layout(const AttentionProblem& p, const KernelSet& kernels, const PrepareOptions& options);

template <>
ForwardLayout make_layout<ForwardLayout>(const AttentionProblem& p, const KernelSet& kernels,
                                         const PrepareOptions& options) {
  const int device = p[Role::kQ].device_id;
  const int ctas_per_sm = loaded(*kernels.main, device, kernels.text_of(*kernels.main)).ctas_per_sm;
  return forward_layout(p, *kernels.main, properties_of(device).without_sms(options.sm_margin), ctas_per_sm,
                        kernels.can_combine(), options.splits);
}
template <>
BackwardLayout make_layout<BackwardLayout>(const AttentionProblem& p, const KernelSet& kernels,
                                           const PrepareOptions& options) {
  const int device = p[Role::kQ].device_id;
  const LoadedKernel& main = loaded(*kernels.main, device, kernels.text_of(*kernels.main));
  BackwardLayout layout =
      backward_layout(p, *kernels.main, properties_of(device).without_sms(options.sm_margin),
                      main.ctas_per_sm, options.deterministic);
  BackwardArgs& args = layout.args;
  args.adds_dbias = kernels.main_adds_dbias;
  if (args.cluster > 1)  // not all SMs of a GPU lie so that clusters fill them
    args.slots =
        std::min(args.slots, args.cluster * active_clusters(*kernels.main, main, device, args.cluster));
  return layout;
}

/// CTAs of a cluster, where the launch says so; 0: as the kernel was compiled.
int cluster_of(const Kernel& kernel, const ForwardArgs& args) {
  return kernel.splits_in_cluster ? args.cluster_ctas : 0;
}
int cluster_of(const Kernel& kernel, const BackwardArgs& args) {
  return kernel.chain ? args.cluster : 0;
}

Grid grid_of(const Kernel& kernel, const ForwardArgs& args) {
  return kernel.forward_grid ? kernel.forward_grid(args) : default_grid(kernel, args);
}
Grid grid_of(const Kernel& kernel, const BackwardArgs& args) {
  return kernel.backward_grid ? kernel.backward_grid(args) : default_grid(kernel, args);
}

bool takes_part(const Kernel& kernel, const ForwardLayout& layout) {
  const ForwardArgs& args = layout.args;
  if (kernel.kind == KernelKind::kClearCounter) return layout.tile_counter >= 0;
  if (kernel.kind == KernelKind::kAlibiNorms) return args.alibi_norms.wanted;
  if (kernel.kind != KernelKind::kCombine) return true;
  return args.num_splits > 1 && args.part_rows == 0;
}
bool takes_part(const Kernel&, const BackwardLayout&) {
  return true;
}

/// The bits of tile::AlignedBit of outputs that TMA writes, or that are written in vectors of 16 bytes alone.
uint32_t output_bits(const ForwardArgs&) {
  return 0;
}
uint32_t output_bits(const BackwardArgs& args) {
  return (args.adds_dbias ? uint32_t{tile::kAlignedDBias} : 0u) |
         (args.dq_in_vectors ? uint32_t{tile::kAlignedDQ} : 0u);
}

/// What `fovea explain` says behind the main kernel.
std::string details(const KernelSet& kernels, const ForwardArgs& args) {
  std::string text;
  for (const Kernel* kernel : kernels.before) {
    if (kernel->kind == KernelKind::kBf16x3) text += std::string(", operands as bf16x3 by ") + kernel->name;
    if (kernel->kind == KernelKind::kTransposeValues)
      text += std::string(", v transposed by ") + kernel->name;
    if (kernel->kind == KernelKind::kAlibiNorms && args.alibi_norms.wanted)
      text += std::string(", keys in reach of the slopes by ") + kernel->name;
  }
  if (args.pack_group) {
    const int rows = kernels.main->tile_m;
    text += ", " + std::to_string(std::min(args.p.group, rows)) + " query heads in a tile";
  }
  if (kernels.main->splits_in_cluster && args.cluster_ctas > 1)
    text += std::string(args.sharing.heads ? ", heads and keys" : ", keys") + " shared by clusters of " +
            std::to_string(args.cluster_ctas) + " CTAs";
  if (args.part_rows > 0) {
    text += ", keys in " + std::to_string(args.num_splits) + " equal shares";
  } else if (args.num_splits > 1) {
    text +=
        ", keys split in " + std::to_string(args.num_splits) + ", merged by " + kernels.after.front()->name;
  }
  return text;
}
std::string details(const KernelSet& kernels, const BackwardArgs& args) {
  std::string others;
  for (const auto* list : {&kernels.before, &kernels.after}) {
    for (const Kernel* kernel : *list)
      others += (others.empty() ? ", with " : ", ") + std::string(kernel->name);
  }
  return (args.cluster > 1 ? ", dq through clusters of " + std::to_string(args.cluster) : "") +
         (args.adds_dbias ? ", which adds to dbias" : "") + others;
}

/// Whether the kernel begins early where `layout` is that of the run: behind whatever the stream has, but for memsets of the run itself.
bool begins_early(const Kernel& kernel, const LoadedKernel& code, const BackwardLayout& layout) {
  const bool memset_before = kernel.adds_dbias && layout.args.adds_dbias;
  return !memset_before && can_begin_early(kernel, code);
}
bool begins_early(const Kernel& kernel, const LoadedKernel& code, const ForwardLayout&) {
  return can_begin_early(kernel, code);
}

Placement placement_of(const AttentionProblem& p, const Kernel& kernel, const LoadedKernel& code,
                       const ForwardArgs& args) {
  if (kernel.kind != KernelKind::kForward) return {kernel.shared_bytes, true};
  return placement_of(p, kernel, args, properties_of(p[Role::kQ].device_id), code.ctas_per_sm);
}
/// The first launch of a run is better early where its CTAs all find room at once (one sequence of 512 tokens 6 % faster, H200). More of
/// them crowd on the SMs that the launch before leaves first, and take longer (32 sequences, causal, 1 to 1.5 %).
Placement placement_of(const AttentionProblem& p, const Kernel& kernel, const LoadedKernel&,
                       const BackwardArgs& args) {
  constexpr int64_t kMostAnSm = 4;  // as many as its registers allow of bwd_preprocess
  const Grid grid = grid_of(kernel, args);
  const bool few = grid.x * grid.y * grid.z <= kMostAnSm * properties_of(p[Role::kQ].device_id).sm_count;
  return {kernel.shared_bytes, kernel.kind != KernelKind::kPreprocess || few};
}

const auto& binding_of(const ArgsBinding& binding, const ForwardLayout&) {
  return binding.forward;
}
const auto& binding_of(const ArgsBinding& binding, const BackwardLayout&) {
  return binding.backward;
}

// --- the launches of a run ---

struct Launch {
  const Kernel* kernel;
  CUfunction function;
  LaunchShape shape;
};

/// The launches of a run, in order, for pointers of one alignment.
template <class Layout>
struct Launches {
  Layout layout;
  std::vector<Launch> list;  ///< none where there is nothing to compute
  NamedPlaces named_places{};
  bool aligned_only = false;
  bool values_in_keys = false;
  std::string summary;
  std::string clause;  ///< why they cannot be; "" when they can

  void put_on(const Buffers& buffers, const typename Layout::Args& args) const;
};

std::string describe(const Kernel& kernel, int ctas_per_sm, const Grid& grid) {
  const auto text = [](int64_t number) { return std::to_string(number); };
  return std::string(kernel.name) + ", tiles of " + text(kernel.tile_m) + " x " + text(kernel.tile_n) + ", " +
         text(grid.x * grid.y * grid.z) + " CTAs of " + text(kernel.threads) + " threads, " +
         text(ctas_per_sm) + " an SM";
}

/// What launches may take for granted of pointers.
enum class Pointers : uint8_t {
  kAligned,       ///< multiples of 16 bytes
  kAny,           ///< multiples of the size of their elements
  kValuesInKeys,  ///< aligned, and v is k
};

template <class Layout>
Launches<Layout> make_launches(Family family, const AttentionProblem& p, const PrepareOptions& options,
                               Pointers pointers, const char* name_pattern) {
  Launches<Layout> launches;
  const KernelSet kernels =
      choose_kernels(family, p,
                     {.values_in_keys = pointers == Pointers::kValuesInKeys,
                      .any_address = pointers == Pointers::kAny,
                      .name_pattern = name_pattern,
                      .flops = options.splits.batch_invariant ? options.flops_of_sequence : options.flops,
                      .splits = options.splits,
                      .deterministic = options.deterministic,
                      .sm_margin = options.sm_margin});
  launches.clause = kernels.clause;
  if (!launches.clause.empty()) return launches;
  launches.layout = make_layout<Layout>(kernels.problem, kernels, options);
  launches.named_places = named_places_of(kernels.problem);
  if (launches.layout.workspace_size >= Parts::kTooMuch) {
    launches.clause = "would need a workspace of 2^57 bytes or more";
    return launches;
  }
  const typename Layout::Args& args = launches.layout.args;
  for (const Kernel* kernel : kernels.in_order()) {
    if (!takes_part(*kernel, launches.layout)) continue;
    const Grid grid = grid_of(*kernel, args);
    if (std::string clause = grid_cannot_because(grid); !clause.empty()) {
      launches.clause = clause + " (" + kernel->name + ")";
      return launches;
    }
    const LoadedKernel& code = loaded(*kernel, p[Role::kQ].device_id, kernels.text_of(*kernel));
    if (kernel == kernels.main) launches.summary = describe(*kernel, code.ctas_per_sm, grid);
    if (!code.note.empty()) launches.summary += ", " + code.note;
    if (code.local_bytes > 0)
      launches.summary += ", which spills " + std::to_string(code.local_bytes) + " bytes a thread";
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) continue;
    const Placement placement = placement_of(kernels.problem, *kernel, code, args);
    launches.list.push_back(
        {.kernel = kernel,
         .function = code.function,
         .shape = {.ctas = grid,
                   .shared_bytes = static_cast<unsigned>(placement.shared_bytes),
                   .cluster = static_cast<unsigned>(cluster_of(*kernel, args)),
                   .early = placement.even && begins_early(*kernel, code, launches.layout)}});
  }
  launches.summary += details(kernels, args);
  if (p.pass == Pass::kForward && options.splits.batch_invariant)
    launches.summary += ", the same in any batch";
  launches.aligned_only = kernels.main->aligned_only;
  launches.values_in_keys = kernels.main->values_in_keys;
  return launches;
}

template <class Layout>
void Launches<Layout>::put_on(const Buffers& buffers, const typename Layout::Args& args) const {
  alignas(64) std::array<std::byte, kMaxArgsBytes>
      own_args;  // not initialised: a binding writes what its kernel reads
  for (const Launch& l : list) {
    const Kernel& kernel = *l.kernel;
    std::array<void*, 1> parameters = {const_cast<typename Layout::Args*>(&args)};
    if (kernel.binding != nullptr) {
      binding_of(*kernel.binding, layout)(
          {kernel, layout, args, static_cast<char*>(buffers.workspace), buffers.stream, buffers.arriving},
          own_args.data());
      parameters = {own_args.data()};
    }
    const CUresult error =
        put_on_stream(kernel, l.function, l.shape, static_cast<CUstream>(buffers.stream), parameters.data());
    if (error != CUDA_SUCCESS) throw_cuda(kernel.name, error);
  }
}

// --- the plan ---

template <class Layout>
class CudaPlan final : public Prepared {
 public:
  /// `any_address` runs where pointers are no multiples of 16 bytes and the first launches need them to be; `values_in_keys` where v is k.
  CudaPlan(const AttentionProblem& problem, Launches<Layout> first,
           std::optional<Launches<Layout>> any_address, std::optional<Launches<Layout>> values_in_keys);

  void run(const Buffers& buffers) const override;

 private:
  const Launches<Layout>& launches_for(const tile::AttentionParams& p) const;
  void bound_an_empty_sequence(tile::AttentionParams& p, char* workspace, void* stream) const;
  void write_rng_state(const Buffers& buffers) const;

  CUcontext context_;
  RunChecks checks_;
  Launches<Layout> first_;
  std::optional<Launches<Layout>> any_address_, values_in_keys_;
  uint32_t needs_aligned_ = 0;  ///< bits of tile::AlignedBit without which a run takes any_address_
  int64_t no_sequences_ =
      -1;  ///< where the bounds of that empty sequence lie in the workspace; -1: there are sequences
  bool writes_rng_state_;  ///< without a launch that would write it
};

template <class Layout>
CudaPlan<Layout>::CudaPlan(const AttentionProblem& problem, Launches<Layout> first,
                           std::optional<Launches<Layout>> any_address,
                           std::optional<Launches<Layout>> values_in_keys)
    : context_(primary_context(problem[Role::kQ].device_id)),
      checks_(problem, context_),
      first_(std::move(first)),
      any_address_(std::move(any_address)),
      values_in_keys_(std::move(values_in_keys)),
      writes_rng_state_(problem.pass == Pass::kForward && problem.has(Role::kRngState) &&
                        first_.list.empty()) {
  summary = first_.summary;
  int64_t size = first_.layout.workspace_size;
  if (first_.aligned_only) needs_aligned_ = input_bits(problem) | output_bits(first_.layout.args);
  if (any_address_) {
    size = std::max(size, any_address_->layout.workspace_size);
    summary += "; for pointers that are no multiples of 16 bytes " + any_address_->summary;
  }
  if (values_in_keys_) {
    size = std::max(size, values_in_keys_->layout.workspace_size);
    summary += "; where v is the first columns of k " + values_in_keys_->summary;
  }
  if (problem.packed && problem.batch == 0) {
    Parts parts;
    parts.take(size, 1);
    no_sequences_ = parts.take(2, sizeof(int32_t));
    size = parts.size();
  }
  workspace_size = static_cast<size_t>(size);
}

template <class Layout>
void CudaPlan<Layout>::bound_an_empty_sequence(tile::AttentionParams& p, char* workspace,
                                               void* stream) const {
  auto* bounds = reinterpret_cast<int32_t*>(workspace + no_sequences_);
  set_words(bounds, 0, 2, stream);
  p.cu_seqlens_q = p.cu_seqlens_k = bounds;
  p.seqused_q = p.seqused_k = nullptr;
}

/// Two numbers of 64 bits, as four words of 32 bits.
template <class Layout>
void CudaPlan<Layout>::write_rng_state(const Buffers& buffers) const {
  auto* state = buffers.get<uint32_t>(Role::kRngState);
  const std::array<uint64_t, 2> numbers = {buffers.seed, buffers.offset};
  for (size_t word = 0; word < 4; ++word) {
    set_words(state + word, static_cast<unsigned>(numbers[word / 2] >> (word % 2 * 32)), 1, buffers.stream);
  }
}

template <class Layout>
const Launches<Layout>& CudaPlan<Layout>::launches_for(const tile::AttentionParams& p) const {
  if ((p.aligned16 & needs_aligned_) != needs_aligned_) {
    if (!any_address_)
      throw RequestError(Status::kInternal, "", "an address is no multiple of 16 bytes where keys arrive");
    return *any_address_;
  }
  return values_in_keys_ && p.v.data == p.k.data ? *values_in_keys_ : first_;
}

template <class Layout>
void CudaPlan<Layout>::run(const Buffers& buffers) const {
  const ContextScope scope(context_);
  checks_.check(buffers, workspace_size > 0);
  const Launches<Layout>* launches = &first_;
  typename Layout::Args args = launches->layout.args;
  cuda::bind(args.p, buffers, launches->named_places);
  if (const Launches<Layout>& others = launches_for(args.p); &others != launches) {
    launches = &others;
    args = launches->layout.args;
    cuda::bind(args.p, buffers, launches->named_places);
  }
  char* workspace = static_cast<char*>(buffers.workspace);
  launches->layout.point_into(workspace, args);
  if (no_sequences_ >= 0) bound_an_empty_sequence(args.p, workspace, buffers.stream);
  if (writes_rng_state_) write_rng_state(buffers);
  launches->put_on(buffers, args);
}

template <class Layout>
Preparation prepare_pass(Family family, const AttentionProblem& problem, const PrepareOptions& options) {
  if (std::string clause = never_because(problem, options.deterministic); !clause.empty())
    return {nullptr, std::move(clause)};
  const AttentionProblem p = with_a_sequence(problem);
  const char* pattern = kernel_name_pattern();
  Launches<Layout> first = make_launches<Layout>(family, p, options, Pointers::kAligned, pattern);
  if (!first.clause.empty()) return {nullptr, std::move(first.clause)};
  std::optional<Launches<Layout>> any_address, values_in_keys;
  if (first.aligned_only &&
      p.arriving_keys == 0) {  // a plan is for any pointers, unless src/distributed knows them
    any_address = make_launches<Layout>(family, p, options, Pointers::kAny, pattern);
    if (!any_address->clause.empty()) return {nullptr, std::move(any_address->clause)};
  }
  if (problem.pass == Pass::kForward && first.aligned_only && p.arriving_keys == 0 &&
      values_may_be_in_keys(p)) {
    values_in_keys = make_launches<Layout>(family, p, options, Pointers::kValuesInKeys, pattern);
    if (!values_in_keys->clause.empty() || !values_in_keys->values_in_keys) values_in_keys.reset();
  }
  return {std::make_unique<CudaPlan<Layout>>(problem, std::move(first), std::move(any_address),
                                             std::move(values_in_keys)),
          ""};
}

}  // namespace

Preparation try_prepare(Family family, const AttentionProblem& problem, const PrepareOptions& options) {
  return problem.pass == Pass::kForward ? prepare_pass<ForwardLayout>(family, problem, options)
                                        : prepare_pass<BackwardLayout>(family, problem, options);
}

}  // namespace fovea::cuda
