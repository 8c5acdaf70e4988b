// Ranks that are processes of MPI, which carry messages of the CPU's memory.
#pragma once

// The C interface alone.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fovea/fovea_mpi.h"

namespace fovea::distributed {

/// What went wrong, with the status that says so.
class MpiFailure : public std::runtime_error {
 public:
  MpiFailure(fovea_status status, const std::string& message)
      : std::runtime_error(message), status_(status) {}
  fovea_status status() const { return status_; }

 private:
  fovea_status status_;
};

/// MPI's own state: initialised here where nobody else has done it.
class MpiSession {
 public:
  /// `may_initialise`: else a program that has not is refused.
  explicit MpiSession(bool may_initialise);
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  /// Without MPI_Finalize, which would wait for ranks that are gone.
  void abandon() { finalises_ = false; }
  ~MpiSession();

 private:
  bool finalises_ = false;
};

class MpiTransport {
 public:
  /// With all ranks of the communicator.
  MpiTransport(const void* communicator, std::chrono::milliseconds deadline);
  MpiTransport(const MpiTransport&) = delete;
  MpiTransport& operator=(const MpiTransport&) = delete;
  ~MpiTransport();

  fovea_transport transport();

 private:
  using Clock = std::chrono::steady_clock;
  /// A message that has to come. Its request is there once the message was found to have the right size.
  struct Expected {
    fovea_message message{};
    MPI_Request request = MPI_REQUEST_NULL;
    bool is_matched = false;
  };
  /// A step that is started and not finished.
  struct Step {
    std::vector<MPI_Request> sends;
    std::vector<int> receivers;  ///< of the sends
    std::vector<Expected> receives;
  };

  void duplicate(MPI_Comm given);
  void start(const fovea_message* sends, int num_sends, const fovea_message* receives, int num_receives);
  void finish();
  void stop(const std::string& reason);
  /// What is left of a step: whether some of it ended just now, and whether all has.
  struct Progress {
    bool some = false, all = true;
  };
  Progress poll(Step& step);
  /// All that had to come has come.
  static bool waits_for_takers(const Step& step);
  bool match(Expected& expected);
  /// Throws where another rank has stopped, or this one.
  void check_stopped();
  void send_stop();
  [[noreturn]] void throw_late(const Step& step) const;
  void check_peer(int peer) const;
  void tell_stop();
  template <class Body>
  static fovea_status guarded(void* context, Body&& body);

  MpiSession session_;
  std::chrono::milliseconds deadline_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  bool from_any_thread_ = false;  ///< MPI allows calls from several threads at once
  std::thread::id thread_;
  std::deque<Step> steps_;
  std::string error_;
  bool failed_ = false;

  /// Of `stop`, which may come from any thread.
  mutable std::mutex mutex_;
  std::string stopped_;     ///< why a rank gave up; "": none did
  bool owes_stop_ = false;  ///< the others are still to be told
  std::vector<MPI_Request> stop_requests_;
};

}  // namespace fovea::distributed
