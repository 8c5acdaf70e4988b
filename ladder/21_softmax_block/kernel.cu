// Softmax of rows, a block for each row: neighbouring threads read neighbouring columns, and combine their
// partial results in shared memory, in halves.
#include "ladder/harness/launch.cuh"

namespace ladder::softmax_block {

constexpr int kThreads = 256;

/// Maximum or sum of one value per thread of the block; all threads get the result.
template <class Combine>
__device__ __forceinline__ float reduce(float (&all)[kThreads], float mine, const Combine& combine) {
  const int thread = static_cast<int>(threadIdx.x);
  all[thread] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) all[thread] = combine(all[thread], all[thread + half]);
    __syncthreads();
  }
  const float result = all[0];
  __syncthreads();  // all have read the result: `all` may be overwritten
  return result;
}

__global__ void __launch_bounds__(kThreads) softmax(Softmax p) {
  __shared__ float all[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const float* x = p.x + static_cast<int64_t>(blockIdx.x) * p.columns;
  float* y = p.y + static_cast<int64_t>(blockIdx.x) * p.columns;
  float largest = -INFINITY;
  for (int j = thread; j < p.columns; j += kThreads) largest = fmaxf(largest, x[j]);
  largest = reduce(all, largest, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
  for (int j = thread; j < p.columns; j += kThreads) sum += expf(x[j] - largest);
  sum = reduce(all, sum, [](float a, float b) { return a + b; });
  for (int j = thread; j < p.columns; j += kThreads) y[j] = expf(x[j] - largest) / sum;
}

void run(const Softmax& p) {
  launch(softmax, {static_cast<unsigned>(p.rows)}, kThreads, 0, p);
}

}  // namespace ladder::softmax_block
