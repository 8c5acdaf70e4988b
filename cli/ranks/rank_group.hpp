// Ranks that compute whole problems together: dealt out, run, put together again.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/options/rank_options.hpp"
#include "cli/ranks/division.hpp"
#include "cli/ranks/mpi_library.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {

/// What a run over ranks took.
struct RankedRun {
  std::string reason{};        ///< of the first rank's plan
  double seconds = 0;          ///< of the slowest rank of this process
  size_t workspace = 0;        ///< of the largest
  int ranks = 0, threads = 0;  ///< threads of each rank
};

/// What ranks read, and keep, for themselves.
struct RankFiles {
  RowReader read{};                                ///< rows of inputs that have no data
  bool keeps_results = false;                      ///< instead of putting them together
  bool gradients_follow = false;                   ///< results of the forward are inputs of the backward
  Division division{};                             ///< of the results that are kept
  std::vector<std::unique_ptr<RankPart>> parts{};  ///< by rank, those of this process
};

/// A failure that all ranks know of: they end by themselves, and together.
struct AgreedFailure : Failure {
  using Failure::Failure;
};

class RankGroup {
 public:
  /// deadline_ms: how long a process waits for another; 0: as long as the library does. Throws a Failure where mpirun has started
  /// another number of processes than --ranks says.
  explicit RankGroup(const RankOptions& options, int64_t deadline_ms = 0);

  int size() const { return size_; }
  /// Whether this process has the whole result: not the second and later ones of mpirun.
  bool has_result() const { return !process_ || process_->transport().rank() == 0; }
  /// Calls work(), what a process does beside the ranks' steps: others, which would wait for it, end with the reason where it throws.
  void telling(const std::function<void()>& work) const;
  /// Calls work(transport) on each rank of this process.
  void run(const std::function<void(const Transport&)>& work) const;
  /// A pass over whole tensors, which every process has, but for those that ranks read or keep.
  RankedRun attend(const Problem& whole, const Execution& execution, RankFiles& files) const;

  /// The first process gets the outputs of the others.
  void gather(const Problem& whole, const Division& division, RankPart& own,
              const Transport& transport) const;
  /// That of this process, where ranks are processes.
  std::optional<Transport> transport() const;

 private:
  RankOptions options_;
  std::optional<MpiProcess> process_;
  std::optional<ThreadRanks> threads_;
  int size_ = 0;
};

/// Whether it went well on all ranks; returns when all have come this far.
bool all_agree(const Transport& transport, bool well);

/// The methods for so many ranks, which need not be there, of a problem whose tensors need no data: those of --on-paper.
std::string methods_on_paper(const Problem& whole, const RankOptions& options, const Execution& execution);

/// What the plan of the first of so many ranks says of a problem, whose tensors need no data.
std::string reason_over_ranks(const Problem& whole, const RankOptions& options, const Execution& execution);

/// An error of a rank's problem as one of the whole: "local.q" is q.
Error of_whole(const Error& error);

}  // namespace fovea::cli
