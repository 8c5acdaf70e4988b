// The oracle: the textbook formula in float64, row by row, for every feature. Independent of the tile code.
#pragma once

#include "core/backend.hpp"

namespace fovea::cpu {

/// The last backend of the list; can do everything, in float64.
extern const Backend kReferenceBackend;

/// Forward or backward of `problem` in float64 arithmetic. Output tensors of any floating type are rounded
/// once from double, and every element of every output is written. One thread. Unlike the other backends it
/// allocates: O(Sk) in the forward, one key head's dk and dv in float64 in the backward, and dbias in float64
/// where it is asked for.
void run_reference(const AttentionProblem& problem, const Buffers& buffers);

}  // namespace fovea::cpu
