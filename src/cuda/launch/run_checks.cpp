// Checks where the pointers and the stream of a run belong.
#include "cuda/launch/run_checks.hpp"

#include <string>

#include "core/status.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/kernel_set.hpp"

namespace fovea::cuda {

RunChecks::RunChecks(const AttentionProblem& problem, CUcontext context)
    : device_(problem[Role::kQ].device_id), context_(context) {
  for (size_t i = 0; i < kPlaceCount; ++i) {
    if (occupies_memory(problem.at(i))) tensors_.push_back({i, problem.name_at(i)});
  }
}

void RunChecks::check(const Buffers& buffers, bool uses_workspace) const {
  constexpr const char* kOwner = "the plan's tensors";
  for (const auto& [place, name] : tensors_) {
    if (const void* pointer = buffers.data[place]) {
      check_memory(name.c_str(), pointer, device_, kOwner,
                   "copy the tensor there, or make a plan for where it is");
    }
  }
  if (uses_workspace) {
    check_memory("workspace", buffers.workspace, device_, kOwner,
                 "take it from fovea_workspace_create, or cudaMalloc");
  }
  check_stream(static_cast<CUstream>(buffers.stream), device_, context_, kOwner);
}

void check_memory(const char* name, const void* pointer, int device, const char* owner, const char* remedy) {
  const cuda::Memory memory = memory_of(pointer);
  if (memory.place == Place::kManaged || memory.place == Place::kUnknown) return;
  if (memory.place == Place::kDevice && memory.device == device) return;
  throw_invalid(name, text_of(memory),
                "memory of cuda:" + std::to_string(device) + ", where " + owner + " are", remedy);
}

void check_stream(CUstream stream, int device, CUcontext expected, const char* owner) {
  if (stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
    return;  // of any device
  const Driver& d = driver();
  // The context first: to ask a capturing stream for its device would break the capture. Only streams of
  // other contexts, green ones of this device among them, are asked further.
  CUcontext context = nullptr;
  const CUresult error = d.stream_get_ctx(stream, &context);
  if (error == CUDA_SUCCESS && context == expected) return;
  const auto refuse = [&](const std::string& got) {
    throw_invalid("stream", got, "one of cuda:" + std::to_string(device) + ", where " + owner + " are",
                  "make the stream while that device is current");
  };
  if (d.stream_get_device != nullptr) {
    CUdevice of_stream = 0;
    if (const CUresult device_error = d.stream_get_device(stream, &of_stream); device_error != CUDA_SUCCESS)
      throw_cuda("stream", device_error);
    if (of_stream == device) return;
    refuse("a stream of cuda:" + std::to_string(of_stream));
  }
  if (error != CUDA_SUCCESS) throw_cuda("stream", error);
  refuse("a stream of another device or context");
}

}  // namespace fovea::cuda
