#include "cuda/launch/cuda_plan.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#include "core/status.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/params.hpp"
#include "cuda/launch/tensor_maps.hpp"

namespace fovea::cuda {
namespace {

/// Whether the tensor has any bytes: a dimension of size 0 leaves none, unless it is never stepped along.
bool occupies_memory(const TensorDesc& t) {
  for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
    if (t.shape[i] == 0 && t.stride[i] != 0) return false;
  }
  return t.present;
}

/// The kernels that a problem takes; null: not needed.
struct Kernels {
  const Kernel* main = nullptr;
  const Kernel* split = nullptr;    ///< null as well where the main kernel needs none
  const Kernel* combine = nullptr;  ///< null as well where the build has none: then keys are not split
  const Kernel* prepare = nullptr;
  const Kernel* finish = nullptr;
  const Kernel* dbias = nullptr;
  const Kernel* dsink = nullptr;
  std::string clause;  ///< what is missing
};

/// What takes the runs of a plan whose pointers are no multiples of 16 bytes: TMA copies no others at all.
Family family_for(Family family, bool any_address) {
  return family == Family::kSm90 && any_address ? Family::kMmaSm80 : family;
}

Kernels choose(Family wanted, const AttentionProblem& problem, bool any_address = false) {
  const Family family = family_for(wanted, any_address);
  const DeviceProperties& device = properties_of(problem[Role::kQ].device_id);
  Kernels kernels;
  const auto find = [&](KernelKind kind, bool optional = false) -> const Kernel* {
    if (!kernels.clause.empty()) return nullptr;
    Choice choice = choose_kernel(kernel_table(), kind, family, problem, device, any_address);
    std::string clause = choice.kernel ? loaded(*choice.kernel, device.id).clause : std::move(choice.clause);
    if (clause.empty()) return choice.kernel;
    if (!optional) kernels.clause = std::move(clause);
    return nullptr;
  };
  if (problem.pass == Pass::kForward) {
    kernels.main = find(KernelKind::kForward);
    if (kernels.main != nullptr && kernels.main->parts > 1) kernels.split = find(KernelKind::kSplit);
    kernels.combine = find(KernelKind::kCombine, true);
  } else {
    kernels.main = find(KernelKind::kBackward);
    kernels.prepare = find(KernelKind::kPrepare);
    if (kernels.main == nullptr || !kernels.main->writes_dq) kernels.finish = find(KernelKind::kFinish);
    if (occupies_memory(problem[Role::kDBias])) kernels.dbias = find(KernelKind::kDBias);
    if (problem.has(Role::kDSink)) kernels.dsink = find(KernelKind::kDSink);
  }
  return kernels;
}

Grid grid_of(const Kernel& kernel, const ForwardArgs& args) {
  return kernel.forward_grid ? kernel.forward_grid(args) : default_grid(kernel, args);
}
Grid grid_of(const Kernel& kernel, const BackwardArgs& args) {
  return kernel.backward_grid ? kernel.backward_grid(args) : default_grid(kernel, args);
}

/// As the kernels see it: a batch of no packed sequences is one of an empty sequence.
AttentionProblem with_a_sequence(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  if (p.packed && p.batch == 0) p.batch = 1;
  return p;
}

ForwardLayout layout_forward(const AttentionProblem& p, const Kernels& kernels) {
  const int device = p[Role::kQ].device_id;
  return forward_layout(p, *kernels.main, properties_of(device), loaded(*kernels.main, device).ctas_per_sm,
                        kernels.combine != nullptr);
}
BackwardLayout layout_backward(const AttentionProblem& p, const Kernels& kernels, bool deterministic) {
  const int device = p[Role::kQ].device_id;
  return backward_layout(p, *kernels.main, properties_of(device), loaded(*kernels.main, device).ctas_per_sm,
                         deterministic);
}

std::string too_large(int64_t workspace_size) {
  return workspace_size >= Parts::kTooMuch ? "would need a workspace of 2^57 bytes or more" : "";
}

template <class Args>
std::string launches_cannot_because(const Kernels& kernels, const Args& args) {
  for (const Kernel* kernel : {kernels.main, kernels.split, kernels.combine, kernels.prepare, kernels.finish,
                               kernels.dbias, kernels.dsink}) {
    if (kernel == nullptr) continue;
    if (std::string clause = grid_cannot_because(grid_of(*kernel, args)); !clause.empty()) {
      return clause + " (" + kernel->name + ")";
    }
  }
  return "";
}

std::string describe(const Kernel& kernel, int ctas_per_sm, const Grid& grid) {
  std::string text = kernel.name;
  const auto add = [&](const char* before, int64_t number) {
    text.append(before).append(std::to_string(number));
  };
  add(", tiles of ", kernel.tile_m);
  add(" x ", kernel.tile_n);
  add(", ", grid.x * grid.y * grid.z);
  add(" CTAs of ", kernel.threads);
  add(" threads, ", ctas_per_sm);
  text += " an SM";
  return text;
}

/// `count` words of 32 bits at `to`, in the order of the stream.
void set_words(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  if (const CUresult error = driver().memset_d32_async(to, value, count, stream); error != CUDA_SUCCESS)
    throw_cuda("cuMemsetD32Async", error);
}

}  // namespace

