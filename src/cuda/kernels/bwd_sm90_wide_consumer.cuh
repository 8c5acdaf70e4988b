// A consumer of bwd_sm90_wide: one of the two warpgroups that share the sums of 64 rows.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bwd_sm90_wide_config.cuh"
#include "cuda/kernels/bwd_sm90_wide_scores.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/gradient.cuh"
#include "cuda/warp/row_vectors.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Consumer 0 computes S and P; consumer 1 dP and dS, where they are wanted; each adds its columns to the sums.
template <class Instance, int kConsumer>
struct BwdSm90WideConsumer : BwdSm90WideScores<Instance, kConsumer> {
  using Base = BwdSm90WideScores<Instance, kConsumer>;
  using T = typename Instance::Element;
  using Memory = BwdSm90WideMemory<Instance>;
  using WgmmaMajor = ptx::WgmmaMajor;
  using WgmmaStart = ptx::WgmmaStart;
  using Base::args, Base::memory, Base::ring_z, Base::ring_w, Base::t;
  using Base::kConfig, Base::kSwizzle, Base::kMakesP, Base::kMakesDs;
  using Base::lane, Base::warp, Base::release, Base::uniform, Base::work;
  using Scores = typename Base::Scores;
  static constexpr int kFirst = kConfig.first_strip(kConsumer), kLast = kConfig.last_strip(kConsumer);
  static constexpr int kColumns = (kLast - kFirst) * kConfig.kStrip;
  static constexpr bool kSumsZ = kConfig.has_dp();  ///< the sums multiply Z, else W
  static constexpr int kSumSlots = kSumsZ ? kConfig.z_pieces : kConfig.w_pieces;
  static constexpr int kSumPieces = kSumsZ ? Memory::kPiecesZ : Memory::kPiecesW;
  /// Pieces that lie side by side wherever the tile begins in the ring: one product covers them.
  static constexpr int kJoined = kSumSlots % 2 == 0 && kSumPieces % 2 == 0 ? 2 : 1;

  float sums[kColumns / 2];

  using Base::Base;
  /// The CTA's rows of the tile: all blocks of Z, head by head.
  __device__ __forceinline__ void run() {
    const BwdSm90WideWork& tile = work();
    const int begin = uniform(tile.begin), end = uniform(tile.end), heads = uniform(tile.heads_z);
    const int full_begin = uniform(tile.full_begin), full_end = uniform(tile.full_end);
#pragma unroll
    for (float& x : sums) x = 0.0f;
    if (begin < end) {
      this->open();
      this->template look_ahead<false>(begin);
      int n = begin;
#pragma unroll 1
      for (int left = heads * (end - begin); left > 0; --left) {
        const int next = n + 1 == end ? begin : n + 1;
        step(n, n < full_begin || n >= full_end, left > 1, next);
        if (next == begin) ++this->head;
        n = next;
      }
    }
    write();
  }

 private:
  /// S and P | dP and dS | the sums. Nothing is in flight behind a step: while one consumer takes exponentials, the other
  /// multiplies, and shared memory, which limits both products, takes in what is streamed.
  __device__ __forceinline__ void step(int n, bool masked, bool more, int next) {
    if (this->odd) this->clear_odd_rows(n);
    if constexpr (kMakesP) {
      Scores s;
      this->template multiply_rows<true>(s, n);
      this->weigh(s, n, masked);
    }
    if constexpr (kMakesDs) {
      Scores dp;
      this->template multiply_rows<false>(dp, n);
      this->score_gradients(dp, n, masked);
    }
    add_to_sums(more, next);
  }

