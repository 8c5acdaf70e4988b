// Forwards with stream_k: tiles are cut into equal shares (tile/stream_k.hpp). What is particular to them: units are counted first;
// each share publishes its parts of tiles that are cut; who finds all parts of a tile there merges them, 128 threads of a CTA. In
// fwd_sm90 these are the producers, when they have nothing left to load: in a consumer it would cost the main loop its uniform
// registers.
//
// `Memory` is the shared memory of a kernel: kConfig, units(), share(), all_parts(), and wait_for_part(part), behind which the part
// is written.
//
// Flags: a part is there when its flag has the tag of the plan, a random number that memory nobody has written to does not hold.
// A CTA sets its flag, then looks at those of the tile's other parts. Between the two is a fence.sc, so that the last one in
// the order of fences finds all set; nobody waits, and CTAs may run in any order. Several may find all set: the one that takes
// the first flag merges, and clears the others, so that the same launch can come again.
#pragma once

#include "cuda/kernels/fwd_combine.cuh"
#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/ptx/acquire_release.cuh"
#include "cuda/ptx/barrier.cuh"
#include "tile/stream_k.hpp"

namespace fovea::cuda {

/// The share of a CTA.
struct StreamShare {
  int heads, ctas;  ///< of its lane (ForwardArgs::part_lanes)
  int lane;
  int units;
  tile::StreamTile first;  ///< if there are units
};

/// Of the heads of this CTA's lane: those of all lanes are cut alike.
template <class Memory>
__device__ __forceinline__ tile::StreamK stream_of(const ForwardArgs& f, const Memory& memory) {
  return {memory.units(), f.p.batch, memory.share()->heads, memory.share()->ctas};
}

/// Counts the units of all sequences: all threads of the CTA, with barriers.
template <class Memory>
__device__ __forceinline__ void count_units(const ForwardArgs& f, const Memory& memory) {
  int* const before = memory.units();
  const int thread = static_cast<int>(threadIdx.x);
  const int heads = (f.pack_group ? f.p.heads_kv : f.p.heads_q) / f.part_lanes;
  for (int b = thread; b < f.p.batch; b += static_cast<int>(blockDim.x)) {
    const tile::SequenceSpan span = tile::cached_span(f.p, b);
    const tile::KvBlocks blocks =
        key_blocks_of_rows(f, span, 0, span.used_q * packed_heads(f), Memory::kConfig.tile_n);
    before[b + 1] = span.used_q > 0 ? tile::stream_units(blocks, heads) : 0;
  }
  if (thread == 0) before[0] = 0;
  __syncthreads();  // units of each sequence are there
  if (thread < 32) {
    int sum = 0;
    for (int first = 1; first <= f.p.batch; first += 32) {
      const int b = first + thread;
      int units = b <= f.p.batch ? before[b] : 0;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int from = __shfl_sync(0xffffffffu, units, max(thread - distance, 0));
        if (thread >= distance) units += from;
      }
      if (b <= f.p.batch) before[b] = sum + units;
      sum += __shfl_sync(0xffffffffu, units, 31);
    }
    __syncwarp();  // lane 0 reads what all have added up
    if (thread == 0) {
      StreamShare* const own = memory.share();
      const int share = static_cast<int>(blockIdx.x) / f.part_lanes;
      own->heads = heads;
      own->ctas = static_cast<int>(gridDim.x) / f.part_lanes;
      own->lane = static_cast<int>(blockIdx.x) - share * f.part_lanes;
      const tile::StreamK stream = stream_of(f, memory);
      own->units = share < stream.shares() ? stream.first_unit(share + 1) - stream.first_unit(share) : 0;
      if (own->units > 0) own->first = stream.first_tile(share);
    }
  }
}

/// Calls visit(tile, where its sequence lies, first row, blocks) for what this CTA's share has of each tile. The tile's `split` is
/// where its part goes, or -1: o and lse themselves.
template <class Memory, class Visit>
__device__ __forceinline__ void for_each_tile_of_share(const ForwardArgs& f, const Memory& memory,
                                                       const Visit& visit) {
  const tile::StreamK stream = stream_of(f, memory);
  int left = memory.share()->units;
  if (left == 0) return;
  tile::StreamTile of_share = memory.share()->first;
  int batch = -1;
  tile::SequenceSpan span;
  tile::KvBlocks blocks;
#pragma unroll 1
  while (true) {
    if (of_share.batch != batch) {
      batch = of_share.batch;
      span = tile::cached_span(f.p, batch);
      blocks = key_blocks_of_rows(f, span, 0, span.used_q * packed_heads(f), Memory::kConfig.tile_n);
    }
    tile::WorkTile work;
    work.head = of_share.head * f.part_lanes + memory.share()->lane;
    work.batch = batch;
    work.split = of_share.whole() ? -1 : tile::StreamK::part(static_cast<int>(blockIdx.x), of_share);
    visit(work, span, 0, tile::units_of(blocks, of_share.begin, of_share.end));
    left -= of_share.end - of_share.begin;
    if (left == 0) return;
    of_share = stream.next_tile(of_share, left);
  }
}

