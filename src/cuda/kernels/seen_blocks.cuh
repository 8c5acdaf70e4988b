// Looks at every pair once, for the main kernel: which blocks of a tile hold a pair that the expression lets see each other,
// and which hold one that it does not (tile/seen_blocks.hpp). Only pairs that the window leaves count. So any expression
// is answered exactly, whatever its tensors hold; it costs a few instructions a pair, and heads and sequences share them where
// the expression is the same for all. Where all queries or all keys of a block are the same to the expression (of one document,
// say), one of them answers for all. Where there is memory for them, it keeps the answers of blocks that are seen in part, a bit
// each.
//
// Grid     seen_blocks_grid: a word, of 32 blocks of a tile, a CTA.
// Block    kSeenBlocksThreads threads, whose warps take a block each, in squares of 32 queries and 32 keys: a lane's key
//          against one query after the other.
#pragma once

#include <type_traits>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/pair_bits.cuh"

namespace fovea::cuda {

inline constexpr int kSeenBlocksThreads = 256, kSquare = 32;

/// The answers of a lane.
struct SeenPairs {
  bool any = false, some = false;  ///< a pair is seen, or is not
  __device__ __forceinline__ bool decided() const {
    return __any_sync(0xffffffffu, any) && __any_sync(0xffffffffu, some);
  }
};

/// A warp's queries or keys [begin, end) of a sequence.
struct SeenRange {
  int begin, end;
};

/// Whether the window leaves a pair of these queries and keys: of other blocks nobody asks.
__device__ __forceinline__ bool window_leaves_pairs(const tile::AttentionParams& p,
                                                    const tile::SequenceSpan& span, const SeenRange& queries,
                                                    const SeenRange& keys) {
  if (queries.begin >= queries.end || keys.begin >= keys.end) return false;
  if (p.window_left < 0 && p.window_right < 0) return true;
  const tile::Span32 window = tile::queries_of_any(p, span, keys.begin, keys.end);
  return max(window.begin, queries.begin) < min(window.end, queries.end);
}

/// Of numbers [0, 32) those below n, as bits.
__device__ __forceinline__ uint32_t bits_below(int n) {
  return n >= 32 ? ~0u : (1u << max(n, 0)) - 1;
}

/// x of another lane.
template <class X>
__device__ __forceinline__ X of_lane(const X& x, int lane) {
  if constexpr (std::is_empty_v<X>) {
    return x;
  } else {
    constexpr size_t kAlignment = alignof(X) < 4 ? 4 : alignof(X);
    struct alignas(kAlignment) Padded {
      X x;
    };
    struct alignas(kAlignment) Words {
      uint32_t at[sizeof(Padded) / 4];
    };
    Words words = __builtin_bit_cast(Words, Padded{x});
#pragma unroll
    for (size_t i = 0; i < sizeof(Padded) / 4; ++i) words.at[i] = __shfl_sync(0xffffffffu, words.at[i], lane);
    return __builtin_bit_cast(Padded, words).x;
  }
}

/// Whether the expression cannot tell make(i), a Query or a Key, of a range apart.
template <class Make>
__device__ __forceinline__ bool all_alike(const SeenRange& range, Make&& make) {
  const auto first = make(range.begin);
  bool alike = true;
#pragma unroll 2
  for (int i = range.begin + static_cast<int>(threadIdx.x) % 32; i < range.end; i += 32)
    alike &= make(i).alike(first);
  return __all_sync(0xffffffffu, alike);
}
__device__ __forceinline__ bool queries_alike(const Expression::Head& head, const SeenRange& queries) {
  return all_alike(queries, [&](int q) { return Expression::Query(head, q); });
}
__device__ __forceinline__ bool keys_alike(const Expression::Head& head, const SeenRange& keys) {
  return all_alike(keys, [&](int k) { return Expression::Key(head, k); });
}

/// A block whose queries, or else whose keys, are all the same: asks for one of them. False where some of its pairs are seen and
/// others are not.
__device__ __forceinline__ bool look_at_one(const tile::AttentionParams& p, const tile::SequenceSpan& span,
                                            const Expression::Head& head, const SeenRange& queries,
                                            const SeenRange& keys, bool one_query, SeenPairs& pairs) {
  const SeenRange others = {one_query ? keys.begin : queries.begin, one_query ? keys.end : queries.end};
  SeenPairs found;
#pragma unroll 2
  for (int i = others.begin + static_cast<int>(threadIdx.x) % 32; i < others.end; i += 32) {
    const int q = one_query ? queries.begin : i, k = one_query ? i : keys.begin;
    bool counts = true;  // whether the window leaves any pair
    if (p.window_left >= 0 || p.window_right >= 0) {
      const tile::Span32 window =
          one_query ? tile::queries_of_any(p, span, k, k + 1) : tile::keys_of(p, span, q);
      counts = max(window.begin, one_query ? queries.begin : keys.begin) <
               min(window.end, one_query ? queries.end : keys.end);
    }
    const bool seen = Expression::sees(head, Expression::Query(head, q), Expression::Key(head, k));
    found.any |= counts && seen;
    found.some |= counts && !seen;
  }
  if (found.decided()) return false;
  pairs.any |= found.any;
  pairs.some |= found.some;
  return true;
}

/// Bit i: whether query `first` + i sees the lane's key k; both exist, or the last one answers for them. Each lane knows one
/// query, and tells the others.
__device__ __forceinline__ uint32_t look_at_square(const tile::AttentionParams& p,
                                                   const tile::SequenceSpan& span,
                                                   const Expression::Head& head, int first, int k,
                                                   const SeenRange& queries, bool exists, SeenPairs& pairs) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Expression::Key key(head, min(k, span.used_k - 1));
  const Expression::Query query(head, min(first + lane, queries.end - 1));
  uint32_t seen = 0;
  if (__all_sync(0xffffffffu, query.alike(of_lane(query, 0)))) {
    seen = Expression::sees(head, query, key) ? ~0u : 0u;
  } else if (__all_sync(0xffffffffu, key.alike(of_lane(key, 0)))) {
    seen = __ballot_sync(0xffffffffu, Expression::sees(head, query, key));
  } else {
#pragma unroll 1
    for (int first_of_four = 0; first_of_four < kSquare; first_of_four += 4) {
      uint32_t four = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (Expression::sees(head, of_lane(query, first_of_four + i), key)) four |= 1u << i;
      seen |= four << first_of_four;
    }
  }
  uint32_t counts = exists ? bits_below(queries.end - first) : 0u;
  if (p.window_left >= 0 || p.window_right >= 0) {
    const tile::Span32 window = tile::queries_of_any(p, span, k, k + 1);
    counts &= bits_below(window.end - first) & ~bits_below(window.begin - first);
  }
  pairs.any |= (seen & counts) != 0;
  pairs.some |= (~seen & counts) != 0;
  return seen;
}

