// The definitions of rank_options.hpp.
#include "cli/options/rank_options.hpp"

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/ranks/launcher.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {

void RankOptions::add_options(CLI::App& command, bool with_mpi) {
  constexpr const char* kGroup = "Ranks";
  command
      .add_option("--ranks", ranks,
                  "Divide the rows among N ranks, which compute the problem together; threads are divided "
                  "among them")
      ->check(CLI::Range(1, kMostRanks))
      ->type_name("N")
      ->group(kGroup);
  command
      .add_option("--heads-ranks", heads_ranks,
                  "Ranks in a row that exchange rows for heads, a divisor of --ranks (default: chosen)")
      ->check(CLI::Range(1, kMostRanks))
      ->type_name("G")
      ->group(kGroup);
  command
      .add_option("--stages", stages,
                  "Steps in which keys come, at most --ranks / --heads-ranks (default: chosen)")
      ->check(CLI::Range(1, kMostRanks))
      ->type_name("S")
      ->group(kGroup);
  if (!with_mpi) return;
  may_be_processes = true;
  CLI::Option* const by_processes =
      command
          .add_flag("--mpi", mpi,
                    "Ranks are the processes that mpirun or srun has started, which is also so without this "
                    "where their environment says that there are several")
          ->group(kGroup);
  command.add_flag("--no-mpi", no_mpi, "This process computes alone, with ranks that are threads")
      ->excludes(by_processes)
      ->group(kGroup);
}

bool RankOptions::by_mpi() const {
  return mpi || (may_be_processes && !no_mpi && launcher());
}

void RankOptions::add_paper_options(CLI::App& command) {
  constexpr const char* kGroup = "Ranks";
  command
      .add_option(
          "--on-paper", on_paper,
          "Weigh methods for ranks that need not be there, each a cpu or a gpu, by the model and on a "
          "simulated clock")
      ->check(CLI::IsMember({"cpu", "gpu"}))
      ->type_name("KIND")
      ->group(kGroup);
  command.add_option("--ranks-per-host", ranks_per_host, "Ranks on one host (default: all)")
      ->check(CLI::Range(1, kMostRanks))
      ->type_name("N")
      ->group(kGroup);
  command
      .add_option("--link", link_gb, "GB/s that a rank sends and receives inside a host (default: see docs)")
      ->check(CLI::PositiveNumber)
      ->type_name("GB/S")
      ->group(kGroup);
  command.add_option("--host-link", host_link_gb, "The same to ranks of other hosts")
      ->check(CLI::PositiveNumber)
      ->type_name("GB/S")
      ->group(kGroup);
}

void RankOptions::check() const {
  if (asked()) return;
  for (const auto& [name, is_given] :
       {std::pair("--heads-ranks", heads_ranks > 0), std::pair("--stages", stages > 0),
        std::pair("--on-paper", !on_paper.empty()), std::pair("--ranks-per-host", ranks_per_host > 0),
        std::pair("--link", link_gb > 0), std::pair("--host-link", host_link_gb > 0)}) {
    if (is_given) {
      throw Failure(Exit::usage, std::string(name) +
                                     ": got it without --ranks, expected both; it says how "
                                     "ranks share the work");
    }
  }
}

int threads_of_a_rank(const Execution& execution, int ranks) {
  return std::max(1, execution.resolved_threads() / ranks);
}

DistributedOptions RankOptions::options(const Execution& execution, int number_of_ranks) const {
  DistributedOptions options;
  options.attention = execution.options();
  options.attention.num_threads = threads_of_a_rank(execution, number_of_ranks);
  options.heads_ranks = heads_ranks;
  options.stages = stages;
  options.ranks_per_host = ranks_per_host;
  options.link_bytes_per_second = link_gb * 1e9;
  options.host_link_bytes_per_second = host_link_gb * 1e9;
  return options;
}

}  // namespace fovea::cli
