// A consumer of fwd_sm90_wide: one of the two warpgroups that share 64 rows of queries.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_epilogue.cuh"
#include "cuda/kernels/fwd_sm90_softmax.cuh"
#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/kernels/fwd_sm90_wide_config.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// The registers of a consumer's thread, and its steps. All steps are inlined into the kernel, so that the
/// arrays stay in registers. Every thread of the warpgroup calls every step.
///
/// Blocks are counted over all tiles of the CTA, `block`: consumer block % 2 makes its weights.
template <class Instance>
struct FwdSm90WideConsumer {
  using Element = typename Instance::Element;
  using Memory = FwdSm90WideMemory<Instance>;
  using WgmmaMajor = ptx::WgmmaMajor;
  using WgmmaStart = ptx::WgmmaStart;
  static constexpr FwdSm90WideConfig kConfig = Instance::kConfig;
  static constexpr int kTileN = kConfig.tile_n, kRowBytes = kConfig.kRowBytes;
  static constexpr int kPiecesK = Memory::kPiecesK, kColumnsO = kConfig.columns_o();
  static constexpr int kStepsQk = kConfig.head_dim / 16, kStepsPv = kTileN / 16;
  static constexpr int kStepsOfPiece = kConfig.kPieceStrips * kConfig.kStrip / 16;
  /// Pieces of Q K that go before the other consumer's P V: the halves of V are then needed at even distances.
  static constexpr int kPiecesBefore = 2;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;
  static_assert(kPiecesK > kPiecesBefore);

  using AccS = float[kTileN / 2];
  using Rows = FwdSm90Rows<Element, kTileN, true, 1>;

  const TmaForwardArgs& args;
  const Memory& memory;
  const int c;     ///< number of this consumer
  const int lane;  ///< of its warp
  /// Start of shared memory in units of 16 bytes, warp-uniform; without the bits above 2^18, where addresses in a cluster have
  /// the rank of the CTA.
  const int base16;

  float acc_o[kColumnsO / 2];
  typename Rows::Weights weights;  ///< P as operand A
  Rows rows;
  const FwdSm90WorkTile* work = nullptr;  ///< in shared memory
  uint32_t blocks_before = 0;             ///< of earlier tiles

  __device__ __forceinline__ FwdSm90WideConsumer(const TmaForwardArgs& args_, const Memory& memory_, int c_,
                                                 int lane_)
      : args(args_),
        memory(memory_),
        c(c_),
        lane(lane_),
        base16(uniform(static_cast<int>(tile::wgmma_start_step(memory_.base)))),
        rows(args_.scale_log2) {}

  /// Takes tiles until the planner says that there are no more.
  __device__ __forceinline__ void run() {
    for (uint32_t tile_count = 0; begin_tile(tile_count); ++tile_count) {
      const Blocks blocks = {uniform(work->load_begin), uniform(work->load_end),
                             uniform(work->blocks.full_begin), uniform(work->blocks.full_end)};
      if (blocks.begin < blocks.end) {
        mainloop(blocks);
      } else {
        __syncwarp();  // every lane has seen the phase of full_q
        release(memory.empty_q(0));
      }
      FwdSm90Epilogue<Instance>(args, *work, c * kColumnsO).write(acc_o, rows);
    }
  }

 private:
  /// Blocks of keys that rows of the cluster see, warp-uniform: all its CTAs take all of these, as they share their loads.
  /// Those outside of [full_begin, full_end) need a mask.
  struct Blocks {
    int begin, end, full_begin, full_end;
    __device__ __forceinline__ bool need_mask(int n) const { return n < full_begin || n >= full_end; }
  };

  /// Waits for the tile and its Q; O and the rows' statistics start empty. False: there is no tile any more.
  __device__ __forceinline__ bool begin_tile(uint32_t tile_count) {
    wait_for_tile(memory.full_q(0), tile_count);
    work = memory.work_tile(0, tile_count);
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    rows.start();
    return !uniform(work->last);
  }

  /// Blocks end - 1 to begin, by turns: a consumer makes the weights of every second one, and multiplies the weights
  /// of all with its half of V, in order.
  __device__ __forceinline__ void mainloop(const Blocks& blocks) {
    uint32_t block = blocks_before;
    int n = blocks.end - 1;
    if ((block & 1) == static_cast<uint32_t>(c)) {
      first_step(blocks, n, block);
      n -= 2, block += 2;
    } else {
      n -= 1, block += 1;
    }
    for (; n >= blocks.begin; n -= 2, block += 2) step(blocks, n, block);
    release(memory.empty_q(0));
    if (n == blocks.begin - 1) {  // the last block is the other's
      take_statistics(block - 1);
      issue_other_pv(block - 1);
      finish_other_pv<0>();
    }
    blocks_before += static_cast<uint32_t>(blocks.end - blocks.begin);
  }

