// The forward on Hopper: TMA, wgmma, specialised warpgroups.
//
//   S = Q K^T        P = exp2(scale log2(e) S - m)        O = P V / l        lse = m + log l
//
// A CTA stays on its SM and takes tile after tile. One thread of its first warpgroup, the producer, decides
// what the next tile is and orders its loads; each other warpgroup, a consumer, owns 64 rows of queries and
// walks over the blocks of kTileN keys that they see, from the last to the first. Scores, weights and outputs
// of a row never leave the four lanes that hold it. While one consumer takes exponentials, the tensor cores
// belong to the others:
//
//   queued      Q K(n) is queued behind P V(n + 1), and the softmax waits for both: with three consumers, or
//   two that
//               take turns, somebody always has products in flight.
//   overlapped  softmax(n) goes on while the consumer's own P V(n + 1) runs, too.
//
// The maximum m of a row is raised only where a weight would exceed 2^kLazyLog2, for all rows of a warp at
// once (softmax does not depend on the maximum taken; the idea: FlashAttention-4). The queued schedule goes
// on from there: blocks that need no mask take exponentials against the maximum so far before anybody knows
// their own; what they exceed it by is read off the packed weights, half as many operations, and not on the
// way to P V. A block that exceeds the bound is done again from S, which is still in registers.
//
// Shared memory   Q 64 rows a consumer; K and V `stages` blocks each; O where there is room, else in place of
// Q. All in
//                 strips of 64 columns: rows of 128 bytes, swizzled as TMA's and wgmma's 128-byte mode.
// Registers       of a consumer's thread: acc_o Dv / 2, acc_s kTileN / 2, P kTileN / 4 (twice when
// overlapped), and about
//                 30 more; the launch gives 65536 / threads to each, setmaxnreg moves those of the producer.
// Barriers        full_q[w]   the place and Q of consumer w are there            producer, bytes -> consumer
// w
//                 empty_q[w]  nobody reads Q (nor O in its place) any more      4 warps of w   -> producer
//                 full_k[s], full_v[s]    the block is there                    producer, bytes -> all
//                 consumers empty_k[s], empty_v[s]  nobody reads the block any more       4 warps a consumer
//                 -> producer turn w      the consumer before has queued its products       consumer w - 1 ->
//                 consumer w own w       no warp of w reads Q any more: O may take its place
//
// NaN and Inf in the V of keys that a row does not see: their weights are 0, and 0 * NaN is NaN. So a warp
// with any output that is not finite computes its rows again without matrix products (warp/exact_row.cuh).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "cuda/kernels/tma_args.hpp"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/setmaxnreg.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/exact_row.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "tile/kv_blocks.hpp"
#include "tile/tile_scheduler.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

struct FwdSm90Config {
  int head_dim, head_dim_v;  ///< padded to multiples of 16
  int tile_n;                ///< a multiple of 16: a step of P V
  int consumers;             ///< warpgroups of 64 rows
  int stages;                ///< of K, and of V
  bool overlapped;           ///< else queued
  /// l by the tensor cores, from columns of ones beside V. It is that of the rounded weights: right for O,
  /// but 1e-3 off for lse.
  bool row_sum_in_mma;
  bool take_turns;  ///< consumers queue their products one after the other
  bool q_in_registers;
  bool softcap;
  int min_ctas = 1;  ///< CTAs an SM

  static constexpr int kRows = 64;                    ///< of a consumer: the m of wgmma
  static constexpr int kStrip = 64, kRowBytes = 128;  ///< columns of a strip, and their bytes
  static constexpr int kOnesBytes = 16 * kRowBytes;   ///< a step of 16 keys
  static constexpr int kMostShared = 227 * 1024;

  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int tile_m() const { return kRows * consumers; }
  /// Registers of a thread: what the launch gives to all, in multiples of 8, less what the producer can do
  /// with.
  constexpr int producer_registers() const { return consumers == 3 ? 32 : (consumers == 2 ? 40 : 56); }
  constexpr int consumer_registers() const {
    const int each = 65536 / min_ctas / threads() / 8 * 8;
    const int all = (each < 256 ? each : 248) * (consumers + 1);
    const int rest = (all - producer_registers()) / consumers / 8 * 8;
    return rest < 240 ? rest : 240;
  }

