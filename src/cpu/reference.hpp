// The oracle: the textbook formula in float64, row by row, for every feature. Independent of the tile code.
#pragma once

#include "core/backend.hpp"

namespace fovea::cpu {

/// The last backend of the list; can do everything, in float64.
extern const Backend kReferenceBackend;

/// Forward or backward of `problem` in float64 arithmetic, on one thread. Outputs are rounded once, from
/// double, and every element of every output is written. Unlike the other backends it allocates: O(Sk) in the
/// forward; in the backward dk and dv of one key head, and dbias where the problem has it, in float64.
void run_reference(const AttentionProblem& problem, const Buffers& buffers);

}  // namespace fovea::cpu
