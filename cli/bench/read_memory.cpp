// The bandwidth of reading memory, on any number of threads.
#include "cli/bench/read_memory.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#if defined(__linux__)
#include <sched.h>
#endif

// The dynamic loader chooses the clone for the processor's widest vectors.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define FOVEA_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOVEA_WIDEST
#endif

namespace fovea::cli {
namespace {

using Line = uint32_t __attribute__((vector_size(64)));
constexpr size_t kLine = sizeof(Line);
constexpr size_t kSums = 4;  // independent chains: the latency of one addition bounds no rate
constexpr size_t kStep = kSums * kLine;

/// `bytes` is a multiple of kStep. Each round adds one line to each sum: four neighbours, or one of each quarter.
FOVEA_WIDEST uint32_t sum_chunk(const char* data, size_t bytes, size_t streams, size_t ahead) {
  const size_t apart = streams == 1 ? kLine : bytes / kSums;
  const size_t advance = streams == 1 ? kStep : kLine;
  Line sums[kSums] = {};
  for (size_t i = 0; i < bytes / kStep; ++i) {
    for (size_t s = 0; s < kSums; ++s) {
      const char* at = data + s * apart + i * advance;
      __builtin_prefetch(at + ahead);
      Line line;
      std::memcpy(&line, at, kLine);
      sums[s] += line;
    }
  }
  uint32_t total = 0;
  for (const Line& sum : sums) {
    for (size_t lane = 0; lane < kLine / sizeof(uint32_t); ++lane) total += sum[lane];
  }
  return total;
}

constexpr size_t kKilo = 1024, kMega = kKilo * kKilo;
constexpr size_t kAhead = 2 * kKilo;
constexpr std::array<ReadWay, 12> kWays = {{{64 * kKilo, 1, 0},
                                            {64 * kKilo, 4, 0},
                                            {kMega, 1, 0},
                                            {kMega, 4, 0},
                                            {16 * kMega, 1, 0},
                                            {16 * kMega, 4, 0},
                                            {64 * kKilo, 1, kAhead},
                                            {64 * kKilo, 4, kAhead},
                                            {kMega, 1, kAhead},
                                            {kMega, 4, kAhead},
                                            {16 * kMega, 1, kAhead},
                                            {16 * kMega, 4, kAhead}}};

}  // namespace

std::string ReadWay::name() const {
  return std::to_string(chunk / kKilo) + " KB chunks, " + std::to_string(streams) +
         (streams == 1 ? " stream" : " streams") + (ahead > 0 ? ", prefetched" : "");
}

ReadWay fastest_way(const std::function<void(const ReadWay&)>& read) {
  using Clock = std::chrono::steady_clock;
  constexpr int kTries = 3;
  auto least = Clock::duration::max();
  ReadWay fastest;
  for (const ReadWay& way : kWays) {
    read(way);
    for (int i = 0; i < kTries; ++i) {
      const Clock::time_point start = Clock::now();
      read(way);
      const Clock::duration taken = Clock::now() - start;
      if (taken >= least) continue;
      least = taken;
      fastest = way;
    }
  }
  return fastest;
}

MemoryReader::MemoryReader(int num_threads) : turn_(std::max(1, num_threads)) {
  for (int t = 1; t < num_threads; ++t) {
    workers_.emplace_back([this] {
      for (;;) {
        turn_.arrive_and_wait();  // there is something to read
        if (stop_) return;
        take_chunks();
        turn_.arrive_and_wait();  // all of it is read
      }
    });
  }
}

MemoryReader::~MemoryReader() {
  stop_ = true;
  turn_.arrive_and_wait();
  for (std::thread& worker : workers_) worker.join();
}

/// Workers wake up on the core of the thread that wakes them, where the system lets them: they are kept off it, and off each other's.
void MemoryReader::keep_apart() {
#if defined(__linux__)
  const int here = sched_getcpu();
  if (here == core_) return;
  core_ = here;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  int core = here;
  for (std::thread& worker : workers_) {
    do core = (core + 1) % CPU_SETSIZE;
    while (!CPU_ISSET(core, &allowed));
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    pthread_setaffinity_np(worker.native_handle(), sizeof(one), &one);
  }
#endif
}

void MemoryReader::take_chunks() {
  uint32_t sum = 0;
  for (size_t start; (start = next_.fetch_add(way_.chunk, std::memory_order_relaxed)) < bytes_;) {
    sum += sum_chunk(data_ + start, std::min(way_.chunk, bytes_ - start), way_.streams, way_.ahead);
  }
  sum_.fetch_add(sum, std::memory_order_relaxed);
}

uint32_t MemoryReader::read(const void* data, size_t bytes, const ReadWay& way) {
  keep_apart();
  data_ = static_cast<const char*>(data);
  bytes_ = bytes / kStep * kStep;
  way_ = way;
  next_ = 0;
  sum_ = 0;
  turn_.arrive_and_wait();
  take_chunks();
  turn_.arrive_and_wait();
  return sum_;
}

}  // namespace fovea::cli
