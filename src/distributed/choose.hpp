// Which method a problem takes: a model of its time, and of the workspace.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "distributed/local_problem.hpp"

namespace fovea::distributed {

/// What the model counts with; docs/distributed.md says where the usual numbers come from.
struct Machine {
  double flops = 0;        ///< a second, of attention on one rank
  double tile_flops = 0;   ///< a second, of one tile on one SM, which no other SM helps; 0: no matter
  double link = 0;         ///< bytes a second that a rank sends and receives, to ranks of its host
  double host_link = 0;    ///< to ranks of other hosts
  double memory = 0;       ///< bytes a second that moves of boxes read and write
  double step = 0;         ///< seconds of a step of messages, however small
  double call = 0;         ///< seconds of a call of attention, however small
  bool overlaps = true;    ///< messages travel while attention computes
  int ranks_per_host = 0;  ///< 0: all ranks are on one
};
/// Of a call.
constexpr double seconds_of(const Machine& machine, double flops, double longest_tile) {
  const double tile = machine.tile_flops > 0 ? longest_tile / machine.tile_flops : 0;
  return machine.call + std::max(flops / machine.flops, tile);
}
Machine machine_of(const LocalProblem& problem, const fovea_distributed_options& options);

/// Of a call of `heads` query heads: 4 d a pair and head forward, 10 d backward.
double flops_of(const LocalProblem& problem, const Call& call, int64_t heads);
/// Of the longest tile of such a call, which is over no sooner than its SM is.
double longest_tile_of(const LocalProblem& problem, const Call& call);
/// Bytes that such a call moves on CPUs beside its products: keys are staged, and a backward sums dq in float32.
double copies_of(const LocalProblem& problem, const Call& call, int64_t heads);
/// Whether two ranks' keys come while calls over them run, whose kernels wait (builder_arriving.cpp): the same on both. Where no backend
/// waits, or calls do not fit, parts are merged all the same.
bool keys_arrive_in_calls(const LocalProblem& problem, const Schedule& schedule);
/// Bytes that a forward's call on a GPU writes where its results are parts in float32: they leave later than its products end.
double part_bytes_of(const LocalProblem& problem, const Call& call, int64_t heads);

/// Seconds of a run by the model, those of the slowest rank.
struct Estimate {
  Method method;
  double seconds = 0;
  double computing = 0, messages = 0,
         moving = 0;      ///< of which; messages that hide behind computing do not count
  double bytes = 0;       ///< that a rank sends at most
  int64_t workspace = 0;  ///< bytes of the rank that needs most, without that of calls
  double simulated = 0;   ///< seconds on a clock that is only thought (simulate.hpp); 0: not looked at

  double expected() const { return simulated > 0 ? simulated : seconds; }
};
Estimate estimate(const LocalProblem& problem, Method method, const Machine& machine);

/// The methods that the options allow, the fastest first, by the simulated clock where ranks are not too many for it; those that need
/// more memory than allowed are last.
std::vector<Estimate> weigh(const LocalProblem& problem, const fovea_distributed_options& options);
/// The same for ranks that are not there: without workspaces where they are too many.
std::vector<Estimate> weigh_on_paper(const LocalProblem& problem, const fovea_distributed_options& options);

/// One line.
std::string describe(const Estimate& estimate, const Shape& shape);

}  // namespace fovea::distributed
