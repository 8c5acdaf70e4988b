// Finds NaN and infinity in tiles of 16-bit elements and replaces them: 0 times NaN is NaN, so a weight of 0 does
// not keep out a row that holds one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/shared.cuh"
#include "tile/shared_tile.hpp"

namespace fovea::cuda {

/// Looks at pairs of T and remembers whether any holds NaN or an infinity: 0 * x is NaN for these alone.
template <class T>
struct NonFinite {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  uint32_t sum = 0;
  __device__ __forceinline__ void look(uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    constexpr bool kMultiply = std::is_same_v<T, __half>;
#else
    constexpr bool kMultiply = true;
#endif
    if constexpr (kMultiply) {
      const uint32_t zero = 0;
      const Pair pair = __hfma2(reinterpret_cast<const Pair&>(word), reinterpret_cast<const Pair&>(zero),
                                reinterpret_cast<const Pair&>(sum));
      sum = reinterpret_cast<const uint32_t&>(pair);
    }
  }
  __device__ __forceinline__ bool any() const {
    return (sum & 0x7fff7fffu) != 0;
  }
};

/// 16 bits of T without NaN and infinity: NaN becomes 0, infinities the largest finite number.
template <class T>
__device__ __forceinline__ uint32_t finite_half(uint32_t bits) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  if ((bits & kExponent) != kExponent) return bits;
  return (bits & ~kExponent & 0x7fffu) != 0 ? 0u : (bits & 0x8000u) | (kExponent - 1u);
}

/// Makes the chunks that this thread copied by copy_tile finite. Call it once its copies are complete.
template <class T, class Tile, int kThreads>
__device__ __forceinline__ void make_finite(uint32_t tile, int thread) {
  using Share = tile::CopyShare<Tile, kThreads>;
  const Share share(static_cast<unsigned>(thread));
  if (!share.exists()) return;
  const auto address = [&](int step) {
    return tile + Tile::offset(share.row + step * Share::kRowsAtOnce, share.chunk);
  };
  NonFinite<T> bad;
#pragma unroll 4
  for (int step = 0; step < Share::kSteps; ++step) {
    if (!share.has(step)) break;
    const uint4 words = ptx::ld_shared_16(address(step));
    bad.look(words.x);
    bad.look(words.y);
    bad.look(words.z);
    bad.look(words.w);
  }
  if (!bad.any()) return;
#pragma unroll 1
  for (int step = 0; step < Share::kSteps; ++step) {
    if (!share.has(step)) break;
#pragma unroll 1
    for (uint32_t byte = 0; byte < 16; byte += 4) {
      const uint32_t word = ptx::ld_shared_4(address(step) + byte);
      ptx::st_shared_4(address(step) + byte, finite_half<T>(word & 0xffffu) | finite_half<T>(word >> 16)
                                                                                  << 16);
    }
  }
}

}  // namespace fovea::cuda
