// The host as a device. Its peak is measured, by chains of fused multiply-adds on all processors.
#include "ladder/harness/vector.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ladder/harness/host_device.cpp"
// Highway compiles the code from here to HWY_AFTER_NAMESPACE once for each instruction set.
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace ladder::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Ten independent chains hide the latency of an addition of four cycles on two pipes. Each begins with a value of its own:
/// compilers make one of chains that are the same. Returns operations done.
double multiply_add_loop(int rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto factor = hn::Set(d, 0.999f), term = hn::Set(d, 1e-3f);
  auto a = hn::Set(d, 1.0f), b = hn::Set(d, 1.1f), c = hn::Set(d, 1.2f), e = hn::Set(d, 1.3f),
       f = hn::Set(d, 1.4f), g = hn::Set(d, 1.5f), h = hn::Set(d, 1.6f), i = hn::Set(d, 1.7f),
       j = hn::Set(d, 1.8f), k = hn::Set(d, 1.9f);
  for (int round = 0; round < rounds; ++round) {
    a = hn::MulAdd(a, factor, term);
    b = hn::MulAdd(b, factor, term);
    c = hn::MulAdd(c, factor, term);
    e = hn::MulAdd(e, factor, term);
    f = hn::MulAdd(f, factor, term);
    g = hn::MulAdd(g, factor, term);
    h = hn::MulAdd(h, factor, term);
    i = hn::MulAdd(i, factor, term);
    j = hn::MulAdd(j, factor, term);
    k = hn::MulAdd(k, factor, term);
  }
  const auto all = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)),
                           hn::Add(hn::Add(f, g), hn::Add(hn::Add(h, i), hn::Add(j, k))));
  *sink = hn::GetLane(all);
  return 2.0 * 10 * rounds * static_cast<double>(hn::Lanes(d));
}

}  // namespace ladder::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "ladder/harness/device.hpp"
#include "ladder/harness/parallel.hpp"

namespace ladder {

namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Host final : public Device {
 public:
  std::string text() const override {
    std::ifstream info("/proc/cpuinfo");
    std::string name = "a processor without a name";
    for (std::string line; std::getline(info, line);) {
      if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos) {
        name = line.substr(line.find(": ") + 2);
        break;
      }
    }
    return name + ", " + std::to_string(std::max(1u, std::thread::hardware_concurrency())) + " threads";
  }
  int capability() const override { return 0; }
  int id() const override { return 0; }
  void* stream() const override { return nullptr; }

  double peak(Bound bound) override {
    if (bound == Bound::cpu_memory) return copy_rate();
    if (bound != Bound::cpu_f32) return 0;
    if (peak_ > 0) return peak_;
    constexpr int kRounds = 1'000'000;
    // Longer than the slice of a scheduler, so that some attempt has the processors to itself.
    constexpr double kSeconds = 0.1;
    const Clock::time_point begin = Clock::now();
    while (peak_ == 0 || since(begin) < kSeconds) {
      const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
      std::atomic<double> operations{0};
      const Clock::time_point start = Clock::now();
      parallel_for(threads, [&](int64_t) {
        float sink = 0;
        double done = LADDER_BEST(multiply_add_loop)(kRounds, &sink);
        if (sink < 0) done = 0;  // never: keeps the loop
        double before = operations;
        while (!operations.compare_exchange_weak(before, before + done)) {
        }
      });
      peak_ = std::max(peak_, operations / since(start));
    }
    return peak_;
  }

  void* allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(256, (bytes + 256) / 256 * 256);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void release(void* memory) override { std::free(memory); }
  void upload(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void synchronize() override {}
  std::vector<std::vector<double>> time(const std::vector<std::function<void()>>& contenders,
                                        const Protocol& protocol) override {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < protocol.warmups && (i == 0 || since(begin) < protocol.seconds); ++i) {
      for (const auto& run : contenders) run();
    }
    std::vector<std::vector<double>> times(contenders.size());
    for (int round = 0; round < protocol.runs && (round < 3 || since(begin) < protocol.seconds); ++round) {
      for (size_t i = 0; i < contenders.size(); ++i) {
        const Clock::time_point start = Clock::now();
        contenders[i]();
        times[i].push_back(since(start));
      }
    }
    return times;
  }
  void profile(const std::function<void()>& run) override { run(); }
  size_t peak_bytes(const std::function<void()>& work) override {
#if defined(__GLIBC__)
    malloc_trim(0);  // returns freed memory to the system, so that taking it again shows
#endif
    std::ofstream reset("/proc/self/clear_refs");
    const bool is_reset(reset << "5" << std::flush);  // the peak becomes what is resident now (man 5 proc)
    const size_t before = status_bytes("VmHWM:");
    work();
    const size_t after = status_bytes("VmHWM:");  // may be less than before: Linux updates its counters late
    return is_reset && before > 0 && after > before ? after - before : 0;
  }

 private:
  /// A value of /proc/self/status; 0 where there is none.
  static size_t status_bytes(const std::string& name) {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
      size_t kibibytes = 0;
      if (word == name && status >> kibibytes) return kibibytes * 1024;
    }
    return 0;
  }

  /// Bytes read and written per second by copies on all processors, 256 MiB each way: far larger than the
  /// caches.
  double copy_rate() {
    if (copy_rate_ > 0) return copy_rate_;
    constexpr size_t kBytes = size_t{256} << 20, kPiece = size_t{1} << 20;
    auto *from = static_cast<char*>(allocate(kBytes)), *to = static_cast<char*>(allocate(kBytes));
    std::memset(from, 1, kBytes);
    std::memset(to, 2, kBytes);
    for (int attempt = 0; attempt < 5; ++attempt) {
      const Clock::time_point start = Clock::now();
      parallel_for(kBytes / kPiece, [&](int64_t i) {
        std::memcpy(to + static_cast<size_t>(i) * kPiece, from + static_cast<size_t>(i) * kPiece, kPiece);
      });
      copy_rate_ = std::max(copy_rate_, 2.0 * static_cast<double>(kBytes) / since(start));
    }
    release(from);
    release(to);
    return copy_rate_;
  }

  double peak_ = 0, copy_rate_ = 0;
};

}  // namespace

std::unique_ptr<Device> host_device() {
  return std::make_unique<Host>();
}

}  // namespace ladder
#endif
