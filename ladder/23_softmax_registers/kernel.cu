// Softmax of rows that are read once: a block keeps its row in registers, kHeld pieces of four values a
// thread. Lanes combine partial results by shuffles, warps in shared memory.
#include "ladder/harness/launch.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::softmax_registers {

constexpr int kHeld = 4;  ///< float4 of a thread: 16 registers

/// Reduction over the block: over the lanes of each warp, then over the warps. `slots`: one for each warp.
template <int kWarps, class Combine>
__device__ __forceinline__ float reduce(float mine, float* slots, const Combine& combine) {
  mine = combine(mine);
  if (kWarps == 1) return mine;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) slots[warp] = mine;
  __syncthreads();
  return combine(slots[lane % kWarps]);
}

/// The sum of kWarps slots, which lanes have read 32 / kWarps times each.
template <int kWarps>
__device__ __forceinline__ float share(float x) {
  return kWarps == 1 ? x : x * (static_cast<float>(kWarps) / 32);
}

__device__ __forceinline__ float4 load4(const float* row, int column, int columns) {
  if (columns % 4 == 0 && column < columns) return *reinterpret_cast<const float4*>(row + column);
  float4 x;
  x.x = column < columns ? row[column] : -INFINITY;
  x.y = column + 1 < columns ? row[column + 1] : -INFINITY;
  x.z = column + 2 < columns ? row[column + 2] : -INFINITY;
  x.w = column + 3 < columns ? row[column + 3] : -INFINITY;
  return x;
}
__device__ __forceinline__ void store4(float* row, int column, int columns, float4 x) {
  if (columns % 4 == 0 && column < columns) {
    *reinterpret_cast<float4*>(row + column) = x;
    return;
  }
  if (column < columns) row[column] = x.x;
  if (column + 1 < columns) row[column + 1] = x.y;
  if (column + 2 < columns) row[column + 2] = x.z;
  if (column + 3 < columns) row[column + 3] = x.w;
}

template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps) softmax(Softmax p) {
  constexpr int kThreads = 32 * kWarps;
  __shared__ float slots[2][kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const float* x = p.x + static_cast<int64_t>(blockIdx.x) * p.columns;
  float* y = p.y + static_cast<int64_t>(blockIdx.x) * p.columns;
  float4 held[kHeld];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = load4(x, (i * kThreads + thread) * 4, p.columns);
    largest = fmaxf(largest, fmaxf(fmaxf(held[i].x, held[i].y), fmaxf(held[i].z, held[i].w)));
  }
  largest = reduce<kWarps>(largest, slots[0], [](float a) { return warp_max(a); });
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = make_float4(expf(held[i].x - largest), expf(held[i].y - largest), expf(held[i].z - largest),
                          expf(held[i].w - largest));
    sum += held[i].x + held[i].y + held[i].z + held[i].w;
  }
  const float whole = share<kWarps>(reduce<kWarps>(sum, slots[1], [](float a) { return warp_sum(a); }));
  const float inverse = 1 / whole;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const float4 weights =
        make_float4(held[i].x * inverse, held[i].y * inverse, held[i].z * inverse, held[i].w * inverse);
    store4(y, (i * kThreads + thread) * 4, p.columns, weights);
  }
}

template <int kWarps>
void start(const Softmax& p) {
  launch(softmax<kWarps>, {static_cast<unsigned>(p.rows)}, 32 * kWarps, 0, p);
}

void run(const Softmax& p) {
  constexpr int kOfWarp = 32 * 4 * kHeld;  // 512 values
  if (p.columns <= kOfWarp) return start<1>(p);
  if (p.columns <= 2 * kOfWarp) return start<2>(p);
  if (p.columns <= 8 * kOfWarp) return start<8>(p);
  start<32>(p);
}

}  // namespace ladder::softmax_registers
