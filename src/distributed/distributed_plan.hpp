// A planned distributed problem of one rank: made with the other ranks, and run with them.
#pragma once

#include <memory>
#include <string>

#include "distributed/local_problem.hpp"
#include "distributed/memory.hpp"
#include "distributed/program.hpp"
#include "distributed/transport.hpp"

namespace fovea::distributed {

class DistributedPlan {
 public:
  /// With all ranks: throws on all where one cannot plan or the problems differ.
  DistributedPlan(const Transport& transport, const fovea_distributed_problem& problem,
                  const fovea_distributed_options& options);

  /// With all ranks.
  void run(const fovea_buffers& buffers) const;

  int64_t workspace_size() const { return program_.workspace; }
  const std::string& reason() const { return reason_; }
  int64_t messages() const;
  int64_t bytes() const;

 private:
  void plan(const fovea_distributed_problem& problem, const fovea_distributed_options& options);
  /// Tells the others that this rank is ready, or why not, and learns the same of them.
  void agree(uint64_t fingerprint, const std::string& failure) const;

  Transport transport_;
  std::unique_ptr<Memory> memory_;
  LocalProblem problem_;
  Program program_;
  std::string reason_;
  uint64_t fingerprint_ = 0;
};

}  // namespace fovea::distributed
