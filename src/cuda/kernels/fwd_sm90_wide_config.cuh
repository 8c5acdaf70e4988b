// Configuration of fwd_sm90_wide, its shared memory and barriers.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_config.cuh"
#include "cuda/kernels/tma_args.hpp"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Of the kernels in which two consumers share 64 rows of O: fwd_sm90_wide, and with values_in_keys fwd_sm90_latent.
struct FwdSm90WideConfig {
  int head_dim;    ///< padded to a multiple of 64
  int head_dim_v;  ///< padded to a multiple of 128: whole strips for each of two consumers
  /// CTAs that share their loads: each has 64 rows of a tile, loads every second strip of K and V, and sends it to all.
  /// One alone would read K and V of L2 at 1 byte for 64 FLOP: 5.5 TB/s at 350 TFLOP/s.
  int cluster = 2;
  bool values_in_keys = false;  ///< V is the first head_dim_v columns of K, which has a strip more
  bool expression = false;      ///< compiled for warp/expression.cuh, which is asked of every pair
  bool dropout = false;

  static constexpr int kRows = 64, kConsumers = 2;
  /// Keys of a block: S and P of 64 fit beside the 128 registers of O.
  static constexpr int tile_n = 64;
  static constexpr bool stream_k = false;
  static constexpr bool multiplies_qv = true;         ///< strips of QV and V stand beside those of Q and K
  static constexpr int kStrip = 64, kRowBytes = 128;  ///< columns of a strip, and their bytes
  static constexpr int strip() { return kStrip; }
  static constexpr int kStripBytes = tile_n * kRowBytes;  ///< of K or V; 64 rows of Q and P as well
  static constexpr int kPieceStrips = 2;                  ///< what one barrier of K stands for
  static constexpr int kMostShared = FwdSm90Config::kMostShared;
  constexpr int work_tile_bytes() const { return expression ? 112 : 96; }  ///< of FwdSm90WorkTile
  // Of the pieces shared with fwd_sm90.
  static constexpr bool row_sum_in_mma = false, e4m3 = false;
  static constexpr int row_groups() { return 1; }
  static constexpr bool plans_ahead() { return false; }
  static constexpr bool seen_blocks() { return false; }
  static constexpr bool arriving = false;
  constexpr int columns_o() const { return head_dim_v / kConsumers; }
  static constexpr int planners() { return 1; }
  /// Threads that take tiles: the planner, and those that load K and each half of V, or K as all of these.
  constexpr int producers() const { return values_in_keys ? 2 : kConsumers + 2; }
  constexpr int next_readers() const { return cluster * producers() - 1; }

  static constexpr int threads() { return 128 * (kConsumers + 1); }
  constexpr int tile_m() const { return kRows * cluster; }
  /// 168 registers a thread at the launch: 232 for a consumer leave 40. A whole warp that loads needs more.
  constexpr int producer_registers() const { return values_in_keys ? 56 : 40; }
  constexpr int consumer_registers() const { return values_in_keys ? 224 : 232; }

  constexpr int strips() const { return (head_dim + kStrip - 1) / kStrip; }  ///< of Q and K
  constexpr int pieces_k() const { return (strips() + kPieceStrips - 1) / kPieceStrips; }
  /// Strips of piece `piece` of K: the last may have one.
  constexpr int strips_of(int piece) const {
    const int left = strips() - piece * kPieceStrips;
    return left < kPieceStrips ? left : kPieceStrips;
  }
  constexpr int strips_v() const { return columns_o() / kStrip; }  ///< of a consumer's half of V

  constexpr int q_bytes() const { return strips() * kStripBytes; }
  constexpr int k_at() const { return q_bytes(); }
  constexpr int v_at() const { return k_at() + strips() * kStripBytes; }
  constexpr int p_at() const { return v_at() + kConsumers * strips_v() * kStripBytes; }
  constexpr int statistics_at() const { return p_at() + kConsumers * kStripBytes; }
  constexpr int barriers_at() const { return statistics_at() + kConsumers * kRows * 8; }
  constexpr int barriers() const { return 2 + 2 * kConsumers * (pieces_k() + 1) + 2 * kConsumers + 4; }
  constexpr int work_tiles_at() const { return barriers_at() + (barriers() * 8 + 15) / 16 * 16; }
  constexpr int next_at() const { return work_tiles_at() + 2 * work_tile_bytes(); }
  constexpr int shared_bytes() const { return next_at() + 2 * 4; }
};

