// The terms of a problem that are arguments of their own, as parts of its expressions: for backends whose kernels are compiled
// for expressions. And windows and slopes, which kernels have, as arguments.
#pragma once

#include <optional>

#include "core/problem.hpp"

namespace fovea::expr {

/// The problem whose score has the softcap, ALiBi and the bias in front of the user's, and whose `sees` has the mask and the block
/// mask beside the user's; their tensors are named tensors behind the user's. The terms themselves stay in the problem. The
/// problem itself where it has none of these terms; nothing where there would be too many tensors.
std::optional<AttentionProblem> with_terms_in_expressions(const AttentionProblem& problem,
                                                          size_t most_tensors = kMaxNamedTensors);

/// The same problem with what its `sees` says of a window as a window, and the rest of `sees` (windows.hpp). Named tensors stay, also
/// where nothing reads them any more.
AttentionProblem with_windows(const AttentionProblem& problem);

/// The same problem with a score that is ALiBi's as slopes, which kernels have without an expression (AttentionProblem::named_slopes).
/// Not where named tensors have gradients, beside a bias, or where `sees` keeps an expression.
AttentionProblem with_slopes(const AttentionProblem& problem);

}  // namespace fovea::expr
