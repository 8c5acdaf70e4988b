// FlashAttention-2's order: a block owns kTileM queries and loops over the keys; outputs and sums stay in
// registers until the end. Scores never leave the chip, outputs are written once, and blocks of one sequence
// run side by side.
#include "ladder/harness/launch.cuh"
#include "ladder/harness/warp.cuh"

namespace ladder::attention_flash2 {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kRows = 8;  ///< queries of a warp: each value of K and V that it reads serves eight rows
constexpr int kTileM = kRows * kWarps;  ///< queries of a block
constexpr int kSram =
    64 * 1024;  ///< bytes that a block may take: all of an SM of sm_75, a third of one of sm_90

/// What fits: Q (kTileM rows), K and V (kKeys rows each), P (kTileM x kKeys), in floats. Rows are 4 longer
/// than D, so that lanes that read four values each of 32 rows meet every bank equally often.
template <int D>
struct Tile {
  static constexpr int kRow = D + 4;
  static constexpr int kKeys = (kSram / 4 - kTileM * kRow) / (2 * kRow + kTileM) / 32 * 32;
  static constexpr int kFloats = kTileM * kRow + kKeys * (2 * kRow + kTileM);
  static_assert(kKeys >= 32);
};

/// Rows [first, first + rows) of a matrix of n rows of d values into a tile; 0 behind the end.
template <int D>
__device__ __forceinline__ void load_tile(float* tile, const float* from, int first, int rows, int n, int d) {
  for (int at = static_cast<int>(threadIdx.x); at < rows * D; at += kThreads) {
    const int r = at / D, c = at % D;
    tile[r * Tile<D>::kRow + c] =
        first + r < n && c < d ? from[static_cast<int64_t>(first + r) * d + c] : 0.0f;
  }
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

/// scores[r][x] = q_r . k of key lane + 32 x, for the rows of a warp.
template <int D>
__device__ __forceinline__ void multiply_qk(float (&scores)[kRows][Tile<D>::kKeys / 32], const float* q,
                                            const float* k, int lane) {
  constexpr int kRow = Tile<D>::kRow;
#pragma unroll 2
  for (int c = 0; c < D; c += 4) {
    float4 values_q[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) values_q[r] = *reinterpret_cast<const float4*>(q + r * kRow + c);
#pragma unroll
    for (int x = 0; x < Tile<D>::kKeys / 32; ++x) {
      const float4 value_k = *reinterpret_cast<const float4*>(k + (lane + 32 * x) * kRow + c);
#pragma unroll
      for (int r = 0; r < kRows; ++r) scores[r][x] = dot4(values_q[r], value_k, scores[r][x]);
    }
  }
}

/// o[r][y] += sum_j p(r, j) v(j, lane + 32 y), for the rows of a warp.
template <int D>
__device__ __forceinline__ void multiply_pv(float (&o)[kRows][D / 32], const float* weights, const float* v,
                                            int lane) {
  constexpr int kKeys = Tile<D>::kKeys;
#pragma unroll 2
  for (int j = 0; j < kKeys; j += 4) {
    float4 values_p[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) values_p[r] = *reinterpret_cast<const float4*>(weights + r * kKeys + j);
#pragma unroll
    for (int y = 0; y < D / 32; ++y) {
      const float* column = v + j * Tile<D>::kRow + lane + 32 * y;
      const float4 value_v =
          make_float4(column[0], column[Tile<D>::kRow], column[2 * Tile<D>::kRow], column[3 * Tile<D>::kRow]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) o[r][y] = dot4(values_p[r], value_v, o[r][y]);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads) flash(Attention<float> p) {
  using T = Tile<D>;
  float* sQ = shared_memory<float>();
  float *sK = sQ + kTileM * T::kRow, *sV = sK + T::kKeys * T::kRow, *sP = sV + T::kKeys * T::kRow;
  const int n = p.seqlen, d = p.head_dim;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * n;
  const int i0 = static_cast<int>(blockIdx.x) * kTileM;
  float* weights = sP + warp * kRows * T::kKeys;  // of this warp
  float o[kRows][D / 32] = {};
  OnlineRow rows[kRows];
  load_tile<D>(sQ, p.q + first * d, i0, kTileM, n, d);

  for (int j0 = 0; j0 < n; j0 += T::kKeys) {
    __syncthreads();  // all warps have read the tiles before: they may be overwritten
    load_tile<D>(sK, p.k + first * d, j0, T::kKeys, n, d);
    load_tile<D>(sV, p.v + first * d, j0, T::kKeys, n, d);
    __syncthreads();  // the tiles are complete and may be read
    float scores[kRows][T::kKeys / 32] = {};
    multiply_qk<D>(scores, sQ + warp * kRows * T::kRow, sK, lane);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      OnlineRow block;
#pragma unroll
      for (int x = 0; x < T::kKeys / 32; ++x) {
        scores[r][x] = j0 + lane + 32 * x < n ? scores[r][x] * p.scale : -INFINITY;
        block.max = fmaxf(block.max, scores[r][x]);
      }
      block.max = warp_max(block.max);
      const float factor = rows[r].merge(block);
#pragma unroll
      for (int x = 0; x < T::kKeys / 32; ++x) {
        const float weight = expf(scores[r][x] - rows[r].max);
        weights[r * T::kKeys + lane + 32 * x] = weight;
        rows[r].sum += weight;  // of this lane's keys; summed over the lanes at the end
      }
#pragma unroll
      for (int y = 0; y < D / 32; ++y) o[r][y] *= factor;
    }
    __syncwarp();  // all lanes have written their weights
    multiply_pv<D>(o, weights, sV, lane);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int i = i0 + warp * kRows + r;
    const float sum = warp_sum(rows[r].sum);
    if (i >= n) continue;
#pragma unroll
    for (int y = 0; y < D / 32; ++y) {
      if (lane + 32 * y < d) p.o[(first + i) * d + lane + 32 * y] = o[r][y] / sum;
    }
    if (lane == 0) p.lse[first + i] = rows[r].max + logf(sum);
  }
}

template <int D>
void start(const Attention<float>& p) {
  launch(flash<D>, {blocks_of(p.seqlen, kTileM), static_cast<unsigned>(p.batch)}, kThreads,
         Tile<D>::kFloats * sizeof(float), p);
}

void run(const Attention<float>& p) {
  if (p.head_dim <= 32) return start<32>(p);
  if (p.head_dim <= 64) return start<64>(p);
  start<128>(p);
}

}  // namespace ladder::attention_flash2
