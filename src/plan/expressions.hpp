// Reads the expressions of a problem, and checks the tensors that they name.
#pragma once

#include <string>

#include "core/problem.hpp"

namespace fovea::plan {

/// Fills in `expressions` and `named` of a problem whose sizes are known. Throws RequestError(kInvalidArgument): what is wrong
/// with a text, and where; names that are taken or unknown; tensors of other types, or too small for the names that index
/// them.
void read_expressions(const ProblemDescription& description, AttentionProblem& problem);

/// The trees as text, a line each, with the derivatives of the score: "score\t...", "d score / d s\t...", one line for each element of a
/// float tensor, and "sees\t...". "" for a problem without expressions.
std::string describe_expressions(const AttentionProblem& problem);

}  // namespace fovea::plan