std::string CudaPlan::cannot_because(Family family, const AttentionProblem& problem) {
  const AttentionProblem p = with_a_sequence(problem);
  const auto layouts_cannot = [&](const Kernels& kernels) -> std::string {
    if (p.pass == Pass::kForward) {
      const ForwardLayout layout = layout_forward(p, kernels);
      std::string clause = too_large(layout.workspace_size);
      return clause.empty() ? launches_cannot_because(kernels, layout.args) : clause;
    }
    for (const bool deterministic : {false, true}) {
      const BackwardLayout layout = layout_backward(p, kernels, deterministic);
      std::string clause = too_large(layout.workspace_size);
      if (clause.empty()) clause = launches_cannot_because(kernels, layout.args);
      if (!clause.empty()) return clause;
    }
    return "";
  };
  // A plan is for any pointers, so the kernels for those that are not aligned must be able, too.
  for (const bool any_address : {false, true}) {
    const Kernels kernels = choose(family, p, any_address);
    std::string clause = kernels.clause.empty() ? layouts_cannot(kernels) : kernels.clause;
    if (!clause.empty()) return clause;
    if (!kernels.main->aligned_only) break;
  }
  return "";
}

CudaPlan::CudaPlan(Family family, const AttentionProblem& problem, bool deterministic)
    : pass_(problem.pass),
      device_(problem[Role::kQ].device_id),
      dtype_(problem.dtype),
      context_(primary_context(device_)),
      writes_rng_state_(problem.pass == Pass::kForward && problem.has(Role::kRngState)) {
  for (size_t i = 0; i < problem.tensors.size(); ++i) {
    const Role role = static_cast<Role>(i);
    if (occupies_memory(problem[role])) memory_.push_back({role, name_of(role)});
  }
  const AttentionProblem p = with_a_sequence(problem);
  first_ = make_variant(family, p, deterministic, false);
  summary = first_.summary;
  int64_t size = first_.workspace_size;
  if (first_.aligned_only) {
    needs_aligned_ = input_bits(pass_);
    any_address_ = make_variant(family, p, deterministic, true);
    size = std::max(size, any_address_->workspace_size);
    summary += "; for pointers that are no multiples of 16 bytes " + any_address_->summary;
  }
  if (p.batch != problem.batch) {
    Parts parts;
    parts.take(size, 1);
    no_sequences_ = parts.take(2, sizeof(int32_t));
    size = parts.size();
  }
  workspace_size = static_cast<size_t>(size);
}

template <class Args>
void CudaPlan::add(Variant& variant, const Kernel& kernel, const Args& args) const {
  const Grid grid = grid_of(kernel, args);
  const LoadedKernel& code = loaded(kernel, device_);
  const auto dimension = [](int64_t n) { return static_cast<unsigned>(n); };
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0;
  if (!empty) {
    variant.launches.push_back(
        {&kernel, code.function, dimension(grid.x), dimension(grid.y), dimension(grid.z)});
  }
  if (kernel.kind == KernelKind::kForward || kernel.kind == KernelKind::kBackward) {
    variant.summary = describe(kernel, code.ctas_per_sm, grid);
    variant.aligned_only = kernel.aligned_only;
    if (kernel.tma) variant.tma = &kernel;
  }
}

