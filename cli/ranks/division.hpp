// A whole problem, dealt out to ranks: which rows each gets, and its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fovea/distributed.hpp"

namespace fovea::cli {

/// Which rank has which rows.
struct Division {
  std::vector<Piece> queries;  ///< empty: every rank has all of them
  std::vector<Piece> keys;
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_k;  ///< of packed sequences
};

/// Zigzag pieces under a causal mask or a window, which balance the ranks, else contiguous ones. Fewer queries than ranks lie on all
/// ranks, where only the forward is asked for. Throws a Failure for packed sequences without data.
Division divide(const Problem& whole, int ranks);

/// Reads rows [begin, end) of one sequence of a tensor, by its name in the problem, to memory.
using RowReader = std::function<void(const std::string& tensor, int64_t sequence, int64_t begin, int64_t end,
                                     std::byte* to)>;

/// Where an output lies.
enum class Spread {
  query_rows,
  key_rows,
  query_statistic,  ///< of queries, which are the last dimension
  everywhere,       ///< whole on every rank
};
/// Of an output of the command line by its name.
Spread spread_of(const std::string& output);

/// One rank's tensors of a whole problem: compact, with memory of their own.
class RankPart {
 public:
  enum class Data {
    described,  ///< no memory: for plans
    empty,      ///< memory for results
    dealt,      ///< and a copy of this rank's rows of the inputs
  };
  /// Inputs of the whole that have no data come from the rank's results `before`, else from `reader`.
  RankPart(const Problem& whole, const Division& division, int rank, Data data,
           const RowReader& reader = nullptr, const RankPart* before = nullptr);

  const DistributedProblem& problem() const { return problem_; }
  /// Memory of the outputs, in the same order on all ranks.
  std::vector<std::span<std::byte>> outputs();
  /// The bytes of this rank's rows [begin, end) of a result, or of all of one that every rank has.
  std::vector<std::byte> rows_of(const std::string& output, int64_t begin, int64_t end) const;
  /// Copies this rank's rows of the outputs into the whole problem.
  void collect(const Problem& whole) const;

 private:
  const Division& division_;
  int rank_;
  DistributedProblem problem_;
  std::vector<std::vector<std::byte>> memory_;     ///< by field
  std::vector<std::vector<std::byte>> gradients_;  ///< of named tensors that have one
};

}  // namespace fovea::cli
