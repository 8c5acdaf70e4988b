// The definitions of thread_transport.hpp.
#include "distributed/thread_transport.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>
#include <thread>

#include "core/status.hpp"

namespace fovea::distributed {
namespace {

constexpr int64_t kDeadline = 60'000;
/// Events of a rank. A step has two, behind what it sends and behind each sender's messages that it took; each is in use until both
/// sides are past it, and at most three steps are open.
constexpr size_t kEventsPerPeer = 8;

/// Streams of ranks that share a GPU may wait for each other in one queue of the hardware.
bool each_has_its_gpu(int size, const fovea_device* devices) {
  std::set<int32_t> ids;
  for (int i = 0; devices != nullptr && i < size; ++i) {
    if (devices[i].type == FOVEA_CUDA) ids.insert(devices[i].id);
  }
  return ids.size() == static_cast<size_t>(size);
}

}  // namespace

ThreadGroup::ThreadGroup(int size, const fovea_device* devices, const fovea_thread_options& options)
    : deadline_(options.deadline_ms > 0 ? options.deadline_ms : kDeadline),
      delay_us_(options.delay_us),
      ranks_(static_cast<size_t>(std::max(size, 0))) {
  if (size < 1) throw_invalid("size", std::to_string(size), "1 or more", "say how many ranks there are");
  if (options.deadline_ms < 0 || options.delay_us < 0)
    throw_invalid(options.deadline_ms < 0 ? "deadline_ms" : "delay_us", "a negative number", "0 or more",
                  "0 takes the usual");
  mailboxes_.resize(ranks_.size() * ranks_.size());
  peer_copies_ = options.peer_copies > 0 || (options.peer_copies == 0 && each_has_its_gpu(size, devices));
  for (int i = 0; i < size; ++i) {
    Rank& rank = ranks_[static_cast<size_t>(i)];
    rank.group = this;
    rank.number = i;
    rank.device = devices ? devices[i] : fovea_device{FOVEA_CPU, 0};
    rank.random = options.seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(i);
    if (rank.device.type != ranks_.front().device.type)
      throw_invalid("devices", "CPU and GPU together", "all on the CPU, or all on GPUs", "use one kind");
    if (rank.device.type != FOVEA_CUDA) continue;
    for (size_t e = 0; e < kEventsPerPeer * ranks_.size(); ++e)
      rank.events.push_back(make_cuda_event(rank.device.id));
    for (int from = 0; from < i; ++from) {
      link_devices(rank.device.id, devices[from].id);
      link_devices(devices[from].id, rank.device.id);
    }
  }
}

template <class Body>
fovea_status ThreadGroup::guarded(void* context, Body&& body) {
  Rank& rank = *static_cast<Rank*>(context);
  try {
    body(*rank.group, rank);
    return FOVEA_OK;
  } catch (const RequestError& error) {
    rank.error = error.what();
    return static_cast<fovea_status>(error.status());
  } catch (const std::exception& error) {
    rank.error = error.what();
    return FOVEA_INTERNAL;
  }
}

fovea_transport ThreadGroup::transport(int rank) {
  if (rank < 0 || rank >= size())
    throw_invalid("rank", std::to_string(rank), "0 to " + std::to_string(size() - 1),
                  "name a rank of the group");
  fovea_transport t{};
  t.struct_size = sizeof t;
  t.context = &ranks_[static_cast<size_t>(rank)];
  t.rank = rank;
  t.size = size();
  t.device = ranks_[static_cast<size_t>(rank)].device;
  t.peer_copies = peer_copies_ ? 1 : 0;
  t.deadline_ms = deadline_.count();
  t.start = [](void* context, const fovea_message* sends, int32_t num_sends, const fovea_message* receives,
               int32_t num_receives, void* stream) {
    return guarded(context, [&](ThreadGroup& group, Rank& self) {
      group.start(self, sends, num_sends, receives, num_receives, stream);
    });
  };
  t.finish = [](void* context, void* stream) {
    return guarded(context, [&](ThreadGroup& group, Rank& self) { group.finish(self, stream); });
  };
  t.stop = [](void* context, const char* reason) {
    Rank& self = *static_cast<Rank*>(context);
    self.group->stop(self, reason ? reason : "");
  };
  t.error = [](void* context) { return static_cast<Rank*>(context)->error.c_str(); };
  return t;
}

void ThreadGroup::sent(int rank, int64_t* messages, int64_t* bytes) const {
  if (rank < 0 || rank >= size())
    throw_invalid("rank", std::to_string(rank), "0 to " + std::to_string(size() - 1),
                  "name a rank of the group");
  const std::lock_guard lock(mutex_);
  if (messages) *messages = ranks_[static_cast<size_t>(rank)].messages;
  if (bytes) *bytes = ranks_[static_cast<size_t>(rank)].bytes;
}

void ThreadGroup::delay(Rank& rank) {
  if (delay_us_ == 0) return;
  rank.random = rank.random * 6364136223846793005u + 1442695040888963407u;
  std::this_thread::sleep_for(std::chrono::microseconds(static_cast<int64_t>(rank.random >> 33) % delay_us_));
}

CudaEvent* ThreadGroup::event(Rank& rank) {
  if (rank.events.empty()) return nullptr;
  return rank.events[rank.next_event++ % rank.events.size()].get();
}

void ThreadGroup::start(Rank& rank, const fovea_message* sends, int num_sends, const fovea_message* receives,
                        int num_receives, void* stream) {
  delay(rank);
  Step step;
  step.receives.assign(receives, receives + num_receives);
  std::vector<std::pair<int, std::shared_ptr<Posted>>> posted;
  CudaEvent* const ready = num_sends > 0 ? event(rank) : nullptr;
  if (ready != nullptr) ready->record(stream);
  for (int i = 0; i < num_sends; ++i) {
    if (sends[i].peer < 0 || sends[i].peer >= size())
      throw_invalid("peer", std::to_string(sends[i].peer), "a rank of the group", "name one");
    auto message = std::make_shared<Posted>();
    message->data = sends[i].data;
    message->bytes = sends[i].bytes;
    message->ready = ready;
    step.sends.push_back(message);
    posted.emplace_back(sends[i].peer, std::move(message));
  }
  {
    const std::lock_guard lock(mutex_);
    if (!stopped_.empty()) throw RequestError(Status::kInternal, "", stopped_);
    for (auto& [peer, message] : posted) {
      ++rank.messages;
      rank.bytes += static_cast<int64_t>(message->bytes);
      mailbox(rank.number, peer).push_back(std::move(message));
    }
    rank.steps.push_back(std::move(step));
  }
  changed_.notify_all();
}

template <class Done>
void ThreadGroup::wait(std::unique_lock<std::mutex>& lock, const std::string& what, Done&& done,
                       std::chrono::milliseconds grace) {
  const bool came = changed_.wait_for(lock, deadline_ + grace, [&] { return done() || !stopped_.empty(); });
  if (done()) return;
  if (came) throw RequestError(Status::kInternal, "", stopped_);
  throw RequestError(Status::kInternal, "", what + " within " + std::to_string(deadline_.count()) + " ms");
}

std::shared_ptr<ThreadGroup::Posted> ThreadGroup::begin_to_take(Rank& rank, const fovea_message& message) {
  std::unique_lock lock(mutex_);
  auto& box = mailbox(message.peer, rank.number);
  const std::string sender = "rank " + std::to_string(message.peer);
  wait(lock, sender + " sent nothing to rank " + std::to_string(rank.number), [&] { return !box.empty(); });
  std::shared_ptr<Posted> posted = box.front();
  if (posted->is_retracted)
    throw RequestError(Status::kInternal, "", stopped_.empty() ? sender + " gave up" : stopped_);
  box.pop_front();
  if (posted->bytes != message.bytes)
    throw RequestError(Status::kInternal, "",
                       sender + " sent " + std::to_string(posted->bytes) + " bytes to rank " +
                           std::to_string(rank.number) + ", which expected " + std::to_string(message.bytes));
  posted->is_begun = true;
  return posted;
}

/// Takes one message from its sender's memory. `taken`: of those of the step from the same sender.
void ThreadGroup::receive(Rank& rank, const fovea_message& message, void* stream, CudaEvent*& taken) {
  delay(rank);
  const std::shared_ptr<Posted> posted = begin_to_take(rank, message);
  const auto end = [&](bool is_taken) {
    {
      const std::lock_guard lock(mutex_);
      posted->taken = taken;
      posted->is_taken = is_taken;
      posted->is_begun = false;
    }
    changed_.notify_all();
  };
  try {
    if (posted->ready != nullptr) {
      posted->ready->wait_on(stream);
      const fovea_device from = ranks_[static_cast<size_t>(message.peer)].device;
      copy_between_devices(rank.device.id, message.data, from.id, posted->data, message.bytes, stream);
      if (taken == nullptr) taken = event(rank);
      // Again for each message: whoever waits for an earlier one waits for this one too, at most.
      taken->record(stream);
    } else if (message.bytes > 0) {
      std::memcpy(message.data, posted->data, message.bytes);
    }
  } catch (...) {
    end(false);
    throw;
  }
  end(true);
}

void ThreadGroup::retract(const std::vector<std::shared_ptr<Posted>>& messages) {
  std::unique_lock lock(mutex_);
  for (const std::shared_ptr<Posted>& message : messages) message->is_retracted = true;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return std::none_of(messages.begin(), messages.end(),
                        [](const auto& message) { return message->is_begun; });
  });
}

