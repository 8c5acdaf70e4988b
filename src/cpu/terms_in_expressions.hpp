// What the vectorised algorithms know of a problem's terms: expressions alone.
#pragma once

#include "core/problem.hpp"

namespace fovea::cpu {

/// The problem with softcap, ALiBi, bias, masks and a scale that is not positive as parts of its expressions, and no longer as
/// arguments; the gradient of the bias is that of a named tensor.
AttentionProblem with_terms_in_expressions(const AttentionProblem& problem);

}  // namespace fovea::cpu
