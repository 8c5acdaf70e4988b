// What the consumers of bwd_sm90 and of bwd_sm90_bf16x3 have in common: the tile, statistics of its queries, the mask.
#pragma once

#include <cstdint>

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/wgmma_map.hpp"

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
  static constexpr int kRowBytes = kConfig.kRowBytes;
  static constexpr auto kSwizzle = tile::SwizzleMode::k128;
  using Scores = float[kM / 2];  ///< (64 keys, kM queries): rows are keys

  /// Zero for pairs that are not seen, whatever they hold. `group`: which 64 of the tile's keys are this warpgroup's.
  __device__ __forceinline__ void mask(Scores& x, const Work& work, int group, int n) const {
    const tile::AttentionParams& p = args.b.p;
    tile::SequenceSpan span;
    span.used_q = work[BwdSm90Work::kUsedQ], span.used_k = work[BwdSm90Work::kUsedK];
    const int first_query = n * kM + 2 * (lane() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = work[BwdSm90Work::kFirstKey] + group * 64 + warp() * 16 + lane() / 4 + 8 * half;
      const tile::Span32 seen = j < span.used_k ? tile::queries_of_any(p, span, j, j + 1) : tile::Span32{};
      const uint32_t kept = below(seen.end - first_query) & ~below(seen.begin - first_query);
#pragma unroll
      for (int t = 0; t < kM / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if ((kept >> (2 * t + e) & 1) == 0) x[4 * t + 2 * half + e] = 0.0f;
      }
    }
  }
  /// Bit 2 t + e for each of this lane's columns 8 t + e below `column`: a test of a bit is half of what comparing takes.
  __device__ __forceinline__ static uint32_t below(int column) {
    static_assert(kM <= 128);
    const int c = max(0, min(column, kM)), bits = c / 8 * 2 + min(c % 8, 2);
    return bits == 32 ? ~0u : (1u << bits) - 1;
  }
  /// lse or delta of kQueries of the queries of a step, those of this lane's columns.
  template <int kQueries>
  struct Statistics {
    uint2 of[kQueries / 8];
    __device__ __forceinline__ void read(uint32_t from) {
#pragma unroll
      for (int t = 0; t < kQueries / 8; ++t) of[t] = ptx::ld_shared_8(from + lane() % 4 * 8 + t * 32);
    }
    /// Of an even element of a thread's scores, and of the next.
    __device__ __forceinline__ float2 operator[](int i) const {
      return {__uint_as_float(of[i / 4].x), __uint_as_float(of[i / 4].y)};
    }
  };
  /// A tile of keys, and the blocks of queries that see any of them; uniform.
  struct Tile {
    Work work;
    uint32_t number;  ///< of the CTA's tiles
    int steps;        ///< -1: there is no tile any more
    int m_begin, m_end, full_begin, full_end;
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
