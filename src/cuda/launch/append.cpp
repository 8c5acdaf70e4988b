// The definitions of append.hpp.
#include "cuda/launch/append.hpp"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <string>

#include "core/status.hpp"
#include "cuda/kernels/append_args.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "cuda/launch/params.hpp"
#include "cuda/launch/run_checks.hpp"

namespace fovea::cuda {
namespace {

const Kernel& append_kernel(DType type, DType keys) {
  for (const Kernel* kernel : kernel_table()) {
    if (kernel->kind == KernelKind::kAppend && kernel->dtype == type &&
        kernel->e4m3_keys == (keys == DType::kE4M3))
      return *kernel;
  }
  throw RequestError(Status::kInternal, "",
                     "this build has no kernel that appends rows of " + std::string(name_of(type)));
}

tile::RowsView rows_view(const TensorDesc& t) {
  return {nullptr, t.stride[0], t.stride[1], t.stride[2]};
}

/// All but pointers. Throws RequestError(kUnsupported) for more rows than the kernel counts.
AppendArgs args_of(const AttentionProblem& p) {
  constexpr int64_t kMostRows = int64_t{1} << 30;
  if (const int64_t rows = std::max(p.total_new, p.total_q); rows > kMostRows) {
    throw RequestError(Status::kUnsupported, "k_new",
                       "k_new: got " + std::to_string(rows) + " rows of k_new or q, expected at most " +
                           std::to_string(kMostRows) + "; append in several calls");
  }
  AppendArgs args;
  args.p = params_of(p);
  args.k_new = rows_view(p[Role::kKNew]);
  args.v_new = rows_view(p[Role::kVNew]);
  args.total_new = static_cast<int>(p.total_new);
  args.new_rows = static_cast<int>(p.new_rows);
  args.cosines.row = p[Role::kRotaryCos].stride[0];
  args.sines.row = p[Role::kRotarySin].stride[0];
  args.angles_are_f32 = p[Role::kRotaryCos].dtype == DType::kF32;
  args.interleaved = p.rotary_interleaved;
  args.by_row = p.rotary_by_row;
  args.positions = static_cast<int>(p.positions);
  args.half = static_cast<int>(p.rotary_half);
  return args;
}

class CudaAppend final : public AppendStep {
 public:
  explicit CudaAppend(const AttentionProblem& problem)
      : context_(primary_context(problem[Role::kQ].device_id)),
        checks_(problem, context_),
        named_places_(named_places_of(problem)),
        args_(args_of(problem)),
        kernel_(append_kernel(problem.dtype, problem[Role::kK].dtype)),
        code_(loaded(kernel_, problem[Role::kQ].device_id)) {
    if (!code_.clause.empty())
      throw RequestError(Status::kUnsupported, "backend", std::string(kernel_.name) + ": " + code_.clause);
  }

  void run(const Buffers& buffers, int32_t* lengths, void* q) const override {
    const ContextScope scope(context_);
    checks_.check(buffers, true);
    AppendArgs args = args_;
    bind(args.p, buffers, named_places_);
    args.k_new.data = buffers.get<char>(Role::kKNew);
    args.v_new.data = buffers.get<char>(Role::kVNew);
    args.cu_seqlens_k_new = buffers.get<const int32_t>(Role::kCuSeqlensKNew);
    args.cosines.data = buffers.get<const char>(Role::kRotaryCos);
    args.sines.data = buffers.get<const char>(Role::kRotarySin);
    args.rotary_positions = buffers.get<const int32_t>(Role::kRotaryPositions);
    args.lengths = lengths;
    args.q_rotated = static_cast<char*>(q);
    if (args.p.batch == 0) return;
    std::array<void*, 1> parameters = {&args};
    const CUresult error = put_on_stream(
        kernel_, code_.function, {.ctas = append_grid<Grid>(args), .early = can_begin_early(kernel_, code_)},
        static_cast<CUstream>(buffers.stream), parameters.data());
    if (error != CUDA_SUCCESS) throw_cuda(kernel_.name, error);
  }

 private:
  CUcontext context_;
  RunChecks checks_;
  NamedPlaces named_places_;
  AppendArgs args_;
  const Kernel& kernel_;
  const LoadedKernel& code_;
};

}  // namespace

std::unique_ptr<const AppendStep> prepare_append(const AttentionProblem& problem, const PrepareOptions&) {
  return std::make_unique<CudaAppend>(problem);
}

}  // namespace fovea::cuda