  /// The tile's first block, with nothing under way.
  __device__ __forceinline__ void first_step(const Blocks& blocks, int n, uint32_t block) {
    AccS acc_s;
    issue_qk<0, kPiecesK>(acc_s, block);
    finish_qk<0, kPiecesK>();
    ptx::wgmma_done(acc_s);
    softmax(acc_s, blocks, n);
    hand_over(block);
    issue_own_pv<WgmmaStart::kZero>(block);
    finish_own_pv();
  }

  /// Block n, this consumer's, after the block before it, the other's:
  ///   Q K, first pieces | P V of the other's weights, Q K, the rest | softmax | P V of its own
  /// At each bar its queue runs empty, and the other consumer has the tensor cores. (With P V in flight across the end of a
  /// step, or waits for barriers between the products of a group, the compiler serialises all products: C7514, C7515.)
  __device__ __forceinline__ void step(const Blocks& blocks, int n, uint32_t block) {
    AccS acc_s;
    issue_qk<0, kPiecesBefore>(acc_s, block);
    finish_qk<0, kPiecesBefore>();
    ptx::wgmma_done(acc_s);
    take_statistics(block - 1);
    issue_other_pv(block - 1);
    issue_qk<kPiecesBefore, kPiecesK>(acc_s, block);
    finish_other_pv<kPiecesK - kPiecesBefore>();
    finish_qk<kPiecesBefore, kPiecesK>();
    ptx::wgmma_done(acc_s);
    const bool raised = softmax(acc_s, blocks, n);
    hand_over(block);
    if (raised) rescale_o();
    issue_own_pv(block);
    finish_own_pv();
  }

  // --- products ---

  /// Arrives for the warp. Call it after a wait for products or __syncwarp(): a lane that has not seen the
  /// barrier's phase yet would miss it.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  /// The same at all CTAs that load pieces of K and V for this one.
  __device__ __forceinline__ void release_piece(uint32_t barrier) const {
    if constexpr (kConfig.cluster == 1) {
      release(barrier);
    } else {
      const uint32_t there = ptx::address_in_cta(barrier, lane % kConfig.cluster);  // of all lanes: no branch
      if (lane < kConfig.cluster) ptx::mbarrier_arrive_in_cta(there);
    }
  }

