// The producers of fwd_sm90: a warp loads K and V, a thread for each consumer plans its tiles and loads Q.
// (One thread for all would need more registers than a producer has.) The tiles of a CTA and the planner serve
// fwd_sm90_wide, too: `Memory` is the shared memory of either.
#pragma once

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_stream_k.cuh"
#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "tile/key_rows.hpp"

namespace fovea::cuda {

/// Where a strip of the rows [Q | QV] or [K | V] of a score lies.
struct TmaStrip {
  const CUtensorMap& map;
  int column;
};
/// Whether strips of values stand before the one that only keys have (fwd_sm90_latent).
template <class Memory>
constexpr bool values_in_keys() {
  if constexpr (Memory::kConfig.multiplies_qv) return Memory::kConfig.values_in_keys;
  return false;
}
/// `front`: of Q or K, `behind`: of QV or V.
template <class Memory>
__device__ __forceinline__ TmaStrip score_strip(const TmaForwardArgs& args, const CUtensorMap& front,
                                                const CUtensorMap& behind, int strip) {
  constexpr int kColumns = Memory::kConfig.strip();
  if constexpr (values_in_keys<Memory>()) {
    if (strip < Memory::kValueStrips) return {behind, strip * kColumns};
    return {front, args.key_column};
  } else if constexpr (Memory::kConfig.multiplies_qv) {
    if (strip >= args.key_strips) return {behind, (strip - args.key_strips) * kColumns};
  }
  return {front, strip * kColumns};
}

/// Whether distances are a part of the score, so that heads may have a reach.
template <class Memory>
constexpr bool has_alibi() {
  if constexpr (requires { Memory::kConfig.alibi; }) return Memory::kConfig.alibi;
  return false;
}

/// Blocks of keys that rows [first, first + rows) of a sequence see, and have in their reach.
template <class Memory>
__device__ __forceinline__ tile::KvBlocks blocks_of_rows(const ForwardArgs& f, const tile::SequenceSpan& span,
                                                         int reach, int first, int rows) {
  constexpr int kTileN = Memory::kConfig.tile_n;
  const int end = min(first + rows, span.used_q * packed_heads(f));
  const tile::KvBlocks blocks = key_blocks_of_rows(f, span, first, end, kTileN);
  if constexpr (!has_alibi<Memory>()) return blocks;
  return tile::keys_in_reach(blocks, span, first, end, reach, kTileN);
}

/// The index of a tile, from the thread that takes it to the other producers of the CTA, or of the cluster: the thread is
/// in the cluster's first CTA, where the others arrive when they have read it.
template <class Memory>
__device__ __forceinline__ void publish_next(const Memory& memory, uint32_t turn, int index) {
  const uint32_t word = static_cast<uint32_t>(index), parity = turn / 2 & 1;
  if constexpr (Memory::kConfig.cluster == 1) {
    ptx::mbarrier_wait(memory.empty_next(turn), parity ^ 1);  // all have read that of two turns ago
    ptx::st_shared_4(memory.next(turn), word);
    ptx::mbarrier_arrive(memory.full_next(turn));
  } else {
    ptx::mbarrier_wait_cluster(memory.empty_next(turn), parity ^ 1);
    for (int cta = 0; cta < Memory::kConfig.cluster; ++cta) {
      ptx::st_cluster_4(ptx::address_in_cta(memory.next(turn), cta), word);
      ptx::mbarrier_arrive_cluster(ptx::address_in_cta(memory.full_next(turn), cta));
    }
  }
}
template <class Memory>
__device__ __forceinline__ int read_next(const Memory& memory, uint32_t turn) {
  const uint32_t parity = turn / 2 & 1;
  if constexpr (Memory::kConfig.cluster == 1) {
    ptx::mbarrier_wait(memory.full_next(turn), parity);
    const uint32_t index = ptx::ld_shared_4(memory.next(turn));
    ptx::mbarrier_arrive(memory.empty_next(turn));
    return static_cast<int>(index);
  } else {
    ptx::mbarrier_wait_cluster(memory.full_next(turn), parity);
    const uint32_t index = ptx::ld_shared_4(memory.next(turn));
    ptx::mbarrier_arrive_cluster(ptx::address_in_cta(memory.empty_next(turn), 0));
    return static_cast<int>(index);
  }
}

/// Rank of the CTA in its cluster.
template <class Memory>
__device__ __forceinline__ int cta_rank() {
  return Memory::kConfig.cluster == 1 ? 0 : static_cast<int>(blockIdx.x % Memory::kConfig.cluster);
}

/// Which producer this is: the one that takes tiles from a counter and tells the others, as one thread or as a warp whose lanes all
/// come here; or one of those that are told.
enum class Taker : uint8_t { kNo, kThread, kWarp };

/// Takes the next tile behind the first `all`, and tells the others.
template <Taker kTaker, class Memory>
__device__ __forceinline__ int take_next(const TmaForwardArgs& args, const Memory& memory, uint32_t turn,
                                         int all) {
  int index = 0;
  if (kTaker == Taker::kThread || threadIdx.x % 32 == 0) {
    index = all + atomicAdd(args.f.tile_counter, 1);
    publish_next(memory, turn, index);
  }
  return kTaker == Taker::kThread ? index : __shfl_sync(0xffffffffu, index, 0);
}

/// The next tile, from the thread that takes it.
template <Taker kTaker, class Memory>
__device__ __forceinline__ int told_next(const Memory& memory, uint32_t turn) {
  if constexpr (kTaker != Taker::kWarp) return read_next(memory, turn);
  int index = 0;
  if (threadIdx.x % 32 == 0) index = read_next(memory, turn);
  return __shfl_sync(0xffffffffu, index, 0);
}

/// The tile of this CTA or cluster where each has one (ForwardArgs::one_tile_each).
template <unsigned kCluster>
__device__ __forceinline__ tile::WorkTile tile_of_grid(const tile::AttentionParams& p) {
  const unsigned block = blockIdx.x / kCluster, last = gridDim.x / kCluster - 1;
  return {static_cast<int>(tile::later_queries_first(p) ? last - block : block), static_cast<int>(blockIdx.y),
          static_cast<int>(blockIdx.z), 0, true};
}

/// Whether load_first serves the launch.
template <class Memory>
__device__ __forceinline__ bool loads_first(const ForwardArgs& f) {
  if constexpr (!requires { Memory::kConfig.loads_first(); }) {
    return false;
  } else {
    return Memory::kConfig.loads_first() && f.loads_first;
  }
}

/// A tile that producers visit.
struct VisitedTile : tile::WorkTile {
  bool asked = false;             ///< whether load_first has asked for Q and the last block of keys
  int reach = tile::kEverywhere;  ///< of the head's slope
};

/// Calls visit(tile, where its sequence lies, its first row, the blocks that its consumers need) for the tiles of this
/// CTA or cluster, the same for each producer. Tiles of equal work are dealt out beforehand. Tiles of unequal work a CTA takes
/// from a counter, one when it has loaded the one before.
template <Taker kTaker, class Memory, class Visit>
__device__ __forceinline__ void for_each_tile(const TmaForwardArgs& args, const Memory& memory,
                                              Visit&& visit) {
  if constexpr (Memory::kConfig.stream_k) {
    for_each_tile_of_share(
        args.f, memory,
        [&](const tile::WorkTile& work, const tile::SequenceSpan& span, int first_row,
            const tile::KvBlocks& loads) { visit(VisitedTile{work}, span, first_row, loads); });
    return;
  }
  constexpr int kTileM = Memory::kConfig.tile_m();
  const ForwardArgs& f = args.f;
  constexpr unsigned kCluster = Memory::kConfig.cluster;
  // Where expressions say what is seen, planners have no registers for a second copy of what they do with a tile.
  if (!Memory::kConfig.seen_blocks() && f.one_tile_each) {
    VisitedTile work{tile_of_grid<kCluster>(f.p), loads_first<Memory>(f)};
    if constexpr (has_alibi<Memory>()) work.reach = alibi_reach(f.p, f.alibi_norms, work.batch, work.head);
    const tile::SequenceSpan span = tile::whole_span(f.p);
    visit(work, span, work.block * kTileM,
          blocks_of_rows<Memory>(f, span, work.reach, work.block * kTileM, kTileM));
    return;
  }
  const tile::QueryTiles tiles =
      query_tiles(f, kTileM, (Memory::kConfig.expression || has_alibi<Memory>()) && f.sequences_first);
  const int count = static_cast<int>(tiles.count()), own = static_cast<int>(blockIdx.x / kCluster);
  const int all = static_cast<int>(gridDim.x / kCluster);
  const auto next = [&](uint32_t turn) {
    if (f.tile_counter == nullptr) {
      // In a turn that goes backwards some CTAs may find no index and others one: then it is the last turn.
      return tile::snake(static_cast<int>(turn) + 1, own, all);
    }
    if (kTaker == Taker::kNo || cta_rank<Memory>() != 0) return told_next<kTaker>(memory, turn);
    return take_next<kTaker>(args, memory, turn, all);
  };
  int index = own;
#pragma unroll 1
  for (uint32_t turn = 0; index < count; ++turn) {
    VisitedTile work{tiles.at(index)};
    if constexpr (has_alibi<Memory>()) {
      work.head = longest_head_first(f.alibi_norms, work.head, f.p.heads_q);
      work.reach = alibi_reach(f.p, f.alibi_norms, work.batch, work.head);
    }
    if (work.valid) {
      const tile::SequenceSpan span = tile::cached_span(f.p, work.batch);
      const int first_row = work.block * kTileM;
      visit(work, span, first_row,
            tile::split_blocks(blocks_of_rows<Memory>(f, span, work.reach, first_row, kTileM), work.split,
                               f.num_splits));
    }
    index = next(turn);
  }
}

/// Where TMA finds the keys of a tile: of one sequence and key head. Producers have few registers.
struct TmaKeys {
  const TmaForwardArgs& args;
  int head;
  int sequence;   ///< of k and v; of the table, where there is one
  int first_row;  ///< of key 0; the last key, where there is a table

