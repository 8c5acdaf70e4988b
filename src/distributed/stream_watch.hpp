// Whether work that waits for other ranks gets done, where the host does not wait for it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "distributed/memory_cuda.hpp"

namespace fovea::distributed {

/// Looks from a thread of its own at events behind pieces of work. Where one is older than the deadline it calls late(), once, with
/// the number of pieces that were done, and looks no more.
class StreamWatch {
 public:
  /// A deadline of 0 is none.
  StreamWatch(int device, std::chrono::milliseconds deadline, std::function<void(size_t)> late);
  StreamWatch(const StreamWatch&) = delete;
  StreamWatch& operator=(const StreamWatch&) = delete;
  ~StreamWatch();

  /// What lies on the stream is a piece.
  void add(void* stream);

 private:
  struct Piece {
    std::unique_ptr<CudaEvent> end;
    std::chrono::steady_clock::time_point begun;
  };
  void watch();

  int device_;
  std::chrono::milliseconds deadline_;
  std::function<void(size_t)> late_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> pieces_;
  std::vector<std::unique_ptr<CudaEvent>> past_;  ///< to be recorded again
  size_t done_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace fovea::distributed
