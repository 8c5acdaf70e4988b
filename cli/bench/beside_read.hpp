// Runs that memory bounds, in turns with a plain read of the memory that they read.
#pragma once

#include <functional>

#include "cli/bench/mirrors.hpp"
#include "cli/bench/report.hpp"

namespace fovea::cli {

/// Times `run` and a plain read of k and v in turns, on so many threads of the CPU.
void time_beside_read(const std::function<void()>& run, const Array& k, const Array& v, int threads,
                      double seconds, BenchRow& row);

/// Times `run` on the GPU, then a copy of k and v within its memory: a copy reads and writes, and both count. `row` also gets the
/// time of the host.
void time_beside_copy(const std::function<void()>& run, const Array& k, const Array& v,
                      const Mirrors& mirrors, Gpu& gpu, double seconds, BenchRow& row);

}  // namespace fovea::cli
