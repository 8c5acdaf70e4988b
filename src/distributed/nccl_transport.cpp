// Ranks of an NCCL communicator. The library is opened at run time, so programs without NCCL never need it.
//
// A step is one group of sends and receives on the caller's stream. The host does not wait, so what a rank that is gone leaves undone
// is seen by a thread: it looks at an event behind each step, and where one is older than the deadline, aborts the communicator.
#include <dlfcn.h>

#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>

#include "capi/last_error.hpp"
#include "core/status.hpp"
#include "distributed/stream_watch.hpp"
#include "fovea/fovea_distributed.h"

namespace fovea::distributed {
namespace {

/// What is used of nccl.h (2.10 and newer), by the names and numbers of its ABI.
struct Nccl {
  using Communicator = void*;
  using Result = int;
  static constexpr Result kSuccess = 0, kInProgress = 7;
  static constexpr int kBytes = 0;  // ncclInt8

  Result (*send)(const void*, size_t, int, int, Communicator, void*) = nullptr;
  Result (*receive)(void*, size_t, int, int, Communicator, void*) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  Result (*count)(Communicator, int*) = nullptr;
  Result (*rank)(Communicator, int*) = nullptr;
  Result (*device)(Communicator, int*) = nullptr;
  Result (*async_error)(Communicator, Result*) = nullptr;
  Result (*abort)(Communicator) = nullptr;
  const char* (*error_string)(Result) = nullptr;
  std::string missing;  ///< "": all is there

  Nccl() {
    constexpr const char* kName = "libnccl.so.2";
    // The program's own comes first: a communicator belongs to the library that made it.
    void* library = dlopen(kName, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr && dlsym(RTLD_DEFAULT, "ncclSend") != nullptr) library = dlopen(nullptr, RTLD_NOW);
    if (library == nullptr) library = dlopen(kName, RTLD_NOW);
    if (library == nullptr) {
      missing = std::string(kName) + " was not found: install NCCL, or load it before";
      return;
    }
    const auto get = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) missing = std::string(kName) + " lacks " + name + ": 2.10 or newer is needed";
    };
    get("ncclSend", send);
    get("ncclRecv", receive);
    get("ncclGroupStart", group_start);
    get("ncclGroupEnd", group_end);
    get("ncclCommCount", count);
    get("ncclCommUserRank", rank);
    get("ncclCommCuDevice", device);
    get("ncclCommGetAsyncError", async_error);
    get("ncclCommAbort", abort);
    get("ncclGetErrorString", error_string);
  }
};
const Nccl& nccl() {
  static const Nccl library;
  return library;
}

class NcclRanks {
 public:
  NcclRanks(void* communicator, int device, int64_t deadline_ms)
      : communicator_(communicator),
        watch_(device, std::chrono::milliseconds(deadline_ms), [this, deadline_ms](size_t) {
          stop("messages of a step did not arrive within " + std::to_string(deadline_ms) +
               " ms; a rank is gone, or late");
        }) {}

  void start(const fovea_message* sends, int num_sends, const fovea_message* receives, int num_receives,
             void* stream) {
    check();
    demand(nccl().group_start(), "ncclGroupStart");
    for (int i = 0; i < num_sends; ++i)
      demand(nccl().send(sends[i].data, sends[i].bytes, Nccl::kBytes, sends[i].peer, communicator_, stream),
             "ncclSend");
    for (int i = 0; i < num_receives; ++i)
      demand(nccl().receive(receives[i].data, receives[i].bytes, Nccl::kBytes, receives[i].peer,
                            communicator_, stream),
             "ncclRecv");
    demand(nccl().group_end(), "ncclGroupEnd");
    if (num_sends + num_receives > 0) watch_.add(stream);
  }
  /// The stream has the step's work in its order already.
  void finish() { check(); }

  void stop(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    give_up(reason.empty() ? "this rank stopped" : reason);
  }
  /// Throws what went wrong so far.
  void check() {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw RequestError(Status::kCudaError, "", failure_);
    Nccl::Result result = Nccl::kSuccess;
    nccl().async_error(communicator_, &result);
    if (result != Nccl::kSuccess && result != Nccl::kInProgress) {
      give_up(std::string("NCCL: ") + nccl().error_string(result));
      throw RequestError(Status::kCudaError, "", failure_);
    }
  }