/// Barrier of the 128 threads that merge.
inline constexpr int kMergeBarrier = 1;

/// The parts of a tile that is cut.
struct TileParts {
  int first_cta, lanes, count;
  __device__ __forceinline__ int at(int n) const { return tile::StreamK::part_of_tile(first_cta, lanes, n); }
};
template <class Memory>
__device__ __forceinline__ TileParts parts_of_tile(const ForwardArgs& f, const Memory& memory,
                                                   const tile::WorkTile& work) {
  const tile::StreamK stream = stream_of(f, memory);
  const int lane = memory.share()->lane, units = stream.units_of_tile(work.batch);
  const int first = stream.before[work.batch] + (work.head - lane) / f.part_lanes * units;
  const int first_share = stream.share_of(first);
  return {first_share * f.part_lanes + lane, f.part_lanes,
          stream.share_of(first + units - 1) - first_share + 1};
}

/// Sets the flag of a part, and says whether all parts of its tile are there and this CTA is to merge them: 128 threads.
template <class Memory>
__device__ __forceinline__ bool publish_part(const ForwardArgs& f, const Memory& memory, int part,
                                             const TileParts& parts, int thread) {
  memory.wait_for_part(part);
  if (thread < 32) {
    if (thread == 0) ptx::st_release(f.part_flags + part, f.part_tag);
    __syncwarp();     // every lane looks behind the flag
    ptx::fence_sc();  // of two CTAs that set flags one sees the other's
    bool all = true;
    for (int n = thread; n < parts.count; n += 32)
      all = all && ptx::ld_acquire(f.part_flags + parts.at(n)) == f.part_tag;
    all = __all_sync(0xffffffffu, all);
    if (thread == 0)
      *memory.all_parts() = all && ptx::take_flag(f.part_flags + parts.at(0), f.part_tag) ? 1 : 0;
  }
  ptx::barrier_wait(kMergeBarrier, 128);  // the answer is there
  const bool all = *memory.all_parts() != 0;
  ptx::barrier_wait(kMergeBarrier, 128);  // everyone has it
  return all;
}

/// Publishes the parts of this CTA's share, and merges tiles whose last part it was: 128 threads.
template <class T, class Memory>
__device__ __forceinline__ void merge_share(const ForwardArgs& f, const Memory& memory, int thread) {
  if (f.num_splits == 1) return;
  const int heads = packed_heads(f);
  for_each_tile_of_share(
      f, memory, [&](const tile::WorkTile& work, const tile::SequenceSpan& span, int, const tile::KvBlocks&) {
        if (work.split < 0) return;
        const TileParts parts = parts_of_tile(f, memory, work);
        if (!publish_part(f, memory, work.split, parts, thread)) return;
#pragma unroll 1
        for (int row = thread / 32; row < span.used_q * heads; row += 4) {
          const int query = query_of_row(f, row), head = work.head * heads + row - query * heads;
          const auto part_at = [&](int n) { return int64_t{parts.at(n)} * f.part_rows + row; };
          constexpr int kInFlight = 16;
          MergeParts<T, kInFlight, decltype(part_at)>(f, parts.count, part_at)
              .write(work.batch, head, span.row_q, query);
        }
        for (int n = thread; n < parts.count; n += 128) f.part_flags[parts.at(n)] = 0;
      });
}

/// Zeros and -inf for the queries that take no part: one warp of each CTA, for every CTA-th head of a sequence.
template <class T>
__device__ __forceinline__ void clear_unused_of_share(const tile::AttentionParams& p) {
  if (p.seqused_q == nullptr && p.cu_seqlens_q == nullptr) return;
  for (int plane = static_cast<int>(blockIdx.x); plane < p.batch * p.heads_q;
       plane += static_cast<int>(gridDim.x)) {
    const int batch = plane / p.heads_q;
    clear_unused<T>(p, tile::cached_span(p, batch), batch, plane % p.heads_q, 0, 1);
  }
}

}  // namespace fovea::cuda
