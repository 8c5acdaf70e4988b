// The forward on Hopper: TMA, wgmma, specialised warpgroups.
//
//   S = Q K^T        P = exp2(scale log2(e) S - m)        O = P V / l        lse = m + log l
//
// A CTA stays on its SM and takes tile after tile. Threads of its first warpgroup, the producers, find out
// what the next tile is and order its loads; each other warpgroup, a consumer, owns 64 rows of queries and
// walks over the blocks of kTileN keys that they see, from the last to the first. Scores, weights and
// outputs of a row never leave the four lanes that hold it. While one consumer takes exponentials, the
// tensor cores belong to the others:
//
//   queued      Q K(n) is queued behind P V(n + 1), and the softmax waits for both.
//   overlapped  softmax(n) goes on while the consumer's own P V(n + 1) runs, too.
//
// The maximum m of a row is raised only where a weight would exceed 2^kLazyGrowthLog2, for all rows of a
// warp at once (softmax does not depend on the maximum taken; the idea: FlashAttention-4). The queued
// schedule goes on from there: where each row has a maximum (in its first block a guess from some of the
// keys), exponentials are taken against that before anybody knows the block's own; what they exceed it by is
// read off the packed weights, half as many operations, and not on the way to P V. A block that exceeds the
// bound is done again from S, still in registers.
//
// Shared memory (fwd_sm90_config.cuh)
//   Q 64 rows a consumer; K and V `stages` blocks each; O where there is room, else in place of Q. All in
//   strips of 64 columns: rows of 128 bytes, swizzled as TMA's and wgmma's 128-byte mode. With row_sum_in_mma
//   each stage of V has one more strip, of ones.
// Registers of a consumer's thread
//   acc_o Dv / 2, acc_s kTileN / 2, P kTileN / 4, and about 30 more, of 65536 / threads, and what setmaxnreg
//   takes from the producers.
// Barriers                                                             who arrives -> who waits
//   full_q[w]            the place and Q of consumer w are there       planner w, bytes -> consumer w
//   empty_q[w]           nobody reads Q, nor O in its place            4 warps of w -> planner w
//   full_k[s] full_v[s]  the block is there                            loader, bytes -> consumers
//   empty_k[s] empty_v[s]  nobody reads the block any more             4 warps a consumer -> loader
//   full_next[t] empty_next[t]  the index of the next tile is there, or read   loader -> planners, and back
//   turn 1 + w           products of the consumer before are done      consumer w - 1 -> consumer w
//                        (queued), or all of them queued (overlapped)
//   own 8 + w            no warp of w reads Q: O may take its place    warps of w
//
// NaN and Inf in the V of keys that a row does not see: their weights are 0, and 0 * NaN is NaN. So a warp
// with any output that is not finite computes its rows again without matrix products (warp/exact_row.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/fwd_sm90_epilogue.cuh"
#include "cuda/kernels/fwd_sm90_producers.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/online_rows.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    fwd_sm90(const __grid_constant__ TmaForwardArgs args) {
  using T = typename Instance::Element;
  using Operand = std::conditional_t<std::is_same_v<T, float>, __nv_bfloat16, T>;  // of products
  using Memory = FwdSm90Memory<Instance>;
  using ptx::WgmmaMajor;
  using ptx::WgmmaStart;
  constexpr int kTileN = Memory::kConfig.tile_n, kRows = Memory::kConfig.kRows,
                kConsumers = Memory::kConfig.consumers;
  constexpr int kDim = Memory::kConfig.head_dim, kDimV = Memory::kConfig.head_dim_v,
                kStages = Memory::kConfig.stages;
  constexpr int kParts = Memory::kConfig.parts, kStripsQ = Memory::kConfig.strips(kDim),
                kStripsV = Memory::kConfig.strips(kDimV);
  static_assert((kParts == 3) == std::is_same_v<T, float>);
  constexpr int kProducts = products_of_parts(kParts);
  constexpr int kStrip = Memory::kConfig.kStrip, kRowBytes = Memory::kConfig.kRowBytes;
  static_assert(!Memory::kConfig.overlapped || !Memory::kConfig.q_in_registers);
  constexpr int kColumnsO =
      kDimV + (Memory::kConfig.row_sum_in_mma ? 8 : 0);  ///< of P V: the sum stands in the last eight
  static_assert(sizeof(FwdSm90Place) <= Memory::kConfig.kPlaceBytes && kTileN % 16 == 0 && kDim % 16 == 0 &&
                kDimV % 16 == 0);
  static_assert(Memory::kConfig.shared_bytes() <= Memory::kConfig.kMostShared / Memory::kConfig.min_ctas);
  static_assert(!Memory::kConfig.row_sum_in_mma || kDimV % kStrip == 0, "ones have a strip of their own");

  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory memory{ptx::shared_address(shared), shared};

  const ForwardArgs& f = args.f;
  const tile::AttentionParams& p = f.p;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // uniform, as the compiler may then know
  if (thread == 0) {
    for (int w = 0; w < kConsumers; ++w) {
      ptx::mbarrier_init(memory.full_q(w), 1);
      ptx::mbarrier_init(memory.empty_q(w), 4);
    }
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(memory.full_k(s), 1);
      ptx::mbarrier_init(memory.full_v(s), 1);
      ptx::mbarrier_init(memory.empty_k(s), 4 * kConsumers);
      ptx::mbarrier_init(memory.empty_v(s), 4 * kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(memory.full_next(i), 1);
      ptx::mbarrier_init(memory.empty_next(i), Memory::kConfig.planners());
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Memory::kConfig.row_sum_in_mma) {
    constexpr uint32_t kOnePair = std::is_same_v<Operand, __half> ? 0x3c003c00u : 0x3f803f80u;
    for (int s = 0; s < kStages; ++s) {
      for (int i = thread; i < Memory::kConfig.ones_bytes() / 4; i += Memory::kConfig.threads())
        ptx::st_shared_4(memory.v(s) + Memory::kConfig.v_bytes() + 4 * i, kOnePair);
    }
    ptx::async_proxy_fence();
  }
  __syncthreads();  // the barriers are ready, and the ones

  if (warpgroup == 0) {
    // --- producers ---
    ptx::setmaxnreg_dec<Memory::kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (lane != 0) return;
    if (role == 0) {
      fwd_sm90_load_keys<Instance>(args, memory);
    } else if (role <= Memory::kConfig.planners()) {
      fwd_sm90_plan<Instance>(args, memory, role - 1);
    }
    return;
  }

  // --- consumers ---
  ptx::setmaxnreg_inc<Memory::kConfig.consumer_registers()>();
  const int w = warpgroup - 1;
  const bool leader = lane == 0;  // of its warp
  // Asked for again where they are used, rarely: registers are what limits this kernel.
  const auto warp_of_consumer = [] { return static_cast<int>(ptx::thread_index() / 32 % 4); };
  const auto lane_of_warp = [] { return static_cast<int>(ptx::thread_index() % 32); };
  const uint32_t sQ = memory.q(w);
  const uint64_t q_descriptor = tile::wgmma_k_major(sQ, tile::SwizzleMode::k128).encode();
  const uint64_t k_descriptor = tile::wgmma_k_major(memory.k(0), tile::SwizzleMode::k128).encode();
  const uint64_t v_descriptor = tile::wgmma_mn_major(memory.v(0), tile::SwizzleMode::k128, kTileN).encode();

  float acc_o[kColumnsO / 2];
  // wgmma cuts sums off at the 24th bit or so: over thousands of keys that is more than float32 may lose, so
  // there each block has a sum of its own.
  constexpr bool kOwnSums = kParts > 1;
  static_assert(!kOwnSums || !Memory::kConfig.overlapped);
  float acc_block[kOwnSums ? kColumnsO / 2 : 1] = {};
  uint32_t weights[kParts][kTileN / 16][4] = {};  // P as operand A
  uint32_t q_fragments[Memory::kConfig.q_in_registers ? kDim / 16 : 1][4];
  using Rows = OnlineRows<Operand, kTileN, !Memory::kConfig.row_sum_in_mma, kParts>;
  Rows rows{.scale_log2 = args.scale_log2};

  // For the same reason the mainloop reads its place from shared memory.
  const FwdSm90Place* here = nullptr;
  StageRing<kStages> now, next;  ///< of the block whose P V comes, and of the one whose Q K comes

  /// Of the result of a shuffle the compiler knows that all lanes have the same: descriptors are then made in
  /// uniform registers, and products follow each other without a move between them.
  const auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };
  /// S = Q K^T, queued.
  const auto issue_scores = [&](float(&acc_s)[kTileN / 2], int stage_of_lane) {
    const int stage = uniform(stage_of_lane);
    const uint64_t k = k_descriptor + stage * tile::wgmma_start_step(Memory::kConfig.k_bytes());
    using Product = ptx::Wgmma<kTileN>;
#pragma unroll
    for (int i = 0; i < kProducts * kDim / 16; ++i) {
      const PartPair part = part_pair(kParts, i / (kDim / 16));
      const int step = i % (kDim / 16), inside = step % 4 * 32;
      const uint64_t a =
          q_descriptor + tile::wgmma_start_step((part.a * kStripsQ + step / 4) * kRows * kRowBytes + inside);
      const uint64_t b =
          k + tile::wgmma_start_step((part.b * kStripsQ + step / 4) * kTileN * kRowBytes + inside);
      if constexpr (Memory::kConfig.q_in_registers) {
        if (i == 0) {
          Product::template rs<Operand, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, q_fragments[0], b);
        } else {
          Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, q_fragments[step], b);
        }
      } else {
        if (i == 0) {
          Product::template ss<Operand, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, a, b);
        } else {
          Product::template ss<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, a, b);
        }
      }
    }
    ptx::wgmma_commit();
  };
  /// O += P V, or O = P V, queued.
  const auto issue_outputs = [&](int stage_of_lane, bool accumulates) {
    const int stage = uniform(stage_of_lane);
#pragma unroll
    for (int i = 0; i < kProducts * kTileN / 16; ++i) {
      const PartPair part = part_pair(kParts, i / (kTileN / 16));
      const int step = i % (kTileN / 16);
      const uint64_t b = v_descriptor + stage * tile::wgmma_start_step(Memory::kConfig.v_stage_bytes()) +
                         tile::wgmma_start_step((part.b * kStripsV * kTileN + step * 16) * kRowBytes);
      using Product = ptx::Wgmma<kColumnsO>;
      if constexpr (!kOwnSums) {
        Product::template rs_mn_if<Operand>(i > 0 || accumulates, acc_o, weights[part.a][step], b);
      } else if (i == 0) {
        Product::template rs<Operand, WgmmaStart::kZero, WgmmaMajor::kMN>(acc_block, weights[part.a][step],
                                                                          b);
      } else {
        Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(acc_block,
                                                                                weights[part.a][step], b);
      }
    }
    ptx::wgmma_commit();
  };
  /// After a wait for products or __syncwarp(): a lane that has not seen the phase that it waits for would
  /// miss it.
  const auto release = [&](uint32_t barrier) {
    if (leader) ptx::mbarrier_arrive(barrier);
  };
  const auto wait_for_turn = [&] {
    if constexpr (Memory::kConfig.take_turns) ptx::barrier_wait(1 + w, 256);
  };
  const auto pass_turn = [&] {
    if constexpr (Memory::kConfig.take_turns) ptx::barrier_arrive(1 + (w + 1 == kConsumers ? 0 : w + 1), 256);
  };
  const auto mask = [&](float(&acc_s)[kTileN / 2], int n) {
    const int lane = lane_of_warp(), lane_row = 16 * warp_of_consumer() + lane / 4,
              lane_column = 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = query_of_row(f, here->first_row + lane_row + 8 * half);
      const tile::Span32 seen = tile::keys_of(p, here->span, i);
      const int first_key = n * kTileN + lane_column;
#pragma unroll
      for (int x = 0; x < kTileN / 4; ++x) {
        const int j = first_key + x / 2 * 8 + x % 2;
        if (j < seen.begin || j >= seen.end) acc_s[x / 2 * 4 + 2 * half + x % 2] = -INFINITY;
      }
    }
  };
  const auto is_masked = [&](int n) { return n < here->blocks.full_begin || n >= here->blocks.full_end; };
  /// From Q K to scores.
  const auto terms = [&](float(&acc_s)[kTileN / 2], int n, bool masked) {
    if constexpr (Memory::kConfig.softcap) {
#pragma unroll
      for (float& s : acc_s) s = p.softcap * tanh_of(s * (p.scale / p.softcap));
    }
    if (masked) mask(acc_s, n);
  };
  /// From Q K to weights; whether maxima were raised.
  const auto weigh = [&](float(&acc_s)[kTileN / 2], int n, bool first, bool masked) {
    terms(acc_s, n, masked);
    if (first) rows.guess(acc_s);
    // A row may have seen no key so far.
    const bool known = first || masked ? rows.all_have_a_maximum() : true;
    if (known && rows.weigh_stale(acc_s, weights)) return false;
    const bool raised = rows.raise(acc_s);
    rows.weigh(acc_s);
    rows.pack_weights(acc_s, weights);
    return raised;
  };
  const auto rescale = [&] {
#pragma unroll
    for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] *= rows.factor[i / 2 % 2];
  };

  const auto load_fragments = [&] {
    if constexpr (Memory::kConfig.q_in_registers) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int lane = lane_of_warp(), r = 16 * warp_of_consumer() + lane % 16,
                  chunk = step % 4 * 2 + lane / 16;
        ptx::ldmatrix_x4(q_fragments[step],
                         sQ + step / 4 * kRows * kRowBytes + r * kRowBytes + (chunk ^ r % 8) * 16);
      }
    }
  };
  const auto write = [&](uint32_t tile, const Rows& rows_of_tile) {
    fwd_sm90_write<Instance>(args, *memory.place(w, tile), acc_o, rows_of_tile);
    __syncwarp();  // no lane reads the place of that tile any more
  };
  /// Of blocks that other consumers need.
  const auto skip = [&](int blocks) {
    for (int i = 0; i < blocks; ++i) {
      wait_for_turn();
      pass_turn();
      next.advance();
    }
  };

  // --- mainloop: a turn a block. P V of one, Q K of the next, then the weights of that ---
  if (Memory::kConfig.take_turns && w == kConsumers - 1) pass_turn();
  uint32_t tiles = 0;              ///< begun
  int n = -1, begin = 0;           ///< the next block, the last one of its tile
  bool owed = false, adds = false;  ///< P V of the block before: there is one, and it is not its tile's first
  for (;; --n) {
    const bool first = n < begin;
    if (first) {
      if (tiles > 0) skip(uniform(begin - here->load_begin));
      ptx::mbarrier_wait(memory.full_q(w), tiles & 1);
      here = memory.place(w, tiles);
      load_fragments();
      begin = uniform(here->blocks.begin);
      n = uniform(here->blocks.end) - 1;
      skip(uniform(here->load_end) - 1 - n);
    }
    const bool exists = n >= begin;  // else no key is seen: a block that is masked out stands for none
    if (owed) ptx::mbarrier_wait(memory.full_v(now.stage), now.phase);
    if (exists) ptx::mbarrier_wait(memory.full_k(next.stage), next.phase);
    const int stage_v = uniform(now.stage), stage_k = uniform(next.stage);
    float acc_s[kTileN / 2];
    if (exists) wait_for_turn();
    ptx::wgmma_fence();
    if constexpr (Memory::kConfig.overlapped) {
      issue_scores(acc_s, stage_k);
      issue_outputs(stage_v, adds);
      if (exists) pass_turn();
    } else {
      issue_outputs(stage_v, adds);
      issue_scores(acc_s, stage_k);
    }
    const bool masked = is_masked(n);
    ptx::wgmma_wait<Memory::kConfig.overlapped ? 1 : 0>();  // Q K
    if (!Memory::kConfig.overlapped && exists) pass_turn();
    ptx::wgmma_done(acc_s);
    if (exists) release(memory.empty_k(next.stage));

    const Rows before = rows;
    bool raised = false;
    if constexpr (Memory::kConfig.overlapped) {
      if (first) rows.start();
      terms(acc_s, n, masked);
      raised = rows.raise(acc_s);
      rows.weigh(acc_s);
      ptx::wgmma_wait<0>();  // P V of the block before
    }
    ptx::wgmma_done(acc_o);
    if (owed) {
      release(memory.empty_v(now.stage));
      if constexpr (kOwnSums) {
        ptx::wgmma_done(acc_block);
#pragma unroll
        for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] += acc_block[i];
      }
    }
    if (first) {
      if (tiles > 0) write(tiles - 1, before);
      if (here->last) break;
      ++tiles;
      if constexpr (kOwnSums) {
#pragma unroll
        for (float& x : acc_o) x = 0.0f;
      }
    }
    if (Memory::kConfig.q_in_registers ? first : n <= begin) release(memory.empty_q(w));
    if constexpr (Memory::kConfig.overlapped) {
      rows.pack_weights(acc_s, weights);  // nobody reads the registers of P any more
    } else {
      if (first) rows.start();
      raised = weigh(acc_s, n, first, masked);
    }
    if (raised && !first) rescale();
    owed = exists;
    adds = !first;
    now = next;
    if (exists) next.advance();
  }
  if (Memory::kConfig.take_turns && w == 0) ptx::barrier_wait(1, 256);  // the turn that nobody takes any more
}

}  // namespace fovea::cuda
