// The text that a kernel is compiled for, from the expressions of a problem.
#pragma once

#include <string>

#include "core/problem.hpp"

namespace fovea::cuda {

/// What stands in the place of warp/expression.cuh. Problems whose expressions need the same code have the same text: sizes enter
/// it only by what they prove.
std::string expression_text(const AttentionProblem& problem);

}  // namespace fovea::cuda
