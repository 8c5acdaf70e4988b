// Runs that memory bounds, in turns with a plain read of the memory that they read.
#pragma once

#include <functional>
#include <span>

#include "cli/bench/mirrors.hpp"
#include "cli/bench/report.hpp"

namespace fovea::cli {

/// What a run reads. The arrays have to outlive this.
struct KeysAndValues {
  const Array *k, *v;
  size_t bytes() const { return k->bytes.size() + v->bytes.size(); }
};

/// Times `run` and a plain read of the same bytes in turns, on so many threads of the CPU. Runs take one of `caches`, which are of
/// one size, after the other, and so do reads: where they are more than a processor's caches hold, memory is what both read.
void time_beside_read(const std::function<void(const KeysAndValues&)>& run,
                      std::span<const KeysAndValues> caches, int threads, double seconds, BenchRow& row);

/// Times `run` on the GPU, then a copy of k and v within its memory: a copy reads and writes, and both count. `row` also gets the
/// time of the host.
void time_beside_copy(const std::function<void()>& run, const Array& k, const Array& v,
                      const Mirrors& mirrors, Gpu& gpu, double seconds, BenchRow& row);

}  // namespace fovea::cli
