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
/// In what order blocks of keys add to sums of dq.
enum class AdditionOrder {
  kAny,         ///< to zeros that are there before
  kFirstAlone,  ///< one of them first, which stores, then the others (BackwardArgs::first_alone)
  kFixed        ///< each behind the one before it, for the same bits each time
};
/// The order that a backward takes, which is fixed where `deterministic` or the kernel asks for it. Else tiles wait for one another where
/// that takes less than zeros do that nobody then writes, so where heads are short and many. (H200, of the time with zeros. All in order:
/// 0.96 to 0.99 at d64 up to 2,048 keys, 0.95 to 0.98 at d96 and d128 up to 1,024 without a mask; up to 1.04 there with one, and 1.3 where an
/// SM has two tiles. The first alone, where the score has no terms: at d128 0.97 to 1.0 up to 4,096 keys and 0.92 to 0.96 with windows of a
/// few hundred; at d64 0.985 to 1.0 under a mask, 0.97 with a window, and 0.98 to 1.0 of the time of all in order up to 2,048 keys; 1.02 from
/// 8,192 keys on, 1.01 where an SM has four tiles.)
AdditionOrder order_of_additions(const AttentionProblem& p, const Kernel& kernel, const BackwardArgs& args,
                                 bool deterministic);
/// The order in which the CTAs of a backward that stays take tiles, and walk through one.
void order_tiles(const AttentionProblem& p, const Kernel& kernel, AdditionOrder order, size_t l2_bytes,
                 BackwardArgs& args);

}  // namespace fovea::cuda
