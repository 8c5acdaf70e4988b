// In what order a backward takes its tiles, and what that depends on.
#pragma once

#include "core/problem.hpp"
#include "cuda/launch/kernel.hpp"

namespace fovea::cuda {

/// Whether tiles of queries can see different numbers of keys.
bool tiles_differ(const AttentionProblem& p);
/// Whether every sequence is as long as any, and alone in its rows of q and k.
bool are_whole(const AttentionProblem& p);
/// Whether a backward has several tiles of keys for each CTA, `slots` of which the GPU holds.
bool has_many_tiles(const AttentionProblem& p, const Kernel& kernel, int64_t slots);
/// Whether sequences share a bias that their heads do not: those of a head side by side read it from L2, and add to its gradient
/// there.
bool shares_bias(const AttentionProblem& p);
/// The order in which the CTAs of a backward that stays take tiles, and walk through one. `in_turns`: they add to dq in a fixed order.
void order_tiles(const AttentionProblem& p, const Kernel& kernel, bool in_turns, size_t l2_bytes,
                 BackwardArgs& args);
/// Whether sums of dq are added up in a fixed order though nobody asks for it: where heads are short and many, tiles wait for one another
/// less than zeros take that nobody then writes. (H200: 1 to 4 % faster at d64 up to 2,048 keys, 2 to 5 % at d96 and d128 up to 1,024 without
/// a mask; up to 4 % slower there with one, and up to a quarter where an SM has two tiles.)
bool prefers_turns(const AttentionProblem& p, const Kernel& kernel, const BackwardArgs& args);

}  // namespace fovea::cuda
