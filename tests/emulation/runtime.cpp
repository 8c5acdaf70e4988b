// A CUDA driver and runtime with one device, which is this process: its memory is the device's memory, and a launch
// runs the kernel's own source under the scheduler before it returns.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "cuda/kernels/append_args.hpp"
#include "cuda/kernels/args.hpp"
#include "cuda/kernels/merge_args.hpp"
#include "cuda/kernels/move_args.hpp"
#include "cuda/kernels/named_sums_args.hpp"
#include "cuda/kernels/tma_args.hpp"
#include "cuda/launch/kernel_table.hpp"
#include "emulation/hopper.hpp"
#include "emulation/scheduler.hpp"
#include "tile/swizzle.hpp"

namespace fovea::emulation {
namespace {

/// The device runs no machine code, so kernels that are compiled at run time are none of its own.
const int without_nvrtc = setenv("FOVEA_NVRTC", "/none", 1);

/// Properties of the emulated device: the limits of a chip of its compute capability, but few SMs, so that small
/// problems are split as large ones are on a GPU.
struct Chip {
  int capability;
  size_t shared_per_sm, shared_per_cta;
  int threads_per_sm;
};
const Chip& chip() {
  static const Chip chosen = [] {
    constexpr Chip chips[] = {{90, 233472, kMostShared, 2048},
                              {89, 102400, 101376, 1536},
                              {80, 167936, 166912, 2048},
                              {75, 65536, 65536, 1024}};
    const char* text = std::getenv("FOVEA_EMULATION_CAPABILITY");
    const int wanted = text && *text ? std::atoi(text) : chips[0].capability;
    for (const Chip& known : chips) {
      if (known.capability == wanted) return known;
    }
    fail("FOVEA_EMULATION_CAPABILITY=%s: expected 90, 89, 80 or 75", text);
  }();
  return chosen;
}
constexpr int kSmCount = 8;
constexpr size_t kReservedShared = 1024;  // of each CTA, by the hardware

const cuda::Kernel* kernel_of(const void* entry) {
  for (const cuda::Kernel* kernel : cuda::kernel_table()) {
    if (kernel->entry == entry) return kernel;
  }
  return nullptr;
}

thread_local CUcontext current = nullptr;
CUcontext primary() {
  static char place;
  return reinterpret_cast<CUcontext>(&place);
}

CUresult ctx_get_current(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
CUresult ctx_set_current(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult primary_ctx_retain(CUcontext* context, CUdevice device) {
  if (device != 0) return CUDA_ERROR_INVALID_VALUE;
  *context = primary();
  return CUDA_SUCCESS;
}
CUresult stream_get_ctx(CUstream, CUcontext* context) {
  *context = primary();
  return CUDA_SUCCESS;
}
CUresult memset_d32_async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
  if (to % sizeof value != 0) return CUDA_ERROR_INVALID_VALUE;
  std::fill_n(reinterpret_cast<unsigned*>(to), count, value);
  return CUDA_SUCCESS;
}
/// Work is done when the call returns: the host waits for other threads' writes.
CUresult stream_batch_mem_op(CUstream, unsigned count, CUstreamBatchMemOpParams* operations, unsigned) {
  for (unsigned i = 0; i < count; ++i) {
    const auto& on = operations[i].waitValue;
    const std::atomic_ref word(*reinterpret_cast<unsigned*>(on.address));
    if (on.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) word.store(on.value);
    while (on.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 && static_cast<int>(word.load() - on.value) < 0)
      std::this_thread::yield();
  }
  return CUDA_SUCCESS;
}

/// FOVEA_EMULATION_REPORT=1: at the end, how often each kernel of this build ran.
class Report {
 public:
  void count(const cuda::Kernel& kernel) {
    if (!wanted_) return;
    const std::lock_guard lock(mutex_);
    ++launches_[kernel.name];
  }
  ~Report() {
    if (!wanted_) return;
    for (const cuda::Kernel* kernel : cuda::kernel_table())
      std::printf("%8lld launches of %s\n", launches_[kernel->name], kernel->name);
  }

 private:
  bool wanted_ = std::getenv("FOVEA_EMULATION_REPORT") != nullptr;
  std::mutex mutex_;
  std::map<std::string, long long> launches_;
};
Report& report() {
  static Report the_report;
  return the_report;
}

template <class Args>
CUresult run_kernel(const Launch& launch, const cuda::Kernel& kernel, const void* parameter) {
  using Entry = void (*)(Args);
  const auto entry = reinterpret_cast<Entry>(const_cast<void*>(kernel.entry));
  const Args& args = *static_cast<const Args*>(parameter);
  run(launch, [&] { entry(args); });
  return CUDA_SUCCESS;
}

CUresult launch_clusters(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                         void** parameters, int cluster) {
  if (current != primary()) fail("a launch without a context");
  const auto& kernel = *reinterpret_cast<const cuda::Kernel*>(function);
  // CUDA's limits, and what cudaFuncSetAttribute allowed.
  constexpr unsigned kMostX = 0x7fffffffu, kMostYZ = 65535;
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || grid_x > kMostX || grid_y > kMostYZ || grid_z > kMostYZ ||
      block_y != 1 || block_z != 1 || shared > chip().shared_per_cta) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  report().count(kernel);
  // Backwards of Hopper wait for one another's tiles: these CTAs take turns at random, or a wait that is missing would not show.
  constexpr int kTogether = 4;
  const bool wait = kernel.kind == cuda::KernelKind::kBackward && kernel.persistent && cluster == 1;
  const Launch launch = {kernel.name,
                         {grid_x, grid_y, grid_z},
                         static_cast<int>(block_x),
                         shared,
                         kernel.family != cuda::Family::kMmaSm75 && chip().capability >= 80,
                         cluster,
                         wait ? kTogether : 1};
  switch (kernel.kind) {
    case cuda::KernelKind::kAppend:
      return run_kernel<cuda::AppendArgs>(launch, kernel, parameters[0]);
    case cuda::KernelKind::kMerge:
      return run_kernel<cuda::MergeArgs>(launch, kernel, parameters[0]);
    case cuda::KernelKind::kMove:
      return run_kernel<cuda::MoveArgs>(launch, kernel, parameters[0]);
    case cuda::KernelKind::kForward:
      if (kernel.tma) return run_kernel<cuda::TmaForwardArgs>(launch, kernel, parameters[0]);
      [[fallthrough]];
    case cuda::KernelKind::kBf16x3:
    case cuda::KernelKind::kTransposeValues:
    case cuda::KernelKind::kSeenBlocks:
    case cuda::KernelKind::kAlibiNorms:
    case cuda::KernelKind::kClearCounter:
    case cuda::KernelKind::kCombine:
      return run_kernel<cuda::ForwardArgs>(launch, kernel, parameters[0]);
    case cuda::KernelKind::kBackward:
    case cuda::KernelKind::kBackwardDv:
    case cuda::KernelKind::kBackwardDq:
      if (kernel.tma) return run_kernel<cuda::TmaBackwardArgs>(launch, kernel, parameters[0]);
      [[fallthrough]];
    case cuda::KernelKind::kPreprocess:
    case cuda::KernelKind::kBackwardBf16x3:
    case cuda::KernelKind::kPostprocess:
    case cuda::KernelKind::kListZeros:
    case cuda::KernelKind::kListCounts:
    case cuda::KernelKind::kListOffsets:
    case cuda::KernelKind::kListInverse:
    case cuda::KernelKind::kListKeys:
    case cuda::KernelKind::kListGradients:
    case cuda::KernelKind::kDBias:
    case cuda::KernelKind::kDSink:
    case cuda::KernelKind::kBackwardSeenBlocks:
    case cuda::KernelKind::kBackwardAlibiNorms:
    case cuda::KernelKind::kNamedZeros:
    case cuda::KernelKind::kNamedGradients:
      return run_kernel<cuda::BackwardArgs>(launch, kernel, parameters[0]);
    case cuda::KernelKind::kNamedPeaks:
    case cuda::KernelKind::kNamedSums:
    case cuda::KernelKind::kNamedResults:
      return run_kernel<cuda::NamedSumsArgs>(launch, kernel, parameters[0]);
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult launch_kernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared, CUstream,
                       void** parameters, void**) {
  return launch_clusters(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, parameters,
                         reinterpret_cast<const cuda::Kernel*>(function)->cluster);
}
/// The size of the clusters is all that launches say in attributes.
int cluster_of(const CUlaunchConfig& c) {
  return c.numAttrs == 1 && c.attrs->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION &&
                 c.attrs->value.clusterDim.y == 1 && c.attrs->value.clusterDim.z == 1
             ? static_cast<int>(c.attrs->value.clusterDim.x)
             : 0;
}
CUresult launch_kernel_ex(const CUlaunchConfig* c, CUfunction function, void** parameters, void**) {
  const int cluster = cluster_of(*c);
  if (cluster < 1 || cluster > kMostCluster) return CUDA_ERROR_INVALID_VALUE;
  return launch_clusters(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
                         c->blockDimZ, c->sharedMemBytes, parameters, cluster);
}
CUresult active_clusters(int* count, CUfunction, const CUlaunchConfig* c) {
  const int cluster = cluster_of(*c);
  *count = cluster < 1 ? 0 : kSmCount / cluster;
  return CUDA_SUCCESS;
}

CUresult get_error_name(CUresult, const char** name) {
  *name = "CUDA_ERROR";
  return CUDA_SUCCESS;
}
CUresult get_error_string(CUresult, const char** text) {
  *text = "refused by the emulated device";
  return CUDA_SUCCESS;
}

/// Memory full of NaN that ends where unmapped memory begins, so that accesses beyond it end the process.
class Allocations {
 public:
  void* allocate(size_t size) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    // Ends at most 63 bytes before the guard: places of tensors keep their offset from 64 bytes.
    const size_t used = (std::max<size_t>(size, 1) + 63) / 64 * 64, mapped = (used + page - 1) / page * page;
    void* memory = mmap(nullptr, mapped + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    mprotect(static_cast<char*>(memory) + mapped, page, PROT_NONE);
    std::memset(memory, 0xff, mapped);
    char* start = static_cast<char*>(memory) + (mapped - used);
    const std::lock_guard lock(mutex_);
    known_[start] = {memory, mapped + page};
    return start;
  }
  bool free(void* start) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(start);
    if (found == known_.end()) return false;
    munmap(found->second.memory, found->second.size);
    known_.erase(found);
    return true;
  }

 private:
  struct Mapped {
    void* memory;
    size_t size;
  };
  std::mutex mutex_;
  std::map<void*, Mapped> known_;
};
Allocations& allocations() {
  static auto* all = new Allocations;  // outlives threads that free memory when they end
  return *all;
}

void* entry_point(const std::string& name) {
  const std::map<std::string, void*> known = {
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&ctx_get_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(&ctx_set_current)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&primary_ctx_retain)},
      {"cuLaunchKernel", reinterpret_cast<void*>(&launch_kernel)},
      {"cuLaunchKernelEx", reinterpret_cast<void*>(&launch_kernel_ex)},
      {"cuOccupancyMaxActiveClusters", reinterpret_cast<void*>(&active_clusters)},
      {"cuMemsetD32Async", reinterpret_cast<void*>(&memset_d32_async)},
      {"cuStreamBatchMemOp", reinterpret_cast<void*>(&stream_batch_mem_op)},
      {"cuStreamGetCtx", reinterpret_cast<void*>(&stream_get_ctx)},
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&tensor_map_encode_tiled)},
      {"cuGetErrorName", reinterpret_cast<void*>(&get_error_name)},
      {"cuGetErrorString", reinterpret_cast<void*>(&get_error_string)},
  };
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace
}  // namespace fovea::emulation

