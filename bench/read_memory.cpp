#include "read_memory.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

// The widest registers that the processor has, chosen by the dynamic loader.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define FOVEA_WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOVEA_WIDEST
#endif

namespace fovea::bench {
namespace {

using Line = uint32_t __attribute__((vector_size(64)));

/// Four streams and four sums: no chain of additions bounds the rate, and each stream runs at the pace of
/// memory.
FOVEA_WIDEST uint32_t sum_lines(const char* data, size_t lines) {
  constexpr size_t kStreams = 4;
  const size_t share = lines / kStreams;
  Line sums[kStreams] = {};
  for (size_t i = 0; i < share; ++i) {
    for (size_t s = 0; s < kStreams; ++s) {
      Line line;
      std::memcpy(&line, data + (s * share + i) * sizeof(Line), sizeof(Line));
      sums[s] += line;
    }
  }
  for (size_t i = kStreams * share; i < lines; ++i) {
    Line line;
    std::memcpy(&line, data + i * sizeof(Line), sizeof(Line));
    sums[0] += line;
  }
  uint32_t total = 0;
  for (const Line& sum : sums) {
    for (size_t lane = 0; lane < sizeof(Line) / sizeof(uint32_t); ++lane) total += sum[lane];
  }
  return total;
}

}  // namespace

uint32_t read_memory(const void* data, size_t bytes, int num_threads) {
  const size_t threads = static_cast<size_t>(std::max(1, num_threads));
  const size_t lines = bytes / sizeof(Line) / threads;
  std::vector<uint32_t> sums(threads);
  const auto share = [&](size_t t) {
    sums[t] = sum_lines(static_cast<const char*>(data) + t * lines * sizeof(Line), lines);
  };
  std::vector<std::thread> workers;
  for (size_t t = 1; t < threads; ++t) workers.emplace_back(share, t);
  share(0);
  for (std::thread& worker : workers) worker.join();
  uint32_t total = 0;
  for (uint32_t sum : sums) total += sum;
  return total;
}

}  // namespace fovea::bench
