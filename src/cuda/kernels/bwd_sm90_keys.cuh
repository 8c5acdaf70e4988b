// What the consumers of bwd_sm90 and of bwd_sm90_bf16x3 have in common: the tile, statistics of its queries, the mask.
#pragma once

#include <cstdint>

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/wgmma_map.hpp"
#include "tile/wgmma_strips.hpp"

namespace fovea::cuda {

/// A warpgroup that works on scores of 64 of the tile's keys.
template <class Instance>
struct BwdSm90Keys : BwdSm90Warpgroup<Instance> {
  using Base = BwdSm90Warpgroup<Instance>;
  using Base::args, Base::memory, Base::lane, Base::uniform, Base::warp;
  using Work = BwdSm90Work;
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  static constexpr int kM = kConfig.tile_m, kN = kConfig.tile_n(), kD = kConfig.head_dim,
                       kDv = kConfig.head_dim_v;
  using KStrips = tile::WgmmaStrips<kConfig.k_strip>;
  using Strips = tile::WgmmaStrips<kConfig.strip>;  ///< of q, v and dO
  using Scores = float[kM / 2];                     ///< (64 keys, kM queries): rows are keys

  /// Which of this lane's pairs of columns, 8 t and 8 t + 1, see its row of this half: bits t and 16 + t. `group`: which 64 of
  /// the tile's keys are this warpgroup's.
  __device__ __forceinline__ uint32_t seen(const Work& work, int group, int n, int half) const {
    tile::SequenceSpan span;
    span.used_q = work[BwdSm90Work::kUsedQ], span.used_k = work[BwdSm90Work::kUsedK];
    const int first_query = n * kM + 2 * (lane() % 4);
    const int j = work[BwdSm90Work::kFirstKey] + group * 64 + warp() * 16 + lane() / 4 + 8 * half;
    const tile::Span32 queries =
        j < span.used_k ? tile::queries_of_any(args.b.p, span, j, j + 1) : tile::Span32{};
    return below(queries.end - first_query) & ~below(queries.begin - first_query);
  }
  /// Of these columns those below `column`.
  __device__ __forceinline__ static uint32_t below(int column) {
    static_assert(kM <= 128);
    const int c = max(0, min(column, kM));
    return ((1u << (c + 7) / 8) - 1) | ((1u << (c + 6) / 8) - 1) << 16;
  }
  /// Zero for pairs that are not seen, whatever they hold.
  __device__ __forceinline__ void mask(Scores& x, const Work& work, int group, int n) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t kept = seen(work, group, n, half);
#pragma unroll
      for (int t = 0; t < kM / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if ((kept >> (16 * e + t) & 1) == 0) x[4 * t + 2 * half + e] = 0.0f;
      }
    }
  }
  /// lse or delta of some of the queries of a step, those of this lane's columns.
  struct Statistics {
    static constexpr int kQueries = kConfig.statistics;
    uint2 of[kQueries / 8];
    __device__ __forceinline__ void read(uint32_t from) {
#pragma unroll
      for (int t = 0; t < kQueries / 8; ++t) of[t] = ptx::ld_shared_8(from + lane() % 4 * 8 + t * 32);
    }
    /// Of elements i and i + 1 of a thread's scores, i even, both among those that were read.
    __device__ __forceinline__ float2 operator[](int i) const {
      return {__uint_as_float(of[i / 4].x), __uint_as_float(of[i / 4].y)};
    }
    /// The same among all of the step, whose statistics are at `all`: reads the next where these begin.
    __device__ __forceinline__ float2 at(int i, uint32_t all) {
      constexpr int kElements = kQueries / 2;
      if (i > 0 && i % kElements == 0) read(all + 2 * i * 4);
      return (*this)[i % kElements];
    }
  };
  /// A tile of keys, and the blocks of queries that see any of them; uniform.
  struct Tile {
    Work work;
    uint32_t number;  ///< of the CTA's tiles
    int steps;        ///< -1: there is no tile any more
    int m_begin, m_end, full_begin, full_end;
    int last_until;  ///< the block is the last to add to dQ of the queries before; the consumer of bwd_sm90 sets it
  };
  /// Waits for tile `number` of the CTA.
  __device__ __forceinline__ Tile read_tile(uint32_t number) const {
    ptx::mbarrier_wait(memory.full_work(number), number / 2 & 1);
    // Each lane leaves the loop of a wait for itself. Behind an .aligned instruction the compiler takes the warp for
    // whole again.
    ptx::wgmma_fence();
    const Work work = memory.work(number);
    return {work,
            number,
            uniform(work[Work::kSteps]),
            uniform(work[Work::kMBegin]),
            uniform(work[Work::kMEnd]),
            uniform(work[Work::kFullBegin]),
            uniform(work[Work::kFullEnd])};
  }
};

}  // namespace fovea::cuda
