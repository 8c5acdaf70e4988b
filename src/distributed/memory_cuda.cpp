// Memory of GPUs: the definitions of memory_cuda.hpp. The caller's stream is the lane of computing, a stream of the plan's that of links.
#include "distributed/memory_cuda.hpp"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "core/dtype.hpp"
#include "core/status.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"

namespace fovea::distributed {
namespace {

void demand(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // ours, and now told
  throw RequestError(status == cudaErrorMemoryAllocation ? Status::kOutOfMemory : Status::kCudaError, "",
                     std::string(what) + ": " + cudaGetErrorString(status));
}

void check_cuda(int device) {
  if (const std::string missing = cuda::unavailable_because(); !missing.empty())
    throw RequestError(Status::kUnsupported, "transport.device",
                       "transport.device: got cuda:" + std::to_string(device) + ", but " + missing);
  cuda::check_device("transport.device", device);
}

DType type_of(const fovea_dtype& type) {
  if (type.bits == 32) return DType::kF32;
  return type.code == FOVEA_CODE_BFLOAT ? DType::kBF16 : DType::kF16;
}

class Event final : public CudaEvent {
 public:
  explicit Event(int device) : device_(device) {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    demand(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~Event() override {
    if (cudaEventDestroy(event_) != cudaSuccess) cudaGetLastError();
  }
  void record(void* stream) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    demand(cudaEventRecord(event_, static_cast<cudaStream_t>(stream)), "cudaEventRecord");
  }
  void wait_on(void* stream) const override {
    demand(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event_, 0), "cudaStreamWaitEvent");
  }
  bool is_past() const override {
    const cudaError_t status = cudaEventQuery(event_);
    if (status != cudaSuccess) cudaGetLastError();
    return status != cudaErrorNotReady;
  }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(int device) : device_(device), computed_(checked(device)), arrived_(device) {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    demand(cudaStreamCreateWithFlags(&link_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~DeviceMemory() override {
    if (cudaStreamDestroy(link_) != cudaSuccess) cudaGetLastError();
  }

  void begin(void* stream) override { compute_ = static_cast<cudaStream_t>(stream); }
  void* stream(Lane lane) const override { return lane == Lane::kCompute ? compute_ : link_; }
  void order(Lane sooner, Lane later) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    Event& event = sooner == Lane::kCompute ? computed_ : arrived_;
    event.record(stream(sooner));
    event.wait_on(stream(later));
  }
  void move(std::span<const Box> boxes, const Move& how, Lane lane) override {
    cuda::move(boxes, type_of(how.from), type_of(how.to), how.add, device_, stream(lane));
  }
  void set_words(void* to, uint32_t word, size_t count, Lane lane) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    cuda::set_words(to, word, count, stream(lane));
  }
  std::shared_ptr<void> keep(const void* data, size_t bytes) override {
    const int device = device_;
    std::shared_ptr<void> memory(cuda::allocate(device, bytes > 0 ? bytes : 1),
                                 [device](void* p) { cuda::release(device, p); });
    copy(memory.get(), data, bytes, cudaMemcpyHostToDevice);
    return memory;
  }
  void copy_and_wait(void* to, const void* from, size_t bytes) override {
    copy(to, from, bytes, cudaMemcpyDeviceToHost);
  }

 private:
  static int checked(int device) {
    check_cuda(device);
    return device;
  }
  /// Behind what lies on the lane of links; done when the call returns.
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    if (bytes > 0) demand(cudaMemcpyAsync(to, from, bytes, kind, link_), "cudaMemcpyAsync");
    demand(cudaStreamSynchronize(link_), "cudaStreamSynchronize");
  }

  int device_;
  cudaStream_t compute_ = nullptr, link_ = nullptr;
  Event computed_, arrived_;
};

}  // namespace

std::unique_ptr<Memory> open_cuda_memory(int device) {
  return std::make_unique<DeviceMemory>(device);
}

std::unique_ptr<CudaEvent> make_cuda_event(int device) {
  check_cuda(device);
  return std::make_unique<Event>(device);
}

void link_devices(int device, int from_device) {
  if (device == from_device) return;
  const cuda::ContextScope scope(cuda::primary_context(device));
  int possible = 0;
  demand(cudaDeviceCanAccessPeer(&possible, device, from_device), "cudaDeviceCanAccessPeer");
  if (possible == 0) return;
  const cudaError_t status = cudaDeviceEnablePeerAccess(from_device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // the program did it, or another group
    return;
  }
  demand(status, "cudaDeviceEnablePeerAccess");
}

void copy_between_devices(int device, void* to, int from_device, const void* from, size_t bytes,
                          void* stream) {
  if (bytes == 0) return;
  const cuda::ContextScope scope(cuda::primary_context(device));
  demand(cudaMemcpyPeerAsync(to, device, from, from_device, bytes, static_cast<cudaStream_t>(stream)),
         "cudaMemcpyPeerAsync");
}

}  // namespace fovea::distributed