/// Bit j of lane i becomes bit i of lane j.
__device__ __forceinline__ uint32_t transposed(uint32_t x, int lane) {
  uint32_t low = 0x0000ffffu;  // of each pair of parts the lower one
#pragma unroll
  for (int s = 16; s > 0; s /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, s);
    x = (lane & s) != 0 ? (x & ~low) | (other >> s & low) : (x & low) | (other << s & ~low);
    low ^= low << s / 2;
  }
  return x;
}

/// A warp's block: `rows` of its tile, `columns` of what the tile walks over. With kKeys rows are keys, else queries. `to`: where
/// its pairs go, or null.
template <bool kKeys>
__device__ __forceinline__ void look_at_block(const tile::AttentionParams& p, const tile::SequenceSpan& span,
                                              const Expression::Head& head, const tile::SeenBlocksView& view,
                                              const SeenRange& rows, const SeenRange& columns, uint32_t* to,
                                              SeenPairs& pairs) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const SeenRange &queries = kKeys ? columns : rows, &keys = kKeys ? rows : columns;
#pragma unroll 1
  for (int row = rows.begin; row < rows.end; row += kSquare) {
    uint32_t words[2] = {};
    int c = 0;
#pragma unroll 1
    for (int column = columns.begin; column < columns.end; column += kSquare, ++c) {
      const int q = kKeys ? column : row, k = (kKeys ? row : column) + lane;
      const uint32_t seen = look_at_square(p, span, head, q, k, queries, k < keys.end, pairs);
      if (to == nullptr) {
        if (pairs.decided()) return;
        continue;
      }
      if (__any_sync(0xffffffffu, seen != 0)) {
        const uint32_t of_row = kKeys ? seen : transposed(seen, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int own = 16 * i + lane / 4;
          const uint32_t of_rows[2] = {__shfl_sync(0xffffffffu, of_row, own),
                                       __shfl_sync(0xffffffffu, of_row, own + 8)};
          words[i] |= pair_bits_of_rows(of_rows, lane, c);
        }
      }
      if (c % 2 == 0 && column + kSquare < columns.end) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int group = (row - rows.begin) / tile::SeenBlocksView::kPairRows + i;
        if (group < view.tile_rows / tile::SeenBlocksView::kPairRows)
          to[group * view.words_of_rows() + c / 2 * 32 + lane] = words[i];
        words[i] = 0;
      }
    }
  }
}

