// cuda::copy_to_host of cuda.hpp.
#include <cuda_runtime_api.h>

#include <string>

#include "core/status.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/run_checks.hpp"

namespace fovea::cuda {
namespace {

void demand(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) throw_cuda(what, static_cast<CUresult>(error));
}

void refuse_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  demand(cudaStreamIsCapturing(stream, &status), "stream");
  if (status == cudaStreamCaptureStatusNone) return;
  throw_invalid("check_contents", "a stream that is being captured", "a stream that the run can wait for",
                "check contents in runs outside of graphs, and capture a plan without it");
}

}  // namespace

void copy_to_host(std::span<const HostCopy> copies, int device, void* stream) {
  constexpr const char* kOwner = "the plan's tensors";
  const CUcontext context = primary_context(device);
  const ContextScope scope(context);
  check_stream(static_cast<CUstream>(stream), device, context, kOwner);
  auto* const s = static_cast<cudaStream_t>(stream);
  refuse_capture(s);
  for (const HostCopy& copy : copies)
    check_memory(copy.name.c_str(), copy.from, device, kOwner,
                 "copy the tensor there, or make a plan for where it is");
  for (const HostCopy& copy : copies)
    demand(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToHost, s), copy.name);
  demand(cudaStreamSynchronize(s), "the stream");
}

}  // namespace fovea::cuda
