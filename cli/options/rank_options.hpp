// Options for one problem over several ranks: threads of this process, or processes that mpirun starts.
#pragma once

#include "cli/options/cli11.hpp"
#include "cli/options/options.hpp"
#include "fovea/distributed.hpp"

namespace fovea::cli {

struct RankOptions {
  static constexpr int kMostRanks = 1024;  ///< each may be a thread

  int ranks = 0;  ///< 0: not given
  int heads_ranks = 0, stages = 0;
  bool mpi = false, no_mpi = false;
  bool may_be_processes = false;
  std::string on_paper;  ///< "cpu" or "gpu": ranks that are not there
  int ranks_per_host = 0;
  double link_gb = 0, host_link_gb = 0;  ///< 10^9 bytes a second

  /// `with_mpi`: ranks may be processes.
  void add_options(CLI::App& command, bool with_mpi);
  /// Ranks that are not there, and the machines that they would be on.
  void add_paper_options(CLI::App& command);
  /// Whether ranks are processes: --mpi says so, or whoever started this process, unless --no-mpi.
  bool by_mpi() const;
  bool asked() const { return ranks > 0 || by_mpi(); }
  /// Throws a Failure for options that make no sense together.
  void check() const;
  /// For `ranks` ranks that share the threads of `execution`.
  DistributedOptions options(const Execution& execution, int ranks) const;
};

/// Threads of each of `ranks` ranks: --threads, or all processors, divided among them.
int threads_of_a_rank(const Execution& execution, int ranks);

}  // namespace fovea::cli
