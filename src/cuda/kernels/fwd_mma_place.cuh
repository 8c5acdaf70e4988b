// Configuration and grid of fwd_mma, where a CTA works, and the rows that take no part.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/mma_tile.cuh"
#include "tile/kv_blocks.hpp"

namespace fovea::cuda {

struct FwdMmaConfig {
  int head_dim;     ///< padded
  int value_slice;  ///< columns of V and O of one CTA; ceil(head_dim_v / value_slice) CTAs cover head_dim_v
  int tile_m, tile_n;
  int num_warps;
  int min_ctas;  ///< CTAs an SM, for the register allocator
  /// Every term of the score and any alignment; else window, causal and lengths only, scale > 0, and q, k and
  /// v whose rows can be copied in pieces of 16 bytes.
  bool general = false;
  /// Of K and V: with 2 a block is copied while the one before is worked on; with 1, K during P V and V during
  /// Q K^T, for half of the shared memory and twice the barriers.
  int stages = 2;
  MmaShape mma = MmaShape::kM16N8K16;

  constexpr int threads() const { return 32 * num_warps; }
  constexpr int warp_m() const { return tile_m / num_warps; }
  constexpr int shared_bytes() const {
    const int q = tile_m * head_dim * 2, o = tile_m * value_slice * 2;
    return (q > o ? q : o) + stages * tile_n * (head_dim + value_slice) * 2 + kPlaceBytes;
  }
  static constexpr int kPlaceBytes = 128;  ///< of FwdMmaPlace
};

/// CTAs of a launch: (heads of a section, tiles of rows, sections * splits * slices). CTAs start in the order
/// of x, y, z, so tiles of a section's heads, whose K and V fit the L2 cache together, run side by side, the
/// longest rows first (under causal the last tile sees most keys).
template <class Grid>
constexpr Grid fwd_mma_grid(const ForwardArgs& args, const FwdMmaConfig& config) {
  const int64_t planes =
      static_cast<int64_t>(args.pack_group ? args.p.heads_kv : args.p.heads_q) * args.p.batch;
  const int64_t rows = static_cast<int64_t>(args.p.seqlen_q) * (args.pack_group ? args.p.group : 1);
  const int64_t tiles = (rows + config.tile_m - 1) / config.tile_m;
  const int64_t slices = (args.p.head_dim_v + config.value_slice - 1) / config.value_slice;
  const int64_t sections = (planes + args.heads_at_once - 1) / args.heads_at_once;
  return {planes < args.heads_at_once ? planes : args.heads_at_once, tiles > 0 ? tiles : 1,
          sections * args.num_splits * slices};
}

/// Where a CTA works: its rows, and the blocks of keys that it walks over.
template <FwdMmaConfig kConfig>
struct FwdMmaPlace {
  tile::SequenceSpan span;
  int batch, head;         ///< `head` of q, or of k for a packed group
  int first_row, end_row;  ///< of queries (times the heads of a packed group); empty: nothing to do
  int first_column;        ///< of v and o
  int split;
  int n_begin, n_end;  ///< blocks of keys
  int n_masked;        ///< blocks from here on need a mask
  const char *k, *v;   ///< first key of the sequence and key head, first column

