// A consumer of fwd_sm90_latent: one of the two warpgroups that share 64 rows of queries.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_latent_memory.cuh"
#include "cuda/kernels/fwd_sm90_wide_rows.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// What fwd_sm90_wide_rows.cuh leaves open: where K and V lie, and the order of products. Blocks of consumer c are in stage c.
template <class Instance>
struct FwdSm90LatentConsumer
    : FwdSm90WideRows<FwdSm90LatentConsumer<Instance>, Instance, FwdSm90LatentMemory<Instance>> {
  using Base = FwdSm90WideRows<FwdSm90LatentConsumer<Instance>, Instance, FwdSm90LatentMemory<Instance>>;
  using Base::acc_o, Base::base16, Base::c, Base::kConfig, Base::kTileN, Base::memory;
  using Base::Base;
  using typename Base::AccS;
  using typename Base::Blocks;
  using typename Base::Element;
  using typename Base::Memory;
  using typename Base::WgmmaMajor;
  using typename Base::WgmmaStart;

  /// The tile's first block, with nothing under way.
  __device__ __forceinline__ void first_step(const Blocks& blocks, int n, uint32_t block) {
    AccS acc_s;
    issue_qk(acc_s, block);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_s);
    this->softmax(acc_s, blocks, n);
    hand_over();
    Base::template issue_own_pv<WgmmaStart::kZero>(v_of(c));
    finish_pv<0>(c);
  }

  /// Block n, this consumer's, after the block before it, the other's:
  ///   P V of the other's weights, Q K | softmax | P V of its own
  /// At each bar its queue runs empty, and the other consumer has the tensor cores. P V comes first, so that the other stage is free, and
  /// loaded again, while this consumer is at Q K and the softmax.
  __device__ __forceinline__ void step(const Blocks& blocks, int n, uint32_t block) {
    AccS acc_s;
    this->take_statistics(block - 1);
    issue_other_pv(block - 1);
    issue_qk(acc_s, block);
    finish_pv<kGroupsQk>(1 - c);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_s);
    const bool raised = this->softmax(acc_s, blocks, n);
    hand_over();
    if (raised) this->rescale_o();
    Base::issue_own_pv(v_of(c));
    finish_pv<0>(c);
  }

  /// The tile's last block, which is the other's.
  __device__ __forceinline__ void last_step(uint32_t block) {
    this->take_statistics(block);
    issue_other_pv(block);
    finish_pv<0>(1 - c);
  }

 private:
  static constexpr int kStep16 = 16;   ///< bytes of a unit of base16
  static constexpr int kGroupsQk = 2;  ///< of products, one for each piece of K

  /// S = Q K^T, in pieces as they are loaded: the same order for both consumers, so that bits do not depend on whose block it is.
  __device__ __forceinline__ void issue_qk(AccS& acc_s, uint32_t block) const {
    issue_qk_piece<0>(acc_s, block);
    issue_qk_piece<1>(acc_s, block);
  }
  template <int kPiece>
  __device__ __forceinline__ void issue_qk_piece(AccS& acc_s, uint32_t block) const {
    const int k16 = base16 + c * (Memory::kStageBytes / kStep16);
    using Product = ptx::Wgmma<kTileN>;
    constexpr int kFirst = 4 * kPiece * kConfig.strips_v(), kSteps = 4 * Memory::strips_of(kPiece);
    ptx::mbarrier_wait(memory.full(c, kPiece), block / 2 & 1);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = kFirst; step < kFirst + kSteps; ++step) {
      const int start16 = (step / 4 * kConfig.kStripBytes + step % 4 * 32) / kStep16;
      const uint64_t q = Memory::first_q().encode_from(base16 + start16),
                     k = Memory::first_k().encode_from(k16 + start16);
      if (step == 0) {
        Product::template ss<Element, WgmmaStart::kZero, WgmmaMajor::kK>(acc_s, q, k);
      } else {
        Product::template ss<Element, WgmmaStart::kAccumulate, WgmmaMajor::kK>(acc_s, q, k);
      }
    }
    ptx::wgmma_commit();
  }

  /// This consumer's half of the values in a stage.
  __device__ __forceinline__ uint64_t v_of(int stage) const {
    return Memory::first_v().encode_from(base16 + stage * (Memory::kStageBytes / kStep16) +
                                         c * (kConfig.strips_v() * kConfig.kStripBytes / kStep16));
  }
  __device__ __forceinline__ void issue_other_pv(uint32_t block) {
    // The other has waited for it too, and has said so, but not for this consumer.
    ptx::mbarrier_wait(memory.full(1 - c, c), block / 2 & 1);
    Base::issue_other_pv(Memory::first_p().encode_from(base16), v_of(1 - c));
  }
  /// Waits for P V, behind which kBehind groups are queued, and gives this consumer's half of the stage back.
  template <int kBehind>
  __device__ __forceinline__ void finish_pv(int stage) {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc_o);
    this->release_piece(memory.empty(stage, c));
  }

  /// Gives a block's weights to the other consumer. This one has read those before them; when all its warps have, there is room.
  __device__ __forceinline__ void hand_over() const {
    ptx::barrier_wait(1 + c, 128);
    Base::hand_over();
  }
};

}  // namespace fovea::cuda
