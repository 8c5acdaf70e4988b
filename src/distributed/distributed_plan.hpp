// A planned distributed problem of one rank: made with the other ranks, and run with them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "distributed/agreement.hpp"
#include "distributed/choose.hpp"
#include "distributed/local_problem.hpp"
#include "distributed/memory.hpp"
#include "distributed/program.hpp"
#include "distributed/transport.hpp"
#include "distributed/windows.hpp"

namespace fovea::distributed {

/// Says which weights dropout drops.
struct DropoutStream {
  uint64_t seed = 0, offset = 0;
};

class DistributedPlan {
 public:
  /// With all ranks: throws on all where one cannot plan or the problems differ.
  DistributedPlan(const Transport& transport, const fovea_distributed_problem& problem,
                  const fovea_distributed_options& options);

  /// With all ranks.
  void run(const fovea_buffers& buffers) const;

  /// Where ranks reach each other's workspaces the plan has its own, but for that of the calls of attention.
  int64_t workspace_size() const {
    return program_.lanes * aligned(static_cast<int64_t>(program_.attention_workspace_size)) +
           (windows_ ? 0 : program_.workspace);
  }
  const std::string& reason() const { return reason_; }
  int64_t messages() const;
  int64_t bytes() const;

 private:
  /// With all ranks.
  void make(const fovea_distributed_problem& problem, const fovea_distributed_options& options,
            bool by_copies);
  SharedArguments plan(const fovea_distributed_problem& problem, const fovea_distributed_options& options,
                       bool by_copies);
  void explain(const std::vector<Estimate>& weighed, const fovea_distributed_options& options);
  void run_steps(const fovea_buffers& buffers, size_t& begun) const;
  /// Tells the others that this rank is ready, or why not, and learns the same of them.
  void agree(const SharedArguments& shared, const std::string& failure) const;
  [[noreturn]] void tell_difference(const SharedArgument& argument) const;
  DropoutStream dropout_of(const fovea_buffers& buffers) const;
  /// Whether each run begins with messages that say what drops weights. On GPUs the host would wait for the stream.
  bool agrees_on_dropout() const;
  void agree_on(const DropoutStream& own) const;
  std::string place_in_run(size_t steps_begun) const;
  void give_up(const std::string& reason, size_t steps_begun) const;

  Transport transport_;
  std::unique_ptr<Memory> memory_;
  LocalProblem problem_;
  Program program_;
  std::unique_ptr<Windows> windows_;  ///< null: ranks send each other messages
  std::string reason_;
};

}  // namespace fovea::distributed