  /// Pieces [kBegin, kEnd) of S = Q K^T, a group each.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void issue_qk(AccS& acc_s, uint32_t block) const {
    const uint64_t q = Memory::first_q().encode_from(base16), k = Memory::first_k().encode_from(base16);
    using Product = ptx::Wgmma<kTileN>;
#pragma unroll
    for (int piece = kBegin; piece < kEnd; ++piece)
      ptx::mbarrier_wait(memory.full_k(c, piece), block / 2 & 1);
    ptx::wgmma_fence();
#pragma unroll
    for (int piece = kBegin; piece < kEnd; ++piece) {
#pragma unroll
      for (int step = piece * kStepsOfPiece; step < min((piece + 1) * kStepsOfPiece, kStepsQk); ++step) {
        const uint64_t start = tile::wgmma_start_step(step / 4 * kConfig.kStripBytes + step % 4 * 32);
        if (step == 0) {
          Product::template ss<Element, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, q + start, k + start);
        } else {
          Product::template ss<Element, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, q + start, k + start);
        }
      }
      ptx::wgmma_commit();
    }
  }
  /// Waits for pieces [kBegin, kEnd), the last that are queued, and gives each back.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void finish_qk() const {
    if constexpr (kBegin < kEnd) {
      ptx::wgmma_wait<kEnd - kBegin - 1>();
      release_piece(memory.empty_k(c, kBegin));
      finish_qk<kBegin + 1, kEnd>();
    }
  }

  /// O += P V of this consumer's half of V; `multiply(step, V)` is a step of 16 keys.
  template <class Multiply>
  __device__ __forceinline__ void issue_pv(uint32_t block, const Multiply& multiply) {
    const uint64_t v = Memory::first_v().encode_from(base16 + v_start16());
    ptx::mbarrier_wait(memory.full_v(c), block & 1);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsPv; ++step)
      multiply(step, v + tile::wgmma_start_step(step * 16 * kRowBytes));
    ptx::wgmma_commit();
  }
  using Product = ptx::Wgmma<kColumnsO>;
  template <WgmmaStart kStart = WgmmaStart::kAccumulate>
  __device__ __forceinline__ void issue_own_pv(uint32_t block) {
    issue_pv(block, [&](int step, uint64_t v) {
      if (kStart == WgmmaStart::kZero && step == 0) {
        Product::template rs<Element, WgmmaStart::kZero, WgmmaMajor::kMN>(acc_o, weights[0][step], v);
      } else {
        Product::template rs<Element, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(acc_o, weights[0][step], v);
      }
    });
  }
  __device__ __forceinline__ void issue_other_pv(uint32_t block) {
    const uint64_t p = Memory::first_p().encode_from(base16 + p_start16(1 - c));
    issue_pv(block, [&](int step, uint64_t v) {
      Product::template ss<Element, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(
          acc_o, p + tile::wgmma_start_step(step * 32), v);
    });
  }
  /// Waits for it, behind which kBehind groups are queued, and gives V back.
  template <int kBehind>
  __device__ __forceinline__ void finish_pv() {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc_o);
    release_piece(memory.empty_v(c));
  }
  __device__ __forceinline__ void finish_own_pv() {
    finish_pv<0>();
  }
  template <int kBehind>
  __device__ __forceinline__ void finish_other_pv() {
    finish_pv<kBehind>();
    release(memory.empty_p(1 - c));
  }
  __device__ __forceinline__ int v_start16() const {
    return c * (kConfig.strips_v() * kConfig.kStripBytes / 16);
  }
  __device__ __forceinline__ static int p_start16(int c) {
    return c * (kConfig.kStripBytes / 16);
  }

  // --- softmax ---

  /// O follows the last raise of the maxima.
  __device__ __forceinline__ void rescale_o() {
#pragma unroll
    for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] *= rows.factor[i / 2 % 2];
  }

  /// From Q K^T of block n to packed weights. Whether rescale_o() is due once no P V is under way.
  __device__ __forceinline__ bool softmax(AccS& acc_s, const Blocks& blocks, int n) {
    if (blocks.need_mask(n)) mask_window(acc_s, args.f, *work, n * kTileN);
    const bool raised = rows.raise(acc_s);
    rows.weigh(acc_s);
    rows.pack_weights(acc_s, weights);
    return raised;
  }

  /// Gives weights, maxima and sums of a block to the other consumer.
  __device__ __forceinline__ void hand_over(uint32_t block) const {
    const int first_row = 16 * warp_index(), row = first_row + lane % 16;
    ptx::mbarrier_wait(memory.empty_p(c), (block / 2 & 1) ^ 1);
#pragma unroll
    for (int step = 0; step < kStepsPv; ++step) {
      const int chunk = 2 * step + lane / 16;
      ptx::stmatrix_x4(memory.p(c) + row * kRowBytes + (chunk ^ row % 8) * 16, weights[0][step]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_total(rows.row_sum[half]);
      if (lane % 4 == 0) {
        ptx::st_shared_8(memory.statistics(c, first_row + lane / 4 + 8 * half),
                         {__float_as_uint(rows.row_max[half]), __float_as_uint(sum)});
      }
    }
    ptx::async_proxy_fence();  // products of the other consumer read P
    __syncwarp();
    release(memory.full_p(c));
  }

  /// Waits for the other consumer's weights of a block; maxima and sums go on from there, and O follows. No P V is
  /// under way.
  __device__ __forceinline__ void take_statistics(uint32_t block) {
    ptx::mbarrier_wait(memory.full_p(1 - c), block / 2 & 1);
    ptx::wgmma_fence();  // .aligned, as in wait_for_tile
    const int row = 16 * warp_index() + lane / 4;
    bool raised = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 of_row = ptx::ld_shared_8(memory.statistics(1 - c, row + 8 * half));
      const float maximum = __uint_as_float(of_row.x);
      raised = raised || maximum != rows.row_max[half];
      rows.raise_to(half, maximum, args.scale_log2);
      rows.row_sum[half] = lane % 4 == 0 ? __uint_as_float(of_row.y) : 0.0f;
    }
    if (__any_sync(kWholeWarp, raised)) rescale_o();
  }
};

}  // namespace fovea::cuda
