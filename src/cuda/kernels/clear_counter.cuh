// Before a persistent forward that takes tiles from a counter: sets it to 0. A launch of its own and not a memset, since it may begin, and
// let the main kernel begin, while the launches before still run.
//
// Grid   clear_counter_ctas(args), of one thread.
#pragma once

#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/ptx/grid.cuh"

namespace fovea::cuda {

constexpr int64_t clear_counter_ctas(const ForwardArgs&) {
  return 1;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) clear_counter(const __grid_constant__ ForwardArgs args) {
  ptx::let_next_launch_begin();
  ptx::wait_for_launches_before();  // the run before takes its tiles from the same counter
  *args.tile_counter = 0;
}

}  // namespace fovea::cuda