  __device__ static __forceinline__ FwdMmaPlace of(const ForwardArgs& args) {
    const tile::AttentionParams& p = args.p;
    FwdMmaPlace place;
    unsigned section = blockIdx.z;
    place.split = 0;
    place.first_column = 0;
    if (args.num_splits > 1) {
      place.split = static_cast<int>(section % args.num_splits);
      section /= args.num_splits;
    }
    if (p.head_dim_v > kConfig.value_slice) {
      const unsigned slices = (p.head_dim_v + kConfig.value_slice - 1) / kConfig.value_slice;
      place.first_column = static_cast<int>(section % slices) * kConfig.value_slice;
      section /= slices;
    }
    const unsigned heads = args.pack_group ? p.heads_kv : p.heads_q;
    const unsigned plane = section * gridDim.x + blockIdx.x;
    place.batch = static_cast<int>(plane / heads);
    place.head = static_cast<int>(plane - place.batch * heads);
    const int head_kv = args.pack_group || p.group == 1
                            ? place.head
                            : static_cast<int>(static_cast<unsigned>(place.head) / p.group);
    place.first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kConfig.tile_m;
    place.end_row = place.n_begin = place.n_end = place.n_masked = 0;
    if (place.batch >= p.batch) {  // the last section has fewer heads
      place.span = {};
      return place;
    }
    place.span = tile::sequence_span(p, place.batch);
    place.end_row =
        min(place.first_row + kConfig.tile_m, place.span.used_q * (args.pack_group ? p.group : 1));
    if (place.first_row >= place.end_row) return place;
    const tile::KvBlocks blocks = tile::kv_blocks(p, place.span, query_of(args, place.first_row),
                                                  query_of(args, place.end_row - 1) + 1, kConfig.tile_n);
    place.n_begin = blocks.begin;
    place.n_end = blocks.end;
    if (args.num_splits > 1) {
      const int share = tile::ceil_div(blocks.count(), args.num_splits);
      place.n_begin += place.split * share;
      place.n_end = min(place.n_begin + share, place.n_end);
    }
    place.k = p.k.data + p.k.offset(place.batch, place.span.row_k, head_kv) * 2;
    place.v = p.v.data + (p.v.offset(place.batch, place.span.row_k, head_kv) + place.first_column) * 2;
    // With a window's left edge every block takes the masked loop: it costs less than a third loop would.
    place.n_masked =
        p.window_left >= 0 ? place.n_begin : max(place.n_begin, min(blocks.full_end, place.n_end));
    return place;
  }

  __device__ static __forceinline__ int query_of(const ForwardArgs& args, int row) {
    return args.pack_group ? static_cast<int>(__umulhi(static_cast<uint32_t>(row), args.query_magic)) : row;
  }
  __device__ __forceinline__ int head_of(const ForwardArgs& args, int row) const {
    return args.pack_group ? head * args.p.group + row - query_of(args, row) * args.p.group : head;
  }
  /// Row of part_lse, and of part_o.
  __device__ __forceinline__ int64_t part_of(const ForwardArgs& args, int i, int q_head) const {
    return ((static_cast<int64_t>(split) * args.p.batch + batch) * args.p.heads_q + q_head) *
               args.p.seqlen_q +
           i;
  }
};

/// Outputs of the queries that take no part: this CTA's share of those from used_q on.
template <FwdMmaConfig kConfig>
__device__ __forceinline__ void write_unused_rows(const ForwardArgs& args,
                                                  const FwdMmaPlace<kConfig>& place) {
  const tile::AttentionParams& p = args.p;
  const int thread = static_cast<int>(threadIdx.x), rows_per_query = args.pack_group ? p.group : 1;
  const int tiles = static_cast<int>(gridDim.y), m_block = tiles - 1 - static_cast<int>(blockIdx.y);
  const int share = tile::ceil_div(max(p.seqlen_q, 1), tiles);
  const int begin = max(place.span.used_q, m_block * share);
  const int end =
      m_block + 1 == tiles ? place.span.length_q : min(place.span.length_q, (m_block + 1) * share);
  const int columns = min(kConfig.value_slice, p.head_dim_v - place.first_column);
  for (int i = begin; i < end; ++i) {
    for (int h = 0; h < rows_per_query; ++h) {
      const int head = place.head * rows_per_query + h;
      const int64_t at = p.o.offset(place.batch, place.span.row_q + i, head) + place.first_column;
      for (int c = thread; c < columns; c += kConfig.threads()) {
        if (p.o_is_f32()) {
          reinterpret_cast<float*>(p.o.data)[at + c] = 0.0f;
        } else {
          reinterpret_cast<uint16_t*>(p.o.data)[at + c] = 0;
        }
      }
      if (p.lse.data != nullptr && thread == 0 && place.first_column == 0) {
        p.lse.data[p.lse.offset(place.batch, head, place.span.row_q + i)] = -INFINITY;
      }
    }
  }
}

}  // namespace fovea::cuda