  std::string error;

 private:
  static void demand(Nccl::Result result, const char* what) {
    if (result == Nccl::kSuccess || result == Nccl::kInProgress) return;
    throw RequestError(Status::kCudaError, "", std::string(what) + ": " + nccl().error_string(result));
  }
  /// Once. Work of the communicator that waits on streams ends. ncclCommAbort() frees memory, which waits for all streams of the
  /// device, also for those that wait for copies until the caller lets them go: so it has a thread of its own.
  void give_up(const std::string& reason) {
    if (!failure_.empty()) return;
    failure_ = reason;
    aborting_ = std::jthread([communicator = communicator_] { nccl().abort(communicator); });
  }

  void* communicator_;
  std::mutex mutex_;
  std::string failure_;
  std::jthread aborting_;
  StreamWatch watch_;  // the last member: its thread uses the others
};

template <class Body>
fovea_status told(void* context, Body&& body) {
  NcclRanks& ranks = *static_cast<NcclRanks*>(context);
  try {
    body(ranks);
    return FOVEA_OK;
  } catch (const RequestError& error) {
    ranks.error = error.what();
    return static_cast<fovea_status>(error.status());
  } catch (const std::exception& error) {
    ranks.error = error.what();
    return FOVEA_INTERNAL;
  }
}

fovea_transport open_nccl(void* communicator, int32_t device, int64_t deadline_ms) {
  if (communicator == nullptr) throw_invalid("communicator", "NULL", "an ncclComm_t", "initialise one");
  if (deadline_ms < 0)
    throw_invalid("deadline_ms", std::to_string(deadline_ms), "0 or more", "0 waits for ever");
  if (!nccl().missing.empty()) throw RequestError(Status::kUnsupported, "communicator", nccl().missing);
  int size = 0, rank = 0, own_device = 0;
  nccl().count(communicator, &size);
  nccl().rank(communicator, &rank);
  nccl().device(communicator, &own_device);
  if (own_device != device)
    throw_invalid("device", "cuda:" + std::to_string(device),
                  "cuda:" + std::to_string(own_device) + ", that of the communicator", "name that device");
  fovea_transport t{};
  t.struct_size = sizeof t;
  t.context = new NcclRanks(communicator, device, deadline_ms);
  t.rank = rank;
  t.size = size;
  t.device = {FOVEA_CUDA, device};
  t.peer_copies = 1;
  t.deadline_ms = deadline_ms;
  t.start = [](void* context, const fovea_message* sends, int32_t num_sends, const fovea_message* receives,
               int32_t num_receives, void* stream) {
    return told(context,
                [&](NcclRanks& ranks) { ranks.start(sends, num_sends, receives, num_receives, stream); });
  };
  t.finish = [](void* context, void*) { return told(context, [](NcclRanks& ranks) { ranks.finish(); }); };
  t.stop = [](void* context, const char* reason) {
    static_cast<NcclRanks*>(context)->stop(reason ? reason : "");
  };
  t.error = [](void* context) { return static_cast<NcclRanks*>(context)->error.c_str(); };
  return t;
}

}  // namespace
}  // namespace fovea::distributed

extern "C" {

fovea_status fovea_nccl_transport_open(void* communicator, int32_t device, int64_t deadline_ms,
                                       fovea_transport* transport) FOVEA_NOEXCEPT {
  return fovea::capi::guarded([&] {
    if (transport == nullptr) fovea::throw_invalid("transport", "NULL", "an address", "pass one");
    *transport = fovea::distributed::open_nccl(communicator, device, deadline_ms);
  });
}
fovea_status fovea_nccl_transport_check(const fovea_transport* transport) FOVEA_NOEXCEPT {
  return fovea::capi::guarded([&] {
    if (transport == nullptr || transport->context == nullptr)
      fovea::throw_invalid("transport", "NULL", "an open one", "open it before");
    static_cast<fovea::distributed::NcclRanks*>(transport->context)->check();
  });
}
void fovea_nccl_transport_close(fovea_transport* transport) FOVEA_NOEXCEPT {
  if (transport == nullptr) return;
  delete static_cast<fovea::distributed::NcclRanks*>(transport->context);
  transport->context = nullptr;
}

}  // extern "C"
