#include "write_late.hpp"

#include <cstdint>

#include "cuda/ptx/grid.cuh"

namespace fovea_test {
namespace {

__global__ void copy_late(uint32_t* to, const uint32_t* from, int words) {
  fovea::cuda::ptx::let_next_launch_begin();
  for (int i = 0; i < 50; ++i) __nanosleep(1000);
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) to[i] = from[i];
}

}  // namespace

void write_late(cudaStream_t stream, void* to, const void* from, int words) {
  copy_late<<<1, 128, 0, stream>>>(static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), words);
}

}  // namespace fovea_test