  static constexpr int strips(int columns) { return (columns + kStrip - 1) / kStrip; }
  constexpr int q_bytes() const { return strips(head_dim) * kRows * kRowBytes; }
  constexpr int o_bytes() const { return strips(head_dim_v) * kRows * kRowBytes; }
  constexpr int k_bytes() const { return strips(head_dim) * tile_n * kRowBytes; }
  constexpr int v_bytes() const { return strips(head_dim_v) * tile_n * kRowBytes; }
  /// O has memory of its own, so that the next Q need not wait until it is stored.
  constexpr bool own_o() const {
    return bytes_without_o() + consumers * o_bytes() <= kMostShared / min_ctas - 1024 * (min_ctas - 1);
  }
  /// Q, where O may take its place.
  constexpr int rows_bytes() const { return own_o() || q_bytes() > o_bytes() ? q_bytes() : o_bytes(); }
  constexpr int k_at() const { return consumers * rows_bytes(); }
  constexpr int v_at() const { return k_at() + stages * k_bytes(); }
  constexpr int ones_at() const { return v_at() + stages * v_bytes(); }
  constexpr int o_at() const { return ones_at() + (row_sum_in_mma ? kOnesBytes : 0); }
  constexpr int barriers_at() const { return own_o() ? o_at() + consumers * o_bytes() : o_at(); }
  constexpr int barriers() const { return 2 * consumers + 4 * stages; }
  constexpr int places_at() const { return barriers_at() + (barriers() * 8 + 15) / 16 * 16; }
  constexpr int shared_bytes() const { return places_at() + 2 * consumers * kPlaceBytes; }
  static constexpr int kPlaceBytes = 96;  ///< of FwdSm90Place

 private:
  constexpr int bytes_without_o() const {
    return consumers * (q_bytes() > o_bytes() ? q_bytes() : o_bytes()) + stages * (k_bytes() + v_bytes()) +
           (row_sum_in_mma ? kOnesBytes : 0) + (barriers() * 8 + 15) / 16 * 16 + 2 * consumers * kPlaceBytes;
  }
};

/// What a consumer does with a tile. Written by the producer before it signals full_q.
struct alignas(16) FwdSm90Place {
  tile::SequenceSpan span;
  int batch, head, split;    ///< `head` of q, or of k for a packed group
  int first_row, end_row;    ///< of queries (times the heads of a packed group) that exist; may be none
  tile::KvBlocks blocks;     ///< that its rows see
  int load_begin, load_end;  ///< blocks that the producer loads: those of all consumers
  int last;                  ///< 1: there is no tile any more
};

