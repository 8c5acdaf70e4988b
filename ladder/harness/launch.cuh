// Launches of kernels, and properties of the GPU. tests/ladder/emulated has the same names for a machine
// without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>

#include "ladder/harness/task.hpp"

namespace ladder {

/// The stream on which rungs run.
cudaStream_t stream();
/// Of the current GPU.
int sm_count();
size_t shared_bytes_of_sm();

inline void demand(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};
constexpr unsigned blocks_of(int64_t count, int64_t block) {
  return static_cast<unsigned>((count + block - 1) / block);
}

/// Kernel<<<grid, threads, shared_bytes>>>(args...); `shared_bytes` of dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, int threads, size_t shared_bytes,
            Arguments... arguments) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (shared_bytes > kWithoutAsking) {
    demand(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
           "shared memory of a kernel");
  }
  kernel<<<dim3(grid.x, grid.y, grid.z), static_cast<unsigned>(threads), shared_bytes, stream()>>>(
      arguments...);
  demand(cudaGetLastError(), "launch of a kernel");
}

inline void fill_zero(float* memory, size_t count) {
  demand(cudaMemsetAsync(memory, 0, count * sizeof(float), stream()), "cudaMemsetAsync");
}

/// The dynamic shared memory of the running block.
template <class T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(1024) unsigned char shared[];
  return reinterpret_cast<T*>(shared);
}

}  // namespace ladder
