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
// warp at once (softmax does not depend on the maximum taken; the idea: FlashAttention-4). And it may be
// stale: where each row has a maximum (in its first block a guess from some of the keys), exponentials are
// taken against that before anybody knows the block's own. Whether they grew too large is seen from their sum
// (kMostSum), or, where tensor cores add them up, from the packed weights. Queued, such a block is done again
// from S, still in registers; overlapped, weights have taken the place of S, and are made smaller themselves.
//
// Shared memory (fwd_sm90_config.cuh)
//   Q 64 rows a consumer; K and V `stages` blocks each. All in strips of 64 columns: rows of 128 bytes,
//   swizzled as TMA's and wgmma's 128-byte mode. With row_sum_in_mma each stage of V has one more strip, of
//   ones.
// Registers of a consumer's thread
//   acc_o Dv / 2, acc_s kTileN / 2, P kTileN / 4, and about 30 more, of 65536 / threads, and what setmaxnreg
//   takes from the producers.
// Barriers                                                             who arrives -> who waits
//   full_q[w]            the place and Q of consumer w are there       planner w, bytes -> consumer w
//   empty_q[w]           nobody reads Q any more                        4 warps of w -> planner w
//   full_k[s] full_v[s]  the block is there                            loader, bytes -> consumers
//   empty_k[s] empty_v[s]  nobody reads the block any more             4 warps a consumer -> loader
//   full_next[t] empty_next[t]  the index of the next tile is there, or read   loader -> planners, and back
//   turn 1 + w           products of the consumer before are done      consumer w - 1 -> consumer w
//                        (queued), or all of them queued (overlapped)
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
#include "cuda/ptx/special.cuh"
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
  constexpr FwdSm90Config kConfig = Instance::kConfig;
  using ptx::WgmmaMajor;
  using ptx::WgmmaStart;
  constexpr int kTileN = kConfig.tile_n, kRows = kConfig.kRows, kConsumers = kConfig.consumers;
  constexpr int kDim = kConfig.head_dim, kDimV = kConfig.head_dim_v, kStages = kConfig.stages;
  constexpr int kStripsQ = kConfig.strips(kDim), kStripsV = kConfig.strips(kDimV), kParts = kConfig.parts;
  static_assert((kParts == 3) == std::is_same_v<T, float>);
  constexpr int kProducts = products_of_parts(kParts);
  constexpr int kStrip = kConfig.kStrip, kRowBytes = kConfig.kRowBytes;
  constexpr int kColumnsO =
      kDimV + (kConfig.row_sum_in_mma ? 8 : 0);  ///< of P V: the sum stands in the last eight
  static_assert(sizeof(FwdSm90Place) <= kConfig.kPlaceBytes && kTileN % 16 == 0 && kDim % 16 == 0 &&
                kDimV % 16 == 0);
  static_assert(kConfig.shared_bytes() <= kConfig.kMostShared / kConfig.min_ctas);
  static_assert(!kConfig.row_sum_in_mma || kDimV % kStrip == 0, "ones have a strip of their own");

  extern __shared__ __align__(1024) unsigned char shared[];
  const Memory memory{ptx::shared_address(shared), shared};

  const ForwardArgs& f = args.f;
  const tile::AttentionParams& p = f.p;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // uniform, as the compiler may then know
  if (thread == 0) memory.init_barriers();
  if constexpr (kConfig.row_sum_in_mma)
    memory.fill_ones(thread, std::is_same_v<Operand, __half> ? 0x3c003c00u : 0x3f803f80u);
  __syncthreads();  // the barriers are ready, and the ones

  if (warpgroup == 0) {
    // --- producers ---
    ptx::setmaxnreg_dec<kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (lane != 0) return;
    if (role == 0) {
      fwd_sm90_load_keys<Instance>(args, memory);
    } else if (role <= kConfig.planners()) {
      fwd_sm90_plan<Instance>(args, memory, role - 1);
    }
    return;
  }

  // --- consumers ---
  ptx::setmaxnreg_inc<kConfig.consumer_registers()>();
  const int w = warpgroup - 1;
  const bool leader = lane == 0;  // of its warp
  // Asked for again where they are used, rarely: registers are what limits this kernel.
  const auto warp_of_consumer = [] { return static_cast<int>(ptx::thread_index() / 32 % 4); };
  const auto lane_of_warp = [] { return static_cast<int>(ptx::thread_index() % 32); };
  const uint32_t sQ = memory.q(w);

  float acc_o[kColumnsO / 2];
  // wgmma cuts sums off at the 24th bit or so: over thousands of keys that is more than float32 may lose, so
  // there each block has a sum of its own.
  constexpr bool kOwnSums = kParts > 1;
  static_assert(!kOwnSums || !kConfig.overlapped);
  float acc_block[kOwnSums ? kColumnsO / 2 : 1];
  uint32_t weights[kParts][kTileN / 16][4];  // P as operand A
  uint32_t q_fragments[kConfig.q_in_registers ? kDim / 16 : 1][4];
  using Rows = OnlineRows<Operand, kTileN, !kConfig.row_sum_in_mma, kParts>;
  Rows rows{.scale_log2 = args.scale_log2};

  const FwdSm90Place* here = nullptr;
  StageRing<kStages> ring;

  /// Of the result of a shuffle the compiler knows that all lanes have the same. What loops are bounded by
  /// has to be such: then their counters, the ring, and the descriptors made of it are in uniform registers,
  /// products follow each other without a move between them, and no branch has a place where lanes meet
  /// again.
  const auto uniform = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };
  // In units of 16 bytes; but for the shuffle it would be made anew between each wait and its product.
  const int base16 = uniform(static_cast<int>(memory.base / 16));
  /// Of consumer or stage number `i`, each of so many bytes; `first` is as if shared memory began at 0.
  const auto descriptor = [&](const tile::WgmmaDescriptor& first, int i, int bytes) {
    const uint64_t encoded = first.encode();
    const int start = base16 + i * static_cast<int>(tile::wgmma_start_step(bytes));
    return (encoded >> 32 << 32) | (static_cast<uint32_t>(encoded) + static_cast<uint32_t>(start));
  };
  /// S = Q K^T, queued.
  const auto issue_scores = [&](float(&acc_s)[kTileN / 2], int stage) {
    const uint64_t q = descriptor(Memory::first_q(), w, kConfig.q_bytes()),
                   k = descriptor(Memory::first_k(), stage, kConfig.k_bytes());
    using Product = ptx::Wgmma<kTileN>;
#pragma unroll
    for (int i = 0; i < kProducts * kDim / 16; ++i) {
      const PartPair part = part_pair(kParts, i / (kDim / 16));
      const int step = i % (kDim / 16), inside = step % 4 * 32;
      const uint64_t a =
          q + tile::wgmma_start_step((part.a * kStripsQ + step / 4) * kRows * kRowBytes + inside);
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
  /// O += P V, queued.
  const auto issue_outputs = [&](int stage) {
    const uint64_t v = descriptor(Memory::first_v(), stage, kConfig.v_stage_bytes());
#pragma unroll
    for (int i = 0; i < kProducts * kTileN / 16; ++i) {
      const PartPair part = part_pair(kParts, i / (kTileN / 16));
      const int step = i % (kTileN / 16);
      const uint64_t b = v + tile::wgmma_start_step((part.b * kStripsV * kTileN + step * 16) * kRowBytes);
      using Product = ptx::Wgmma<kColumnsO>;
      if constexpr (!kOwnSums) {
        Product::template rs<Operand, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(acc_o, weights[part.a][step],
                                                                                b);
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
  /// After the wait for them.
  const auto outputs_done = [&] {
    ptx::wgmma_done(acc_o);
    if constexpr (kOwnSums) {
      ptx::wgmma_done(acc_block);
#pragma unroll
      for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] += acc_block[i];
    }
  };
  /// After a wait for products or __syncwarp(): a lane that has not seen its phase yet would miss it.
  const auto release = [&](uint32_t barrier) {
    if (leader) ptx::mbarrier_arrive(barrier);
  };
  const auto wait_for_turn = [&] {
    if constexpr (Memory::kConfig.take_turns) ptx::barrier_wait(1 + w, 256);
  };
  const auto pass_turn = [&] {
    if constexpr (Memory::kConfig.take_turns) ptx::barrier_arrive(1 + (w + 1 == kConsumers ? 0 : w + 1), 256);
  };
  /// Blocks that other consumers need. Not waited for, the arrivals could count for an earlier block.
  const auto skip = [&] {
    wait_for_turn();
    pass_turn();
    ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
    ptx::mbarrier_wait(memory.full_v(ring.stage), ring.phase);
    __syncwarp();  // all lanes have seen the phases
    release(memory.empty_k(ring.stage));
    release(memory.empty_v(ring.stage));
    ring.advance();
  };
  const auto mask = [&](float(&acc_s)[kTileN / 2], int n) {
    const int lane = lane_of_warp(), lane_row = 16 * warp_of_consumer() + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = query_of_row(f, here->first_row + lane_row + 8 * half);
      const tile::Span32 seen = tile::keys_of(p, here->span, i);
      Rows::mask(acc_s, half, n * kTileN + 2 * (lane % 4), seen.begin, seen.end);
    }
  };
  /// From Q K to scores.
  const auto terms = [&](float(&acc_s)[kTileN / 2], int n, bool masked) {
    if constexpr (Memory::kConfig.softcap) {
#pragma unroll
      for (float& s : acc_s) s = p.softcap * tanh_of(s * (p.scale / p.softcap));
    }
    if (masked) mask(acc_s, n);
  };
  const auto rescale = [&] {
#pragma unroll
    for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] *= rows.factor[i / 2 % 2];
  };
  bool all_begun = false;  // each row of the warp has seen a key: it has a maximum
  /// From Q K to weights. O is there already, or 0.
  const auto weigh = [&](float(&acc_s)[kTileN / 2], int n, bool first, bool masked) {
    terms(acc_s, n, masked);
    if (first) rows.guess(acc_s);
    if (!all_begun) all_begun = rows.all_have_a_maximum();
    if (all_begun && rows.weigh_stale(acc_s, weights)) return;
    if (rows.raise(acc_s)) rescale();
    rows.weigh(acc_s);
    rows.pack_weights(acc_s, weights);
  };

  if (kConfig.take_turns && w == kConsumers - 1) pass_turn();
  for (uint32_t tile_count = 0;; ++tile_count) {
    ptx::mbarrier_wait(memory.full_q(w), tile_count & 1);
    // Each lane leaves the loop of a wait for itself. Behind an .aligned instruction the compiler takes the
    // warp for whole again: else nothing from here on could be in uniform registers.
    ptx::wgmma_fence();
    here = memory.place(w, tile_count);
    if (uniform(here->last)) break;
    const int begin = uniform(here->blocks.begin), end = uniform(here->blocks.end),
              full_begin = uniform(here->blocks.full_begin), full_end = uniform(here->blocks.full_end),
              load_begin = uniform(here->load_begin), load_end = uniform(here->load_end);
    const auto is_masked = [&](int n) { return n < full_begin || n >= full_end; };
    if constexpr (kConfig.q_in_registers) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int lane = lane_of_warp(), r = 16 * warp_of_consumer() + lane % 16,
                  chunk = step % 4 * 2 + lane / 16;
        ptx::ldmatrix_x4(q_fragments[step],
                         sQ + step / 4 * kRows * kRowBytes + r * kRowBytes + (chunk ^ r % 8) * 16);
      }
      release(memory.empty_q(w));
    }
    constexpr bool kReleaseQ = !kConfig.q_in_registers;  // else it is let go already
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
#pragma unroll
    for (float& x : acc_block) x = 0.0f;
    rows.start();
    all_begun = false;

    // --- mainloop ---
#pragma unroll 1
    for (int n = load_end - 1; n >= max(end, load_begin); --n) skip();
    if (begin < end) {
      if constexpr (!kConfig.overlapped) {
        for (int n = end - 1; n >= begin; --n) {
          float acc_s[kTileN / 2];
          ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
          ptx::wgmma_fence();
          issue_scores(acc_s, ring.stage);
          const bool masked = is_masked(n);
          ptx::wgmma_wait<0>();  // Q K of this block, and P V of the one before
          if (n + 1 < end) pass_turn();
          ptx::wgmma_done(acc_s);
          outputs_done();
          release(memory.empty_k(ring.stage));
          if (n + 1 < end) release(memory.empty_v(ring.before()));
          if (kReleaseQ && n == begin) release(memory.empty_q(w));
          weigh(acc_s, n, n + 1 == end, masked);
          ptx::mbarrier_wait(memory.full_v(ring.stage), ring.phase);
          wait_for_turn();
          ptx::wgmma_fence();
          issue_outputs(ring.stage);
          ring.advance();
        }
        ptx::wgmma_wait<0>();
        pass_turn();
        outputs_done();
        release(memory.empty_v(ring.before()));
      } else {
        float acc_s[kTileN / 2];
        ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
        wait_for_turn();
        ptx::wgmma_fence();
        issue_scores(acc_s, ring.stage);
        pass_turn();
        ptx::wgmma_wait<0>();
        ptx::wgmma_done(acc_s);
        release(memory.empty_k(ring.stage));
        weigh(acc_s, end - 1, true, is_masked(end - 1));
        for (int n = end - 2; n >= begin; --n) {
          const StageRing<kStages> before = ring;
          ring.advance();
          ptx::mbarrier_wait(memory.full_k(ring.stage), ring.phase);
          ptx::mbarrier_wait(memory.full_v(before.stage), before.phase);
          wait_for_turn();
          ptx::wgmma_fence();
          issue_scores(acc_s, ring.stage);
          issue_outputs(before.stage);
          pass_turn();
          const bool masked = is_masked(n);
          ptx::wgmma_wait<1>();  // Q K of this block
          ptx::wgmma_done(acc_s);
          release(memory.empty_k(ring.stage));
          terms(acc_s, n, masked);
          bool raised;
          if (all_begun) {
            raised = rows.weigh_in_place(acc_s);
          } else {
            raised = rows.raise(acc_s);
            rows.weigh(acc_s);
            all_begun = rows.all_have_a_maximum();
          }
          ptx::wgmma_wait<0>();  // P V of the one before
          outputs_done();
          release(memory.empty_v(before.stage));
          if (raised) rescale();
          rows.pack_weights(acc_s, weights);  // nobody reads the registers of P any more
        }
        if (kReleaseQ) release(memory.empty_q(w));
        ptx::mbarrier_wait(memory.full_v(ring.stage), ring.phase);
        ptx::wgmma_fence();
        issue_outputs(ring.stage);
        ptx::wgmma_wait<0>();
        outputs_done();
        release(memory.empty_v(ring.stage));
        ring.advance();
      }
    } else if (kReleaseQ) {
      __syncwarp();  // all lanes have seen the phase
      release(memory.empty_q(w));
    }
    // Blocks behind its last one a consumer skips when it has written, beside the others' products: the
    // loader has stages left meanwhile. In float32 that would take registers that are not there.
    const auto skip_rest = [&] {
#pragma unroll 1
      for (int n = min(begin, load_end) - 1; n >= load_begin; --n) skip();
    };
    if (kParts > 1) skip_rest();
    fwd_sm90_write<Instance>(args, *here, acc_o, rows);  // the place is overwritten two tiles later
    if (kParts == 1) {
      ptx::wgmma_fence();  // an .aligned instruction again: the stage is to stay in uniform registers
      skip_rest();
    }
  }
  if (kConfig.take_turns && w == 0) ptx::barrier_wait(1, 256);  // the turn that nobody takes any more
}

}  // namespace fovea::cuda
