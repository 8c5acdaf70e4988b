// What the plan and the C ABI see of CUDA. The same face in builds without it (no_cuda.cpp), where every
// backend says so.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/backend.hpp"
#include "core/box.hpp"

namespace fovea::cuda {

/// One for each family of kernels, in order of preference. They are part of every build; where CUDA, a driver
/// or a GPU is missing, they say which.
std::span<const Backend* const> backends();

/// "" when this machine has a GPU that CUDA knows, else what is missing.
std::string unavailable_because();
/// "runtime 13.0, driver 13.0"; "" in a build without CUDA or without a driver.
std::string versions_text();
/// 0 when there is none, for whatever reason.
int device_count();
/// "NVIDIA H200: compute capability 9.0, 132 SMs, 139.8 GiB" for an index below device_count().
std::string device_description(int index);

/// Throws RequestError(kInvalidArgument) for a device that this machine does not have. Says nothing where
/// there is none at all: the backends tell why.
void check_device(const char* argument, int id);

/// Where memory lies. kUnknown: nobody can tell (no driver in this process, or not initialised).
enum class Place : uint8_t { kUnknown, kHost, kPinned, kDevice, kManaged };
struct Memory {
  Place place = Place::kUnknown;
  int device = 0;  ///< of kDevice
};
/// Whether a CUDA driver is loaded in this process, so that memory_of can tell. Loads none, initialises none.
bool can_tell_memory();
Memory memory_of(const void* pointer) noexcept;
/// "memory of cuda:1", "memory of the CPU", ...
std::string text_of(const Memory& memory);

/// Memory of a device until release, which waits for the work that may use it. Throws kInvalidArgument for a
/// device that is not there, kUnsupported where CUDA is missing, kOutOfMemory, kCudaError.
void* allocate(int device, size_t bytes);
void release(int device, void* memory) noexcept;

/// Bytes of a device's memory that the host wants at `to`.
struct HostCopy {
  std::string name;  ///< of the tensor, for messages
  const void* from;
  void* to;
  size_t bytes;
};
/// Copies behind all that the stream has, and waits. Throws RequestError(kInvalidArgument) for memory or a stream of elsewhere, and for a
/// stream that is being captured; kCudaError; kUnsupported where CUDA is missing.
void copy_to_host(std::span<const HostCopy> copies, int device, void* stream);

/// Merges partial results over disjoint keys, as cpu::merge, on the device of o and in the order of the stream. More than 48 parts
/// take memory of the device's pool (cudaMallocAsync). Throws RequestError for pointers and streams of elsewhere, and where
/// CUDA is missing.
void merge(std::span<const TensorDesc> o_parts, std::span<const TensorDesc> lse_parts, const TensorDesc& o,
           const TensorDesc& lse, void* stream);

/// Loads the kernels of merge and move. Their first use does it else, and may wait for all that the device has begun, while it holds what
/// other threads need to begin what that waits for.
void load_merge(int device);
void load_move(int device);

/// Copies boxes of elements of type `from` to elements of type `to` (float32, float16, bfloat16), or adds them to those, on a device and
/// in the order of a stream. Targets do not overlap, nor targets and sources. Memory is taken as it is: what lies elsewhere
/// is an error of the launch. Threads take one part of a box after the other: `most_ctas` are some waves of the largest chip.
void move(std::span<const Box> boxes, DType from, DType to, bool add, int device, void* stream,
          int64_t most_ctas = 4096);

}  // namespace fovea::cuda
