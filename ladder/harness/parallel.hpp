// The harness's own threads, for references and checks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace ladder {

/// Calls body(i) for i in [0, count), on all processors.
template <class Body>
void parallel_for(int64_t count, const Body& body) {
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) body(i);
  };
  const auto others = std::min<int64_t>(count, std::max(1u, std::thread::hardware_concurrency())) - 1;
  std::vector<std::jthread> threads;
  for (int64_t t = 0; t < others; ++t) threads.emplace_back(work);
  work();
}

}  // namespace ladder
