// Attention weights, which the library never stores: computed again from q, k and lse, a tile at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cli/data/inputs.hpp"
#include "cli/options/options.hpp"

namespace fovea::cli {

enum class Pooling { max, mean };

/// A picture of weights: row-major, from the first query down and the first key to the right.
struct WeightGrid {
  int64_t rows = 0, columns = 0;
  std::vector<float> values;
  float at(int64_t row, int64_t column) const { return values[static_cast<size_t>(row * columns + column)]; }
};

/// A range of tokens, `last` not included.
struct Range {
  int64_t first = 0, last = 0;
  int64_t size() const { return last - first; }
};

/// The attention of one head of one sequence of a batch.
class AttentionMap {
 public:
  /// Runs the library's forward for that head alone, for its lse. The arrays of `inputs` must outlive the map. Throws
  /// Failure when there is no such head or sequence, Error when shapes do not fit each other.
  AttentionMap(const Inputs& inputs, const Terms& terms, const Execution& execution, int64_t batch_index,
               int64_t head);

  int64_t seqlen_q() const { return seqlen_q_; }
  int64_t seqlen_k() const { return seqlen_k_; }
  const std::string& backend() const { return backend_; }

  /// The weights of `queries` for `keys`, pooled to at most rows x columns cells: one for each pair of tokens where there
  /// are fewer. Needs memory for the grid and one tile per thread.
  WeightGrid pooled(Range queries, Range keys, int64_t rows, int64_t columns, Pooling pooling,
                    int threads) const;

 private:
  /// Runs the forward of this head.
  void compute_lse(const Terms& terms, const Execution& execution, int64_t head_kv, float sink);
  /// Fills q_ and k_transposed_.
  void store_rows(const Terms& terms, int64_t head_kv);
  /// Weights of up to kRowsAtOnce queries from `first_query`, for `keys`, row after row.
  void weights(int64_t first_query, int64_t count, Range keys, float* out) const;
  /// One row of cells over `queries`. `tile` has room for the weights of one call, `sums` a number for each cell.
  void pool_row(Range queries, Range keys, Pooling pooling, float* tile, std::span<double> sums,
                std::span<float> out) const;
  float element(const Array& array, int64_t query, int64_t key) const;

  const Inputs& inputs_;
  int64_t batch_index_, head_;
  int64_t seqlen_q_ = 0, seqlen_k_ = 0, head_dim_ = 0;
  double softcap_ = 0;
  int64_t left_ = -1, right_ = -1;  ///< the window, causal mask included; -1: unlimited
  float slope_ = 0;
  std::vector<float> q_;             ///< (seqlen_q, head_dim), times scale
  std::vector<float> k_transposed_;  ///< (head_dim, seqlen_k): the inner loop runs over keys
  std::vector<float> lse_;
  std::string backend_;
};

}  // namespace fovea::cli
