// Properties, contexts and loaded kernels of the GPUs of this machine.
#include "cuda/launch/device.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "core/status.hpp"
#include "cuda/launch/decode_clusters.hpp"
#include "cuda/launch/driver.hpp"
#include "cuda/launch/runtime_kernel.hpp"
#include "cuda/launch/schedule.hpp"

namespace fovea::cuda {
namespace {

struct Device {
  std::once_flag properties_known, context_known;
  DeviceProperties properties;
  CUcontext context = nullptr;
};

Device& device(int id) {
  static const std::unique_ptr<Device[]> devices =
      std::make_unique<Device[]>(static_cast<size_t>(driver().device_count > 0 ? driver().device_count : 1));
  return devices[static_cast<size_t>(id)];
}

void demand(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // ours, and now told
  throw RequestError(Status::kCudaError, "", std::string(what) + ": " + cudaGetErrorString(error));
}

int attribute(cudaDeviceAttr which, int id) {
  int value = 0;
  demand(cudaDeviceGetAttribute(&value, which, id), "cudaDeviceGetAttribute");
  return value;
}

DeviceProperties read_properties(int id) {
  cudaDeviceProp p;
  demand(cudaGetDeviceProperties(&p, id), "cudaGetDeviceProperties");
  DeviceProperties out;
  out.id = id;
  out.name = p.name;
  out.capability = 10 * p.major + p.minor;
  out.sm_count = p.multiProcessorCount;
  out.shared_per_sm = p.sharedMemPerMultiprocessor;
  out.shared_per_cta = p.sharedMemPerBlockOptin;
  out.threads_per_sm = p.maxThreadsPerMultiProcessor;
  out.memory_bytes = p.totalGlobalMem;
  out.l2_bytes = static_cast<size_t>(attribute(cudaDevAttrL2CacheSize, id));
  return out;
}

/// While a stream is captured, calls that allocate break the capture, unless the thread says that they have
/// nothing to do with it. Loading a kernel has not, so a plan may be made inside a capture.
class OutsideOfCaptures {
 public:
  OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCaptures(const OutsideOfCaptures&) = delete;
  OutsideOfCaptures& operator=(const OutsideOfCaptures&) = delete;
  ~OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Why no SM can hold one CTA.
std::string too_large(const Kernel& kernel, int id) {
  return std::string(kernel.name) +
         " needs more registers or shared memory than an SM of cuda:" + std::to_string(id) + " has";
}

LoadedKernel load(const Kernel& kernel, int id) {
  const ContextScope scope(primary_context(id));
  const OutsideOfCaptures relaxed;
  LoadedKernel result;
  const auto fails = [&](cudaError_t error) {
    cudaGetLastError();  // ours, and now told
    const DeviceProperties& p = properties_of(id);
    const bool no_code = error == cudaErrorNoKernelImageForDevice ||
                         error == cudaErrorInvalidDeviceFunction || error == cudaErrorUnsupportedPtxVersion;
    result.clause = no_code ? "was compiled without code that cuda:" + std::to_string(id) + " (" + p.name +
                                  ", compute capability " + std::to_string(p.capability / 10) + "." +
                                  std::to_string(p.capability % 10) + ") can run"
                            : std::string(kernel.name) + " does not load: " + cudaGetErrorString(error);
    return result;
  };
  cudaFuncAttributes attributes;
  if (const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel.entry); e != cudaSuccess)
    return fails(e);
  result.chip = attributes.ptxVersion;
  const auto shared = static_cast<int>(
      kernel.splits_in_cluster ? shared_of_whole_sm(kernel, properties_of(id)) : kernel.shared_bytes);
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      e != cudaSuccess) {
    return fails(e);
  }
  if (const cudaError_t e =
          kernel.splits_in_cluster  // of more than the 8 CTAs that every GPU with clusters takes
              ? cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)
              : cudaSuccess;
      e != cudaSuccess) {
    return fails(e);
  }
  if (const cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &result.ctas_per_sm, kernel.entry, kernel.threads, kernel.shared_bytes);
      e != cudaSuccess) {
    return fails(e);
  }
  if (result.ctas_per_sm == 0) {
    result.clause = too_large(kernel, id);
    return result;
  }
  cudaFunction_t function = nullptr;
  if (const cudaError_t e = cudaGetFuncBySymbol(&function, kernel.entry); e != cudaSuccess) return fails(e);
  result.function = function;
  return result;
}

/// Loads machine code (or PTX, which the driver compiles). It stays for the life of the process.
LoadedKernel load_code(const Kernel& kernel, int id, const CompiledKernel& compiled) {
  const Driver& d = driver();
  const ContextScope scope(primary_context(id));
  const OutsideOfCaptures relaxed;
  LoadedKernel result;
  result.note = compiled.note;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  const auto shared = static_cast<int>(kernel.shared_bytes);
  CUresult error = d.module_load_data(&module, compiled.code.data());
  if (error == CUDA_SUCCESS) error = d.module_get_function(&function, module, compiled.symbol.c_str());
  if (error == CUDA_SUCCESS) {
    error = d.func_get_attribute(&result.local_bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function);
  }
  if (error == CUDA_SUCCESS)
    error = d.func_get_attribute(&result.chip, CU_FUNC_ATTRIBUTE_PTX_VERSION, function);
  const bool spills_much = result.local_bytes > kMostSpilledBytes;
  if (error == CUDA_SUCCESS && !spills_much) {
    error = d.func_set_attribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
  }
  if (error == CUDA_SUCCESS && !spills_much) {
    error = d.occupancy(&result.ctas_per_sm, function, kernel.threads, kernel.shared_bytes);
  }
  if (error != CUDA_SUCCESS) {
    result.clause = std::string(kernel.name) + " does not load: " + error_text(error);
  } else if (spills_much) {
    result.clause = std::string(kernel.name) + " spills registers with this expression (" +
                    std::to_string(result.local_bytes) + " bytes a thread)";
  } else if (result.ctas_per_sm == 0) {
    result.clause = too_large(kernel, id);
  }
  if (result.clause.empty()) {
    result.function = function;
  } else if (module != nullptr) {
    d.module_unload(module);
  }
  return result;
}

