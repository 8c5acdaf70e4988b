// The definitions of mpi_transport.hpp.
#include "distributed/mpi/mpi_transport.hpp"

#include <algorithm>
#include <climits>
#include <memory>

#include "distributed/grace.hpp"

namespace fovea::distributed {
namespace {

constexpr int kDataTag = 0, kStopTag = 1;
/// Bytes of a reason: a message that MPI sends at once, whether or not anybody receives.
constexpr size_t kLongestReason = 1000;
/// MPI counts in int. Longer messages are of a type of this many bytes and a rest.
constexpr size_t kBlock = size_t{1} << 30;
/// Polls that only give way to other threads, before those that sleep: about what an answer of a rank takes that is at work.
constexpr int kEagerPolls = 2000;
/// Naps grow with the time that was waited for, to a 32nd of it: a rank that waits long leaves its core to others.
constexpr std::chrono::microseconds kShortestNap{50}, kLongestNap{1000};
constexpr int kShareOfWaiting = 32;

void check(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw MpiFailure(FOVEA_INTERNAL, what + ": " + text.data());
}

/// The type of a message as MPI counts it: `count` of `type`.
class MessageType {
 public:
  explicit MessageType(size_t bytes) {
    if (bytes <= INT_MAX) {
      count_ = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block), "a type of a long message");
    const auto blocks = static_cast<int>(bytes / kBlock), rest = static_cast<int>(bytes % kBlock);
    const std::array<int, 2> lengths = {blocks, rest};
    const std::array<MPI_Aint, 2> offsets = {0,
                                             static_cast<MPI_Aint>(blocks) * static_cast<MPI_Aint>(kBlock)};
    const std::array<MPI_Datatype, 2> types = {block, MPI_BYTE};
    check(MPI_Type_create_struct(2, lengths.data(), offsets.data(), types.data(), &type_),
          "a type of a long message");
    MPI_Type_free(&block);
    check(MPI_Type_commit(&type_), "a type of a long message");
    is_own_ = true;
  }
  MessageType(const MessageType&) = delete;
  MessageType& operator=(const MessageType&) = delete;
  /// Messages under way keep it.
  ~MessageType() {
    if (is_own_) MPI_Type_free(&type_);
  }
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
  bool is_own_ = false;
};

/// Waits between looks, short ones first.
class Pause {
 public:
  void operator()() {
    if (++polls_ < kEagerPolls) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(nap_);
      napped_ += nap_;
      nap_ = std::clamp(napped_ / kShareOfWaiting, kShortestNap, kLongestNap);
    }
  }
  void reset() { *this = {}; }

 private:
  int polls_ = 0;
  std::chrono::microseconds napped_{0}, nap_ = kShortestNap;
};

bool is_initialised() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}
bool is_finalised() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

}  // namespace

MpiSession::MpiSession(bool may_initialise) {
  if (is_finalised())
    throw MpiFailure(FOVEA_INVALID_ARGUMENT,
                     "communicator: MPI is finalised, expected it at work; open before MPI_Finalize");
  if (is_initialised()) return;
  if (!may_initialise)
    throw MpiFailure(
        FOVEA_INVALID_ARGUMENT,
        "communicator: MPI is not initialised, expected it at work; call MPI_Init_thread first, or "
        "pass NULL");
  int level = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
  finalises_ = true;
}
MpiSession::~MpiSession() {
  if (finalises_ && !is_finalised()) MPI_Finalize();
}

MpiTransport::MpiTransport(const void* communicator, std::chrono::milliseconds deadline)
    : session_(communicator == nullptr), deadline_(deadline), thread_(std::this_thread::get_id()) {
  const MPI_Comm given = communicator ? *static_cast<const MPI_Comm*>(communicator) : MPI_COMM_WORLD;
  int is_between = 0, level = MPI_THREAD_SINGLE;
  if (given == MPI_COMM_NULL)
    throw MpiFailure(FOVEA_INVALID_ARGUMENT,
                     "communicator: got MPI_COMM_NULL, expected a communicator that this process belongs to");
  MPI_Comm_test_inter(given, &is_between);
  if (is_between)
    throw MpiFailure(FOVEA_INVALID_ARGUMENT,
                     "communicator: got an intercommunicator, expected one group; use MPI_Intercomm_merge");
  MPI_Query_thread(&level);
  from_any_thread_ = level == MPI_THREAD_MULTIPLE;
  try {
    duplicate(given);
  } catch (...) {
    session_.abandon();
    throw;
  }
  MPI_Comm_rank(communicator_, &rank_);
  MPI_Comm_size(communicator_, &size_);
}

