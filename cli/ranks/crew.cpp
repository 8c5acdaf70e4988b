// The definitions of crew.hpp.
#include "cli/ranks/crew.hpp"

#include <algorithm>
#include <vector>

#include "cli/data/elements.hpp"

namespace fovea::cli {

RankCrew::RankCrew(const Problem& whole, const RankGroup& group, const RankOptions& options,
                   const Execution& execution)
    : whole_(whole),
      group_(group),
      division_(divide(whole, group.size())),
      options_(options.options(execution, group.size())),
      begin_(group.size() + 1),
      end_(group.size() + 1) {
  if (group.transport()) {
    if (group.has_result()) tell(Task::deal);
    return;
  }
  thread_ = std::jthread([this] { group_.run([this](const Transport& transport) { work(transport); }); });
  try {
    tell(Task::deal);
  } catch (...) {
    tell(Task::leave);
    throw;
  }
}

RankCrew::~RankCrew() {
  if (thread_.joinable()) tell(Task::leave);
  if (!group_.transport() || !group_.has_result() || failure_) return;
  try {
    tell_processes(Task::leave);
  } catch (const std::exception&) {
    // They are gone, or find out by the deadline.
  }
}

void RankCrew::deal(const std::function<void()>& renew) {
  renew();
  tell(Task::deal);
}

void RankCrew::tell(Task task) {
  if (group_.transport()) {
    try {
      group_.run([&](const Transport& transport) {
        tell_processes(task);
        do_task(task, transport, own_);
      });
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
    return;
  }
  task_ = task;
  begin_.arrive_and_wait();
  if (task_ == Task::leave) {
    thread_.join();
    return;
  }
  end_.arrive_and_wait();
  if (failure_) std::rethrow_exception(failure_);
}

void RankCrew::tell_processes(Task task) {
  const Transport transport = *group_.transport();
  std::vector<fovea_message> sends;
  for (int peer = 1; peer < group_.size(); ++peer) sends.push_back({peer, &task, sizeof task});
  transport.exchange(sends, {});
}

void RankCrew::follow(const std::function<void()>& renew) {
  group_.run([&](const Transport& transport) {
    for (;;) {
      Task task = Task::leave;
      const fovea_message told{0, &task, sizeof task};
      transport.exchange({}, {&told, 1});
      if (task == Task::leave) return;
      if (task == Task::deal && own_.plan) renew();
      do_task(task, transport, own_);
    }
  });
}

/// One rank that is a thread: what it throws goes to the one who told it, and the others stop.
void RankCrew::work(const Transport& transport) {
  Worker worker;
  for (;;) {
    begin_.arrive_and_wait();
    if (task_ == Task::leave) return;
    try {
      do_task(task_, transport, worker);
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

/// All ranks end a run together: the one that tells takes the time of the slowest.
void RankCrew::do_task(Task task, const Transport& transport, Worker& worker) {
  if (task == Task::run) {
    worker.plan->run(worker.buffers, *worker.workspace);
    if (group_.transport()) all_agree(transport, true);
  }
  if (task == Task::collect) {
    worker.part->collect(whole_);
    if (group_.transport()) group_.gather(whole_, division_, *worker.part, transport);
  }
  if (task != Task::deal) return;
  worker.part.emplace(whole_, division_, transport.rank(), RankPart::Data::dealt);
  worker.buffers = buffers_of(worker.part->problem().local);
  if (worker.plan) return;
  worker.plan.emplace(transport, worker.part->problem(), options_);
  worker.workspace.emplace(worker.plan->workspace_size(), worker.plan->device());
  const std::lock_guard lock(mutex_);
  workspace_ = std::max(workspace_, worker.plan->workspace_size());
  if (transport.rank() == 0) reason_ = worker.plan->reason();
}

}  // namespace fovea::cli
