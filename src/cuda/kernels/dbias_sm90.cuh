// The gradient of a bias on Hopper: dbias_tile.cuh with products by wgmma.
#pragma once

#include <cstdint>

#include "cuda/kernels/dbias_tile.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/wgmma_map.hpp"
#include "tile/wgmma_strips.hpp"

namespace fovea::cuda {

/// A warpgroup's 64 rows, queued: P is computed beside them.
template <class Instance>
struct DBiasWgmma {
  using T = typename Instance::Element;
  static constexpr DBiasConfig kConfig = Instance::kConfig;
  using Strips = tile::WgmmaStrips<64>;
  using Scores = float[kConfig.kTileN / 2];

  static __device__ __forceinline__ void copies_are_there() { ptx::async_proxy_fence(); }
  static __device__ __forceinline__ void begin(Scores& scores, uint32_t base, int x_at, int y_at) {
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(ptx::thread_index()) / 128, 0),
              base16 = __shfl_sync(~0u, static_cast<int>(base / 16), 0);
    const auto descriptor = [&](int offset) {
      return tile::wgmma_k_major(0, Strips::kSwizzle).encode_from(base16 + offset / 16);
    };
    const uint64_t a = descriptor(x_at + warpgroup * 64 * kConfig.kRowBytes), b = descriptor(y_at);
    ptx::wgmma_fence();
    using Product = ptx::Wgmma<kConfig.kTileN>;
#pragma unroll
    for (int i = 0; i < kConfig.head_dim / 16; ++i) {
      const uint64_t x = a + tile::wgmma_start_step(Strips::column_at(16 * i, kConfig.tile_m));
      const uint64_t y = b + tile::wgmma_start_step(Strips::column_at(16 * i, kConfig.kTileN));
      if (i == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(scores, x, y);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(scores, x, y);
      }
    }
    ptx::wgmma_commit();
  }
  static __device__ __forceinline__ void finish(Scores& scores) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(scores);
  }
};

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.kCtas)
    dbias_sm90(const __grid_constant__ BackwardArgs args) {
  run_dbias_tile<Instance, DBiasWgmma<Instance>>(args);
}

}  // namespace fovea::cuda