  /// sums += weights (columns of Z or W that are this consumer's). Meanwhile, with `more`, looks at the step behind, of block
  /// `next`; the rings have room for its first piece.
  __device__ __forceinline__ void add_to_sums(bool more, int next) {
    static_assert(kSumSlots > kSumPieces);
    ptx::mbarrier_wait(memory.full_weights(), t & 1);
    if constexpr (!kSumsZ) this->wait_for_w();
    ptx::wgmma_fence();
    issue_sums<kFirst>(this->base16_of_step());
    ptx::wgmma_commit();
    if (more) this->template look_ahead<true>(next);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(sums);
    this->template release_pieces<kSumsZ, 0, kSumPieces>();
    if (lane() == 0) ptx::mbarrier_arrive(memory.empty_weights());
    ring_z.next(), ring_w.next(), ++t;
  }
  template <int kStrip>
  __device__ __forceinline__ void issue_sums(int base) {
    if constexpr (kStrip < kLast) {
      constexpr int kTogether = kJoined * kConfig.kPieceStrips, kPiece = kStrip / kConfig.kPieceStrips;
      constexpr int kUnitEnd = (kStrip / kTogether + 1) * kTogether,
                    kEnd = kUnitEnd < kLast ? kUnitEnd : kLast;
      constexpr int kN = (kEnd - kStrip) * kConfig.kStrip, kInside = kStrip % kConfig.kPieceStrips;
      auto& part = reinterpret_cast<float(&)[kN / 2]>(sums[(kStrip - kFirst) * kConfig.kStrip / 2]);
      const int slot = kSumsZ ? ring_z.slot(kPiece) : ring_w.slot(kPiece);
      const int at = (kSumsZ ? kConfig.z_at() : kConfig.w_at()) + slot * kConfig.piece_bytes() +
                     kInside * kConfig.strip_bytes();
      const uint64_t a = tile::wgmma_k_major(kConfig.weights_at(), kSwizzle).encode_from(base);
      const uint64_t b = tile::wgmma_mn_major(0, kSwizzle, kConfig.streamed).encode_from(base + at / 16);
#pragma unroll
      for (int i = 0; i < kConfig.streamed / 16; ++i)
        ptx::Wgmma<kN>::template ss<T, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(
            part, a + tile::wgmma_start_step(i * 32), b + tile::wgmma_start_step(i * 16 * kConfig.kRowBytes));
      issue_sums<kEnd>(base);
    }
  }

  // --- the gradient ---

  /// Rows of the gradient, times `scale`, or for dV what dropout keeps times its factor; zeros in rows that take no part.
  __device__ __forceinline__ void write() {
    using Mode = BwdSm90WideMode;
    const tile::AttentionParams& p = args.b.p;
    constexpr Mode kMode = kConfig.mode;
    const tile::RowsView& view = kMode == Mode::kDq ? p.dq : kMode == Mode::kDk ? p.dk : p.dv;
    constexpr uint32_t kAligned = kMode == Mode::kDq   ? tile::kAlignedDQ
                                  : kMode == Mode::kDk ? tile::kAlignedDK
                                                       : tile::kAlignedDV;
    const int columns = (kSumsZ ? p.head_dim : p.head_dim_v) - kFirst * kConfig.kStrip;
    const float factor = kMode != Mode::kDv ? p.scale : kConfig.dropout ? p.dropout_keep_scale : 1.0f;
    const BwdSm90WideWork& tile = work();
    const int used = kConfig.queries_stay() ? tile.used_q : tile.used_k;
    const int64_t first = view.offset(tile.batch, tile.row_x, tile.head_x) + kFirst * kConfig.kStrip;
    const bool aligned = (p.aligned16 & kAligned) != 0,
               is_f32 = kMode == Mode::kDq ? p.dq_is_f32 : p.dk_is_f32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = this->row_x(half);
      if (row >= used) {
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) sums[i / 2 * 4 + 2 * half + i % 2] = 0.0f;
      }
      store_gradient_row<kColumns, T>(view.data, first + row * view.row, is_f32, aligned,
                                      row < tile.length_x ? columns : 0, sums, half, factor, lane());
    }
    // Rows behind all tiles, which the last packed sequence has.
    constexpr int kRows = kConfig.kRows * kConfig.kCluster;
    const int tiles_end = bwd_sm90_wide_tiles<kConfig>(p) * kRows;
    if (tile.first + kRows != tiles_end) return;
    for (int row = tiles_end + ptx::cta_rank() * 4 + warp(); row < tile.length_x;
         row += 4 * kConfig.kCluster) {
      for (int c = lane(); c < min(columns, kColumns); c += 32)
        store_gradient<T>(view.data, first + row * view.row + c, is_f32, 0.0f);
    }
  }
};

}  // namespace fovea::cuda
