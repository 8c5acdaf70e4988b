// Of fwd_decode_e4m3: the warp that copies blocks of K and V, as stages become free.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_decode_e4m3_config.cuh"
#include "cuda/kernels/fwd_decode_rows.cuh"
#include "cuda/kernels/tma_decode_args.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "tile/key_rows.hpp"

namespace fovea::cuda {

/// Fetches the maps of K and V: one thread.
__device__ __forceinline__ void prefetch_maps(const TmaDecodeArgs& args) {
  ptx::tma_prefetch(args.k);
  ptx::tma_prefetch(args.v);
}

/// Blocks whose keys all exist are copied by TMA, a box of one page by each lane. Of the others, the last of a sequence, pieces of 16 rows
/// are copied by cp.async, which puts zeros in the place of rows behind the last key: what lies there in memory may be NaN.
template <class Instance>
struct FwdDecodeE4M3Producer {
  static constexpr auto kConfig = Instance::kConfig;
  static constexpr int kBlockKeys = kConfig.block_keys;
  static_assert(kConfig.head_dim == kConfig.head_dim_v, "maps of K and V have boxes of equal width");
  using Strips = tile::ByteStrips<kConfig.head_dim>;

  const TmaDecodeArgs& args;
  const FwdDecodeE4M3Memory<Instance>& memory;
  const int lane;
  // Lanes have the boxes of neighbouring blocks, as many as 32 lanes have room for.
  const int block_of_lane, key_of_lane;  ///< the first of the lane's box, in the block
  DecodeRing<kConfig.stages> ring;

  __device__ __forceinline__ FwdDecodeE4M3Producer(const TmaDecodeArgs& args_,
                                                   const FwdDecodeE4M3Memory<Instance>& memory_, int lane_)
      : args(args_),
        memory(memory_),
        lane(lane_),
        block_of_lane(lane_ >> args_.log2_boxes),
        key_of_lane((lane_ - (block_of_lane << args_.log2_boxes)) * args_.box_keys) {}

  /// Copies these blocks of a tile.
  __device__ __forceinline__ void copy(const FwdWorkTile& work, const tile::KvBlocks& blocks) {
    const int whole = max(blocks.begin, min(blocks.end, work.span.used_k / kBlockKeys));
    ring.begin_tile();
    if (args.f.p.page_table.data != nullptr) {
      copy_boxes<true>(work, blocks.begin, whole);
    } else {
      copy_boxes<false>(work, blocks.begin, whole);
    }
    if (whole < blocks.end) copy_last(work, whole);
    ring.end_tile(blocks.count());
  }

 private:
  template <bool kPages>
  __device__ __forceinline__ void copy_boxes(const FwdWorkTile& work, int begin, int end) {
    const tile::AttentionParams& p = args.f.p;
    const int at_once = 32 >> args.log2_boxes, head = head_of_keys(args.f, work);
    const int last = end * kBlockKeys - 1;
    // With pages the table's entry for the lane's next box, as it is: what is done with it waits for it.
    const auto row_at = [&](int n) { return min((n + block_of_lane) * kBlockKeys + key_of_lane, last); };
    const auto look_up = [&](int n) { return tile::page_entry(p, work.batch, row_at(n)).page; };
    int entry = kPages && begin < end ? look_up(begin) : 0;
#pragma unroll 1
    for (int first = begin; first < end; first += at_once) {
      const int row =
          kPages ? p.cache_rows.remainder(row_at(first)) : static_cast<int>(work.span.row_k) + row_at(first);
      const int page = kPages ? tile::page_in_pool(p, entry) : tile::cache_of(p, work.batch);
      if (kPages && first + at_once < end) entry = look_up(first + at_once);
      const int count = min(at_once, end - first);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const uint32_t full = memory.full(ring.stage);
        ptx::mbarrier_wait(memory.empty(ring.stage), ring.parity ^ 1);
        // Loads of values to registers may be on their way yet when their warp has arrived.
        ptx::async_proxy_fence();
        if (lane == 0) {
          ptx::mbarrier_arrive_expect(full, kConfig.stage_bytes());
        } else {
          ptx::mbarrier_arrive(full);
        }
        __syncwarp();  // bytes are expected before any arrives
        if (block_of_lane == i) {
          const uint32_t to =
              memory.stage(0, ring.stage) + static_cast<uint32_t>(key_of_lane * Strips::kStripColumns);
          load(to, args.k, full, row, head, page);
          load(to + kConfig.values_behind(), args.v, full, row, head, page);
        }
        ring.advance(1);
      }
    }
  }
  /// A box of each strip.
  __device__ __forceinline__ void load(uint32_t to, const CUtensorMap& map, uint32_t full, int row, int head,
                                       int page) const {
#pragma unroll
    for (int column = 0; column < kConfig.head_dim; column += Strips::kStripColumns)
      ptx::tma_load(to + column * kBlockKeys, map, full, column, row, head, page);
  }

  /// Block n, of which some keys exist.
  __device__ __forceinline__ void copy_last(const FwdWorkTile& work, int n) {
    using Rows = FwdDecodeRows<Instance>;
    constexpr int kPieces = kConfig.pieces();
    Rows rows{args.f, memory, 0, lane};
    const int head = head_of_keys(args.f, work), last_key = work.span.used_k - 1;
    const tile::KeyRows k = tile::key_rows(args.f.p, args.f.p.k, work.span, work.batch, head, sizeof(E4M3)),
                        v = tile::key_rows(args.f.p, args.f.p.v, work.span, work.batch, head, sizeof(E4M3));
    ptx::mbarrier_wait(memory.empty(ring.stage), ring.parity ^ 1);
    __syncwarp();  // the stage is free for all lanes
    rows.for_layout(k, [&](auto layout) {
      const int first = n * kPieces, end = first + kPieces;
      rows.template begin_rows<layout.value>(k, last_key, first);
#pragma unroll 1
      for (int piece = first; piece < end; ++piece)
        rows.template load<layout.value>(k, v, last_key, piece, end, ring.stage);
    });
    ptx::cp_async_wait<0>();
    ptx::async_proxy_fence();  // wgmma reads what cp.async has written
    ptx::mbarrier_arrive(memory.full(ring.stage));
    ring.advance(1);
  }
};

}  // namespace fovea::cuda
