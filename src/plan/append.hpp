// Problems that append to a cache: a step that writes the new rows, then attention over all of them.
#pragma once

#include "core/backend.hpp"

namespace fovea::plan {

/// The problem that is left once its new rows are written: the same without them, with the lengths that result, and with a compact
/// q where q is rotated. A problem that appends nothing is left as it is.
AttentionProblem once_appended(const AttentionProblem& problem);

/// Backend::try_prepare for any problem: where it appends, with the backend's prepare_append before.
Preparation try_prepare(const Backend& backend, const AttentionProblem& problem,
                        const PrepareOptions& options);

}  // namespace fovea::plan
