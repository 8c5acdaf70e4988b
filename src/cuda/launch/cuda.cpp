// What the rest of the library asks of CUDA beside attention: devices and memory.
#include "cuda/launch/cuda.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cmath>

#include "core/status.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"

namespace fovea::cuda {
namespace {

using PointerGetAttributes = CUresult (*)(unsigned, CUpointer_attribute*, void**, CUdeviceptr);

/// Null until a driver is loaded in this process, by whoever needed it.
PointerGetAttributes pointer_get_attributes() {
  static std::atomic<PointerGetAttributes> known{nullptr};
  PointerGetAttributes function = known.load(std::memory_order_relaxed);
  if (function != nullptr) return function;
  void* driver_library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver_library == nullptr) return nullptr;
  function = reinterpret_cast<PointerGetAttributes>(dlsym(driver_library, "cuPointerGetAttributes"));
  known.store(function, std::memory_order_relaxed);
  // The handle stays open: the driver is never unloaded while functions of it are known.
  return function;
}

void demand(cudaError_t error, const char* what, size_t bytes) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // ours, and now told
  throw RequestError(
      error == cudaErrorMemoryAllocation ? Status::kOutOfMemory : Status::kCudaError, "",
      std::string(what) + " of " + std::to_string(bytes) + " bytes: " + cudaGetErrorString(error) +
          "; free memory of the device, or ask for less at a time (a smaller batch, fewer heads)");
}

std::string gibibytes(size_t bytes) {
  const auto tenths =
      static_cast<int64_t>(std::llround(static_cast<double>(bytes) / (1024.0 * 1024 * 1024) * 10));
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GiB";
}

}  // namespace

std::string unavailable_because() {
  return driver().missing;
}

std::string versions_text() {
  const Driver& d = driver();
  std::string text = "runtime " + version_text(d.runtime_version);
  if (d.driver_version > 0) text += ", driver for CUDA " + version_text(d.driver_version);
  return text;
}

int device_count() {
  return driver().device_count;
}

std::string device_description(int index) {
  const DeviceProperties& p = properties_of(index);
  return p.name + ": compute capability " + std::to_string(p.capability / 10) + "." +
         std::to_string(p.capability % 10) + ", " + std::to_string(p.sm_count) + " SMs, " +
         gibibytes(p.memory_bytes);
}

void check_device(const char* argument, int id) {
  if (device_count() == 0 || (id >= 0 && id < device_count())) return;
  throw_invalid(argument, "cuda:" + std::to_string(id),
                device_count() == 1 ? "cuda:0, the only device of this machine"
                                    : "cuda:0 to cuda:" + std::to_string(device_count() - 1),
                "check device.id (CUDA_VISIBLE_DEVICES numbers devices anew)");
}

bool can_tell_memory() {
  return pointer_get_attributes() != nullptr;
}

Memory memory_of(const void* pointer) noexcept {
  const PointerGetAttributes ask = pointer_get_attributes();
  if (ask == nullptr) return {};
  std::array<CUpointer_attribute, 3> which = {
      CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  unsigned type = 0;
  unsigned managed = 0;
  int device = 0;
  std::array<void*, 3> answers = {&type, &managed, &device};
  if (ask(3, which.data(), answers.data(), reinterpret_cast<CUdeviceptr>(pointer)) != CUDA_SUCCESS) return {};
  if (managed != 0) return {Place::kManaged, device};
  switch (type) {
    case CU_MEMORYTYPE_DEVICE:
      return {Place::kDevice, device};
    case CU_MEMORYTYPE_HOST:
      return {Place::kPinned, 0};
    case 0:  // nothing that CUDA knows
      return {Place::kHost, 0};
    default:
      return {};
  }
}

std::string text_of(const Memory& memory) {
  switch (memory.place) {
    case Place::kHost:
      return "memory of the CPU";
    case Place::kPinned:
      return "page-locked memory of the CPU";
    case Place::kDevice:
      return "memory of cuda:" + std::to_string(memory.device);
    case Place::kManaged:
      return "managed memory";
    case Place::kUnknown:
      break;
  }
  return "unknown memory";
}

void* allocate(int device, size_t bytes) {
  if (device_count() == 0) {
    throw RequestError(
        Status::kUnsupported, "device",
        "device: got cuda:" + std::to_string(device) + ", which cannot be used: " + driver().missing);
  }
  check_device("device", device);
  const ContextScope scope(primary_context(device));
  void* memory = nullptr;
  demand(cudaMalloc(&memory, bytes), "a workspace", bytes);
  return memory;
}

void release(int device, void* memory) noexcept {
  try {
    const ContextScope scope(primary_context(device));
    if (cudaFree(memory) != cudaSuccess) cudaGetLastError();
  } catch (...) {
    // The context is lost, and the memory with it.
  }
}

}  // namespace fovea::cuda
