// The tiled forward and backward of the CPU backends (forward.cpp, backward.cpp), over a table of vector operations.
#pragma once

#include <memory>

#include "core/backend.hpp"
#include "cpu/ops.hpp"

namespace fovea::cpu {

/// The workspace grows with the threads and, where keys are split, with the rows.
std::unique_ptr<const Prepared> prepare_forward(const AttentionProblem& problem, const Ops& ops,
                                                const PrepareOptions& options);

/// The same of problems where queries have lists of keys. The workspace grows with the threads.
std::unique_ptr<const Prepared> prepare_forward_of_lists(const AttentionProblem& problem, const Ops& ops,
                                                         const PrepareOptions& options);

/// Whether tiles multiply the few query rows of a forward, whatever its type.
bool few_rows_on_tiles(const AttentionProblem& problem, const Ops& ops);
/// Whether tiles multiply the many query rows of a forward of float16 or float32, as bfloat16 parts.
bool many_rows_as_parts(const AttentionProblem& problem);

/// The workspace grows with the query rows (float32 dQ).
std::unique_ptr<const Prepared> prepare_backward(const AttentionProblem& problem, const Ops& ops,
                                                 const PrepareOptions& options);

/// The same where queries have lists of keys, without the gradient of a bias. The workspace grows with the keys (float32
/// dK and dV, a few copies).
std::unique_ptr<const Prepared> prepare_backward_of_lists(const AttentionProblem& problem, const Ops& ops,
                                                          const PrepareOptions& options);

}  // namespace fovea::cpu
