// A GPU as `fovea bench` needs it: memory that mirrors arrays, a stream, and times without the gaps between launches.
#pragma once

#include <functional>
#include <memory>

#include "cli/data/elements.hpp"
#include "cli/measure/measure.hpp"
#include "fovea/fovea.hpp"

namespace fovea::cli {

/// Errors of CUDA are Failures. In a build without CUDA, and on a machine without a GPU, making one is a Failure,
/// too.
class Gpu {
 public:
  explicit Gpu(int id);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  fovea_device device() const;
  /// Name, SMs, memory and clocks: one line.
  std::string text() const;
  /// A cudaStream_t.
  void* stream() const;
  void synchronize();

  /// Memory of the device for an array, not yet written; it goes with the Gpu.
  void* allocate(size_t bytes);
  void upload(void* to, const Array& from);
  void download(Array& to, const void* from);
  /// Puts a copy within the device's memory on the stream.
  void copy(void* to, const void* from, size_t bytes);

  /// Times `run`, which puts work on the stream: replays of a CUDA graph with so many launches that one lasts
  /// some milliseconds, between two events; at least `least` replays and until `seconds` have passed. `runs`
  /// counts launches, times are of one.
  Timing measure(const std::function<void()>& run, double seconds, int least);
  /// Seconds of the host for one `run` on a queue that is not full: of batches, the median.
  double host_seconds(const std::function<void()>& run);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fovea::cli
