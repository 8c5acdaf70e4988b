// A consumer of fwd_sm90_wide: one of the two warpgroups that share 64 rows of queries.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_wide_config.cuh"
#include "cuda/kernels/fwd_sm90_wide_rows.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// What fwd_sm90_wide_rows.cuh leaves open: where K and V lie, and the order of products.
template <class Instance>
struct FwdSm90WideConsumer
    : FwdSm90WideRows<FwdSm90WideConsumer<Instance>, Instance, FwdSm90WideMemory<Instance>> {
  using Base = FwdSm90WideRows<FwdSm90WideConsumer<Instance>, Instance, FwdSm90WideMemory<Instance>>;
  using Base::acc_o, Base::base16, Base::c, Base::kConfig, Base::kTileN, Base::memory;
  using typename Base::AccS;
  using typename Base::Blocks;
  using typename Base::Element;
  using typename Base::Memory;
  using typename Base::WgmmaMajor;
  using typename Base::WgmmaStart;
  static constexpr int kPiecesK = Memory::kPiecesK, kStepsQk = kConfig.head_dim / 16;
  static constexpr int kStepsOfPiece = kConfig.kPieceStrips * kConfig.kStrip / 16;
  /// Pieces of Q K that go before the other consumer's P V: the halves of V are then needed at even distances.
  static constexpr int kPiecesBefore = 2;
  static_assert(kPiecesK > kPiecesBefore);
  using Base::Base;

  /// The tile's first block, with nothing under way.
  __device__ __forceinline__ void first_step(const Blocks& blocks, int n, uint32_t block) {
    AccS acc_s;
    issue_qk<0, kPiecesK>(acc_s, block);
    finish_qk<0, kPiecesK>();
    ptx::wgmma_done(acc_s);
    this->softmax(acc_s, blocks, n);
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
    this->take_statistics(block - 1);
    issue_other_pv(block - 1);
    issue_qk<kPiecesBefore, kPiecesK>(acc_s, block);
    finish_other_pv<kPiecesK - kPiecesBefore>();
    finish_qk<kPiecesBefore, kPiecesK>();
    ptx::wgmma_done(acc_s);
    const bool raised = this->softmax(acc_s, blocks, n);
    hand_over(block);
    if (raised) this->rescale_o();
    issue_own_pv(block);
    finish_own_pv();
  }

  /// The tile's last block, which is the other's.
  __device__ __forceinline__ void last_step(uint32_t block) {
    this->take_statistics(block);
    issue_other_pv(block);
    finish_other_pv<0>();
  }

 private:
  // --- products ---

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
      this->release_piece(memory.empty_k(c, kBegin));
      finish_qk<kBegin + 1, kEnd>();
    }
  }

  /// This consumer's half of V, when that of the block is there.
  __device__ __forceinline__ uint64_t v_of(uint32_t block) const {
    ptx::mbarrier_wait(memory.full_v(c), block & 1);
    return Memory::first_v().encode_from(base16 + c * (kConfig.strips_v() * kConfig.kStripBytes / 16));
  }
  template <WgmmaStart kStart = WgmmaStart::kAccumulate>
  __device__ __forceinline__ void issue_own_pv(uint32_t block) {
    Base::template issue_own_pv<kStart>(v_of(block));
  }
  __device__ __forceinline__ void issue_other_pv(uint32_t block) {
    const uint64_t p = Memory::first_p().encode_from(base16 + (1 - c) * (kConfig.kStripBytes / 16));
    Base::issue_other_pv(p, v_of(block));
  }
  /// Waits for it, behind which kBehind groups are queued, and gives V back.
  template <int kBehind>
  __device__ __forceinline__ void finish_pv() {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc_o);
    this->release_piece(memory.empty_v(c));
  }
  __device__ __forceinline__ void finish_own_pv() {
    finish_pv<0>();
  }
  template <int kBehind>
  __device__ __forceinline__ void finish_other_pv() {
    finish_pv<kBehind>();
    this->release(memory.empty_p(1 - c));
  }

  /// Gives a block's weights to the other consumer, which has read those of two blocks before.
  __device__ __forceinline__ void hand_over(uint32_t block) const {
    ptx::mbarrier_wait(memory.empty_p(c), (block / 2 & 1) ^ 1);
    Base::hand_over();
  }
};

}  // namespace fovea::cuda
