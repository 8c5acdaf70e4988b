// Problems over several ranks, and how they are divided, by random numbers.
#pragma once

#include "distributed/local_ranks.hpp"
#include "verify/problem_spec.hpp"
#include "verify/random.hpp"

namespace fovea::distributed_tests {

/// `same_axis`: queries and keys are the same rows, as in self-attention.
verify::ProblemSpec random_spec(verify::Random& random, bool same_axis);

/// For `ranks` ranks.
Division random_division(verify::Random& random, const verify::ProblemSpec& spec, bool same_axis, int ranks);

}  // namespace fovea::distributed_tests
