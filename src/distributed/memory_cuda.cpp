// Memory of GPUs: the definitions of memory_cuda.hpp. The caller's stream is the lane of computing, a stream of the plan's that of links.
#include "distributed/memory_cuda.hpp"

#include <cuda_runtime_api.h>

#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/dtype.hpp"
#include "core/status.hpp"
#include "cuda/launch/cuda.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/driver.hpp"
#include "distributed/rectangles.hpp"
#include "distributed/shared_memory.hpp"

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
  /// On the host; an event that was never recorded is past.
  void wait() const noexcept {
    if (cudaEventSynchronize(event_) != cudaSuccess) cudaGetLastError();
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

/// The same in all processes of a host, since it was started; 0 where streams cannot wait for words.
uint64_t host_number() {
  if (cuda::driver().stream_batch_mem_op == nullptr) return 0;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  return std::hash<std::string>{}(text);
}

/// Of memory of a GPU.
struct DevicePlace {
  uint64_t host = 0;
  pid_t process = 0;
  int device = 0;
  void* memory = nullptr;
  cudaIpcMemHandle_t handle{};
  std::array<char, 16> bus{};  ///< where the GPU is: processes may count theirs in other orders
};
static_assert(sizeof(DevicePlace) <= sizeof(SharedPlace));

class DeviceMemory final : public Memory {
 public:
  explicit DeviceMemory(int device) : device_(checked(device)) {
    cuda::load_merge(device_);
    cuda::load_move(device_);
    for (auto& event : done_) event = std::make_unique<Event>(device_);
    ended_ = std::make_unique<Event>(device_);
    const cuda::ContextScope scope(cuda::primary_context(device_));
    for (cudaStream_t* stream : {&link_, &beside_})
      demand(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "cudaStreamCreate");
    // Of a priority of its own, so that it shares no queue of the hardware with streams that wait.
    int least = 0, greatest = 0;
    demand(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    demand(cudaStreamCreateWithPriority(&aside_, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  }
  ~DeviceMemory() override {
    for (cudaStream_t stream : {link_, beside_, aside_}) {
      if (cudaStreamDestroy(stream) != cudaSuccess) cudaGetLastError();
    }
  }

  void begin(void* stream) override { compute_ = static_cast<cudaStream_t>(stream); }
  void* stream(Lane lane) const override {
    return lane == Lane::kCompute ? compute_ : lane == Lane::kBeside ? beside_ : link_;
  }
  void order(Lane sooner, Lane later) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    Event& event = *done_[static_cast<size_t>(sooner)];
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

  std::shared_ptr<void> share(size_t bytes, SharedPlace& place) override {
    // Whole pages of the driver: smaller memory may lie in one page with other memory of the program.
    constexpr size_t kPage = size_t{2} << 20;
    const int device = device_;
    std::shared_ptr<void> memory(cuda::allocate(device, (bytes + kPage - 1) / kPage * kPage),
                                 [device](void* p) { cuda::release(device, p); });
    const cuda::ContextScope scope(cuda::primary_context(device_));
    demand(cudaMemsetAsync(memory.get(), 0, bytes, link_), "cudaMemsetAsync");
    demand(cudaStreamSynchronize(link_), "cudaStreamSynchronize");
    SharedMemories::of_process().add(memory);
    DevicePlace own{host_number(), getpid(), device_, memory.get(), {}, bus_of(device_)};
    if (cudaIpcGetMemHandle(&own.handle, memory.get()) != cudaSuccess) {
      cudaGetLastError();  // other processes do not reach it, threads do
      own.handle = {};
    }
    std::memcpy(place.words.data(), &own, sizeof own);
    return memory;
  }
  std::shared_ptr<void> reach(const SharedPlace& place) override {
    DevicePlace other;
    std::memcpy(&other, place.words.data(), sizeof other);
    if (other.host != host_number() || other.host == 0) return nullptr;
    if (other.process == getpid())
      return link_devices(device_, other.device) ? SharedMemories::of_process().find(other.memory) : nullptr;
    const int device = device_;
    const cuda::ContextScope scope(cuda::primary_context(device));
    void* memory = nullptr;
    if (cudaIpcOpenMemHandle(&memory, other.handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
      cudaGetLastError();  // messages go there all the same
      return nullptr;
    }
    return {memory, [device](void* p) {
              const cuda::ContextScope context(cuda::primary_context(device));
              if (cudaIpcCloseMemHandle(p) != cudaSuccess) cudaGetLastError();
            }};
  }
  bool is_of_this_device(const SharedPlace& place) const override {
    DevicePlace other;
    std::memcpy(&other, place.words.data(), sizeof other);
    return other.bus == bus_of(device_);
  }
  void copy(const Box& box, int64_t element_bytes, Lane lane) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    auto* const on = static_cast<cudaStream_t>(stream(lane));
    for_each_rectangle(box, element_bytes, [&](const Rectangle& r) {
      const auto width = static_cast<size_t>(r.width), lines = static_cast<size_t>(r.lines);
      demand(lines == 1
                 ? cudaMemcpyAsync(r.to, r.from, width, cudaMemcpyDefault, on)
                 : cudaMemcpy2DAsync(r.to, static_cast<size_t>(r.to_pitch), r.from,
                                     static_cast<size_t>(r.from_pitch), width, lines, cudaMemcpyDefault, on),
             "cudaMemcpy2DAsync");
    });
  }
  void copy_at_once(std::span<const Box> boxes, const fovea_dtype& type, Lane lane) override {
    // Two CTAs an SM have 4 MB on their way, more than a link holds; others of the SM move rows within the memory meanwhile.
    const int64_t ctas = 2 * cuda::properties_of(device_).sm_count;
    cuda::move(boxes, type_of(type), type_of(type), false, device_, stream(lane), ctas);
  }
  void tell(std::span<uint32_t* const> words, uint32_t number, Lane lane) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    cuda::write_words(words, number, stream(lane));
  }
  void await(std::span<uint32_t* const> words, uint32_t number, Lane lane,
             const std::function<void()>&) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    cuda::await_words(words, number, stream(lane));
  }
  void end() override { ended_->record(compute_); }
  void wait_for_end() noexcept override {
    ended_->wait();
    for (cudaStream_t stream : {link_, beside_}) {
      if (cudaStreamSynchronize(stream) != cudaSuccess) cudaGetLastError();
    }
  }
  std::vector<uint32_t> take_over(uint32_t* words, size_t count, uint32_t number) override {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    std::vector<uint32_t> were(count);
    demand(cudaMemcpyAsync(were.data(), words, count * sizeof(uint32_t), cudaMemcpyDeviceToHost, aside_),
           "cudaMemcpyAsync");
    if (number != 0) cuda::set_words(words, number, count, aside_);
    demand(cudaStreamSynchronize(aside_), "cudaStreamSynchronize");
    return were;
  }

 private:
  static int checked(int device) {
    check_cuda(device);
    return device;
  }
  static std::array<char, 16> bus_of(int device) {
    std::array<char, 16> bus{};
    demand(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device), "cudaDeviceGetPCIBusId");
    return bus;
  }
  /// Behind what lies on the lane of links; done when the call returns.
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const cuda::ContextScope scope(cuda::primary_context(device_));
    if (bytes > 0) demand(cudaMemcpyAsync(to, from, bytes, kind, link_), "cudaMemcpyAsync");
    demand(cudaStreamSynchronize(link_), "cudaStreamSynchronize");
  }

  int device_;
  cudaStream_t compute_ = nullptr, link_ = nullptr, beside_ = nullptr, aside_ = nullptr;
  std::array<std::unique_ptr<Event>, kLanes> done_;  ///< behind each lane
  std::unique_ptr<Event> ended_;
};

}  // namespace

std::unique_ptr<Memory> open_cuda_memory(int device) {
  return std::make_unique<DeviceMemory>(device);
}

std::unique_ptr<CudaEvent> make_cuda_event(int device) {
  check_cuda(device);
  return std::make_unique<Event>(device);
}

bool link_devices(int device, int from_device) {
  if (device == from_device) return true;
  const cuda::ContextScope scope(cuda::primary_context(device));
  int possible = 0;
  demand(cudaDeviceCanAccessPeer(&possible, device, from_device), "cudaDeviceCanAccessPeer");
  if (possible == 0) return false;
  const cudaError_t status = cudaDeviceEnablePeerAccess(from_device, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // the program did it, or another group
    return true;
  }
  demand(status, "cudaDeviceEnablePeerAccess");
  return true;
}

void copy_between_devices(int device, void* to, int from_device, const void* from, size_t bytes,
                          void* stream) {
  if (bytes == 0) return;
  const cuda::ContextScope scope(cuda::primary_context(device));
  demand(cudaMemcpyPeerAsync(to, device, from, from_device, bytes, static_cast<cudaStream_t>(stream)),
         "cudaMemcpyPeerAsync");
}

}  // namespace fovea::distributed
