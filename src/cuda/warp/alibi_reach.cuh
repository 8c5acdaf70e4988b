// The reach of a head under ALiBi (tile/alibi_reach.hpp), from the norms of its rows.
#pragma once

#include <cmath>

#include "cuda/warp/alibi.cuh"
#include "tile/alibi_reach.hpp"

namespace fovea::cuda {

/// Of query head `head`: one thread, behind the launch that finds the norms, if any does.
__device__ __forceinline__ int alibi_reach(const tile::AttentionParams& p, const tile::AlibiNorms& norms,
                                           int batch, int head) {
  if (!norms.wanted) return tile::kEverywhere;
  const auto* const parts = reinterpret_cast<const uint4*>(norms.of_head(p, batch, head));
  uint32_t both = 0;
#pragma unroll 1
  for (int i = 0; i < tile::AlibiNorms::kParts / 4; ++i) {
    const uint4 four = parts[i];
    both = __vmaxu2(both, __vmaxu2(__vmaxu2(four.x, four.y), __vmaxu2(four.z, four.w)));
  }
  const float q = __uint_as_float(both & 0xffff0000u), k = __uint_as_float(both << 16);
  return tile::alibi_reach(alibi_slope(p, batch, head), fabsf(p.scale) * q * k);
}

/// Of the heads that share a key head, the longest.
__device__ __forceinline__ int alibi_reach_of_group(const tile::AttentionParams& p,
                                                    const tile::AlibiNorms& norms, int batch, int head_kv) {
  int reach = 0;
#pragma unroll 1
  for (int i = 0; i < p.group; ++i) reach = max(reach, alibi_reach(p, norms, batch, head_kv * p.group + i));
  return reach;
}

}  // namespace fovea::cuda
