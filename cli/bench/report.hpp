// What `fovea bench` found, and how it is printed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/bench/rows.hpp"
#include "cli/measure/measure.hpp"

namespace fovea::cli {

/// A plain read of K and V beside the run.
struct MemoryRead {
  Timing timing;
  std::string way;
  size_t bytes = 0;  ///< those of K and V; a copy moves twice as many
  double rate() const { return static_cast<double>(bytes) / timing.median; }
};

/// The same problem on one rank with all threads, in turns with the run over ranks.
struct SingleRun {
  Timing timing;
  int ranks = 0;
  std::string reason{};  ///< of the plan over ranks
};

struct BenchRow {
  BenchCase what;
  std::string backend;
  Timing timing{};  ///< of results that are right
  double flops = 0, error = 0, allowed = 0;
  int64_t rows_checked = 0;
  size_t workspace = 0;
  double host_seconds = 0;  ///< on a GPU: of the call, which does not wait for the work
  std::optional<MemoryRead> read{};
  std::optional<SingleRun> single{};

  bool right() const { return error <= allowed; }
  double rate() const { return flops / timing.median; }
  /// Bytes of K and V a second.
  double key_rate() const { return static_cast<double>(what.key_bytes()) / timing.median; }
  /// Of the rate on one rank with as many threads.
  double share_of_single() const { return single->timing.median / timing.median; }
  /// Of the rate at which memory can be read.
  double share_of_read() const { return key_rate() / read->rate(); }
};

/// Where and how all rows ran.
struct BenchSetting {
  int threads = 0;
  bool causal = false;
  std::string gpu;  ///< described in one line; empty on the CPU
};

void print_bench_json(const BenchSetting& setting, const std::vector<BenchRow>& rows);
void print_bench_table(const BenchSetting& setting, const std::vector<BenchRow>& rows);

}  // namespace fovea::cli
