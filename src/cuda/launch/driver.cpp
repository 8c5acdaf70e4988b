// Finds the entry points of the CUDA driver.
#include "cuda/launch/driver.hpp"

#include <cuda_runtime_api.h>

#include <vector>

namespace fovea::cuda {
namespace {

template <class Function>
bool get_entry(const char* name, [[maybe_unused]] unsigned version, Function*& function) {
  void* pointer = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &pointer, version, cudaEnableLegacyStream, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &pointer, cudaEnableLegacyStream, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) pointer = nullptr;
  function = reinterpret_cast<Function*>(pointer);
  return pointer != nullptr;
}

Driver make_driver() {
  Driver d;
  cudaRuntimeGetVersion(&d.runtime_version);
  if (cudaDriverGetVersion(&d.driver_version) != cudaSuccess || d.driver_version == 0) {
    d.missing = "no CUDA driver on this machine";
    return d;
  }
  const cudaError_t error = cudaGetDeviceCount(&d.device_count);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && d.device_count == 0)) {
    d.missing = "no CUDA device on this machine";
  } else if (error == cudaErrorInsufficientDriver) {
    d.missing = "the driver is too old: it knows CUDA " + version_text(d.driver_version) +
                ", and this library was built with CUDA " + version_text(d.runtime_version) +
                "; install a newer driver";
  } else if (error != cudaSuccess) {
    d.missing = std::string("CUDA does not start: ") + cudaGetErrorString(error);
  }
  cudaGetLastError();  // ours, and now told
  if (!d.missing.empty()) {
    d.device_count = 0;
    return d;
  }
  const bool complete = get_entry("cuCtxGetCurrent", 4000, d.ctx_get_current) &&
                        get_entry("cuCtxSetCurrent", 4000, d.ctx_set_current) &&
                        get_entry("cuDevicePrimaryCtxRetain", 7000, d.primary_ctx_retain) &&
                        get_entry("cuLaunchKernel", 4000, d.launch_kernel) &&
                        get_entry("cuMemsetD32Async", 3020, d.memset_d32_async) &&
                        get_entry("cuStreamGetCtx", 9020, d.stream_get_ctx) &&
                        get_entry("cuGetErrorName", 6000, d.get_error_name) &&
                        get_entry("cuGetErrorString", 6000, d.get_error_string);
  d.loads_modules = get_entry("cuModuleLoadData", 2000, d.module_load_data) &&
                    get_entry("cuModuleUnload", 2000, d.module_unload) &&
                    get_entry("cuModuleGetFunction", 2000, d.module_get_function) &&
                    get_entry("cuFuncGetAttribute", 2020, d.func_get_attribute) &&
                    get_entry("cuFuncSetAttribute", 9000, d.func_set_attribute) &&
                    get_entry("cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, d.occupancy);
  get_entry("cuLaunchKernelEx", 11060, d.launch_kernel_ex);
  get_entry("cuOccupancyMaxActiveClusters", 11070, d.active_clusters);
  get_entry("cuStreamBatchMemOp", 11070, d.stream_batch_mem_op);
  get_entry("cuStreamGetDevice", 12080, d.stream_get_device);
  get_entry("cuTensorMapEncodeTiled", 12000, d.tensor_map_encode_tiled);
  if (!complete) {
    d.missing = "the driver lacks entry points of CUDA 9.2";
    d.device_count = 0;
  }
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver the_driver = make_driver();
  return the_driver;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string error_text(CUresult error) {
  const char *name = nullptr, *text = nullptr;
  const Driver& d = driver();
  if (d.get_error_name == nullptr || d.get_error_name(error, &name) != CUDA_SUCCESS || name == nullptr ||
      d.get_error_string(error, &text) != CUDA_SUCCESS || text == nullptr) {
    return "CUDA error " + std::to_string(static_cast<int>(error));
  }
  return std::string(text) + " (" + name + ")";
}

bool is_of_earlier_work(CUresult error) {
  switch (error) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
      return true;
    default:
      return false;
  }
}

void throw_cuda(const std::string& what, CUresult error) {
  throw RequestError(
      Status::kCudaError, "",
      is_of_earlier_work(error)
          ? what + ": not launched, because earlier work of this process on the device had failed: " +
                error_text(error) +
                "; look for the fault before this call (compute-sanitizer, CUDA_LAUNCH_BLOCKING=1)"
          : what + ": CUDA refused: " + error_text(error));
}

void set_words(void* to, unsigned value, size_t count, void* stream) {
  const CUresult error = driver().memset_d32_async(reinterpret_cast<CUdeviceptr>(to), value, count,
                                                   static_cast<CUstream>(stream));
  if (error != CUDA_SUCCESS) throw_cuda("cuMemsetD32Async", error);
}

namespace {

/// One operation for each word, in one call. kMember: what describes it.
template <auto kMember>
void on_words(std::span<uint32_t* const> words, uint32_t number, CUstreamBatchMemOpType type, unsigned flags,
              void* stream) {
  if (words.empty()) return;
  std::vector<CUstreamBatchMemOpParams> operations(words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    auto& operation = operations[i].*kMember;
    operation.operation = type;
    operation.address = reinterpret_cast<CUdeviceptr>(words[i]);
    operation.value = number;
    operation.flags = flags;
  }
  const CUresult error = driver().stream_batch_mem_op(
      static_cast<CUstream>(stream), static_cast<unsigned>(operations.size()), operations.data(), 0);
  if (error != CUDA_SUCCESS) throw_cuda("cuStreamBatchMemOp", error);
}

}  // namespace

void write_words(std::span<uint32_t* const> words, uint32_t number, void* stream) {
  on_words<&CUstreamBatchMemOpParams::writeValue>(words, number, CU_STREAM_MEM_OP_WRITE_VALUE_32,
                                                  CU_STREAM_WRITE_VALUE_DEFAULT, stream);
}

void await_words(std::span<uint32_t* const> words, uint32_t number, void* stream) {
  on_words<&CUstreamBatchMemOpParams::waitValue>(words, number, CU_STREAM_MEM_OP_WAIT_VALUE_32,
                                                 CU_STREAM_WAIT_VALUE_GEQ, stream);
}

}  // namespace fovea::cuda
