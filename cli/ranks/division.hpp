// A whole problem, dealt out to ranks: which rows each gets, and its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
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

/// One rank's tensors of a whole problem: compact, with memory of their own.
class RankPart {
 public:
  enum class Data {
    described,  ///< no memory: for plans
    empty,      ///< memory for results
    dealt,      ///< and a copy of this rank's rows of the inputs
  };
  RankPart(const Problem& whole, const Division& division, int rank, Data data);

  const DistributedProblem& problem() const { return problem_; }
  /// Memory of the outputs, in the same order on all ranks.
  std::vector<std::span<std::byte>> outputs();
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
