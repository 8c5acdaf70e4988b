// Ranks that are threads of one process: each finds the others' messages in mailboxes, and takes them from where they lie.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "distributed/grace.hpp"
#include "distributed/memory_cuda.hpp"
#include "fovea/fovea_distributed.h"

namespace fovea::distributed {

class ThreadGroup {
 public:
  ThreadGroup(int size, const fovea_device* devices, const fovea_thread_options& options);

  int size() const { return static_cast<int>(ranks_.size()); }
  fovea_transport transport(int rank);
  void sent(int rank, int64_t* messages, int64_t* bytes) const;

 private:
  /// A message that waits to be taken. On GPUs the receiver's stream waits for `ready`, and the sender's for `taken`.
  struct Posted {
    const void* data = nullptr;
    size_t bytes = 0;
    bool is_begun = false, is_taken = false;
    bool is_retracted = false;  ///< the sender gave up, and its memory may be gone
    CudaEvent *ready = nullptr, *taken = nullptr;
  };
  /// A step that is started and not finished.
  struct Step {
    std::vector<std::shared_ptr<Posted>> sends;
    std::vector<fovea_message> receives;
  };
  struct Rank {
    ThreadGroup* group = nullptr;
    int number = 0;
    fovea_device device{};
    std::deque<Step> steps;
    std::vector<std::unique_ptr<CudaEvent>> events;  ///< reused in turn; see event()
    size_t next_event = 0;
    uint64_t random = 0;
    int64_t messages = 0, bytes = 0;
    std::string error;
  };

  void start(Rank& rank, const fovea_message* sends, int num_sends, const fovea_message* receives,
             int num_receives, void* stream);
  void finish(Rank& rank, void* stream);
  void receive(Rank& rank, const fovea_message& message, void* stream, CudaEvent*& taken);
  void stop(Rank& rank, const std::string& reason);
  /// Nobody takes these messages any more when it returns: their memory may go.
  void retract(const std::vector<std::shared_ptr<Posted>>& messages);
  void exchange(Rank& rank, const Step& step, void* stream);
  /// The oldest message from a peer, which is begun then.
  std::shared_ptr<Posted> begin_to_take(Rank& rank, const fovea_message& message);
  void delay(Rank& rank);
  CudaEvent* event(Rank& rank);
  std::deque<std::shared_ptr<Posted>>& mailbox(int from, int to) {
    return mailboxes_[static_cast<size_t>(from) * ranks_.size() + static_cast<size_t>(to)];
  }
  /// Waits until `done` or the deadline. Throws RequestError where a rank has stopped, or nothing came.
  template <class Done>
  void wait(std::unique_lock<std::mutex>& lock, const std::string& what, Done&& done,
            std::chrono::milliseconds grace = {});
  template <class Body>
  static fovea_status guarded(void* context, Body&& body);

  std::chrono::milliseconds deadline_;
  int64_t delay_us_;
  bool peer_copies_ = false;
  std::vector<Rank> ranks_;
  std::vector<std::deque<std::shared_ptr<Posted>>> mailboxes_;  ///< by sender and receiver
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string stopped_;  ///< why a rank gave up; "": none did
};

}  // namespace fovea::distributed