/// kKeys: tiles are of keys, and walk over blocks of queries of all heads of a group.
template <bool kKeys>
__device__ __forceinline__ void seen_blocks_of_tile(const tile::AttentionParams& p,
                                                    const tile::SeenBlocksView& view) {
  __shared__ uint32_t any, some;
  if (threadIdx.x == 0) any = some = 0;
  __syncthreads();  // the words are clear
  const auto words = static_cast<unsigned>(view.words());
  const unsigned tiles = blockIdx.x / words;
  const int word = static_cast<int>(blockIdx.x % words), tile = static_cast<int>(tiles % view.tiles);
  const int h = static_cast<int>(tiles / view.tiles % view.heads),
            b = static_cast<int>(tiles / view.tiles / view.heads);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const tile::SequenceSpan span = tile::cached_span(p, b);
  const int used_tile = kKeys ? span.used_k : span.used_q, used_block = kKeys ? span.used_q : span.used_k;
  const SeenRange rows = {tile * view.tile_rows, min((tile + 1) * view.tile_rows, used_tile)};
  // Where heads differ, those of a group share a tile of keys.
  const bool shares = kKeys && view.pair_heads > 1;
  const int head0 = shares ? h * p.group : h, head1 = shares ? head0 + p.group : head0 + 1;
  // The answers of heads that share a tile are kept if any of them sees a block in part.
  const bool keeps_all = shares && view.pairs != nullptr;
  bool one_row = false;
  if (!shares && rows.begin < rows.end) {
    const Expression::Head head = expression_head(p, span, b, head0);
    one_row = kKeys ? keys_alike(head, rows) : queries_alike(head, rows);
  }
#pragma unroll 1
  for (int i = warp; i < 32; i += kSeenBlocksThreads / 32) {
    const int n = word * 32 + i;
    const SeenRange columns = {n * view.block_rows, min((n + 1) * view.block_rows, used_block)};
    const SeenRange &queries = kKeys ? columns : rows, &keys = kKeys ? rows : columns;
    if (!window_leaves_pairs(p, span, queries, keys)) continue;
    SeenPairs pairs;
#pragma unroll 1
    for (int head = head0; head < head1; ++head) {
      uint32_t* const to = view.pairs == nullptr ? nullptr
                                                 : view.pairs + view.pairs_offset(b, head, tile) +
                                                       int64_t{n} * view.words_of_block();
      const Expression::Head of_head = expression_head(p, span, b, head);
      const bool one_column =
          !keeps_all && !one_row && (kKeys ? queries_alike(of_head, columns) : keys_alike(of_head, columns));
      if ((!one_row && !one_column) || !look_at_one(p, span, of_head, queries, keys, kKeys != one_row, pairs))
        look_at_block<kKeys>(p, span, of_head, view, rows, columns, to, pairs);
      if (to == nullptr && pairs.decided()) break;
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
    to[view.size()] = some;
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
  return {view.size()};
}

}  // namespace fovea::cuda