  __device__ __forceinline__ TmaKeys(const TmaForwardArgs& args_, const tile::WorkTile& work,
                                     const tile::SequenceSpan& span)
      : args(args_),
        head(args.f.pack_group || args.f.p.group == 1 ? work.head
                                                      : tile::quotient(work.head, args.f.p.group)),
        sequence(paged() ? work.batch : tile::cache_of(args.f.p, work.batch)),
        first_row(paged() ? span.used_k - 1 : static_cast<int>(span.row_k)) {}

  __device__ __forceinline__ bool paged() const { return args.f.p.page_table.data != nullptr; }
  /// Where the box of keys from key + first on lies, in the block from `key` on; keys that arrive have the same rows in their own
  /// maps. Behind the last key no entry of the table is read: the
  /// block's first box is loaded again, for keys that no row sees.
  __device__ __forceinline__ tile::PageRow box(int key, int first) const {
    if (!paged()) return {sequence, first_row + key + first};
    return tile::page_row(args.f.p, sequence, key + first <= first_row ? key + first : key);
  }
  /// Calls visit(first key of the box in the block, row, head, sequence or page) for the boxes of kTileN keys from `key` on.
  template <int kTileN, class Visit>
  __device__ __forceinline__ void for_each_box(int key, const Visit& visit) const {
#pragma unroll 1
    for (int first = 0; first < kTileN; first += args.box_keys) {
      const tile::PageRow at = box(key, first);
      visit(first, at.row, head, at.page);
    }
  }
};

/// Loads block n of V where its keys lie side by side: one thread.
template <class Memory, class Ring>
__device__ __forceinline__ void load_transposed(const TmaForwardArgs& args, const Memory& memory,
                                                const Ring& ring, int batch, int head_kv, int n) {
  constexpr int kBytes = Memory::kConfig.v_bytes();
  const uint32_t full = memory.full_v(ring.stage);
  ptx::mbarrier_wait(memory.empty_v(ring.stage), ring.phase ^ 1);
  ptx::mbarrier_arrive_expect(full, kBytes);
  ptx::bulk_load(memory.v(ring.stage), args.f.transposed_v.block(args.f.p, batch, head_kv, n), kBytes, full);
}

/// Waits for the part of the keys of a head that arrive with this one, if it does; `part` is that of the key behind it, and becomes its
/// own. -1: keys that do not.
__device__ __forceinline__ void wait_for_keys(const ArrivingKeysView& arriving, int head, int key,
                                              int& part) {
  if (key >= arriving.keys) return;
  const int own = key / arriving.keys_a_part;
  if (own == part) return;
  part = own;
  ptx::wait_for_arrival(arriving.words + head / arriving.heads * arriving.key_parts + own, arriving.number);
}

/// Asks for Q of all row groups and the last block of K and V that the CTA's one tile sees: one thread. A plan takes 1,300 clocks, which
/// is as long as the loads. Planners expect the bytes of Q, before or after they arrive.
template <class Instance>
__device__ __forceinline__ void load_first(const TmaForwardArgs& args,
                                           const FwdSm90Memory<Instance>& memory) {
  using Memory = FwdSm90Memory<Instance>;
  constexpr int kTileN = Memory::kConfig.tile_n, kColumns = Memory::kConfig.strip();
  constexpr int kRowBytes = Memory::kConfig.kRowBytes, kStripBytes = Memory::kConfig.kRows * kRowBytes;
  const tile::AttentionParams& p = args.f.p;
  const tile::WorkTile work = tile_of_grid<1>(p);
  const int row = work.block * Memory::kConfig.tile_m();
  for (int w = 0; w < Memory::kConfig.row_groups(); ++w) {
    for (int s = 0; s * kStripBytes < Memory::kConfig.q_bytes(); ++s) {
      ptx::tma_load(memory.q(w) + s * kStripBytes, args.q, memory.full_q(w), s * kColumns, 0,
                    row + w * Memory::kConfig.kRows, work.head, work.batch);
    }
  }
  const int end =
      tile::keys_of(p, tile::whole_span(p), min(row + Memory::kConfig.tile_m(), p.seqlen_q) - 1).end;
  if (end <= 0) return;
  const int head = p.group == 1 ? work.head : tile::quotient(work.head, p.group);
  const int key = (end - 1) / kTileN * kTileN;
  const auto load = [&](const CUtensorMap& map, uint32_t to, int bytes, uint32_t full) {
    ptx::mbarrier_arrive_expect(full, bytes);
    for (int s = 0; s * kTileN * kRowBytes < bytes; ++s)
      ptx::tma_load(to + s * kTileN * kRowBytes, map, full, s * kColumns, key, head, work.batch);
  };
  load(args.k, memory.k(0), Memory::kConfig.k_bytes(), memory.full_k(0));
  load(args.v, memory.v(0), Memory::kConfig.v_bytes(), memory.full_v(0));
}

/// Loads K and V: one warp, or its lane 0 alone (FwdSm90Config::pages()). Each lane loads a box of the block (without pages lane 0 all of it),
/// so that lanes look up their pages at the same time, before they wait for a free stage.
template <class Instance>
__device__ __forceinline__ void fwd_sm90_load_keys(const TmaForwardArgs& args,
                                                   const FwdSm90Memory<Instance>& memory) {
  using Memory = FwdSm90Memory<Instance>;
  constexpr int kTileN = Memory::kConfig.tile_n, kRowBytes = Memory::kConfig.kRowBytes;
  static_assert(kTileN <= 32 * kTmaFewestKeys, "a lane for each box");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) {
    ptx::tma_prefetch(args.q);
    ptx::tma_prefetch(args.k);
    ptx::tma_prefetch(args.v);
  }
  ptx::wait_for_launches_before();  // what they have written may be read
  if constexpr (Memory::kConfig.loads_first()) {
    if (lane == 0 && loads_first<Memory>(args.f)) load_first(args, memory);
  }
  constexpr bool kPages = Memory::kConfig.pages();
  const int first = kPages ? lane * args.box_keys : 0;  // key of the lane's box in the block
  constexpr int kStages = Memory::kConfig.stages_of_ring();
  constexpr bool kTwoRings = Memory::kConfig.rings() == 2;
  StageRing<kStages> ring, other{kStages};  // blocks go to them in turn, where there are two
  for_each_tile<kPages ? Taker::kWarp : Taker::kThread>(
      args, memory,
      [&](const VisitedTile& work, const tile::SequenceSpan& span, int first_row,
          const tile::KvBlocks& loads) {
        const TmaKeys keys(args, work, span);
        const TileBlocks<Memory::kConfig.consumers> blocks(args.f, work.batch, work.head, first_row);
        int part = -1;  // of keys that arrive: the one that the tile has come to, if any
        if (kTwoRings && ring.first != 0) exchange(ring, other);
        const auto advance = [&] {
          ring.advance();
          if (kTwoRings) exchange(ring, other);
        };
        int n = blocks.before(loads.end, loads.begin);
        if (work.asked && n >= loads.begin) {
          advance();
          --n;
        }
#pragma unroll 1
        for (; n >= loads.begin; n = blocks.before(n, loads.begin)) {
          tile::PageRow at = {keys.sequence, keys.first_row + n * kTileN};
          if (kPages && first < kTileN) {
            at = keys.box(n * kTileN, first);
            if constexpr (Memory::kConfig.arriving)
              wait_for_keys(args.arriving, keys.head, n * kTileN + first, part);
          }
          const auto load = [&](const CUtensorMap& map, uint32_t to, int bytes, uint32_t full,
                                uint32_t empty) {
            ptx::mbarrier_wait(empty, ring.phase ^ 1);
            if (lane == 0) ptx::mbarrier_arrive_expect(full, bytes);
            if constexpr (kPages) __syncwarp();  // bytes are expected before any arrives
            if (first >= kTileN) return;
            for (int s = 0; s * kTileN * kRowBytes < bytes; ++s) {
              ptx::tma_load(to + (s * kTileN + first) * kRowBytes, map, full, s * Memory::kConfig.strip(),
                            at.row, keys.head, at.page);
            }
          };
          load(part >= 0 ? args.arriving.k : args.k, memory.k(ring.stage), Memory::kConfig.k_bytes(),
               memory.full_k(ring.stage), memory.empty_k(ring.stage));
          if constexpr (Memory::kConfig.e4m3) {
            if (lane == 0) load_transposed(args, memory, ring, work.batch, keys.head, n);
          } else {
            load(part >= 0 ? args.arriving.v : args.v, memory.v(ring.stage), Memory::kConfig.v_bytes(),
                 memory.full_v(ring.stage), memory.empty_v(ring.stage));
          }
          advance();
        }
      });
}

