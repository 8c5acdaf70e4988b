// The driver, asked for its entry points at run time, so that one binary starts on machines with and without
// it. Runs go through it rather than through the runtime: a launch then costs no look-up of the kernel, and
// the current context can be saved and restored without creating one.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/status.hpp"

namespace fovea::cuda {

struct Driver {
  CUresult (*ctx_get_current)(CUcontext*) = nullptr;
  CUresult (*ctx_set_current)(CUcontext) = nullptr;
  CUresult (*primary_ctx_retain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream, void**, void**) = nullptr;
  /// With attributes, for clusters, and how many of these the GPU holds at a time; null before CUDA 11.8.
  CUresult (*launch_kernel_ex)(const CUlaunchConfig*, CUfunction, void**, void**) = nullptr;
  CUresult (*active_clusters)(int*, CUfunction, const CUlaunchConfig*) = nullptr;
  CUresult (*memset_d32_async)(CUdeviceptr, unsigned, size_t, CUstream) = nullptr;
  /// Writes of words and waits for them on streams; null before CUDA 11.7.
  CUresult (*stream_batch_mem_op)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned) = nullptr;
  CUresult (*stream_get_ctx)(CUstream, CUcontext*) = nullptr;
  CUresult (*stream_get_device)(CUstream, CUdevice*) = nullptr;  ///< null before CUDA 12.8
  CUresult (*tensor_map_encode_tiled)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                      const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                      CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                      CUtensorMapFloatOOBfill) = nullptr;  ///< null before CUDA 12.0
  CUresult (*module_load_data)(CUmodule*, const void*) = nullptr;
  CUresult (*module_unload)(CUmodule) = nullptr;
  CUresult (*module_get_function)(CUfunction*, CUmodule, const char*) = nullptr;
  CUresult (*func_get_attribute)(int*, CUfunction_attribute, CUfunction) = nullptr;
  CUresult (*func_set_attribute)(CUfunction, CUfunction_attribute, int) = nullptr;
  CUresult (*occupancy)(int*, CUfunction, int, size_t) = nullptr;  ///< CTAs an SM
  CUresult (*get_error_name)(CUresult, const char**) = nullptr;
  CUresult (*get_error_string)(CUresult, const char**) = nullptr;

  int driver_version = 0, runtime_version = 0;  ///< 1000 * major + 10 * minor
  int device_count = 0;
  bool loads_modules = false;  ///< has the entry points for kernels compiled at run time
  std::string missing;         ///< "" when there is a driver and a GPU, else what is missing
};

/// Initialises CUDA on first use. What is missing then stays missing.
const Driver& driver();

/// "13.0".
std::string version_text(int version);

/// "an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)".
std::string error_text(CUresult error);

/// Whether the error tells of earlier work that ran on the device, not of the call that returned it. Such
/// errors stay with the context: every later call returns them.
bool is_of_earlier_work(CUresult error);

/// Throws RequestError(kCudaError), which names `what` (a kernel, mostly) and tells earlier failures from its
/// own.
[[noreturn]] void throw_cuda(const std::string& what, CUresult error);

/// Puts `count` words of 32 bits of `value` at `to` (device memory), in the order of the stream.
void set_words(void* to, unsigned value, size_t count, void* stream);

/// Writes words of memory that the current device reaches, once all that lies on the stream is done and seen by other devices.
void write_words(std::span<uint32_t* const> words, uint32_t number, void* stream);
/// What is put on the stream from now on waits until each of the words has come to the number, or past it by less than half of all
/// numbers.
void await_words(std::span<uint32_t* const> words, uint32_t number, void* stream);

/// Makes a context current in this scope. Nothing happens where it is already.
class ContextScope {
 public:
  explicit ContextScope(CUcontext context) {
    const Driver& d = driver();
    if (d.ctx_get_current(&before_) != CUDA_SUCCESS) before_ = nullptr;
    changed_ = before_ != context;
    if (changed_) {
      if (const CUresult error = d.ctx_set_current(context); error != CUDA_SUCCESS)
        throw_cuda("the device", error);
    }
  }
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;
  ~ContextScope() {
    if (changed_) driver().ctx_set_current(before_);
  }

 private:
  CUcontext before_ = nullptr;
  bool changed_ = false;
};

}  // namespace fovea::cuda