CudaPlan::Variant CudaPlan::make_variant(Family family, const AttentionProblem& p, bool deterministic,
                                         bool any_address) const {
  const Kernels kernels = choose(family, p, any_address);
  Variant v;
  if (pass_ == Pass::kForward) {
    const ForwardLayout layout = layout_forward(p, kernels);
    v.forward = layout.args;
    v.part_o = layout.part_o;
    v.part_lse = layout.part_lse;
    v.workspace_size = layout.workspace_size;
    v.split_q = layout.split_q;
    v.split_k = layout.split_k;
    v.split_v = layout.split_v;
    v.tile_counter = layout.tile_counter;
    if (kernels.split != nullptr) add(v, *kernels.split, v.forward);
    add(v, *kernels.main, v.forward);
    if (kernels.split != nullptr) v.summary += std::string(", operands in parts by ") + kernels.split->name;
    if (v.forward.pack_group) v.summary += ", " + std::to_string(p.group()) + " query heads in a tile";
    if (v.forward.num_splits > 1) {
      add(v, *kernels.combine, v.forward);
      v.summary +=
          ", keys split in " + std::to_string(v.forward.num_splits) + ", merged by " + kernels.combine->name;
    }
    return v;
  }
  const BackwardLayout layout = layout_backward(p, kernels, deterministic);
  v.backward = layout.args;
  v.lse_log2 = layout.lse_log2;
  v.delta = layout.delta;
  v.dq_sum = layout.dq_sum;
  v.turns = layout.turns;
  v.workspace_size = layout.workspace_size;
  std::string others;
  // Each reads what those before it wrote, in the order of the stream.
  for (const Kernel* kernel : {kernels.prepare, kernels.main, kernels.finish, kernels.dbias, kernels.dsink}) {
    if (kernel == nullptr) continue;
    add(v, *kernel, v.backward);
    if (kernel != kernels.main) others += (others.empty() ? "" : ", ") + std::string(kernel->name);
  }
  v.summary += ", with " + others;
  return v;
}

void CudaPlan::check_memory(const char* name, const void* pointer, const char* remedy) const {
  const cuda::Memory memory = memory_of(pointer);
  if (memory.place == Place::kManaged || memory.place == Place::kUnknown) return;
  if (memory.place == Place::kDevice && memory.device == device_) return;
  throw_invalid(name, text_of(memory),
                "memory of cuda:" + std::to_string(device_) + ", where the plan's tensors are", remedy);
}

void CudaPlan::check_stream(CUstream stream) const {
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
    return;  // of any device
  const Driver& d = driver();
  // The context first: to ask a capturing stream for its device would break the capture. Only streams of
  // other contexts, green ones of this device among them, are asked further.
  CUcontext context = nullptr;
  const CUresult error = d.stream_get_ctx(stream, &context);
  if (error == CUDA_SUCCESS && context == context_) return;
  if (d.stream_get_device != nullptr) {
    CUdevice owner = 0;
    if (const CUresult device_error = d.stream_get_device(stream, &owner); device_error != CUDA_SUCCESS)
      throw_cuda("stream", device_error);
    if (owner == device_) return;
    throw_invalid("stream", "a stream of cuda:" + std::to_string(owner),
                  "one of cuda:" + std::to_string(device_) + ", where the plan's tensors are",
                  "make the stream while that device is current");
  }
  if (error != CUDA_SUCCESS) throw_cuda("stream", error);
  throw_invalid("stream", "a stream of another device or context",
                "one of cuda:" + std::to_string(device_) + ", where the plan's tensors are",
                "make the stream while that device is current");
}

tile::AttentionParams& params_in(ForwardArgs& args) {
  return args.p;
}
tile::AttentionParams& params_in(BackwardArgs& args) {
  return args.p;
}
/// Kernels without TMA see the ForwardArgs that it begins with.
tile::AttentionParams& params_in(TmaForwardArgs& args) {
  static_assert(offsetof(TmaForwardArgs, f) == 0);
  return args.f.p;
}

