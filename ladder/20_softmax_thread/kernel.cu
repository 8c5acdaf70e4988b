// Softmax of rows, a thread for each row: the largest, the sum, the quotients.
#include "ladder/harness/launch.cuh"

namespace ladder::softmax_thread {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) softmax(Softmax p) {
  const int row = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (row >= p.rows) return;
  const float* x = p.x + static_cast<int64_t>(row) * p.columns;
  float* y = p.y + static_cast<int64_t>(row) * p.columns;
  float largest = -INFINITY;
  for (int j = 0; j < p.columns; ++j) largest = fmaxf(largest, x[j]);
  float sum = 0;
  for (int j = 0; j < p.columns; ++j) sum += expf(x[j] - largest);
  for (int j = 0; j < p.columns; ++j) y[j] = expf(x[j] - largest) / sum;
}

void run(const Softmax& p) {
  launch(softmax, {blocks_of(p.rows, kThreads)}, kThreads, 0, p);
}

}  // namespace ladder::softmax_thread
