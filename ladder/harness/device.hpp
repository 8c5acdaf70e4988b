// The interface of a device on which rungs run: its memory, its peaks, and timing.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ladder/harness/rung.hpp"

namespace ladder {

/// How a rung is timed: `warmups` runs that do not count, then `runs` that do; after `seconds` fewer, but at
/// least three.
struct Protocol {
  int warmups = 2, runs = 11;
  double seconds = 10;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string text() const = 0;  ///< the machine, in one line
  virtual int capability() const = 0;    ///< of a GPU, times ten; 0 for the host
  virtual int id() const = 0;            ///< of a GPU
  virtual void* stream() const = 0;      ///< of a GPU: the cudaStream_t on which rungs run
  virtual double peak(Bound bound) = 0;  ///< operations or bytes a second; 0 when unknown

  /// Memory for `bytes` bytes, aligned to 256; throws std::bad_alloc. `release` or the end of the device frees
  /// it.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  virtual void upload(void* to, const void* from, size_t bytes) = 0;
  virtual void download(void* to, const void* from, size_t bytes) = 0;
  /// Waits for all launches; throws std::runtime_error when one failed.
  virtual void synchronize() = 0;
  /// Seconds of single runs of each of `contenders`, interleaved: a GPU's clock moves with the power that it
  /// has drawn, by a tenth and more.
  virtual std::vector<std::vector<double>> time(const std::vector<std::function<void()>>& contenders,
                                                const Protocol& protocol) = 0;
  /// One run between the marks at which profilers start and stop, after a kernel named `profile_marker`.
  virtual void profile(const std::function<void()>& run) = 0;
  /// Peak bytes of this device's memory that `work` held, beyond those in use before, as the system reports
  /// them; 0 where it does not.
  virtual size_t peak_bytes(const std::function<void()>& work) = 0;
};

std::unique_ptr<Device> host_device();
/// Null without a GPU, or without CUDA in this build; `why` says which.
std::unique_ptr<Device> gpu_device(int id, std::string& why);

}  // namespace ladder
