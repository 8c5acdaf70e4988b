// The definitions of rank_group.hpp.
#include "cli/ranks/rank_group.hpp"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "cli/data/elements.hpp"
#include "cli/options/shape_options.hpp"
#include "cli/ranks/launcher.hpp"
#include "cli/terminal/failure.hpp"

namespace fovea::cli {

RankGroup::RankGroup(const RankOptions& options, int64_t deadline_ms) : options_(options) {
  options.check();
  if (!options.by_mpi()) {
    threads_.emplace(options.ranks);
    size_ = options.ranks;
    return;
  }
  process_.emplace(deadline_ms);
  size_ = process_->transport().size();
  if (const std::optional<Launcher> by = launcher(); by && by->processes != size_) {
    throw Failure(Exit::resources,
                  "--mpi: got " + std::to_string(size_) + " processes of MPI, expected " +
                      std::to_string(by->processes) + " (" + by->variable +
                      "); start them by the mpirun of the MPI that Fovea was built with, or pass --no-mpi");
  }
  if (options.ranks != 0 && options.ranks != size_) {
    throw Failure(Exit::usage, "--ranks: got " + std::to_string(options.ranks) + ", expected " +
                                   std::to_string(size_) +
                                   ", the number of processes that mpirun started, or none; --no-mpi makes "
                                   "ranks threads of each process");
  }
}

void RankGroup::telling(const std::function<void()>& work) const {
  if (!process_) return work();
  const Transport own = process_->transport();
  const std::string rank = "rank " + std::to_string(own.rank()) + ": ";
  try {
    work();
  } catch (const AgreedFailure&) {
    throw;
  } catch (const std::exception& error) {
    own.stop(rank + error.what());
    throw;
  } catch (...) {
    own.stop(rank + "an exception of an unknown type");
    throw;
  }
}

void RankGroup::run(const std::function<void(const Transport&)>& work) const {
  try {
    if (!process_) return threads_->run(work);
    telling([&] { work(process_->transport()); });
  } catch (const Error& error) {
    throw of_whole(error);
  }
}

std::optional<Transport> RankGroup::transport() const {
  return process_ ? std::optional(process_->transport()) : std::nullopt;
}

void RankGroup::gather(const Problem& whole, const Division& division, RankPart& own,
                       const Transport& transport) const try {
  if (transport.rank() > 0) {
    for (const std::span<std::byte> output : own.outputs()) {
      const fovea_message message{0, output.data(), output.size()};
      transport.exchange({&message, 1}, {});
    }
    return;
  }
  std::vector<RankPart> others;
  others.reserve(static_cast<size_t>(size_));
  for (int rank = 1; rank < size_; ++rank) others.emplace_back(whole, division, rank, RankPart::Data::empty);
  for (size_t i = 0; i < own.outputs().size(); ++i) {
    std::vector<fovea_message> receives;
    for (int rank = 1; rank < size_; ++rank) {
      const std::span<std::byte> output = others[static_cast<size_t>(rank - 1)].outputs()[i];
      receives.push_back({rank, output.data(), output.size()});
    }
    transport.exchange({}, receives);
  }
  for (const RankPart& other : others) other.collect(whole);
} catch (const Error& error) {
  throw Error(error.status(), error.argument(),
              std::string(error.what()) + ", while rank 0 gathers the results");
}

RankedRun RankGroup::attend(const Problem& whole, const Execution& execution, RankFiles& files) const {
  Problem divided = whole;
  if (files.gradients_follow && files.keeps_results) divided.pass = Pass::backward;
  files.division = divide(divided, size_);
  files.parts.resize(static_cast<size_t>(size_));
  RankedRun all{.ranks = size_, .threads = threads_of_a_rank(execution, size_)};
  std::mutex mutex;
  run([&](const Transport& transport) {
    std::unique_ptr<RankPart>& kept = files.parts[static_cast<size_t>(transport.rank())];
    auto part = std::make_unique<RankPart>(whole, files.division, transport.rank(), RankPart::Data::dealt,
                                           files.read, kept.get());
    const DistributedPlan plan(transport, part->problem(), options_.options(execution, size_));
    Workspace workspace(plan.workspace_size(), plan.device());
    const Buffers buffers = buffers_of(part->problem().local);
    const auto start = std::chrono::steady_clock::now();
    plan.run(buffers, workspace);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (files.keeps_results) {
      kept = std::move(part);
    } else {
      part->collect(whole);
      if (process_) gather(whole, files.division, *part, transport);
    }
    const std::lock_guard lock(mutex);
    all.seconds = std::max(all.seconds, seconds);
    all.workspace = std::max(all.workspace, plan.workspace_size());
    if (transport.rank() == 0) all.reason = plan.reason();
  });
  return all;
}

bool all_agree(const Transport& transport, bool well) {
  const auto size = static_cast<size_t>(transport.size());
  char own = well ? 1 : 0;
  std::vector<char> others(size, 1);
  std::vector<fovea_message> sends, receives;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer == transport.rank()) continue;
    sends.push_back({peer, &own, 1});
    receives.push_back({peer, &others[static_cast<size_t>(peer)], 1});
  }
  transport.exchange(sends, receives);
  return well && std::ranges::find(others, 0) == others.end();
}

std::string reason_over_ranks(const Problem& whole, const RankOptions& options, const Execution& execution) {
  options.check();
  const Division division = divide(whole, options.ranks);
  std::string reason;
  try {
    ThreadRanks(options.ranks).run([&](const Transport& transport) {
      const RankPart part(whole, division, transport.rank(), RankPart::Data::described);
      const DistributedPlan plan(transport, part.problem(), options.options(execution, options.ranks));
      if (transport.rank() == 0) reason = plan.reason();
    });
  } catch (const Error& error) {
    throw of_whole(error);
  }
  return reason;
}

std::string methods_on_paper(const Problem& whole, const RankOptions& options, const Execution& execution) {
  options.check();
  const Division division = divide(whole, options.ranks);
  const RankPart part(whole, division, 0, RankPart::Data::described);
  DistributedProblem problem = part.problem();
  if (options.on_paper == "gpu") move_to_gpu(problem.local, 0);
  try {
    return distributed_on_paper(options.ranks, problem, options.options(execution, options.ranks));
  } catch (const Error& error) {
    throw of_whole(error);
  }
}

Error of_whole(const Error& error) {
  constexpr std::string_view kLocal = "local.";
  std::string argument = error.argument(), message = error.what();
  for (std::string* text : {&argument, &message}) {
    if (text->starts_with(kLocal)) text->erase(0, kLocal.size());
  }
  return {error.status(), argument, message};
}

}  // namespace fovea::cli
