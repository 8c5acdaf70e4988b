// cuda::merge of cuda.hpp: launches of one kernel, each of which takes some of the parts.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>

#include "core/status.hpp"
#include "cuda/kernels/merge_args.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/kernel_set.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "cuda/launch/run_checks.hpp"

namespace fovea::cuda {
namespace {

const Kernel& merge_kernel() {
  for (const Kernel* kernel : kernel_table()) {
    if (kernel->kind == KernelKind::kMerge) return *kernel;
  }
  throw RequestError(Status::kInternal, "", "this build has no kernel that merges");
}

MergePart part_of(const TensorDesc& o, const TensorDesc& lse) {
  MergePart part;
  part.o = {static_cast<char*>(o.data), o.stride[0], o.stride[1], o.stride[2]};
  part.lse = {static_cast<float*>(lse.data), lse.stride[0], lse.stride[1], lse.stride[2]};
  part.type = o.dtype;
  return part;
}

bool starts_rows_at_vectors(const TensorDesc& o) {
  constexpr int64_t kVector = 16;
  const int64_t size = size_of(o.dtype);
  const bool strides =
      std::all_of(o.stride.begin(), o.stride.begin() + 3, [&](int64_t s) { return s * size % kVector == 0; });
  return strides && o.shape[3] % kColumns == 0 && reinterpret_cast<uintptr_t>(o.data) % kVector == 0;
}

/// o in float32 and its lse between launches, compact: rows of one sequence after the other.
class Scratch {
 public:
  Scratch(const TensorDesc& o, CUstream stream) : stream_(stream) {
    const int64_t rows = o.shape[0] * o.shape[1] * o.shape[2];
    void* memory = nullptr;
    const size_t bytes = static_cast<size_t>(rows * (o.shape[3] + 1)) * sizeof(float);
    if (const cudaError_t error = cudaMallocAsync(&memory, bytes, stream); error != cudaSuccess) {
      cudaGetLastError();  // ours, and now told
      throw RequestError(error == cudaErrorMemoryAllocation ? Status::kOutOfMemory : Status::kCudaError, "",
                         std::to_string(bytes) + " bytes for sums of more than " +
                             std::to_string(kMostMergeParts) + " parts: " + cudaGetErrorString(error) +
                             "; merge fewer at a time");
    }
    float* const sums = static_cast<float*>(memory);
    const int64_t row = o.shape[2] * o.shape[3];
    part_.o = {static_cast<char*>(memory), o.shape[1] * row, row, o.shape[3]};
    part_.lse = {sums + rows * o.shape[3], o.shape[1] * o.shape[2], 1, o.shape[2]};
    part_.type = DType::kF32;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (cudaFreeAsync(part_.o.data, stream_) != cudaSuccess) cudaGetLastError();
  }
  const MergePart& part() const { return part_; }

 private:
  CUstream stream_;
  MergePart part_;
};

void launch(const Kernel& kernel, const LoadedKernel& code, MergeArgs& args, CUstream stream) {
  // What a launch takes along x, and along y and z; warps and CTAs take what is left behind those of their own.
  constexpr int64_t kMostX = std::numeric_limits<int32_t>::max(), kMostYZ = 65535;
  constexpr int64_t kWarps = kMergeThreads / 32;
  const auto least = [](int64_t a, int64_t b) { return static_cast<unsigned>(std::min(a, b)); };
  const int64_t groups = merge_groups(args.rows), inner = args.heads_inside ? args.heads : groups,
                outer = args.heads_inside ? groups : args.heads;
  std::array<void*, 1> parameters = {&args};
  const CUresult error = driver().launch_kernel(code.function, least((inner + kWarps - 1) / kWarps, kMostX),
                                                least(outer, kMostYZ), least(args.batch, kMostYZ),
                                                static_cast<unsigned>(kernel.threads), 1, 1, 0, stream,
                                                parameters.data(), nullptr);
  if (error != CUDA_SUCCESS) throw_cuda(kernel.name, error);
}

}  // namespace

void load_merge(int device) {
  const ContextScope scope(primary_context(device));
  usable(merge_kernel(), device);
}

void merge(std::span<const TensorDesc> o_parts, std::span<const TensorDesc> lse_parts, const TensorDesc& o,
           const TensorDesc& lse, void* given_stream) {
  const int device = o.device_id;
  const auto stream = static_cast<CUstream>(given_stream);
  if (const std::string& missing = driver().missing; !missing.empty())
    throw RequestError(Status::kUnsupported, "o",
                       "o: got memory of cuda:" + std::to_string(device) + ", but " + missing);
  check_device("o", device);
  const CUcontext context = primary_context(device);
  const ContextScope scope(context);
  constexpr const char* kOwner = "the tensors of the call";
  const auto check = [&](const std::string& name, const TensorDesc& t) {
    if (occupies_memory(t)) check_memory(name.c_str(), t.data, device, kOwner, "copy the tensor there");
  };
  check_stream(stream, device, context, kOwner);
  MergeArgs args;
  args.batch = o.shape[0];
  args.rows = o.shape[1];
  args.heads = o.shape[2];
  args.columns = o.shape[3];
  args.vectors =
      starts_rows_at_vectors(o) && std::all_of(o_parts.begin(), o_parts.end(), starts_rows_at_vectors);
  // With fewer heads than a CTA has warps some would have nothing to do.
  args.heads_inside = args.heads >= kMergeThreads / 32 && o.stride[2] < o.stride[1];
  if (args.batch * args.rows * args.heads == 0) return;
  check("o", o);
  check("lse", lse);
  for (size_t i = 0; i < o_parts.size(); ++i) {
    const auto indexed = [i](std::string name) {
      return name.append("[").append(std::to_string(i)).append("]");
    };
    check(indexed("o_parts"), o_parts[i]);
    check(indexed("lse_parts"), lse_parts[i]);
  }
  const Kernel& kernel = merge_kernel();
  const LoadedKernel& code = usable(kernel, device);

  // More parts than one launch takes: what is merged so far becomes the first part of the next.
  std::optional<Scratch> scratch;
  if (o_parts.size() > kMostMergeParts) scratch.emplace(o, stream);
  for (size_t next = 0; next < o_parts.size();) {
    args.count = 0;
    if (next > 0) args.parts[args.count++] = scratch->part();
    while (next < o_parts.size() && args.count < kMostMergeParts) {
      args.parts[args.count++] = part_of(o_parts[next], lse_parts[next]);
      ++next;
    }
    args.result = next < o_parts.size() ? scratch->part() : part_of(o, lse);
    launch(kernel, code, args, stream);
  }
}

}  // namespace fovea::cuda
