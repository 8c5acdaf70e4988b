// Runs of a problem whose slopes of ALiBi came as a named tensor (expr::with_slopes).
#pragma once

#include "core/backend.hpp"

namespace fovea::plan {

/// What was prepared for the problem, for buffers that have the slopes in the place of the named tensor.
Preparation with_named_slopes(const AttentionProblem& problem, Preparation preparation);

}  // namespace fovea::plan