/// A communicator of this transport's own, whose errors come back.
void MpiTransport::duplicate(MPI_Comm given) {
  MPI_Errhandler before = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(given, &before);
  MPI_Comm_set_errhandler(given, MPI_ERRORS_RETURN);
  MPI_Request request = MPI_REQUEST_NULL;
  // MPI writes it when all ranks are there, which may be after this rank gave up.
  auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  int code = MPI_Comm_idup(given, made.get(), &request), done = 0;
  const auto end = Clock::now() + deadline_;
  Pause pause;
  while (code == MPI_SUCCESS && !done && Clock::now() < end) {
    code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (!done) pause();
  }
  MPI_Comm_set_errhandler(given, before);
  MPI_Errhandler_free(&before);
  check(code, "MPI_Comm_idup");
  if (!done) {
    static_cast<void>(made.release());
    throw MpiFailure(FOVEA_INTERNAL, "communicator: not all of its ranks opened a transport within " +
                                         std::to_string(deadline_.count()) + " ms");
  }
  communicator_ = *made;
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
}

MpiTransport::~MpiTransport() {
  if (is_finalised()) return;
  try {
    while (!failed_ && !steps_.empty()) finish();
  } catch (const std::exception&) {
    failed_ = true;
  }
  try {
    tell_stop();
  } catch (const std::exception&) {
    failed_ = true;
  }
  if (failed_) {
    // Messages may be under way: the communicator stays, and MPI with it.
    session_.abandon();
  } else {
    MPI_Comm_free(&communicator_);
  }
}

/// Tells the others of a stop, and waits until that is on its way.
void MpiTransport::tell_stop() {
  const std::unique_lock lock(mutex_);
  send_stop();
  failed_ = failed_ || !stopped_.empty();
  const auto end = Clock::now() + deadline_;
  Pause pause;
  for (int done = 0; !done && !stop_requests_.empty() && Clock::now() < end; pause())
    check(MPI_Testall(static_cast<int>(stop_requests_.size()), stop_requests_.data(), &done,
                      MPI_STATUSES_IGNORE),
          "a stop");
}

template <class Body>
fovea_status MpiTransport::guarded(void* context, Body&& body) {
  auto& self = *static_cast<MpiTransport*>(context);
  fovea_status status = FOVEA_INTERNAL;
  try {
    body(self);
    return FOVEA_OK;
  } catch (const MpiFailure& failure) {
    self.error_ = failure.what();
    status = failure.status();
  } catch (const std::exception& error) {
    self.error_ = error.what();
  }
  self.failed_ = true;
  return status;
}

fovea_transport MpiTransport::transport() {
  fovea_transport t{};
  t.struct_size = sizeof t;
  t.context = this;
  t.rank = rank_;
  t.size = size_;
  t.device = {FOVEA_CPU, 0};
  t.start = [](void* context, const fovea_message* sends, int32_t num_sends, const fovea_message* receives,
               int32_t num_receives, void*) {
    return guarded(context,
                   [&](MpiTransport& self) { self.start(sends, num_sends, receives, num_receives); });
  };
  t.finish = [](void* context, void*) {
    return guarded(context, [&](MpiTransport& self) { self.finish(); });
  };
  t.stop = [](void* context, const char* reason) {
    static_cast<MpiTransport*>(context)->stop(reason && *reason ? reason : "a rank stopped");
  };
  t.error = [](void* context) { return static_cast<MpiTransport*>(context)->error_.c_str(); };
  return t;
}

void MpiTransport::check_peer(int peer) const {
  if (peer >= 0 && peer < size_) return;
  throw MpiFailure(FOVEA_INVALID_ARGUMENT, "peer: got " + std::to_string(peer) + ", expected 0 to " +
                                               std::to_string(size_ - 1) +
                                               "; name a rank of the communicator");
}

void MpiTransport::start(const fovea_message* sends, int num_sends, const fovea_message* receives,
                         int num_receives) {
  check_stopped();
  for (int i = 0; i < num_sends; ++i) check_peer(sends[i].peer);
  for (int i = 0; i < num_receives; ++i) check_peer(receives[i].peer);
  Step& step = steps_.emplace_back();
  for (int i = 0; i < num_receives; ++i) step.receives.push_back({receives[i]});
  for (int i = 0; i < num_sends; ++i) {
    const MessageType type(sends[i].bytes);
    MPI_Request request = MPI_REQUEST_NULL;
    check(
        MPI_Isend(sends[i].data, type.count(), type.type(), sends[i].peer, kDataTag, communicator_, &request),
        "a message to rank " + std::to_string(sends[i].peer));
    step.sends.push_back(request);
    step.receivers.push_back(sends[i].peer);
  }
}

/// Looks for a message, and receives it where its size is right. Messages of a rank are found in the order that it sent them.
bool MpiTransport::match(Expected& expected) {
  const fovea_message& message = expected.message;
  const std::string from = "rank " + std::to_string(message.peer);
  int found = 0;
  MPI_Message handle = MPI_MESSAGE_NULL;
  MPI_Status status;
  check(MPI_Improbe(message.peer, kDataTag, communicator_, &found, &handle, &status), "a message of " + from);
  if (!found) return false;
  MPI_Count bytes = 0;
  check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "the size of a message of " + from);
  if (static_cast<size_t>(bytes) != message.bytes)
    throw MpiFailure(FOVEA_INTERNAL, from + " sent " + std::to_string(bytes) + " bytes to rank " +
                                         std::to_string(rank_) + ", which expected " +
                                         std::to_string(message.bytes));
  const MessageType type(message.bytes);
  check(MPI_Imrecv(message.data, type.count(), type.type(), &handle, &expected.request),
        "a message of " + from);
  expected.is_matched = true;
  return true;
}

