// Ranks that stay at work: the same problem again and again, for timing.
#pragma once

#include <barrier>
#include <exception>
#include <mutex>
#include <thread>

#include "cli/ranks/rank_group.hpp"

namespace fovea::cli {

/// Threads that compute one pass over whole tensors together whenever they are told to.
class RankCrew {
 public:
  /// Deals the inputs out and plans. `whole` and its memory have to outlive this.
  RankCrew(const Problem& whole, const RankOptions& options, const Execution& execution);
  ~RankCrew();
  RankCrew(const RankCrew&) = delete;
  RankCrew& operator=(const RankCrew&) = delete;

  /// All ranks compute; each keeps its part of the result.
  void run() { tell(Task::run); }
  /// Puts the parts of the result together.
  void collect() { tell(Task::collect); }
  /// Deals the inputs out again.
  void deal() { tell(Task::deal); }

  /// Of the largest rank.
  size_t workspace() const { return workspace_; }
  const std::string& reason() const { return reason_; }

 private:
  enum class Task { deal, run, collect, leave };
  void tell(Task task);
  void work(const Transport& transport);

  const Problem& whole_;
  Division division_;
  DistributedOptions options_;
  ThreadRanks ranks_;
  std::barrier<> begin_, end_;  ///< of all ranks and the one who tells them
  Task task_ = Task::deal;
  std::mutex mutex_;
  std::exception_ptr failure_;
  size_t workspace_ = 0;
  std::string reason_;
  std::jthread thread_;  ///< last: starts the ranks
};

}  // namespace fovea::cli
