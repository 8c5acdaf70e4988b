// The CPU backends, in order of preference; the reference is last.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "core/backend.hpp"

namespace fovea::cpu {

std::span<const Backend* const> backends();

/// Backend::prepare_append of every CPU backend.
std::unique_ptr<const AppendStep> prepare_append(const AttentionProblem& problem,
                                                 const PrepareOptions& options);

/// Threads that a plan uses when the caller names none: the processors that this process may run on.
int default_threads();

/// Processor name and the instruction sets that matter here, one line.
std::string machine_description();

/// Merges partial results over disjoint keys (see fovea_merge). Views are (batch, seqlen, heads, size) for o
/// and (batch, heads, seqlen) for lse, shapes equal and checked; a part may alias the output.
void merge(std::span<const TensorDesc> o_parts, std::span<const TensorDesc> lse_parts, const TensorDesc& o,
           const TensorDesc& lse);

}  // namespace fovea::cpu