LoadedKernel compile_and_load(const Kernel& kernel, int id, const std::string& expression) {
  LoadedKernel result;
  if (!driver().loads_modules) {
    result.clause = "needs a driver that loads kernels compiled at run time";
    return result;
  }
  const CompiledKernel& compiled = compile_kernel(kernel, expression, properties_of(id).capability);
  if (compiled.clause.empty()) return load_code(kernel, id, compiled);
  result.clause = std::string(kernel.name) + " " + compiled.clause;
  return result;
}

}  // namespace

const DeviceProperties& properties_of(int id) {
  Device& d = device(id);
  std::call_once(d.properties_known, [&] { d.properties = read_properties(id); });
  return d.properties;
}

CUcontext primary_context(int id) {
  Device& d = device(id);
  std::call_once(d.context_known, [&] {
    CUcontext context = nullptr;
    if (const CUresult error = driver().primary_ctx_retain(&context, id); error != CUDA_SUCCESS) {
      throw_cuda("cuda:" + std::to_string(id), error);
    }
    d.context = context;
  });
  return d.context;
}

const LoadedKernel& loaded(const Kernel& kernel, int id) {
  if (kernel.entry == nullptr) return compiled_and_loaded(kernel, id, "");  // only compiled at run time
  static std::mutex mutex;
  static std::map<std::pair<const Kernel*, int>, LoadedKernel> kernels;  // nodes stay where they are
  const std::scoped_lock lock(mutex);
  const std::pair key(&kernel, id);
  if (const auto found = kernels.find(key); found != kernels.end()) return found->second;
  return kernels.emplace(key, load(kernel, id)).first->second;
}

const LoadedKernel& usable(const Kernel& kernel, int id) {
  const LoadedKernel& code = loaded(kernel, id);
  if (!code.clause.empty())
    throw RequestError(Status::kUnsupported, "", std::string(kernel.name) + ": " + code.clause);
  return code;
}

bool can_begin_early(const Kernel& kernel, const LoadedKernel& code) {
  constexpr int kOldestChip = 90, kOldestDriver = 12030;
  return kernel.begins_early && code.chip >= kOldestChip && driver().driver_version >= kOldestDriver;
}

namespace {

/// A launch in clusters, or one that begins early. It points into itself.
struct AttributedLaunch {
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config = {};

  AttributedLaunch(const Kernel& kernel, const LaunchShape& shape, CUstream stream) {
    if (shape.cluster > 0) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attribute.value.clusterDim = {shape.cluster, 1, 1};
    }
    if (shape.early) {
      CUlaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attribute.value.programmaticStreamSerializationAllowed = 1;
    }
    config.gridDimX = static_cast<unsigned>(shape.ctas.x);
    config.gridDimY = static_cast<unsigned>(shape.ctas.y);
    config.gridDimZ = static_cast<unsigned>(shape.ctas.z);
    config.blockDimX = static_cast<unsigned>(kernel.threads);
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shape.shared_bytes;
    config.hStream = stream;
    config.attrs = attributes;
  }
  AttributedLaunch(const AttributedLaunch&) = delete;
  AttributedLaunch& operator=(const AttributedLaunch&) = delete;
};

}  // namespace

CUresult put_on_stream(const Kernel& kernel, CUfunction function, const LaunchShape& shape, CUstream stream,
                       void** parameters) {
  if (shape.cluster == 0 && !shape.early) {
    return driver().launch_kernel(function, static_cast<unsigned>(shape.ctas.x),
                                  static_cast<unsigned>(shape.ctas.y), static_cast<unsigned>(shape.ctas.z),
                                  static_cast<unsigned>(kernel.threads), 1, 1, shape.shared_bytes, stream,
                                  parameters, nullptr);
  }
  const AttributedLaunch launch(kernel, shape, stream);
  return driver().launch_kernel_ex(&launch.config, function, parameters, nullptr);
}

int active_clusters(const Kernel& kernel, const LoadedKernel& code, int id, int cluster) {
  const ContextScope scope(primary_context(id));
  const AttributedLaunch launch(kernel,
                                {.ctas = {.x = cluster},
                                 .shared_bytes = static_cast<unsigned>(kernel.shared_bytes),
                                 .cluster = static_cast<unsigned>(cluster)},
                                nullptr);
  int count = 0;
  if (const CUresult error = driver().active_clusters(&count, code.function, &launch.config);
      error != CUDA_SUCCESS) {
    throw_cuda(kernel.name, error);
  }
  return std::max(1, count);
}

const LoadedKernel& loaded(const Kernel& kernel, int id, const std::string& expression) {
  return expression.empty() ? loaded(kernel, id) : compiled_and_loaded(kernel, id, expression);
}

const LoadedKernel& compiled_and_loaded(const Kernel& kernel, int id, const std::string& expression) {
  struct Entry {
    std::once_flag once;
    LoadedKernel kernel;
  };
  static std::mutex mutex;
  static std::map<std::tuple<const Kernel*, int, std::string>, Entry> kernels;  // nodes stay where they are
  Entry* entry = nullptr;
  {
    const std::scoped_lock lock(mutex);
    entry = &kernels[{&kernel, id, expression}];
  }
  std::call_once(entry->once, [&] { entry->kernel = compile_and_load(kernel, id, expression); });
  return entry->kernel;
}

}  // namespace fovea::cuda
