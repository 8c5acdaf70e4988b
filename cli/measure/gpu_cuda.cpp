// A GPU through the CUDA runtime: memory, a stream, and times of CUDA graphs.
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "cli/measure/gpu.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void demand(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Failure(Exit::resources,
                fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;

Event make_event() {
  cudaEvent_t event = nullptr;
  demand(cudaEventCreate(&event), "cudaEventCreate");
  return Event(event);
}

struct DestroyGraph {
  void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, DestroyGraph>;

}  // namespace

struct Gpu::Impl {
  int id = 0;
  cudaStream_t stream = nullptr;
  std::vector<void*> memory;

  ~Impl() {
    if (stream != nullptr) cudaStreamDestroy(stream);
    for (void* block : memory) cudaFree(block);
  }

  Graph capture(const std::function<void()>& run, int launches) const {
    demand(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      for (int i = 0; i < launches; ++i) run();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    demand(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    demand(made, "cudaGraphInstantiate");
    return Graph(executable);
  }
};

Gpu::Gpu(int id) : impl_(std::make_unique<Impl>()) {
  impl_->id = id;
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) {
    throw Failure(Exit::problem,
                  fmt::format("there is no GPU here ({}); `fovea info` tells what is",
                              counted != cudaSuccess ? cudaGetErrorString(counted) : "none found"));
  }
  if (id < 0 || id >= count) {
    throw Failure(Exit::usage,
                  fmt::format("--device: got cuda:{}, expected cuda:0 to cuda:{}", id, count - 1));
  }
  demand(cudaSetDevice(id), "cudaSetDevice");
  // Not the default stream: that one waits for others, and cannot be captured.
  demand(cudaStreamCreateWithFlags(&impl_->stream, cudaStreamNonBlocking), "cudaStreamCreate");
}

Gpu::~Gpu() = default;

fovea_device Gpu::device() const {
  return cuda(impl_->id);
}

std::string Gpu::text() const {
  cudaDeviceProp p{};
  demand(cudaGetDeviceProperties(&p, impl_->id), "cudaGetDeviceProperties");
  int khz = 0, driver = 0, runtime = 0;
  demand(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, impl_->id), "cudaDeviceGetAttribute");
  demand(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  demand(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  const auto version = [](int v) { return fmt::format("{}.{}", v / 1000, v % 1000 / 10); };
  return fmt::format("{}, {} SMs up to {} MHz, {:.0f} GiB, {:.0f} MiB of L2; CUDA {}, driver for {}", p.name,
                     p.multiProcessorCount, khz / 1000, static_cast<double>(p.totalGlobalMem) / 0x1p30,
                     static_cast<double>(p.l2CacheSize) / 0x1p20, version(runtime), version(driver));
}

void* Gpu::stream() const {
  return impl_->stream;
}

void Gpu::synchronize() {
  demand(cudaStreamSynchronize(impl_->stream), "the GPU");
}

void* Gpu::allocate(size_t bytes) {
  void* memory = nullptr;
  demand(cudaMalloc(&memory, std::max<size_t>(bytes, 1)), "cudaMalloc");
  impl_->memory.push_back(memory);
  return memory;
}

void Gpu::upload(void* to, const Array& from) {
  demand(cudaMemcpyAsync(to, from.bytes.data(), from.bytes.size(), cudaMemcpyHostToDevice, impl_->stream),
         "copy to the GPU");
  synchronize();
}

void Gpu::download(Array& to, const void* from) {
  demand(cudaMemcpyAsync(to.bytes.data(), from, to.bytes.size(), cudaMemcpyDeviceToHost, impl_->stream),
         "copy from the GPU");
  synchronize();
}

void Gpu::copy(void* to, const void* from, size_t bytes) {
  demand(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, impl_->stream), "copy on the GPU");
}

Timing Gpu::measure(const std::function<void()>& run, double seconds, int least) {
  // One replay is long beside its start and the clock's tick, 0.5 us; so many launches make a graph large enough.
  constexpr double kReplaySeconds = 0.008;
  constexpr int kMostLaunches = 200, kMostReplays = 10'000;
  const Event begin = make_event(), end = make_event();
  const auto timed = [&](const std::function<void()>& work) {
    demand(cudaEventRecord(begin.get(), impl_->stream), "cudaEventRecord");
    work();
    demand(cudaEventRecord(end.get(), impl_->stream), "cudaEventRecord");
    demand(cudaEventSynchronize(end.get()), "the GPU");
    float milliseconds = 0;
    demand(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  };
  run();
  const double one = std::max(timed(run), 1e-6);
  const int launches =
      static_cast<int>(std::clamp(std::ceil(kReplaySeconds / one), 1.0, static_cast<double>(kMostLaunches)));
  const Graph graph = impl_->capture(run, launches);
  const auto replay = [&] { demand(cudaGraphLaunch(graph.get(), impl_->stream), "cudaGraphLaunch"); };
  timed(replay);  // brings the graph to the device
  std::vector<double> times;
  const Clock::time_point start = Clock::now();
  while (static_cast<int>(times.size()) < kMostReplays &&
         (static_cast<int>(times.size()) < least || since(start) < seconds)) {
    times.push_back(timed(replay) / launches);
  }
  Timing timing = summary(std::move(times));
  timing.runs *= launches;
  return timing;
}

double Gpu::host_seconds(const std::function<void()>& run) {
  // The queue of a stream holds 1,024 launches; a run is a few of them.
  constexpr int kBatches = 21, kRuns = 100;
  std::vector<double> times;
  for (int batch = 0; batch < kBatches; ++batch) {
    synchronize();
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kRuns; ++i) run();
    times.push_back(since(start) / kRuns);
  }
  synchronize();
  return summary(std::move(times)).median;
}

}  // namespace fovea::cli
