// Options that several subcommands share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/data/elements.hpp"
#include "cli/options/cli11.hpp"
#include "fovea/fovea.hpp"

namespace fovea::cli {

/// "3,-1" as two whole numbers; a Failure names `option` and `expected`, for example "LEFT,RIGHT".
std::pair<int64_t, int64_t> parse_pair(const std::string& option, const std::string& text, char separator,
                                       const std::string& expected);

/// A real type; a Failure names `option`.
ElementType parse_type(const std::string& option, const std::string& text);

/// Terms of the score that need no array.
struct Terms {
  bool causal = false;
  std::string window;
  double softcap = 0, scale = 0, dropout = 0;
  uint64_t seed = 0;

  void add_options(CLI::App& command, bool with_dropout);
  /// Fills in the fields of `problem`.
  void apply(Problem& problem) const;
};

/// How the problem is to be done.
struct Execution {
  std::string backend;
  int threads = 0;
  bool deterministic = false;
  int splits = 0;
  bool batch_invariant = false;

  /// `with_bits`: also the options that decide the last bits of results.
  void add_options(CLI::App& command, bool with_bits);
  /// Those options alone.
  void add_options_of_bits(CLI::App& command, const char* group);
  Options options() const {
    return {.backend = backend,
            .num_threads = threads,
            .deterministic = deterministic,
            .num_splits = splits,
            .batch_invariant = batch_invariant};
  }
  /// The number of threads a plan will use.
  int resolved_threads() const { return threads > 0 ? threads : default_threads(); }
};

/// --device: cpu, cuda or cuda:N.
void add_device_option(CLI::App& command, std::string& device);
/// The GPU that --device names, if it names one; where it is left out, the first one for a backend of GPUs.
std::optional<int> gpu_of(const std::string& device, const std::string& backend);

void add_json_option(CLI::App& command, bool& json);

}  // namespace fovea::cli
