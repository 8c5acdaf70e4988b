// The definitions of stream_watch.hpp.
#include "distributed/stream_watch.hpp"

#include <utility>

namespace fovea::distributed {

StreamWatch::StreamWatch(int device, std::chrono::milliseconds deadline, std::function<void(size_t)> late)
    : device_(device), deadline_(deadline), late_(std::move(late)) {
  if (deadline_.count() > 0) thread_ = std::thread([this] { watch(); });
}

StreamWatch::~StreamWatch() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StreamWatch::add(void* stream) {
  if (deadline_.count() == 0) return;
  std::unique_ptr<CudaEvent> end;
  {
    const std::lock_guard lock(mutex_);
    if (!past_.empty()) {
      end = std::move(past_.back());
      past_.pop_back();
    }
  }
  if (!end) end = make_cuda_event(device_);
  end->record(stream);
  const std::lock_guard lock(mutex_);
  pieces_.push_back({std::move(end), std::chrono::steady_clock::now()});
}

void StreamWatch::watch() {
  constexpr std::chrono::milliseconds kLook{20};
  std::unique_lock lock(mutex_);
  while (!closing_) {
    changed_.wait_for(lock, kLook);
    while (!pieces_.empty() && pieces_.front().end->is_past()) {
      past_.push_back(std::move(pieces_.front().end));
      pieces_.pop_front();
      ++done_;
    }
    if (pieces_.empty() || std::chrono::steady_clock::now() - pieces_.front().begun <= deadline_) continue;
    const size_t done = done_;
    lock.unlock();
    late_(done);
    return;
  }
}

}  // namespace fovea::distributed