template <class Args>
void CudaPlan::launch(const Variant& variant, Args& args, const Buffers& buffers) const {
  const Driver& d = driver();
  const auto stream = static_cast<CUstream>(buffers.stream);
  if (no_sequences_ >= 0) {
    auto* bounds = reinterpret_cast<int32_t*>(static_cast<char*>(buffers.workspace) + no_sequences_);
    set_words(reinterpret_cast<CUdeviceptr>(bounds), 0, 2, stream);
    tile::AttentionParams& p = params_in(args);
    p.cu_seqlens_q = p.cu_seqlens_k = bounds;
    p.seqused_q = p.seqused_k = nullptr;
  }
  if (writes_rng_state_ && variant.launches.empty()) {
    // Kernels write it; here are none. Two 64-bit numbers, as four words of 32 bits.
    const auto state = reinterpret_cast<CUdeviceptr>(params_in(args).rng_state);
    const std::array<uint64_t, 2> numbers = {buffers.seed, buffers.offset};
    for (size_t word = 0; word < 4; ++word) {
      const auto value = static_cast<unsigned>(numbers[word / 2] >> (word % 2 * 32));
      set_words(state + word * 4, value, 1, stream);
    }
  }
  std::array<void*, 1> parameters = {&args};
  for (const Launch& l : variant.launches) {
    const CUresult error =
        d.launch_kernel(l.function, l.x, l.y, l.z, static_cast<unsigned>(l.kernel->threads), 1, 1,
                        static_cast<unsigned>(l.kernel->shared_bytes), stream, parameters.data(), nullptr);
    if (error != CUDA_SUCCESS) throw_cuda(l.kernel->name, error);
  }
}

void CudaPlan::run(const Buffers& buffers) const {
  const ContextScope scope(context_);
  for (const Memory& m : memory_) {
    if (const void* pointer = buffers.data[index_of(m.role)])
      check_memory(m.name, pointer, "copy the tensor there, or make a plan for where it is");
  }
  if (workspace_size > 0)
    check_memory("workspace", buffers.workspace, "take it from fovea_workspace_create, or cudaMalloc");
  check_stream(static_cast<CUstream>(buffers.stream));

  char* workspace = static_cast<char*>(buffers.workspace);
  const auto part = [&](int64_t offset) { return reinterpret_cast<float*>(workspace + offset); };
  if (pass_ == Pass::kForward) {
    ForwardArgs args = first_.forward;
    bind(args.p, buffers);
    const Variant& v = variant_for(args.p);
    if (&v != &first_) {
      args = v.forward;
      bind(args.p, buffers);
    }
    if (args.num_splits > 1) {
      args.part_o = part(v.part_o);
      args.part_lse = part(v.part_lse);
    }
    if (v.forward.split_columns > 0) {
      args.split_q = workspace + v.split_q;
      args.split_k = workspace + v.split_k;
      args.split_v = workspace + v.split_v;
    }
    if (v.tma != nullptr && !v.launches.empty()) {
      TmaForwardArgs with_maps = with_tensor_maps(args, dtype_, v.tma->tile_n, v.tma->name);
      if (v.tile_counter >= 0) {
        with_maps.tile_counter = reinterpret_cast<int*>(workspace + v.tile_counter);
        set_words(reinterpret_cast<CUdeviceptr>(with_maps.tile_counter), 0, 1,
                  static_cast<CUstream>(buffers.stream));
      }
      launch(v, with_maps, buffers);
    } else {
      launch(v, args, buffers);
    }
  } else {
    BackwardArgs args = first_.backward;
    bind(args.p, buffers);
    const Variant& v = variant_for(args.p);
    if (&v != &first_) {
      args = v.backward;
      bind(args.p, buffers);
    }
    args.lse_log2 = part(v.lse_log2);
    args.delta = part(v.delta);
    args.dq_sum = part(v.dq_sum);
    if (v.turns >= 0) args.turns = reinterpret_cast<int*>(workspace + v.turns);
    launch(v, args, buffers);
  }
}

}  // namespace fovea::cuda
