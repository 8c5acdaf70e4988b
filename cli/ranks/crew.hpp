// Ranks that stay at work: the same problem again and again, for timing.
#pragma once

#include <barrier>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "cli/ranks/rank_group.hpp"

namespace fovea::cli {

/// Ranks that compute one pass over whole tensors together whenever they are told to: by this process, which has the first rank, or, in the
/// other processes of mpirun, by that one.
class RankCrew {
 public:
  /// Deals the inputs out and plans; in processes that are told, follow() does. `whole`, its memory and `group` have to outlive this.
  RankCrew(const Problem& whole, const RankGroup& group, const RankOptions& options,
           const Execution& execution);
  ~RankCrew();
  RankCrew(const RankCrew&) = delete;
  RankCrew& operator=(const RankCrew&) = delete;

  /// All ranks compute; each keeps its part of the result.
  void run() { tell(Task::run); }
  /// Puts the parts of the result together.
  void collect() { tell(Task::collect); }
  /// Deals the inputs out again, once each process has called `renew` on its own.
  void deal(const std::function<void()>& renew);
  /// Does what the first process tells, until its crew ends.
  void follow(const std::function<void()>& renew);

  /// Of the largest rank of this process.
  size_t workspace() const { return workspace_; }
  const std::string& reason() const { return reason_; }

 private:
  enum class Task : char { deal, run, collect, leave };
  /// One rank, its tensors and its plan.
  struct Worker {
    std::optional<RankPart> part;
    std::optional<DistributedPlan> plan;
    std::optional<Workspace> workspace;
    Buffers buffers;
  };
  void tell(Task task);
  void tell_processes(Task task);
  void work(const Transport& transport);
  void do_task(Task task, const Transport& transport, Worker& worker);

  const Problem& whole_;
  const RankGroup& group_;
  Division division_;
  DistributedOptions options_;
  std::barrier<> begin_, end_;  ///< of all ranks that are threads and the one who tells them
  Task task_ = Task::deal;
  std::mutex mutex_;
  std::exception_ptr failure_;
  size_t workspace_ = 0;
  std::string reason_;
  Worker own_;           ///< of a rank that is this process
  std::jthread thread_;  ///< last: starts the ranks that are threads
};

}  // namespace fovea::cli
