// Decoding over a key-value cache, as `fovea bench --decode` times it: few queries, many keys, whole or in pages.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "cli/bench/mirrors.hpp"
#include "cli/bench/rows.hpp"

namespace fovea::cli {

/// Values of the options of --decode: every combination with a shape is a row.
struct DecodeOptions {
  std::vector<int64_t> page = {0, 64};
  std::vector<std::string> cache_type = {"q", "float8_e4m3fn"};
  int64_t copies = 1;          ///< as CacheForm says
  bool heads_outside = false;  ///< the same

  void add_options(CLI::App& command);
  /// Whether one of these was given.
  bool given() const;
  std::vector<BenchCase> cases(const std::vector<Shape>& shapes, const Terms& terms) const;

 private:
  std::vector<CLI::Option*> options_;
};

/// The sizes that --decode takes where they are not given.
ShapeOptions default_decode_shapes();

/// Queries, a cache that is in use to the last key, and results. Inputs are normal random numbers; the pages of a sequence lie
/// anywhere. With a GPU every array has a mirror in its memory.
class DecodeData {
 public:
  DecodeData(const BenchCase& what, Gpu* gpu);

  /// On the memory of the arrays.
  Problem problem() const;
  /// The same without data: an invalid one is refused before memory is asked for. `gpu` may be null.
  static Problem described(const BenchCase& what, const Gpu* gpu);
  void download_outputs();
  const Array& k() const { return k_; }
  const Array& v() const { return v_; }
  /// K and V of further caches with the same contents, one less than the form of the cache says.
  const std::vector<std::array<Array, 2>>& copies() const { return copies_; }
  const Mirrors& mirrors() const { return mirrors_; }
  /// The largest relative error (Frobenius norm) of o and lse against the oracle in float64, of the first and the last sequence and
  /// head of keys. NaN where an output is NaN.
  double largest_error() const;

 private:
  double error_of(int64_t batch, int64_t head_kv) const;
  Array keys_of(const Array& cache, int64_t batch, int64_t head_kv) const;

  BenchCase what_;
  Array q_, k_, v_, o_, lse_, used_, pages_;
  std::vector<std::array<Array, 2>> copies_;
  Mirrors mirrors_;
};

}  // namespace fovea::cli
