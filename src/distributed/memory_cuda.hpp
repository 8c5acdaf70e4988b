// Memory of GPUs, for plans and for the transport between threads. In builds without CUDA each function throws.
#pragma once

#include <cstddef>
#include <memory>

#include "distributed/memory.hpp"

namespace fovea::distributed {

std::unique_ptr<Memory> open_cuda_memory(int device);

/// What one thread's stream tells another's.
class CudaEvent {
 public:
  CudaEvent() = default;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  virtual ~CudaEvent() = default;
  virtual void record(void* stream) = 0;
  /// What is put on `stream` from now on waits for what was recorded.
  virtual void wait_on(void* stream) const = 0;
  /// Whether the device is past what was recorded.
  virtual bool is_past() const = 0;
};
std::unique_ptr<CudaEvent> make_cuda_event(int device);

/// Lets copies from `from_device` to `device` go straight over their link, where the machine can; elsewhere they pass through the
/// host's memory. Returns which.
bool link_devices(int device, int from_device);
/// Copies between devices, in the order of a stream of `device`.
void copy_between_devices(int device, void* to, int from_device, const void* from, size_t bytes,
                          void* stream);

}  // namespace fovea::distributed