MpiTransport::Progress MpiTransport::poll(Step& step) {
  Progress progress;
  const auto test = [&](MPI_Request& request, const char* what, int peer) {
    if (request == MPI_REQUEST_NULL) return;
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what + std::to_string(peer));
    progress.some = progress.some || done;
    progress.all = progress.all && done;
  };
  std::vector<bool> waits(static_cast<size_t>(size_),
                          false);  // for a message, before which none of the rank can be another's
  for (Expected& expected : step.receives) {
    const auto peer = static_cast<size_t>(expected.message.peer);
    if (!expected.is_matched && !waits[peer] && match(expected)) progress.some = true;
    waits[peer] = waits[peer] || !expected.is_matched;
    if (!expected.is_matched) progress.all = false;
    test(expected.request, "a message of rank ", expected.message.peer);
  }
  for (size_t i = 0; i < step.sends.size(); ++i) test(step.sends[i], "a message to rank ", step.receivers[i]);
  return progress;
}

bool MpiTransport::waits_for_takers(const Step& step) {
  return std::all_of(step.receives.begin(), step.receives.end(), [](const Expected& expected) {
    return expected.is_matched && expected.request == MPI_REQUEST_NULL;
  });
}

void MpiTransport::throw_late(const Step& step) const {
  const std::string within = " within " + std::to_string(deadline_.count()) + " ms";
  const std::string own = "rank " + std::to_string(rank_);
  for (const Expected& expected : step.receives) {
    const std::string from = "rank " + std::to_string(expected.message.peer);
    if (!expected.is_matched) throw MpiFailure(FOVEA_INTERNAL, from + " sent nothing to " + own + within);
    if (expected.request != MPI_REQUEST_NULL)
      throw MpiFailure(FOVEA_INTERNAL, from + " did not send all of a message to " + own + within);
  }
  for (size_t i = 0; i < step.sends.size(); ++i) {
    if (step.sends[i] != MPI_REQUEST_NULL)
      throw MpiFailure(FOVEA_INTERNAL, "rank " + std::to_string(step.receivers[i]) +
                                           " did not take a message of " + own + within);
  }
  throw MpiFailure(FOVEA_INTERNAL, "a step of " + own + " did not end" + within);
}

void MpiTransport::finish() {
  if (steps_.empty()) throw MpiFailure(FOVEA_INTERNAL, "no step is started");
  Step& step = steps_.front();
  auto end = Clock::now() + deadline_;
  Pause pause;
  for (;;) {
    const Progress progress = poll(step);
    if (progress.all) break;
    check_stopped();
    if (progress.some) {
      end = Clock::now() + deadline_;
      pause.reset();
    } else if (Clock::now() >
               end + (waits_for_takers(step) ? grace_of(deadline_) : std::chrono::milliseconds{0})) {
      throw_late(step);
    }
    pause();
  }
  steps_.pop_front();
}

void MpiTransport::check_stopped() {
  const std::lock_guard lock(mutex_);
  send_stop();
  if (stopped_.empty()) {
    int found = 0;
    MPI_Status status;
    check(MPI_Iprobe(MPI_ANY_SOURCE, kStopTag, communicator_, &found, &status), "a look for stops");
    if (!found) return;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    std::string reason(static_cast<size_t>(std::max(bytes, 0)), '\0');
    check(MPI_Recv(reason.data(), bytes, MPI_BYTE, status.MPI_SOURCE, kStopTag, communicator_,
                   MPI_STATUS_IGNORE),
          "a stop of rank " + std::to_string(status.MPI_SOURCE));
    stopped_ = reason;
  }
  throw MpiFailure(FOVEA_INTERNAL, stopped_);
}

void MpiTransport::stop(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!stopped_.empty()) return;  // all ranks know, or will by this rank's next call
  stopped_ = reason.substr(0, kLongestReason);
  owes_stop_ = true;
  if (from_any_thread_ || std::this_thread::get_id() == thread_) send_stop();
}

/// Tells all other ranks, where that is still to be done; with the mutex held.
void MpiTransport::send_stop() {
  if (!owes_stop_) return;
  owes_stop_ = false;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    MPI_Request& request = stop_requests_.emplace_back(MPI_REQUEST_NULL);
    // A rank that cannot be told finds out by the deadline.
    static_cast<void>(MPI_Isend(stopped_.data(), static_cast<int>(stopped_.size()), MPI_BYTE, peer, kStopTag,
                                communicator_, &request));
  }
}

}  // namespace fovea::distributed
