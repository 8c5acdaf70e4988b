// What `fovea bench` times: sizes from the command line, or the named rows of the CPU benchmark.
#pragma once

#include <string>
#include <vector>

#include "cli/options/options.hpp"
#include "cli/options/shape_options.hpp"

namespace fovea::cli {

/// One problem to time.
struct BenchCase {
  std::string name;  ///< of a listed row; empty for sizes from the command line
  Shape shape;
  Pass pass = Pass::forward;
  Terms terms;
  bool reads_memory = false;  ///< timed in turns with a plain read of K and V: decoding is bound by memory
};

/// The rows of bench/cpu/rows.py whose name contains `filter`: grouped by type and pass, decoding last.
std::vector<BenchCase> listed_rows(const std::string& filter);

}  // namespace fovea::cli
