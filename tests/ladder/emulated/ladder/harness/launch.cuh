// ladder/harness/launch.cuh for the emulated device: the same names.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda_device.hpp"
#include "ladder/harness/task.hpp"

namespace ladder {

/// For reports of the emulated device.
extern const char* running_rung;
/// The least that the rung asks for: the memory of the smallest such chip is what it may have.
extern int running_capability;

inline int sm_count() {
  return 3;  // few, so that persistent kernels have several tiles each
}
inline size_t shared_bytes_of_sm() {
  return size_t{100} * 1024;
}

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};
constexpr unsigned blocks_of(int64_t count, int64_t block) {
  return static_cast<unsigned>((count + block - 1) / block);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, int threads, size_t shared_bytes,
            Arguments... arguments) {
  using fovea::emulation::fail;
  if (shared_bytes > (running_capability == 90 ? 227 : 99) * size_t{1024})
    fail("%zu bytes of shared memory: more than sm_86 and sm_89 have, or sm_90 for its own rungs",
         shared_bytes);
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535)
    fail("a grid of %u x %u x %u", grid.x, grid.y, grid.z);
  fovea::emulation::run({running_rung, {grid.x, grid.y, grid.z}, threads, shared_bytes},
                        [&] { kernel(arguments...); });
}

inline void fill_zero(float* memory, size_t count) {
  std::memset(memory, 0, count * sizeof(float));
}

template <class T>
T* shared_memory() {
  return reinterpret_cast<T*>(fovea::cuda::shared);
}

}  // namespace ladder

// CTAs run one after the other, so nothing needs to be atomic.
inline float atomicAdd(float* to, float x) {
  const float before = *to;
  *to += x;
  return before;
}