/// CTAs of a launch: at most as many as the GPU holds at a time.
template <class Grid>
constexpr Grid fwd_sm90_grid(const ForwardArgs& args, const FwdSm90Config& config) {
  const int64_t tiles = query_tiles(args, config.tile_m()).count();
  const int64_t slots = args.slots > 0 ? args.slots : 1;
  return {tiles < slots ? tiles : slots};
}

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    fwd_sm90(const __grid_constant__ TmaForwardArgs args) {
  using T = typename Instance::Element;
  using ptx::WgmmaMajor;
  using ptx::WgmmaStart;
  constexpr int kTileN = Instance::kConfig.tile_n, kRows = Instance::kConfig.kRows,
                kConsumers = Instance::kConfig.consumers;
  constexpr int kDim = Instance::kConfig.head_dim, kDimV = Instance::kConfig.head_dim_v,
                kStages = Instance::kConfig.stages;
  constexpr int kStrip = Instance::kConfig.kStrip, kRowBytes = Instance::kConfig.kRowBytes;
  constexpr int kStripsQ = Instance::kConfig.strips(kDim), kStripsV = Instance::kConfig.strips(kDimV);
  constexpr int kColumnsO =
      kDimV + (Instance::kConfig.row_sum_in_mma ? 8 : 0);  ///< of P V: the sum stands in the last eight
  static_assert(sizeof(FwdSm90Place) <= Instance::kConfig.kPlaceBytes && kTileN % 16 == 0 && kDim % 16 == 0 &&
                kDimV % 16 == 0);
  static_assert(Instance::kConfig.shared_bytes() <=
                Instance::kConfig.kMostShared / Instance::kConfig.min_ctas);
  static_assert(!Instance::kConfig.row_sum_in_mma || kDimV % kStrip == 0,
                "the ones stand in a strip of their own");

  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t memory = ptx::shared_address(shared);
  const uint32_t barriers = memory + Instance::kConfig.barriers_at();
  const auto full_q = [&](int w) { return barriers + 8 * w; };
  const auto empty_q = [&](int w) { return barriers + 8 * (kConsumers + w); };
  const uint32_t full_k = barriers + 16 * kConsumers, full_v = full_k + 8 * kStages;
  const uint32_t empty_k = full_v + 8 * kStages, empty_v = empty_k + 8 * kStages;
  const auto place_of = [&](int w, uint32_t tile) {
    return reinterpret_cast<FwdSm90Place*>(shared + Instance::kConfig.places_at()) + 2 * w + (tile & 1);
  };
  /// A ring of blocks in shared memory, from the view of one side.
  struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ int before() const { return (stage == 0 ? kStages : stage) - 1; }
    __device__ __forceinline__ void advance() {
      if (++stage == kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  };

  const ForwardArgs& f = args.f;
  const tile::AttentionParams& p = f.p;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);  // uniform, as the compiler may then know
  if (thread == 0) {
    for (int w = 0; w < kConsumers; ++w) {
      ptx::mbarrier_init(full_q(w), 1);
      ptx::mbarrier_init(empty_q(w), 4);
    }
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full_k + 8 * s, 1);
      ptx::mbarrier_init(full_v + 8 * s, 1);
      ptx::mbarrier_init(empty_k + 8 * s, 4 * kConsumers);
      ptx::mbarrier_init(empty_v + 8 * s, 4 * kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Instance::kConfig.row_sum_in_mma) {
    constexpr uint32_t kOnePair = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
    for (int i = thread; i < Instance::kConfig.kOnesBytes / 4; i += Instance::kConfig.threads())
      ptx::st_shared_4(memory + Instance::kConfig.ones_at() + 4 * i, kOnePair);
    ptx::async_proxy_fence();
  }
  __syncthreads();  // the barriers are ready, and the ones

  if (warpgroup == 0) {
    // --- producers: warp 0 loads K and V, warp 1 + w plans the tiles of consumer w and loads Q ---
    ptx::setmaxnreg_dec<Instance::kConfig.producer_registers()>();
    const int role = __shfl_sync(0xffffffffu, thread / 32, 0);
    if (lane != 0 || role > kConsumers) return;
    const int group = f.pack_group ? p.group : 1;
    const auto blocks_of = [&](const tile::SequenceSpan& span, int first, int rows) {
      const int end = min(first + rows, span.used_q * group);
      return first < end
                 ? tile::kv_blocks(p, span, query_of_row(f, first), query_of_row(f, end - 1) + 1, kTileN)
                 : tile::KvBlocks{};
    };
    /// The tiles of this CTA, with the blocks that its consumers need: the same for each producer.
    const auto for_each_tile = [&](auto&& visit) {
      const tile::QueryTiles tiles = query_tiles(f, Instance::kConfig.tile_m());
      const int count = static_cast<int>(tiles.count()), ctas = static_cast<int>(gridDim.x);
#pragma unroll 1
      for (int turn = 0; turn * ctas < count; ++turn) {
        const int index = tile::snake(turn, static_cast<int>(blockIdx.x), ctas);
        if (index >= count) continue;
        const tile::WorkTile work = tiles.at(index);
        if (!work.valid) continue;
        const tile::SequenceSpan span = tile::sequence_span(p, work.batch);
        const int first_row = work.block * Instance::kConfig.tile_m();
        tile::KvBlocks loads = blocks_of(span, first_row, Instance::kConfig.tile_m());
        if (f.num_splits > 1) loads = tile::split_blocks(loads, work.split, f.num_splits);
        visit(work, span, first_row, loads);
      }
    };
    if (role == 0) {
      Ring ring;
      for_each_tile(
          [&](const tile::WorkTile& work, const tile::SequenceSpan& span, int, const tile::KvBlocks& loads) {
            const int batch = p.cu_seqlens_k != nullptr ? 0 : work.batch;
            const int head =
                f.pack_group ? work.head : static_cast<int>(static_cast<unsigned>(work.head) / p.group);
            int row = static_cast<int>(span.row_k) + loads.end * kTileN;
#pragma unroll 1
            for (int n = loads.end - 1; n >= loads.begin; --n) {
              row -= kTileN;
              const auto load = [&](const CUtensorMap& map, uint32_t to, int strips, int bytes, uint32_t full,
                                    uint32_t empty) {
                ptx::mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
                ptx::mbarrier_arrive_expect(full + 8 * ring.stage, bytes);
                for (int s = 0; s < strips; ++s) {
                  ptx::tma_load(to + ring.stage * bytes + s * kTileN * kRowBytes, map, full + 8 * ring.stage,
                                s * kStrip, row, head, batch);
                }
              };
              load(args.k, memory + Instance::kConfig.k_at(), kStripsQ, Instance::kConfig.k_bytes(), full_k,
                   empty_k);
              load(args.v, memory + Instance::kConfig.v_at(), kStripsV, Instance::kConfig.v_bytes(), full_v,
                   empty_v);
              ring.advance();
            }
          });
      return;
    }
    const int w = role - 1;
    uint32_t tile_count = 0;
    for_each_tile([&](const tile::WorkTile& work, const tile::SequenceSpan& span, int first_row,
                      const tile::KvBlocks& loads) {
      ptx::mbarrier_wait(empty_q(w), (tile_count & 1) ^ 1);  // Q is free, and the place of two tiles ago
      FwdSm90Place& place = *place_of(w, tile_count);
      const int row = first_row + w * kRows;
      tile::KvBlocks blocks = blocks_of(span, row, kRows);
      blocks.begin = max(blocks.begin, loads.begin);
      blocks.end = min(blocks.end, loads.end);
      place = {span,   work.batch,  work.head, work.split, row, min(row + kRows, span.length_q * group),
               blocks, loads.begin, loads.end, 0};
      ptx::mbarrier_arrive_expect(full_q(w), Instance::kConfig.q_bytes());
      const int query = query_of_row(f, row), batch = p.cu_seqlens_q != nullptr ? 0 : work.batch;
      for (int s = 0; s < kStripsQ; ++s) {
        ptx::tma_load(memory + w * Instance::kConfig.rows_bytes() + s * kRows * kRowBytes, args.q, full_q(w),
                      s * kStrip, row - query * group, static_cast<int>(span.row_q) + query, work.head,
                      batch);
      }
      ++tile_count;
    });
    ptx::mbarrier_wait(empty_q(w), (tile_count & 1) ^ 1);
    place_of(w, tile_count)->last = 1;
    ptx::mbarrier_arrive(full_q(w));
    return;
  }

  // --- consumers ---
  ptx::setmaxnreg_inc<Instance::kConfig.consumer_registers()>();
  const int w = warpgroup - 1;
  const bool leader = lane == 0;  // of its warp
  // Asked for again where they are used, rarely: registers are what limits this kernel.
  const auto warp_of_consumer = [] { return static_cast<int>(ptx::thread_index() / 32 % 4); };
  const auto lane_of_warp = [] { return static_cast<int>(ptx::thread_index() % 32); };
  const uint32_t sQ = memory + w * Instance::kConfig.rows_bytes();
  const uint32_t sO =
      Instance::kConfig.own_o() ? memory + Instance::kConfig.o_at() + w * Instance::kConfig.o_bytes() : sQ;
  const uint64_t q_descriptor = tile::wgmma_k_major(sQ, tile::SwizzleMode::k128).encode();
  const uint64_t k_descriptor =
      tile::wgmma_k_major(memory + Instance::kConfig.k_at(), tile::SwizzleMode::k128).encode();
  const uint64_t v_descriptor =
      tile::wgmma_mn_major(memory + Instance::kConfig.v_at(), tile::SwizzleMode::k128, kTileN).encode();

  float acc_o[kColumnsO / 2];
  uint32_t weights[kTileN / 16][4];  // P as operand A
  uint32_t q_fragments[Instance::kConfig.q_in_registers ? kDim / 16 : 1][4];
  using Rows = OnlineRows<T, kTileN, !Instance::kConfig.row_sum_in_mma>;
  Rows rows{.scale_log2 = args.scale_log2};

  // For the same reason the mainloop reads its place from shared memory.
  const FwdSm90Place* here = nullptr;
  Ring ring;

  /// S = Q K^T, queued.
  const auto issue_scores = [&](float(&acc_s)[kTileN / 2], int stage) {
    const uint64_t k = k_descriptor + stage * tile::wgmma_start_step(Instance::kConfig.k_bytes());
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const int strip = step / 4, inside = step % 4 * 32;
      const uint64_t a = q_descriptor + tile::wgmma_start_step(strip * kRows * kRowBytes + inside);
      const uint64_t b = k + tile::wgmma_start_step(strip * kTileN * kRowBytes + inside);
      using Product = ptx::Wgmma<kTileN>;
      if constexpr (Instance::kConfig.q_in_registers) {
        if (step == 0) {
          Product::template rs<T, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, q_fragments[0], b);
        } else {
          Product::template rs<T, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, q_fragments[step], b);
        }
      } else {
        if (step == 0) {
          Product::template ss<T, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, a, b);
        } else {
          Product::template ss<T, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, a, b);
        }
      }
    }
    ptx::wgmma_commit();
  };
  /// O += P V, queued.
  const auto issue_outputs = [&](int stage) {
    const uint32_t start = memory + Instance::kConfig.v_at() + stage * Instance::kConfig.v_bytes();
#pragma unroll
    for (int step = 0; step < kTileN / 16; ++step) {
      uint64_t b = v_descriptor + stage * tile::wgmma_start_step(Instance::kConfig.v_bytes()) +
                   tile::wgmma_start_step(step * 16 * kRowBytes);
      if constexpr (Instance::kConfig.row_sum_in_mma) {
        // Behind the strip of V come the ones, the same for each step: the distance to them is another one
        // each time.
        const auto at = start + step * 16 * kRowBytes;
        b = tile::WgmmaDescriptor{at, memory + Instance::kConfig.ones_at() - at, 8 * kRowBytes,
                                  tile::SwizzleMode::k128, 0}
                .encode();
      }
      ptx::Wgmma<kColumnsO>::template rs<T, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(acc_o, weights[step],
                                                                                      b);
    }
    ptx::wgmma_commit();
  };
  /// After a wait for products or __syncwarp(): a lane that has not seen the phase that it waits for would
  /// miss it.
  const auto release = [&](uint32_t barrier) {
    if (leader) ptx::mbarrier_arrive(barrier);
  };
  const auto wait_for_turn = [&] {
    if constexpr (Instance::kConfig.take_turns) ptx::barrier_wait(1 + w, 256);
  };
  const auto pass_turn = [&] {
    if constexpr (Instance::kConfig.take_turns)
      ptx::barrier_arrive(1 + (w + 1 == kConsumers ? 0 : w + 1), 256);
  };
  /// Blocks that other consumers need.
  const auto skip = [&] {
    wait_for_turn();
    pass_turn();
    ptx::mbarrier_wait(full_k + 8 * ring.stage,
                       ring.phase);  // else the arrivals could count for an earlier block
    ptx::mbarrier_wait(full_v + 8 * ring.stage, ring.phase);
    __syncwarp();  // all lanes have seen the phases
    release(empty_k + 8 * ring.stage);
    release(empty_v + 8 * ring.stage);
    ring.advance();
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
  /// From Q K to scores; whether the block needed a mask.
  const auto terms = [&](float(&acc_s)[kTileN / 2], int n) {
    if constexpr (Instance::kConfig.softcap) {
#pragma unroll
      for (float& s : acc_s) s = p.softcap * tanh_of(s * (p.scale / p.softcap));
    }
    const bool masked = n < here->blocks.full_begin || n >= here->blocks.full_end;
    if (masked) mask(acc_s, n);
    return masked;
  };
  const auto rescale = [&] {
#pragma unroll
    for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] *= rows.factor[i / 2 % 2];
  };

  if (Instance::kConfig.take_turns && w == kConsumers - 1) pass_turn();
  for (uint32_t tile_count = 0;; ++tile_count) {
    ptx::mbarrier_wait(full_q(w), tile_count & 1);
    here = place_of(w, tile_count);
    if (here->last) break;
    const int begin = here->blocks.begin, end = here->blocks.end;
    if constexpr (Instance::kConfig.q_in_registers) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const int lane = lane_of_warp(), r = 16 * warp_of_consumer() + lane % 16,
                  chunk = step % 4 * 2 + lane / 16;
        ptx::ldmatrix_x4(q_fragments[step],
                         sQ + step / 4 * kRows * kRowBytes + r * kRowBytes + (chunk ^ r % 8) * 16);
      }
      if (Instance::kConfig.own_o()) release(empty_q(w));
    }
    const bool release_q_early = !Instance::kConfig.q_in_registers && Instance::kConfig.own_o();
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    rows.start();

    // --- mainloop ---
    for (int n = here->load_end - 1; n >= max(end, here->load_begin); --n) skip();
    if (begin < end) {
      if constexpr (!Instance::kConfig.overlapped) {
        for (int n = end - 1; n >= begin; --n) {
          float acc_s[kTileN / 2];
          ptx::mbarrier_wait(full_k + 8 * ring.stage, ring.phase);
          wait_for_turn();
          ptx::wgmma_fence();
          issue_scores(acc_s, ring.stage);
          pass_turn();
          ptx::wgmma_wait<0>();  // Q K of this block, and P V of the one before
          ptx::wgmma_done(acc_s);
          ptx::wgmma_done(acc_o);
          release(empty_k + 8 * ring.stage);
          if (n + 1 < end) release(empty_v + 8 * ring.before());
          if (release_q_early && n == begin) release(empty_q(w));
          bool raised;
          if (terms(acc_s, n) || n + 1 == end) {  // rows may have seen no key so far
            raised = rows.raise(acc_s);
            rows.weigh(acc_s);
            rows.pack_weights(acc_s, weights);
          } else {
            raised = rows.weigh_stale(acc_s, weights);
          }
          if (raised) rescale();
          ptx::mbarrier_wait(full_v + 8 * ring.stage, ring.phase);
          ptx::wgmma_fence();
          issue_outputs(ring.stage);
          ring.advance();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_done(acc_o);
        release(empty_v + 8 * ring.before());
      } else {
        float acc_s[kTileN / 2];
        ptx::mbarrier_wait(full_k + 8 * ring.stage, ring.phase);
        wait_for_turn();
        ptx::wgmma_fence();
        issue_scores(acc_s, ring.stage);
        pass_turn();
        ptx::wgmma_wait<0>();
        ptx::wgmma_done(acc_s);
        release(empty_k + 8 * ring.stage);
        terms(acc_s, end - 1);
        rows.raise(acc_s);  // O is 0: nothing to rescale
        rows.weigh(acc_s);
        rows.pack_weights(acc_s, weights);
        for (int n = end - 2; n >= begin; --n) {
          const Ring before = ring;
          ring.advance();
          ptx::mbarrier_wait(full_k + 8 * ring.stage, ring.phase);
          ptx::mbarrier_wait(full_v + 8 * before.stage, before.phase);
          wait_for_turn();
          ptx::wgmma_fence();
          issue_scores(acc_s, ring.stage);
          issue_outputs(before.stage);
          pass_turn();
          ptx::wgmma_wait<1>();  // Q K of this block
          ptx::wgmma_done(acc_s);
          release(empty_k + 8 * ring.stage);
          terms(acc_s, n);
          const bool raised = rows.raise(acc_s);
          rows.weigh(acc_s);
          ptx::wgmma_wait<0>();  // P V of the one before
          ptx::wgmma_done(acc_o);
          release(empty_v + 8 * before.stage);
          if (raised) rescale();
          rows.pack_weights(acc_s, weights);  // nobody reads the registers of P any more
        }
        if (release_q_early) release(empty_q(w));
        ptx::mbarrier_wait(full_v + 8 * ring.stage, ring.phase);
        ptx::wgmma_fence();
        issue_outputs(ring.stage);
        ptx::wgmma_wait<0>();
        ptx::wgmma_done(acc_o);
        release(empty_v + 8 * ring.stage);
        ring.advance();
      }
    } else if (release_q_early) {
      __syncwarp();  // all lanes have seen the phase
      release(empty_q(w));
    }
    for (int n = min(begin, here->load_end) - 1; n >= here->load_begin; --n) skip();

    // --- epilogue ---
    const FwdSm90Place& place = *here;
    const int warp = warp_of_consumer(), lane = lane_of_warp(), lane_column = 2 * (lane % 4);
    const int columns = p.head_dim_v, group = f.pack_group ? p.group : 1;
    const int warp_row = place.first_row + 16 * warp, end_row = place.end_row,
              used_row = place.span.used_q * group;
    const auto head_of = [&](int row) {
      return f.pack_group ? place.head * group + row - query_of_row(f, row) * group : place.head;
    };
    const auto part_of = [&](int i, int head) {
      return ((static_cast<int64_t>(place.split) * p.batch + place.batch) * p.heads_q + head) * p.seqlen_q +
             i;
    };
    /// Writes lse and returns the factor of acc_o; a row without keys, or behind the last query, gets -inf
    /// and 0.
    const auto finish_row = [&](int row, float base, float sum, bool writes) {
      const int i = query_of_row(f, row), head = head_of(row);
      const float sink =
          row < used_row && p.sink != nullptr && f.num_splits == 1 ? p.sink[head] * kLog2e : -INFINITY;
      const RowEnd done = row < used_row ? end_of_row(base, sum, sink) : RowEnd{};
      if (writes) {
        if (f.num_splits > 1) {
          if (row < used_row) f.part_lse[part_of(i, head)] = done.lse_log2 * kLn2;
        } else if (p.lse.data != nullptr) {
          p.lse.data[p.lse.offset(place.batch, head, place.span.row_q + i)] = done.lse_log2 * kLn2;
        }
      }
      return done.factor;
    };
    const bool as_f32 = f.num_splits > 1 || p.o_is_f32;
    const auto f32_row = [&](int row) {
      const int i = query_of_row(f, row), head = head_of(row);
      return f.num_splits > 1
                 ? f.part_o + part_of(i, head) * columns
                 : reinterpret_cast<float*>(p.o.data) + p.o.offset(place.batch, place.span.row_q + i, head);
    };
    const auto element_row = [&](int row) {
      return reinterpret_cast<T*>(p.o.data) +
             p.o.offset(place.batch, place.span.row_q + query_of_row(f, row), head_of(row));
    };

    float probe[4] = {};  // NaN when any output of the warp is not finite: 0 * NaN and 0 * Inf are
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) probe[i % 4] = fmaf(acc_o[i], 0.0f, probe[i % 4]);
    const bool odd = __any_sync(0xffffffffu, (probe[0] + probe[1]) + (probe[2] + probe[3]) != 0.0f);
    // Where this warp's rows go: by TMA as a whole, if all of them exist (or lie behind the tensor's end,
    // where TMA writes nothing).
    const bool whole = args.o_by_tma && !odd &&
                       (warp_row + 16 <= end_row || (p.cu_seqlens_q == nullptr && warp_row < end_row));
    if constexpr (!Instance::kConfig.own_o())
      ptx::barrier_wait(8 + w, 128);  // no warp of this consumer reads Q any more
    if (odd) {
#pragma unroll 1
      for (int r = 0; r < 16; ++r) {
        const int row = warp_row + r;
        if (row >= end_row) break;
        const int i = query_of_row(f, row), head = head_of(row), head_kv = head / p.group;
        const auto* k =
            reinterpret_cast<const T*>(p.k.data) + p.k.offset(place.batch, place.span.row_k, head_kv);
        const auto* v =
            reinterpret_cast<const T*>(p.v.data) + p.v.offset(place.batch, place.span.row_k, head_kv);
        ExactRow<kDimV> exact;
        exact.add(p, RowTerms<T>(p, place.span, place.batch, head, i), tile::Dropout(),
                  reinterpret_cast<const T*>(p.q.data) + p.q.offset(place.batch, place.span.row_q + i, head),
                  k, v, columns, row < used_row ? tile::keys_of(p, place.span, i) : tile::Span32{},
                  place.load_begin * kTileN, place.load_end * kTileN);
        const float base = exact.maximum == -INFINITY ? 0.0f : exact.maximum * kLog2e;
        const float factor = finish_row(row, base, exact.sum, lane == 0);
#pragma unroll
        for (int c32 = 0; c32 < ExactRow<kDimV>::kPerLane; ++c32) {
          const int c = lane + 32 * c32;
          if (c >= columns) break;
          if (as_f32) {
            if (f.num_splits == 1 || row < used_row) f32_row(row)[c] = exact.o[c32] * factor;
          } else {
            element_row(row)[c] = static_cast<T>(exact.o[c32] * factor);
          }
        }
      }
    } else {
      float factor[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + lane / 4 + 8 * half;
        const float sum =
            Instance::kConfig.row_sum_in_mma ? acc_o[kDimV / 2 + 2 * half] : rows.sum_of_row(half);
        factor[half] = row < end_row ? finish_row(row, rows.base(half), sum, lane % 4 == 0) : 0.0f;
      }
      if (whole) {
        if (lane == 0) ptx::tma_store_wait_read<0>();
        __syncwarp();  // the O before this one has left shared memory
        const int r = 16 * warp + lane % 16;
#pragma unroll
        for (int n16 = 0; n16 < kDimV / 16; ++n16) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* o = acc_o + n16 * 8 + i / 2 * 4 + i % 2 * 2;
            x[i] = pack<T>(o[0] * factor[i % 2], o[1] * factor[i % 2]);
          }
          const int chunk = n16 % 4 * 2 + lane / 16;
          ptx::stmatrix_x4(sO + n16 / 4 * kRows * kRowBytes + r * kRowBytes + (chunk ^ r % 8) * 16, x);
        }
        ptx::async_proxy_fence();
        __syncwarp();  // all of the warp's rows are in shared memory, and TMA may see them
        if (lane == 0) {
          const int query = query_of_row(f, warp_row);
          for (int s = 0; s < kStripsV; ++s) {
            ptx::tma_store(args.o, sO + s * kRows * kRowBytes + 16 * warp * kRowBytes, s * kStrip,
                           warp_row - query * group, static_cast<int>(place.span.row_q) + query, place.head,
                           p.cu_seqlens_q != nullptr ? 0 : place.batch);
          }
          ptx::tma_store_commit();
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + lane / 4 + 8 * half;
          if (row >= end_row || (f.num_splits > 1 && row >= used_row)) continue;
          const int left = columns - lane_column;
          const auto store = [&](auto* to) {
            using Out = std::remove_pointer_t<decltype(to)>;
#pragma unroll
            for (int n8 = 0; n8 < kDimV / 8; ++n8) {
              if (n8 * 8 < left) to[n8 * 8] = static_cast<Out>(acc_o[4 * n8 + 2 * half] * factor[half]);
              if (n8 * 8 + 1 < left)
                to[n8 * 8 + 1] = static_cast<Out>(acc_o[4 * n8 + 2 * half + 1] * factor[half]);
            }
          };
          if (as_f32) {
            store(f32_row(row) + lane_column);
          } else {
            store(element_row(row) + lane_column);
          }
        }
      }
    }
    if (!Instance::kConfig.own_o() && lane == 0) ptx::tma_store_wait_read<0>();
    __syncwarp();  // no lane reads the place of this tile any more, and O has left the place of Q
    if (!Instance::kConfig.own_o()) release(empty_q(w));
  }
  if (Instance::kConfig.take_turns && w == 0)
    ptx::barrier_wait(1, 256);                   // the turn that nobody takes any more
  if (lane == 0) ptx::tma_store_wait_read<0>();  // shared memory must outlive the stores
}

}  // namespace fovea::cuda
