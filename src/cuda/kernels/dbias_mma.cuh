// The gradient of a bias on chips of the sm_80 class: dbias_tile.cuh with products by mma.sync.
#pragma once

#include <cstdint>

#include "cuda/kernels/dbias_tile.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace fovea::cuda {

/// A warp's 16 rows. They are there at once: what hides them are other warps.
template <class Instance>
struct DBiasMma {
  using T = typename Instance::Element;
  static constexpr DBiasConfig kConfig = Instance::kConfig;
  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.kTileN;
  using Scores = float[kTileN / 2];
  using StripM = SharedTile<kTileM, 64>;
  using StripN = SharedTile<kTileN, 64>;
  static_assert(StripM::kRowBytes == kConfig.kRowBytes,
                "copies swizzle rows of a strip as ldmatrix reads them");

  static __device__ __forceinline__ void copies_are_there() {}
  static __device__ __forceinline__ void begin(Scores& scores, uint32_t base, int x_at, int y_at) {
    const int thread = static_cast<int>(ptx::thread_index()), lane = thread % 32, warp = thread / 32;
    const FragmentAddresses<StripM, LdmatrixOrder::kDownFirst> of_x(lane, 16 * warp);
    const FragmentAddresses<StripN, LdmatrixOrder::kAcrossFirst> of_y(lane, 0);
    const uint32_t x = base + static_cast<uint32_t>(x_at), y = base + static_cast<uint32_t>(y_at);
    float acc[1][kTileN / 8][4];
    clear(acc);
    multiply<T, MmaShape::kM16N8K16, 1, kTileN / 16, kConfig.head_dim / 16>(
        acc,
        [&](uint32_t(&a)[4], int k, int) {
          ptx::ldmatrix_x4(a, of_x.at(x + k / 4 * StripM::kBytes, 0, k % 4));
        },
        [&](uint32_t(&b)[4], int k, int n) {
          ptx::ldmatrix_x4(b, of_y.at(y + k / 4 * StripN::kBytes, 16 * n, k % 4));
        });
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) scores[i] = acc[0][i / 4][i % 4];
  }
  static __device__ __forceinline__ void finish(Scores&) {}
};

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.kCtas)
    dbias_mma(const __grid_constant__ BackwardArgs args) {
  run_dbias_tile<Instance, DBiasMma<Instance>>(args);
}

}  // namespace fovea::cuda
