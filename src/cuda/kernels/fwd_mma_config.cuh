// Configuration and grid of fwd_mma, and the work of a CTA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/warp/expression.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "tile/key_rows.hpp"
#include "tile/kv_blocks.hpp"
#include "tile/seen_blocks.hpp"
#include "tile/tile_scheduler.hpp"

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
  bool paged = false;  ///< reads keys by a table of pages; general kernels do so where there is one
  /// K and V are float8_e4m3fn and become elements of 16 bits on their way, in one stage, beside which the next block comes as it is. They may
  /// lie in pages.
  bool e4m3 = false;
  // Kernels that know a term, and for the rest are no general ones.
  bool alibi = false, dropout = false;
  bool expression = false;  ///< compiled for the problem's expression

  constexpr bool has_term() const { return alibi || dropout || expression; }
  constexpr int threads() const { return 32 * num_warps; }
  constexpr int warp_m() const { return tile_m / num_warps; }
  constexpr int key_bytes() const { return e4m3 ? 1 : 2; }  ///< of an element of K and V, as it comes
  constexpr int raw_bytes() const { return e4m3 ? tile_n * (head_dim + value_slice) : 0; }
  constexpr int shared_bytes() const {
    const int q = tile_m * head_dim * 2, o = tile_m * value_slice * 2;
    return (q > o ? q : o) + stages * tile_n * (head_dim + value_slice) * 2 + raw_bytes() + work_tile_bytes();
  }
  constexpr int work_tile_bytes() const { return expression && dropout ? 144 : 128; }  ///< of FwdMmaWorkTile
};

/// In the place of a tile's SeenBlocks in kernels without an expression: all blocks, one after the other.
struct AllBlocks {
  __device__ __forceinline__ int before(int n, int) const { return n - 1; }
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

/// The work of a CTA: its rows, its columns of V and O, and the blocks of keys that it walks over.
template <FwdMmaConfig kConfig>
struct FwdMmaWorkTile : FwdWorkTile {
  int first_column;    ///< of v and o
  int n_begin, n_end;  ///< blocks of keys
  int n_masked;        ///< blocks from here on need a mask
  const char *k, *v;   ///< of key_rows, from the first column
  /// Blocks that the expression lets the rows see.
  std::conditional_t<kConfig.expression && Expression::kHasSees, tile::SeenBlocks, AllBlocks> seen;
  std::conditional_t<kConfig.dropout, tile::Dropout, NoDropout> dropout;

  /// Of this CTA. Without rows (first_row >= end_row) the rest is not set.
  __device__ static __forceinline__ FwdMmaWorkTile of(const ForwardArgs& args) {
    const tile::AttentionParams& p = args.p;
    FwdMmaWorkTile work;
    unsigned section = blockIdx.z;
    work.split = 0;
    work.first_column = 0;
    if (args.num_splits > 1) {
      work.split = static_cast<int>(section % args.num_splits);
      section /= args.num_splits;
    }
    if (p.head_dim_v > kConfig.value_slice) {
      const unsigned slices = (p.head_dim_v + kConfig.value_slice - 1) / kConfig.value_slice;
      work.first_column = static_cast<int>(section % slices) * kConfig.value_slice;
      section /= slices;
    }
    const unsigned heads = args.pack_group ? p.heads_kv : p.heads_q;
    const unsigned plane = section * gridDim.x + blockIdx.x;
    work.batch = static_cast<int>(plane / heads);
    work.head = static_cast<int>(plane - work.batch * heads);
    if constexpr (kConfig.alibi)
      work.head = longest_head_first(args.alibi_norms, work.head, static_cast<int>(heads));
    const int head_kv = args.pack_group || p.group == 1
                            ? work.head
                            : static_cast<int>(static_cast<unsigned>(work.head) / p.group);
    work.first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kConfig.tile_m;
    work.end_row = work.n_begin = work.n_end = work.n_masked = 0;
    if (work.batch >= p.batch) {  // the last section has fewer heads
      work.span = {};
      return work;
    }
    work.span = tile::cached_span(p, work.batch);
    work.end_row = min(work.first_row + kConfig.tile_m, work.span.used_q * packed_heads(args));
    if (work.first_row >= work.end_row) return work;
    work.set_key_blocks(args);
    work.k = tile::key_rows(p, p.k, work.span, work.batch, head_kv, kConfig.key_bytes()).data;
    work.v =
        tile::key_rows(p, p.v, work.span, work.batch, head_kv, kConfig.key_bytes(), work.first_column).data;
    if constexpr (kConfig.dropout) work.dropout = tile::dropout_of(p);
    if constexpr (kConfig.expression && Expression::kHasSees)
      work.seen = args.seen.at(work.batch, work.head, work.first_row / kConfig.tile_m);
    return work;
  }
  /// query_of_row in one instruction, for the mainloop: its 64-bit product takes a pair of registers.
  __device__ static __forceinline__ int query_of(const ForwardArgs& args, int row) {
    return args.pack_group ? static_cast<int>(__umulhi(static_cast<uint32_t>(row), args.query_magic)) : row;
  }

 private:
  __device__ __forceinline__ void set_key_blocks(const ForwardArgs& args) {
    tile::KvBlocks blocks = key_blocks_of_rows(args, span, first_row, end_row, kConfig.tile_n);
    if constexpr (kConfig.alibi)
      blocks = tile::keys_in_reach(blocks, span, first_row, end_row,
                                   alibi_reach(args.p, args.alibi_norms, batch, head), kConfig.tile_n);
    blocks = tile::split_blocks(blocks, split, args.num_splits);
    n_begin = blocks.begin;
    n_end = blocks.end;
    // With a window's left edge every block takes the masked loop: it costs less than a third loop would.
    n_masked = args.p.window_left >= 0 ? n_begin : blocks.full_end;
  }
};

}  // namespace fovea::cuda
