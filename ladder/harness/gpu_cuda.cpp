// A GPU as a device: runs are replays of CUDA graphs between two events, so that host time does not count.
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <new>
#include <stdexcept>

#include "ladder/harness/device.hpp"

namespace ladder {

cudaStream_t stream();
int sm_count();
size_t shared_bytes_of_sm();
void launch_profile_marker();  // profile_marker.cu

namespace {

cudaStream_t the_stream = nullptr;
cudaDeviceProp properties{};

void demand(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

/// Operations of an SM per clock, dense, with float32 sums, from NVIDIA's white papers of the architectures.
double operations_per_clock(Bound bound, int capability) {
  struct Known {
    int capability;
    double f32, tf32, bf16;
  };
  constexpr Known kChips[] = {{75, 128, 0, 0},      {80, 128, 1024, 2048}, {86, 256, 256, 512},
                              {87, 256, 512, 1024}, {89, 256, 256, 512},   {90, 256, 2048, 4096}};
  for (const Known& chip : kChips) {
    if (chip.capability != capability) continue;
    if (bound == Bound::gpu_f32) return chip.f32;
    if (bound == Bound::gpu_tf32) return chip.tf32;
    if (bound == Bound::gpu_bf16) return chip.bf16;
  }
  return 0;
}

class Event {
 public:
  Event() { demand(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Gpu final : public Device {
 public:
  explicit Gpu(int id) : id_(id) {
    demand(cudaSetDevice(id), "cudaSetDevice");
    demand(cudaGetDeviceProperties(&properties, id), "cudaGetDeviceProperties");
    demand(cudaDeviceGetAttribute(&khz_, cudaDevAttrClockRate, id), "cudaDeviceGetAttribute");
    // Not the default stream, which cannot be captured.
    demand(cudaStreamCreateWithFlags(&the_stream, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Gpu() override { cudaStreamDestroy(the_stream); }

  std::string text() const override {
    return std::string(properties.name) + ", compute capability " + std::to_string(properties.major) + "." +
           std::to_string(properties.minor) + ", " + std::to_string(properties.multiProcessorCount) +
           " SMs up to " + std::to_string(khz_ / 1000) + " MHz";
  }
  int capability() const override { return properties.major * 10 + properties.minor; }
  int id() const override { return id_; }
  void* stream() const override { return the_stream; }

  double peak(Bound bound) override {
    if (bound == Bound::gpu_memory) return copy_rate();
    return operations_per_clock(bound, capability()) * properties.multiProcessorCount * khz_ * 1e3;
  }

  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    const cudaError_t status = cudaMalloc(&memory, std::max<size_t>(bytes, 1));
    if (status == cudaErrorMemoryAllocation) throw std::bad_alloc();
    demand(status, "cudaMalloc");
    note_use();
    return memory;
  }
  void release(void* memory) override { cudaFree(memory); }
  void upload(void* to, const void* from, size_t bytes) override {
    demand(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, the_stream), "copy to the GPU");
    synchronize();
  }
  void download(void* to, const void* from, size_t bytes) override {
    demand(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, the_stream), "copy from the GPU");
    synchronize();
  }
  void synchronize() override {
    demand(cudaStreamSynchronize(the_stream), "the GPU");
    note_use();  // others may have allocated since
  }

  std::vector<std::vector<double>> time(const std::vector<std::function<void()>>& contenders,
                                        const Protocol& protocol) override {
    // A replay takes much longer than its start and the clock's tick of 0.5 us.
    constexpr double kReplaySeconds = 0.005;
    constexpr double kMostLaunches = 200;
    const auto begin = std::chrono::steady_clock::now();
    const auto since = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    struct Replayed {
      cudaGraphExec_t graph;
      int launches;
    };
    std::vector<Replayed> graphs;
    for (const auto& run : contenders) {
      run();
      const double one = std::max(timed(run), 1e-6);
      const int launches = static_cast<int>(std::clamp(std::ceil(kReplaySeconds / one), 1.0, kMostLaunches));
      graphs.push_back({capture(run, launches), launches});
    }
    const auto replay = [&](const Replayed& x) {
      return timed([&] { demand(cudaGraphLaunch(x.graph, the_stream), "cudaGraphLaunch"); }) / x.launches;
    };
    for (int i = 0; i < std::max(protocol.warmups, 1); ++i) {
      for (const Replayed& x : graphs) replay(x);
    }
    std::vector<std::vector<double>> times(contenders.size());
    for (int round = 0; round < protocol.runs && (round < 3 || since() < protocol.seconds); ++round) {
      for (size_t i = 0; i < graphs.size(); ++i) times[i].push_back(replay(graphs[i]));
    }
    for (const Replayed& x : graphs) cudaGraphExecDestroy(x.graph);
    return times;
  }

  void profile(const std::function<void()>& run) override {
    demand(cudaProfilerStart(), "cudaProfilerStart");
    launch_profile_marker();
    run();
    synchronize();
    demand(cudaProfilerStop(), "cudaProfilerStop");
  }

  size_t peak_bytes(const std::function<void()>& work) override {
    synchronize();
    const size_t before = most_used_ = used();
    watches_ = true;
    work();
    watches_ = false;
    return most_used_ - before;
  }

 private:
  /// Bytes of the GPU's memory in use by all processes; the driver allocates in blocks of 2 MiB.
  static size_t used() {
    size_t available = 0, total = 0;
    demand(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    return total - available;
  }
  void note_use() {
    if (watches_) most_used_ = std::max(most_used_, used());
  }

  double timed(const std::function<void()>& work) {
    const Event begin, end;
    demand(cudaEventRecord(begin.get(), the_stream), "cudaEventRecord");
    work();
    demand(cudaEventRecord(end.get(), the_stream), "cudaEventRecord");
    demand(cudaEventSynchronize(end.get()), "the GPU");
    float milliseconds = 0;
    demand(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

  static cudaGraphExec_t capture(const std::function<void()>& run, int launches) {
    cudaGraph_t graph = nullptr;
    demand(cudaStreamBeginCapture(the_stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      for (int i = 0; i < launches; ++i) run();
    } catch (...) {
      cudaStreamEndCapture(the_stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    demand(cudaStreamEndCapture(the_stream, &graph), "cudaStreamEndCapture");
    cudaGraphExec_t executable = nullptr;
    const cudaError_t made = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    demand(made, "cudaGraphInstantiate");
    return executable;
  }

  /// Bytes read and written in a second by a copy within the GPU's memory, 1 GiB each way.
  double copy_rate() {
    if (copy_rate_ > 0) return copy_rate_;
    constexpr size_t kBytes = size_t{1} << 30;
    void *from = allocate(kBytes), *to = allocate(kBytes);
    const auto copy = [&] {
      demand(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, the_stream),
             "a copy within the GPU");
    };
    copy();
    double best = timed(copy);
    for (int i = 0; i < 10; ++i) best = std::min(best, timed(copy));
    release(from);
    release(to);
    return copy_rate_ = 2.0 * static_cast<double>(kBytes) / best;
  }

  int id_, khz_ = 0;
  double copy_rate_ = 0;
  bool watches_ = false;
  size_t most_used_ = 0;
};

}  // namespace

cudaStream_t stream() {
  return the_stream;
}
int sm_count() {
  return properties.multiProcessorCount;
}
size_t shared_bytes_of_sm() {
  return properties.sharedMemPerMultiprocessor;
}

std::unique_ptr<Device> gpu_device(int id, std::string& why) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || id >= count) {
    why = counted != cudaSuccess
              ? cudaGetErrorString(counted)
              : "there is no GPU " + std::to_string(id) + " here, but " + std::to_string(count);
    return nullptr;
  }
  return std::make_unique<Gpu>(id);
}

}  // namespace ladder
