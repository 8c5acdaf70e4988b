// Memory that ranks of one process share: it is there as long as one of them uses it, also where the rank that made it has failed.
#pragma once

#include <map>
#include <memory>
#include <mutex>

namespace fovea::distributed {

class SharedMemories {
 public:
  static SharedMemories& of_process() {
    static SharedMemories all;
    return all;
  }
  void add(const std::shared_ptr<void>& memory) {
    const std::lock_guard lock(mutex_);
    std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
    known_[memory.get()] = memory;
  }
  /// Null where it is gone.
  std::shared_ptr<void> find(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(address);
    return found != known_.end() ? found->second.lock() : nullptr;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::weak_ptr<void>> known_;
};

}  // namespace fovea::distributed
