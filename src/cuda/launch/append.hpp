// What comes before a forward that appends to its cache: one launch.
#pragma once

#include <memory>

#include "core/backend.hpp"

namespace fovea::cuda {

/// Backend::prepare_append of every CUDA backend. Its runs check pointers as those of try_prepare do, then launch.
std::unique_ptr<const AppendStep> prepare_append(const AttentionProblem& problem,
                                                 const PrepareOptions& options);

}  // namespace fovea::cuda
