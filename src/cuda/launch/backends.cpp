// The CUDA backends: one for each family of kernels.
#include <cuda_runtime_api.h>

#include <array>
#include <utility>

#include "core/status.hpp"
#include "cuda/launch/append.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/cuda_plan.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/kernel_table.hpp"

namespace fovea::cuda {
namespace {

template <Family kFamily>
Preparation try_prepare_family(const AttentionProblem& problem, const PrepareOptions& options) {
  return try_prepare(kFamily, problem, options);
}

void* allocate(int device, size_t bytes, void* stream) {
  const ContextScope scope(primary_context(device));
  void* memory = nullptr;
  const cudaError_t error = cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return memory;
  cudaGetLastError();  // ours, and now told
  throw RequestError(error == cudaErrorMemoryAllocation ? Status::kOutOfMemory : Status::kCudaError, "",
                     "a workspace of " + std::to_string(bytes) + " bytes: " + cudaGetErrorString(error) +
                         "; make a plan and bring a workspace");
}
void release(int device, void* memory, void* stream) noexcept {
  try {
    const ContextScope scope(primary_context(device));
    if (cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)) != cudaSuccess) cudaGetLastError();
  } catch (...) {
    // The context is lost, and the memory with it.
  }
}
constexpr DeviceMemory kMemory = {allocate, release};

template <Family kFamily>
const Backend& backend() {
  static const Backend the_backend = {backend_name(kFamily), unavailable_because, try_prepare_family<kFamily>,
                                      prepare_append,        DeviceType::kCuda,   &kMemory};
  return the_backend;
}

/// The backend of each family, in the order of preference.
template <size_t... kFamily>
std::span<const Backend* const> list(std::index_sequence<kFamily...>) {
  static const std::array all = {&backend<static_cast<Family>(kFamily)>()...};
  return all;
}

}  // namespace

std::span<const Backend* const> backends() {
  return list(std::make_index_sequence<kFamilyCount>());
}

}  // namespace fovea::cuda
