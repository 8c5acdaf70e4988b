// What `fovea bench` times: sizes from the command line, or the named rows of the CPU benchmark.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/options/options.hpp"
#include "cli/options/shape_options.hpp"

namespace fovea::cli {

/// A key-value cache that is decoded over.
struct CacheForm {
  int64_t page = 0;        ///< rows of a page; 0: one piece for each sequence
  bool of_8_bits = false;  ///< float8_e4m3fn; else the type of the queries
  bool heads_outside =
      false;  ///< the rows of a head, in its piece, side by side (bhsd); else those of all heads (bshd)
  int64_t copies = 1;  ///< caches that timed runs take in turn
};

/// One problem to time.
struct BenchCase {
  std::string name;  ///< of a listed row; empty for sizes from the command line
  Shape shape;
  Pass pass = Pass::forward;
  Terms terms;
  bool reads_memory = false;  ///< timed in turns with a plain read of K and V: decoding is bound by memory
  std::optional<CacheForm> cache{};  ///< of rows of --decode

  /// What one run reads of K and V.
  size_t key_bytes() const;
};

/// The rows of bench/cpu/rows.py whose name contains `filter`: grouped by type and pass, decoding last.
std::vector<BenchCase> listed_rows(const std::string& filter);

}  // namespace fovea::cli
