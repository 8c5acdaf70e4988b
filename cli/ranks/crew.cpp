// The definitions of crew.hpp.
#include "cli/ranks/crew.hpp"

#include <algorithm>
#include <optional>

#include "cli/data/elements.hpp"

namespace fovea::cli {

RankCrew::RankCrew(const Problem& whole, const RankOptions& options, const Execution& execution)
    : whole_(whole),
      division_(divide(whole, options.ranks)),
      options_(options.options(execution, options.ranks)),
      ranks_(options.ranks),
      begin_(options.ranks + 1),
      end_(options.ranks + 1),
      thread_([this] { ranks_.run([this](const Transport& transport) { work(transport); }); }) {
  try {
    deal();
  } catch (...) {
    tell(Task::leave);
    throw;
  }
}

RankCrew::~RankCrew() {
  if (thread_.joinable()) tell(Task::leave);
}

void RankCrew::tell(Task task) {
  task_ = task;
  begin_.arrive_and_wait();
  if (task == Task::leave) {
    thread_.join();
    return;
  }
  end_.arrive_and_wait();
  if (failure_) std::rethrow_exception(failure_);
}

/// One rank: what it throws goes to the one who told it, and the others stop.
void RankCrew::work(const Transport& transport) {
  std::optional<RankPart> part;
  std::optional<DistributedPlan> plan;
  std::optional<Workspace> workspace;
  Buffers buffers;
  const auto deal = [&] {
    part.emplace(whole_, division_, transport.rank(), RankPart::Data::dealt);
    buffers = buffers_of(part->problem().local);
    if (plan) return;
    plan.emplace(transport, part->problem(), options_);
    workspace.emplace(plan->workspace_size(), plan->device());
    const std::lock_guard lock(mutex_);
    workspace_ = std::max(workspace_, plan->workspace_size());
    if (transport.rank() == 0) reason_ = plan->reason();
  };
  for (;;) {
    begin_.arrive_and_wait();
    if (task_ == Task::leave) return;
    try {
      if (task_ == Task::deal) deal();
      if (task_ == Task::run) plan->run(buffers, *workspace);
      if (task_ == Task::collect) part->collect(whole_);
    } catch (const Error& error) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::make_exception_ptr(of_whole(error));
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    end_.arrive_and_wait();
  }
}

}  // namespace fovea::cli