void ThreadGroup::finish(Rank& rank, void* stream) {
  Step step;
  {
    const std::lock_guard lock(mutex_);
    if (rank.steps.empty()) throw RequestError(Status::kInternal, "", "no step is started");
    step = std::move(rank.steps.front());
    rank.steps.pop_front();
  }
  try {
    exchange(rank, step, stream);
  } catch (...) {
    retract(step.sends);
    throw;
  }
}

void ThreadGroup::exchange(Rank& rank, const Step& step, void* stream) {
  std::vector<CudaEvent*> taken(ranks_.size(), nullptr);
  for (const fovea_message& message : step.receives) {
    if (message.peer < 0 || message.peer >= size())
      throw_invalid("peer", std::to_string(message.peer), "a rank of the group", "name one");
    receive(rank, message, stream, taken[static_cast<size_t>(message.peer)]);
  }
  // The memory of what this rank sent is its own again.
  for (const std::shared_ptr<Posted>& message : step.sends) {
    {
      std::unique_lock lock(mutex_);
      wait(
          lock, "nobody took a message of rank " + std::to_string(rank.number),
          [&] { return message->is_taken; }, grace_of(deadline_));
    }
    if (message->taken != nullptr) message->taken->wait_on(stream);
  }
}

void ThreadGroup::stop(Rank& rank, const std::string& reason) {
  std::vector<std::shared_ptr<Posted>> open;
  {
    const std::lock_guard lock(mutex_);
    if (stopped_.empty()) stopped_ = reason.empty() ? "a rank stopped" : reason;
    for (const Step& step : rank.steps) open.insert(open.end(), step.sends.begin(), step.sends.end());
  }
  retract(open);
}

}  // namespace fovea::distributed
