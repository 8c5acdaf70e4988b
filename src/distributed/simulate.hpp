// A run of all ranks on a clock that is only thought: what each step takes by the rates of a machine, and what waits for what.
#pragma once

#include <vector>

#include "distributed/choose.hpp"
#include "distributed/program.hpp"

namespace fovea::distributed {

/// Seconds until the last rank is done. A rank has a lane of computing and a lane of links, as Memory has, which are one where
/// messages do not hide behind computing; it sends one message at a time and receives one at a time. Throws std::logic_error where
/// a rank waits for a message that nobody sends.
double simulate(const std::vector<Program>& of_rank, const Machine& machine);

}  // namespace fovea::distributed