/// Plans for row groups `first`, first + planners() and so on: one thread.
template <class Memory>
__device__ __forceinline__ void fwd_sm90_plan(const TmaForwardArgs& args, const Memory& memory, int first) {
  constexpr int kRows = Memory::kConfig.kRows, kStripBytes = kRows * Memory::kConfig.kRowBytes;
  const ForwardArgs& f = args.f;
  const int group = f.pack_group ? f.p.group : 1;
  if (!loads_first<Memory>(f)) ptx::wait_for_launches_before();  // lengths may be read, and Q
  uint32_t tile_count = 0;
  for_each_tile<Taker::kNo>(
      args, memory,
      [&](const VisitedTile& work, const tile::SequenceSpan& span, int first_row,
          const tile::KvBlocks& loads) {
#pragma unroll 1
        for (int w = first; w < Memory::kConfig.row_groups(); w += Memory::kConfig.planners()) {
          constexpr bool kAhead = Memory::kConfig.plans_ahead();
          // Until Q is free. Without plans_ahead() that frees the place of the work tile, too.
          const auto wait_for_q = [&] {
            ptx::mbarrier_wait(memory.empty_q(w), (tile_count & 1) ^ 1);
            // Loads of Q to registers may be on their way yet when their warps have arrived.
            ptx::async_proxy_fence();
          };
          if constexpr (!kAhead) wait_for_q();
          const int row = first_row + (cta_rank<Memory>() * Memory::kConfig.row_groups() + w) * kRows;
          FwdSm90WorkTile& tile = *memory.work_tile(w, tile_count);
          static_cast<FwdWorkTile&>(tile) = {span,       work.batch, work.head,
                                             work.split, row,        min(row + kRows, span.length_q * group)};
          tile::KvBlocks blocks = blocks_of_rows<Memory>(f, span, work.reach, row, kRows);
          tile.load_begin = loads.begin;
          tile.load_end = loads.end;
          tile.last = 0;
          if constexpr (Expression::kHasSees && Memory::kConfig.seen_blocks()) {
            tile.blocks.full_begin = blocks.full_begin;
            tile.blocks.full_end = blocks.full_end;
            const TileBlocks<Memory::kConfig.row_groups()> all(f, work.batch, work.head, first_row);
            tile.seen = all.tile_of(w, loads.begin, loads.end, tile.blocks.begin, tile.blocks.end);
          } else {
            tile.blocks = {max(blocks.begin, loads.begin), blocks.full_begin, blocks.full_end,
                           min(blocks.end, loads.end)};
          }
          if constexpr (kAhead) wait_for_q();
          ptx::mbarrier_arrive_expect(memory.full_q(w), Memory::kConfig.q_bytes());
          if (work.asked) continue;
          // With plans_ahead() read again from shared memory: a planner has few registers.
          const FwdWorkTile& of_q = tile;
          const int row_of_q = kAhead ? of_q.first_row : row, head = kAhead ? of_q.head : work.head,
                    sequence = kAhead ? of_q.batch : work.batch,
                    first_of_q = static_cast<int>(kAhead ? of_q.span.row_q : span.row_q);
          const int query = query_of_row(f, row_of_q), batch = f.p.cu_seqlens_q != nullptr ? 0 : sequence;
          for (int s = 0; s * kStripBytes < Memory::kConfig.q_bytes(); ++s) {
            const TmaStrip strip = score_strip<Memory>(args, args.q, args.qv, s);
            ptx::tma_load(memory.q(w) + s * kStripBytes, strip.map, memory.full_q(w), strip.column,
                          row_of_q - query * group, first_of_q + query, head, batch);
          }
        }
        ++tile_count;
      });
  for (int w = first; w < Memory::kConfig.row_groups(); w += Memory::kConfig.planners()) {
    ptx::mbarrier_wait(memory.empty_q(w), (tile_count & 1) ^ 1);
    memory.work_tile(w, tile_count)->last = 1;
    ptx::mbarrier_arrive(memory.full_q(w));
  }
}

}  // namespace fovea::cuda
