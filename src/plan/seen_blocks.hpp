// Which blocks of queries and keys are seen, as far as it is known without computing a score.
#pragma once

#include <cstdint>
#include <span>

#include "core/problem.hpp"
#include "expr/blocks.hpp"

namespace fovea::plan {

/// One query head of one sequence, in blocks.
struct BlockGrid {
  int64_t batch = 0, head = 0, block_q = 0, block_k = 0;

  int64_t rows(const AttentionProblem& p) const { return (p.seqlen_q + block_q - 1) / block_q; }
  int64_t columns(const AttentionProblem& p) const { return (p.seqlen_k + block_k - 1) / block_k; }
};

/// What causal, window and `sees` leave of each block, row after row, in rows x columns elements of `seen`. Tensors count with
/// their values where the problem has their data on the CPU. A block behind the end of its sequence is kNone. Throws
/// RequestError(kInvalidArgument) naming what is wrong with the grid.
void find_seen_blocks(const AttentionProblem& problem, const BlockGrid& grid, std::span<expr::Seen> seen);

}  // namespace fovea::plan
