// Worker threads of one run, and the queue that hands them their work. OpenMP keeps a pool of threads between
// runs; the std::thread variant is for ThreadSanitizer, which cannot see into libgomp.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(FOVEA_STD_THREADS)
#include <thread>
#include <vector>
#endif

namespace fovea::cpu {

/// Calls body(thread) for thread in [0, num_threads), each on a thread of its own. One thread costs nothing.
template <class Body>
void run_threads(int num_threads, const Body& body) {
  if (num_threads <= 1) {
    body(0);
    return;
  }
#if defined(FOVEA_STD_THREADS)
  std::vector<std::thread> workers;
  for (int t = 1; t < num_threads; ++t) workers.emplace_back([&body, t] { body(t); });
  body(0);
  for (std::thread& worker : workers) worker.join();
#else
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int t = 0; t < num_threads; ++t) body(t);
#endif
}

/// Hands out the items 0 .. count-1 to whichever thread asks; callers put the longest items first.
class WorkQueue {
 public:
  explicit WorkQueue(int64_t count) : count_(count) {}
  /// The next item, or -1 when there is none left.
  int64_t next() {
    const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    return item < count_ ? item : -1;
  }

 private:
  std::atomic<int64_t> next_{0};
  int64_t count_;
};

}  // namespace fovea::cpu
