// Device memory for the tensors of a problem: for each run mirrors of the host tensors, between guards. The checks
// use this interface, so that they compile without CUDA; a program with CUDA sets `open_device_memory`
// (cuda_memory.hpp).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/fovea.h"

namespace fovea::verify {

/// Whether `backend` reads and writes memory of a GPU.
inline bool is_cuda(std::string_view backend) {
  return backend.starts_with("cuda_");
}

/// Device memory of one thread. One run at a time: place, (run), finish.
class DeviceMemory {
 public:
  /// Bytes of the host to mirror. The mirror starts at the same offset from a multiple of 64
  /// bytes, so that a kernel meets the alignment that the host tensor was given.
  struct Block {
    const char* name;
    unsigned char* host;
    size_t size;
  };

  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  virtual ~DeviceMemory() = default;

  virtual fovea_device device() const = 0;
  /// The stream for runs.
  virtual void* stream() const = 0;
  /// Makes mirrors that hold what the host holds, and a workspace of exactly `workspace_size` bytes, each
  /// byte of it `workspace_fill`. What lies between holds the pattern of owned_tensor.hpp. Returns the
  /// addresses of the mirrors, then of the workspace, which is a multiple of FOVEA_WORKSPACE_ALIGNMENT, but
  /// of no more.
  virtual std::vector<void*> place(const std::vector<Block>& blocks, size_t workspace_size,
                                   unsigned char workspace_fill) = 0;
  /// Waits for the stream and copies the mirrors back to the host. "" when nothing outside of the mirrors and
  /// the workspace was written, else what is wrong.
  virtual std::string finish(const std::vector<Block>& blocks) = 0;
};

/// Gives the device memory of the calling thread; null in programs without CUDA, which leave out CUDA backends.
inline DeviceMemory& (*open_device_memory)() = nullptr;

}  // namespace fovea::verify
