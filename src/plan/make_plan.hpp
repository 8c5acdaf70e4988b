// From what is asked to who does it: the ordered list of backends and the choice among them.
#pragma once

#include <span>

#include "core/backend.hpp"
#include "cuda/launch/ahead.hpp"

namespace fovea::plan {

/// Most threads that a plan may ask for; larger numbers are mistakes, and workspaces grow with them.
inline constexpr int kMaxThreads = 4096;

/// Every backend, in order of preference. The last one, the reference, can do everything on the CPU.
std::span<const Backend* const> backends();

/// Validates, takes the first backend that can (or the one that `options` names), and fills in the rest of
/// the plan. Throws RequestError: kInvalidArgument for wrong input, kUnsupported when no backend, or not the
/// one named, can do the problem.
Plan make_plan(const ProblemDescription& description, const PlanOptions& options);

/// Compiles what a plan would compile on a chip (cuda/launch/ahead.hpp); fills in what `request` has of the problem and of `options`.
std::vector<cuda::AheadKernel> compile_ahead(const ProblemDescription& description,
                                             const PlanOptions& options, cuda::AheadRequest request);

/// Floating-point operations of the products over the pairs that causal and window keep (see
/// fovea_plan_flops). Lengths come from cu_seqlens and seqused where `buffers` has them, else every sequence
/// counts as the longest.
double count_flops(const AttentionProblem& problem, const Buffers& buffers);

}  // namespace fovea::plan
