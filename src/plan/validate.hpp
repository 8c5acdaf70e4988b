// The one place where a problem is checked: what passes here needs no check in any backend.
#pragma once

#include "core/problem.hpp"

namespace fovea::plan {

/// Largest head size (D and Dv): 576 is the latent head of multi-head latent attention, the largest in use.
inline constexpr int64_t kMaxHeadSize = 576;

/// The problem in the form that src/core/problem.hpp documents. Contents of cu_seqlens and seqused are
/// checked where their data is at hand (on the CPU); data pointers are kept in `tensors`. Throws
/// RequestError(kInvalidArgument) naming the argument.
AttentionProblem validate(const ProblemDescription& description);

/// Checks what cu_seqlens_q/k and seqused_q/k hold, in O(batch); arrays whose pointer is null are skipped. Throws
/// RequestError(kInvalidArgument).
void check_sequence_lengths(const AttentionProblem& problem, const Buffers& buffers);

/// Checks the entries of `keys`, behind check_sequence_lengths(). Throws RequestError(kInvalidArgument).
void check_key_lists(const AttentionProblem& problem, const Buffers& buffers);

}  // namespace fovea::plan