/// Where things lie in shared memory: addresses in the shared window. Barriers: see fwd_sm90_wide.cuh.
template <class Instance>
struct FwdSm90WideMemory {
  static constexpr FwdSm90WideConfig kConfig = Instance::kConfig;
  static constexpr int kPiecesK = kConfig.pieces_k();
  static constexpr int kConsumers = kConfig.kConsumers;
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int) const { return base; }
  __device__ __forceinline__ uint32_t k(int piece) const {
    return base + kConfig.k_at() + piece * kConfig.kPieceStrips * kConfig.kStripBytes;
  }
  /// The half of V that consumer c multiplies.
  __device__ __forceinline__ uint32_t v(int c) const {
    return base + kConfig.v_at() + c * kConfig.strips_v() * kConfig.kStripBytes;
  }
  /// P of consumer c, and the maxima and sums of its rows, 8 bytes a row.
  __device__ __forceinline__ uint32_t p(int c) const {
    return base + kConfig.p_at() + c * kConfig.kStripBytes;
  }
  __device__ __forceinline__ uint32_t statistics(int c, int row) const {
    return base + kConfig.statistics_at() + (c * kConfig.kRows + row) * 8;
  }

  /// Operands of products as if shared memory began at 0: the first strip of Q and of K, P and V of consumer 0.
  static constexpr tile::WgmmaDescriptor first_q() { return tile::wgmma_k_major(0, tile::SwizzleMode::k128); }
  static constexpr tile::WgmmaDescriptor first_k() {
    return tile::wgmma_k_major(kConfig.k_at(), tile::SwizzleMode::k128);
  }
  static constexpr tile::WgmmaDescriptor first_p() {
    return tile::wgmma_k_major(kConfig.p_at(), tile::SwizzleMode::k128);
  }
  static constexpr tile::WgmmaDescriptor first_v() {
    return tile::wgmma_mn_major(kConfig.v_at(), tile::SwizzleMode::k128, kConfig.tile_n);
  }

  __device__ __forceinline__ uint32_t full_q(int) const { return barrier(0); }
  __device__ __forceinline__ uint32_t empty_q(int) const { return barrier(1); }
  /// Of the blocks of consumer c alone: it would not notice phases of the others.
  __device__ __forceinline__ uint32_t full_k(int c, int piece) const {
    return barrier(kK + c * kPiecesK + piece);
  }
  __device__ __forceinline__ uint32_t empty_k(int c, int piece) const {
    return barrier(kK + (kConsumers + c) * kPiecesK + piece);
  }
  __device__ __forceinline__ uint32_t full_v(int c) const { return barrier(kV + c); }
  __device__ __forceinline__ uint32_t empty_v(int c) const { return barrier(kV + kConsumers + c); }
  __device__ __forceinline__ uint32_t full_p(int c) const { return barrier(kP + c); }
  __device__ __forceinline__ uint32_t empty_p(int c) const { return barrier(kP + kConsumers + c); }
  __device__ __forceinline__ uint32_t full_next(uint32_t turn) const { return barrier(kNext + turn % 2); }
  __device__ __forceinline__ uint32_t empty_next(uint32_t turn) const { return full_next(turn) + 16; }
  /// The index of the tile after the one of this turn.
  __device__ __forceinline__ uint32_t next(uint32_t turn) const {
    return base + kConfig.next_at() + turn % 2 * 4;
  }

  /// By one thread; the others see the barriers after a __syncthreads().
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4, kReaders = kWarps * kConfig.cluster;  // of a consumer, of a piece
    ptx::mbarrier_init(full_q(0), 1);
    ptx::mbarrier_init(empty_q(0), kConsumers * kWarps);
    for (int c = 0; c < kConsumers; ++c) {
      for (int piece = 0; piece < kPiecesK; ++piece) {
        ptx::mbarrier_init(full_k(c, piece), 1);
        ptx::mbarrier_init(empty_k(c, piece), kReaders);
      }
      ptx::mbarrier_init(full_v(c), 1);
      ptx::mbarrier_init(empty_v(c), kReaders);
      ptx::mbarrier_init(full_p(c), kWarps);
      ptx::mbarrier_init(empty_p(c), kWarps);
    }
    for (uint32_t turn = 0; turn < 2; ++turn) {
      ptx::mbarrier_init(full_next(turn), 1);
      ptx::mbarrier_init(empty_next(turn), kConfig.next_readers());
    }
    ptx::mbarrier_init_fence();
  }

  /// Tile number `tile` of the CTA, which the planner overwrites two tiles later.
  __device__ __forceinline__ FwdSm90WorkTile* work_tile(int, uint32_t tile) const {
    return reinterpret_cast<FwdSm90WorkTile*>(ptx::shared_pointer(base + kConfig.work_tiles_at())) +
           (tile & 1);
  }

 private:
  static constexpr int kK = 2, kV = kK + 2 * kConsumers * kPiecesK, kP = kV + 2 * kConsumers,
                       kNext = kP + 2 * kConsumers;
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + kConfig.barriers_at() + 8 * i; }
};

}  // namespace fovea::cuda
