// Softmax of rows, a warp for each row: maximum and sum in one pass (online), four values an access; lanes
// combine partial results by shuffles. No shared memory, no barrier.
#include "ladder/harness/launch.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::softmax_warp {

constexpr int kWarps = 4;  ///< rows of a block
constexpr int kThreads = 32 * kWarps;

__device__ __forceinline__ OnlineRow warp_merge(OnlineRow row) {
  for (int bit = 16; bit > 0; bit /= 2) {
    OnlineRow other;
    other.max = __shfl_xor_sync(kWholeWarp, row.max, bit);
    other.sum = __shfl_xor_sync(kWholeWarp, row.sum, bit);
    row.merge(other);
  }
  return row;
}

/// A piece of one or four values.
__device__ __forceinline__ OnlineRow piece(float x) {
  OnlineRow row;
  row.max = x;
  row.sum = 1;
  return row;
}
__device__ __forceinline__ OnlineRow piece(float4 x) {
  OnlineRow row;
  row.max = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
  row.sum = expf(x.x - row.max) + expf(x.y - row.max) + expf(x.z - row.max) + expf(x.w - row.max);
  return row;
}
__device__ __forceinline__ float weight(float x, float base, float inverse) {
  return expf(x - base) * inverse;
}
__device__ __forceinline__ float4 weight(float4 x, float base, float inverse) {
  return make_float4(weight(x.x, base, inverse), weight(x.y, base, inverse), weight(x.z, base, inverse),
                     weight(x.w, base, inverse));
}

/// T: float4 where rows are aligned to 16 bytes, else float. `count` of them a row.
template <class T>
__global__ void __launch_bounds__(kThreads) softmax(const T* x, T* y, int rows, int count) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (row >= rows) return;
  x += static_cast<int64_t>(row) * count;
  y += static_cast<int64_t>(row) * count;
  OnlineRow state;
  for (int j = lane; j < count; j += 32) state.merge(piece(x[j]));
  state = warp_merge(state);
  const float inverse = 1 / state.sum;
  for (int j = lane; j < count; j += 32) y[j] = weight(x[j], state.max, inverse);
}

void run(const Softmax& p) {
  const Grid grid = {blocks_of(p.rows, kWarps)};
  if (p.columns % 4 == 0) {
    launch(softmax<float4>, grid, kThreads, 0, reinterpret_cast<const float4*>(p.x),
           reinterpret_cast<float4*>(p.y), p.rows, p.columns / 4);
  } else {
    launch(softmax<float>, grid, kThreads, 0, p.x, p.y, p.rows, p.columns);
  }
}

}  // namespace ladder::softmax_warp
