// Looks at every pair once, for the main kernel: which blocks of a tile hold a pair that the expression lets see each other,
// and which hold one that it does not (tile/seen_blocks.hpp). Only pairs that the window leaves count. So any expression
// is answered exactly, whatever its tensors hold; it costs a few instructions a pair, and heads share them where the
// expression does not depend on the head.
//
// Grid     seen_blocks_grid: a word, of 32 blocks of a tile, a CTA.
// Block    kSeenBlocksThreads threads, whose warps take a block each; lanes take keys.
#pragma once

#include <type_traits>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/score_terms.cuh"

namespace fovea::cuda {

inline constexpr int kSeenBlocksThreads = 256;

/// The answers of a warp.
struct SeenPairs {
  bool any = false, some = false;  ///< a pair is seen, or is not
  __device__ __forceinline__ bool decided() const {
    return __any_sync(0xffffffffu, any) && __any_sync(0xffffffffu, some);
  }
};

/// Of queries [q0, q1) and keys [k0, k1) of one head.
__device__ __forceinline__ void look_at_pairs(const tile::AttentionParams& p, const tile::SequenceSpan& span,
                                              const Expression::Head& head, int q0, int q1, int k0, int k1,
                                              SeenPairs& pairs) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int k = k0 + lane; k - lane < k1; k += 32) {
    const int in_use = min(k, k1 - 1);
    const Expression::Key key(head, in_use);
#pragma unroll 4
    for (int q = q0; q < q1; ++q) {
      const tile::Span32 window = tile::keys_of(p, span, q);
      const bool counts = k < k1 && k >= window.begin && k < window.end;
      const bool seen = Expression::sees(head, Expression::Query(head, q), key);
      pairs.any |= counts && seen;
      pairs.some |= counts && !seen;
    }
    if (pairs.decided()) return;
  }
}

/// kKeys: tiles are of keys, and walk over blocks of queries of all heads of a group.
template <bool kKeys>
__device__ __forceinline__ void seen_blocks_of_tile(const tile::AttentionParams& p,
                                                    const tile::SeenBlocksView& view) {
  __shared__ uint32_t any, some;
  if (threadIdx.x == 0) any = some = 0;
  __syncthreads();  // the words are clear
  const unsigned tiles = blockIdx.x / view.words;
  const int word = static_cast<int>(blockIdx.x % view.words), tile = static_cast<int>(tiles % view.tiles);
  const int h = static_cast<int>(tiles / view.tiles % view.heads),
            b = static_cast<int>(tiles / view.tiles / view.heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const tile::SequenceSpan span = tile::sequence_span(p, b);
  const int used_tile = kKeys ? span.used_k : span.used_q, used_block = kKeys ? span.used_q : span.used_k;
  const int row0 = tile * view.tile_rows, row1 = min(row0 + view.tile_rows, used_tile);
  // Where heads differ, those of a group share a tile of keys.
  const int head0 = kKeys && view.heads > 1 ? h * p.group : h;
  const int head1 = kKeys && view.heads > 1 ? head0 + p.group : head0 + 1;
#pragma unroll 1
  for (int i = warp; i < 32; i += kSeenBlocksThreads / 32) {
    const int from = (word * 32 + i) * view.block_rows, to = min(from + view.block_rows, used_block);
    if (row0 >= row1 || from >= to) continue;
    SeenPairs pairs;
#pragma unroll 1
    for (int head = head0; head < head1 && !pairs.decided(); ++head) {
      const Expression::Head of_head = expression_head(p, span, b, head);
      look_at_pairs(p, span, of_head, kKeys ? from : row0, kKeys ? to : row1, kKeys ? row0 : from,
                    kKeys ? row1 : to, pairs);
    }
    const bool is_any = __any_sync(0xffffffffu, pairs.any), is_some = __any_sync(0xffffffffu, pairs.some);
    if (threadIdx.x % 32 == 0) {
      if (is_any) atomicOr(&any, 1u << i);
      if (is_some) atomicOr(&some, 1u << i);
    }
  }
  __syncthreads();  // all warps have answered
  if (threadIdx.x == 0) {
    uint32_t* to = view.data + view.offset(b, h, tile) + word;
    to[0] = any;
    to[view.size(p.batch)] = some;
  }
}

/// Args: ForwardArgs, or BackwardArgs, whose tiles are of keys.
template <class Args>
__global__ void __launch_bounds__(kSeenBlocksThreads) seen_blocks(const __grid_constant__ Args args) {
  seen_blocks_of_tile<std::is_same_v<Args, BackwardArgs>>(args.p, args.seen);
}

/// No CTA where nobody looks.
template <class Grid, class Args>
constexpr Grid seen_blocks_grid(const Args& args) {
  const tile::SeenBlocksView& view = args.seen;
  return {view.size(args.p.batch)};
}

}  // namespace fovea::cuda
