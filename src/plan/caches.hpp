// Key-value caches: which tensors go together, and what page tables, cache_batch and leftpad_k hold.
#pragma once

#include "core/problem.hpp"

namespace fovea::plan {

/// Throws RequestError(kInvalidArgument) for tensors of a cache that contradict each other.
void check_cache_tensors(const AttentionProblem& problem);

/// Throws RequestError(kInvalidArgument) for pages, sequences and rows that the cache does not have. Checks what `buffers` has,
/// in a problem in the common form whose lengths are checked.
void check_cache_contents(const AttentionProblem& problem, const Buffers& buffers);

}  // namespace fovea::plan
