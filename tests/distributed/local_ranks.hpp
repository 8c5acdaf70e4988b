// A problem of the suite, computed on ranks that are threads: its rows are dealt out, and the results put together again.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fovea/fovea_distributed.h"
#include "verify/owned_problem.hpp"

namespace fovea::distributed_tests {

struct Division {
  int ranks = 1;
  std::vector<fovea_piece> queries, keys;
  bool queries_everywhere = false;
  int heads_ranks = 0, stages = 0;  ///< 0: chosen
  int64_t memory_limit = 0;
  int64_t delay_us = 0;
  bool deterministic = false;
  const char* backend = nullptr;      ///< of the calls on each rank; nullptr: chosen
  std::vector<fovea_device> devices;  ///< of each rank; empty: the CPU
  int peer_copies = 0;                ///< as fovea_thread_options has it
  int64_t gap = 3;                    ///< elements between rows, on every second rank
  size_t skew = 0;                    ///< elements from an aligned address to the first
};

/// Ranks that each compute their part of a problem: threads, or one of them in this process.
class LocalRanks {
 public:
  LocalRanks(const verify::OwnedProblem& problem, Division division);

  /// Computes a pass, and writes the whole result to the problem's outputs. Returns "" or what went wrong.
  std::string run(fovea_pass pass);
  /// Computes the part of one rank alone, with others elsewhere, and writes it into the problem's outputs, whose other elements are 0:
  /// the sum over ranks is the whole result.
  std::string run_one(fovea_pass pass, const fovea_transport& transport);
  /// What the plan of rank 0 says of itself.
  const std::string& reason() const { return reason_; }
  /// What a pass writes.
  std::vector<verify::Role> outputs(fovea_pass pass) const;

 private:
  struct Rank;
  std::string run_rank(Rank& rank, fovea_pass pass, const fovea_transport& transport);
  void describe(Rank& rank, fovea_pass pass);
  std::string run_plan(Rank& rank, const fovea_distributed_plan* plan);
  std::string check(const Rank& rank, fovea_pass pass) const;
  static bool by_copies(const Rank& rank);
  std::string check_messages(const fovea_thread_group* group, const Rank& rank) const;
  bool has_rows_of_keys(verify::Role role) const;
  /// The rows of the whole axis that a rank holds, in its order.
  std::vector<int64_t> rows_of(int rank, bool keys) const;
  void deal(Rank& rank, verify::Role role, bool empty);
  void collect(const Rank& rank, verify::Role role);

  const verify::OwnedProblem& x_;
  Division division_;
  std::vector<int32_t> starts_q_, starts_k_;
  std::string reason_;
};

}  // namespace fovea::distributed_tests