using namespace fovea::emulation;

const char* cudaGetErrorString(cudaError_t) {
  return "refused by the emulated device";
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  *p = {};
  std::snprintf(p->name, sizeof p->name, "emulated device");
  p->major = chip().capability / 10;
  p->minor = chip().capability % 10;
  p->multiProcessorCount = kSmCount;
  p->maxThreadsPerMultiProcessor = chip().threads_per_sm;
  p->sharedMemPerMultiprocessor = chip().shared_per_sm;
  p->sharedMemPerBlockOptin = chip().shared_per_cta;
  p->totalGlobalMem = size_t{1} << 30;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1 << 20;  // of L2: small, so that a launch has several sections
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** pointer, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *pointer = entry_point(name);
  *found = *pointer ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  *attributes = {};
  return kernel_of(kernel) ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return value >= 0 && static_cast<size_t>(value) <= chip().shared_per_cta ? cudaSuccess
                                                                           : cudaErrorInvalidValue;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, const void*, int threads,
                                                          size_t shared) {
  *ctas = std::min(chip().threads_per_sm / std::max(threads, 1),
                   static_cast<int>(chip().shared_per_sm / (shared + kReservedShared)));
  return cudaSuccess;
}
cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* kernel) {
  const fovea::cuda::Kernel* known = kernel_of(kernel);
  *function = reinterpret_cast<cudaFunction_t>(const_cast<fovea::cuda::Kernel*>(known));
  return known ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<char*>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(current, *mode);
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t size) {
  *memory = allocations().allocate(size);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  return memory == nullptr || allocations().free(memory) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaMallocAsync(void** memory, size_t size, cudaStream_t) {
  return cudaMalloc(memory, size);
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  return cudaFree(memory);
}
cudaError_t cudaMallocHost(void** memory, size_t size) {
  return cudaMalloc(memory, size);
}
cudaError_t cudaFreeHost(void* memory) {
  return cudaFree(memory);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
  if (width > to_pitch || width > from_pitch) return cudaErrorInvalidValue;
  for (size_t line = 0; line < height; ++line)
    std::memcpy(static_cast<char*>(to) + line * to_pitch, static_cast<const char*>(from) + line * from_pitch,
                width);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetPCIBusId(char* bus, int size, int) {
  std::snprintf(bus, static_cast<size_t>(size), "%s", "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return cudaErrorInvalidValue;
}
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return cudaErrorInvalidValue;
}
cudaError_t cudaIpcCloseMemHandle(void*) {
  return cudaErrorInvalidValue;
}
cudaError_t cudaDeviceCanAccessPeer(int* possible, int, int) {
  *possible = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaErrorInvalidValue;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new char;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t size) {
  std::memset(to, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t) {
  std::memset(to, value, size);
  return cudaSuccess;
}
