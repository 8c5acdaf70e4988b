// The tiled forward and backward of the CPU backends (forward.cpp, backward.cpp), over a table of vector
// operations.
#pragma once

#include "core/backend.hpp"
#include "cpu/ops.hpp"

namespace fovea::cpu {

/// Bytes of workspace of a forward; grows with the threads and, where keys are split, with the rows.
size_t forward_workspace(const AttentionProblem& problem, const Ops& ops, int num_threads);
void forward(const Plan& plan, const Buffers& buffers, const Ops& ops);

/// Bytes of workspace of a backward; grows with the query rows (float32 dQ).
size_t backward_workspace(const AttentionProblem& problem, const Ops& ops, int num_threads);
void backward(const Plan& plan, const Buffers& buffers, const Ops& ops);

}  // namespace fovea::cpu
