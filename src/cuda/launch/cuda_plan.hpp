// A problem on one family of kernels: chosen and laid out once, launched by every run.
#pragma once

#include "core/backend.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

/// The problem on the device of its tensors with the kernels of `family`, or the first clause that fails. Its runs
/// check pointers and stream, then launch: no allocation, lock or synchronisation, so they may be captured in a graph.
Preparation try_prepare(Family family, const AttentionProblem& problem, const PrepareOptions& options);

}  // namespace fovea::cuda
