// A consumer of bwd_sm90: 64 keys of the tile, against all queries that see any of its 128. The steps of step(), in the
// order in which they are called.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_dq.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/finite_tile.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/row_vectors.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// Which gradients a consumer sums.
enum class BwdSm90Part { kBoth, kDv, kDk };

template <class Instance, BwdSm90Part kPart>
struct BwdSm90Consumer : BwdSm90Warpgroup<Instance> {
  using T = typename Instance::Element;
  using Base = BwdSm90Warpgroup<Instance>;
  using Base::args, Base::memory, Base::descriptor, Base::lane, Base::release, Base::uniform, Base::warp;
  using Work = BwdSm90Work;
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  static constexpr int kM = kConfig.tile_m, kN = kConfig.tile_n(), kD = kConfig.head_dim,
                       kDv = kConfig.head_dim_v;
  static constexpr int kRowBytes = kConfig.kRowBytes, kPieces = kConfig.pieces;
  static constexpr auto kSwizzle = tile::SwizzleMode::k128;
  using Scores = float[kM / 2];          ///< (64 keys, kM queries): rows are keys
  using Operand = uint32_t[kM / 16][4];  ///< the same as operand A

  static constexpr bool kSumsDv = kPart != BwdSm90Part::kDk, kSumsDk = kPart != BwdSm90Part::kDv;
  struct Sums {
    float dk[kSumsDk ? kD / 2 : 1], dv[kSumsDv ? kDv / 2 : 1];
  };
  using Dq = BwdSm90Dq<Instance>;
  int consumer;

  /// Which 64 of the tile's keys are its own.
  __device__ __forceinline__ int keys() const { return kPart == BwdSm90Part::kBoth ? consumer : 0; }

  // --- products, each queued as a group of its own ---

  /// Queues acc = (own 64 rows of the tile of keys) (kM rows of the tile of queries)^T, k columns at a time, piece by
  /// piece as they arrive.
  template <int kColumns, bool kQ>
  __device__ __forceinline__ void issue_keys_by_queries(Scores& acc, uint32_t count) const {
    constexpr int kSteps = kColumns / 16 / kPieces;
    const uint64_t a =
        descriptor(tile::wgmma_k_major(0, kSwizzle), (kQ ? 0 : kConfig.v_at()) + keys() * 64 * kRowBytes);
    using Product = ptx::Wgmma<kM>;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const auto slot = slot_of<kQ>(count, piece);
      ptx::mbarrier_wait(kQ ? memory.full_q(slot.index) : memory.full_do(slot.index), slot.phase);
      ptx::wgmma_fence();
      const uint64_t b = descriptor(tile::wgmma_k_major(0, kSwizzle), at_of<kQ>(slot.index));
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int key_step = piece * kSteps + i;
        const uint64_t a_step = a + tile::wgmma_start_step(key_step / 4 * kN * kRowBytes + key_step % 4 * 32);
        const uint64_t b_step = b + tile::wgmma_start_step(i / 4 * kM * kRowBytes + i % 4 * 32);
        if (key_step == 0) {
          Product::template ss<T, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(acc, a_step, b_step);
        } else {
          Product::template ss<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(acc, a_step, b_step);
        }
      }
    }
    ptx::wgmma_commit();
  }
  /// Queues acc (64 keys, kColumns) += operand (64 keys, kM queries) (kM x kColumns tile of queries): a group of products
  /// a piece.
  template <int kColumns, bool kQ>
  __device__ __forceinline__ void issue_gradient(float (&acc)[kColumns / 2], const Operand& operand,
                                                 uint32_t count) const {
    constexpr int kPieceColumns = kColumns / kPieces;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const uint64_t b =
          descriptor(tile::wgmma_mn_major(0, kSwizzle, kM), at_of<kQ>(slot_of<kQ>(count, piece).index));
      auto& part = reinterpret_cast<float(&)[kPieceColumns / 2]>(acc[piece * kPieceColumns / 2]);
#pragma unroll
      for (int i = 0; i < kM / 16; ++i)
        ptx::Wgmma<kPieceColumns>::template rs<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kMN>(
            part, operand[i], b + tile::wgmma_start_step(i * 16 * kRowBytes));
      ptx::wgmma_commit();
    }
  }
  /// The slot of a piece of Q or dO of step number `count`, and where it lies in shared memory.
  template <bool kQ>
  __device__ __forceinline__ static auto slot_of(uint32_t count, int piece) {
    return RingSlot < kQ ? kConfig.q_slots : kConfig.do_slots > (count * kPieces + piece);
  }
  template <bool kQ>
  __device__ __forceinline__ static int at_of(int slot) {
    return kQ ? kConfig.q_at() + slot * kConfig.q_bytes() : kConfig.do_at() + slot * kConfig.do_bytes();
  }
  /// No product of this warp reads Q, or dO, of step number `count` any more.
  template <bool kQ>
  __device__ __forceinline__ void release_rows(uint32_t count) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int slot = slot_of<kQ>(count, piece).index;
      release(kQ ? memory.empty_q(slot) : memory.empty_do(slot));
    }
  }

  // --- element by element ---

  /// Zero for pairs that are not seen, whatever they hold.
  __device__ __forceinline__ void mask(Scores& x, const Work& work, int n) const {
    const tile::AttentionParams& p = args.b.p;
    tile::SequenceSpan span;
    span.used_q = work[BwdSm90Work::kUsedQ], span.used_k = work[BwdSm90Work::kUsedK];
    const int first_query = n * kM + 2 * (lane() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = work[BwdSm90Work::kFirstKey] + keys() * 64 + warp() * 16 + lane() / 4 + 8 * half;
      const tile::Span32 seen = j < span.used_k ? tile::queries_of_any(p, span, j, j + 1) : tile::Span32{};
      const int begin = seen.begin - first_query, end = seen.end - first_query;
#pragma unroll
      for (int t = 0; t < kM / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * t + e < begin || 8 * t + e >= end) x[4 * t + 2 * half + e] = 0.0f;
      }
    }
  }
  /// lse or delta of the queries of this lane's columns, read before the scores are awaited.
  struct Statistics {
    uint2 of[kM / 8];
  };
  __device__ __forceinline__ static void read(Statistics& x, uint32_t from) {
#pragma unroll
    for (int t = 0; t < kM / 8; ++t) x.of[t] = ptx::ld_shared_8(from + lane() % 4 * 8 + t * 32);
  }
  /// S -> P = exp2(scale_log2 S - lse_log2).
  __device__ __forceinline__ void weigh(Scores& s, const Statistics& lse) const {
#pragma unroll
    for (int i = 0; i < kM / 2; ++i) {
      const uint32_t of_query = i % 2 == 0 ? lse.of[i / 4].x : lse.of[i / 4].y;
      s[i] = ptx::ex2(fmaf(s[i], args.scale_log2, -__uint_as_float(of_query)));
    }
  }
  /// dP -> dS = P (dP - delta).
  __device__ __forceinline__ static void score_gradients(const Operand& p, Scores& dp,
                                                         const Statistics& delta) {
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      const float2 weights = unpack<T>(p[i / 8][i % 8 / 2]);
      dp[i] = weights.x * (dp[i] - __uint_as_float(delta.of[i / 4].x));
      dp[i + 1] = weights.y * (dp[i + 1] - __uint_as_float(delta.of[i / 4].y));
    }
  }
  __device__ __forceinline__ static void to_operand(const Scores& x, Operand& operand) {
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) operand[i / 4][i % 4] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
  /// P from the consumer that sums dV to the one that sums dK, whose threads hold the same keys and queries.
  __device__ __forceinline__ void hand_over(const Operand& p, int buffer, uint32_t phase) const {
    const uint32_t at = memory.p(buffer) + static_cast<int>(ptx::thread_index()) % 128 * 16;
    ptx::mbarrier_wait(memory.empty_p(buffer), phase ^ 1);
#pragma unroll
    for (int i = 0; i < kM / 16; ++i)
      ptx::st_shared_16(at + i * 2048, uint4{p[i][0], p[i][1], p[i][2], p[i][3]});
    __syncwarp();  // the warp's part is written
    release(memory.full_p(buffer));
  }
  __device__ __forceinline__ void take_over(Operand& p, int buffer, uint32_t phase) const {
    const uint32_t at = memory.p(buffer) + static_cast<int>(ptx::thread_index()) % 128 * 16;
    ptx::mbarrier_wait(memory.full_p(buffer), phase);
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) {
      const uint4 x = ptx::ld_shared_16(at + i * 2048);
      p[i][0] = x.x, p[i][1] = x.y, p[i][2] = x.z, p[i][3] = x.w;
    }
    __syncwarp();  // the warp has read its part
    release(memory.empty_p(buffer));
  }
  /// Transposed into the strip of dS of this consumer's keys.
  __device__ __forceinline__ void store_ds(const Operand& ds, int buffer) const {
    const int row = lane() % 8 + lane() / 16 * 8, chunk = 2 * warp() + lane() / 8 % 2;
    const uint32_t at = memory.ds(buffer, keys()) + row * kRowBytes + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) ptx::stmatrix_x4_trans(at + i * 16 * kRowBytes, ds[i]);
  }
  // --- what is not finite (bwd_sm90.cuh) ---

  /// Makes this consumer's rows of K finite.
  __device__ __forceinline__ void make_keys_finite() const {
    const int thread = static_cast<int>(ptx::thread_index()) % 128;
    const uint32_t own = memory.k() + keys() * 64 * kRowBytes;
    constexpr int kChunks = 64 * kRowBytes / 16;  // of a strip's 64 rows
    NonFinite<T> bad;
#pragma unroll
    for (int c = 0; c < kConfig.strips(kD) * kChunks / 128; ++c) {
      const uint4 x =
          ptx::ld_shared_16(own + c * 128 / kChunks * kN * kRowBytes + (c * 128 % kChunks + thread) * 16);
      bad.look(x.x), bad.look(x.y), bad.look(x.z), bad.look(x.w);
    }
    if (bad.any()) {
#pragma unroll 1
      for (int word = 0; word < kConfig.strips(kD) * kChunks / 128 * 4; ++word) {
        const int c = word / 4;
        const uint32_t at =
            own + c * 128 / kChunks * kN * kRowBytes + (c * 128 % kChunks + thread) * 16 + word % 4 * 4;
        const uint32_t pair = ptx::ld_shared_4(at);
        ptx::st_shared_4(at, finite_half<T>(pair & 0xffffu) | finite_half<T>(pair >> 16) << 16);
      }
      ptx::async_proxy_fence();
    }
    ptx::barrier_wait(kOwnKeys + keys(),
                      128);  // all four warps' rows are finite: the products of this consumer may begin
  }
  /// Whether lse of any row of the step is not finite. The same for all warps, as each looks at all rows.
  __device__ __forceinline__ bool any_odd_row(int s) const {
    bool odd = false;
#pragma unroll
    for (int i = 0; i < kM / 32; ++i)
      odd |= !(fabsf(__uint_as_float(ptx::ld_shared_4(memory.lse(s) + (lane() + 32 * i) * 4))) < INFINITY);
    return __any_sync(0xffffffffu, odd);
  }
  /// Rows of Q and dO whose lse is not finite become zeros, before any product reads them. All consumers.
  __device__ __forceinline__ void clear_odd_rows(uint32_t count) const {
    const int lse_slot = slot_of<true>(count, 0).index;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const auto q = slot_of<true>(count, piece);
      const auto d_o = slot_of<false>(count, piece);
      ptx::mbarrier_wait(memory.full_q(q.index), q.phase);
      ptx::mbarrier_wait(memory.full_do(d_o.index), d_o.phase);
      clear_odd_chunks<kConfig.q_bytes()>(memory.q(q.index), lse_slot);
      clear_odd_chunks<kConfig.do_bytes()>(memory.d_o(d_o.index), lse_slot);
    }
    ptx::async_proxy_fence();
    ptx::barrier_wait(kOddRows, kBothConsumers);  // the rows are zeros for the products of both consumers
  }
  /// Of a piece; the threads of both consumers share its 16-byte chunks.
  template <int kBytes>
  __device__ __forceinline__ void clear_odd_chunks(uint32_t piece, int lse_slot) const {
    const int thread = consumer * 128 + static_cast<int>(ptx::thread_index()) % 128;
#pragma unroll 1
    for (int i = thread; i < kBytes / 16; i += kBothConsumers) {
      const int row = i / 8 % kM;
      if (fabsf(__uint_as_float(ptx::ld_shared_4(memory.lse(lse_slot) + row * 4))) < INFINITY) continue;
      ptx::st_shared_16(piece + i * 16, uint4{0, 0, 0, 0});
    }
  }

  // --- the mainloop ---

  /// Step number `count` of this CTA: block n of the queries of one head. dS of the step before has been written long ago
  /// by both consumers: its dQ fills the time of this step's elements.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Work& work, int n, uint32_t count, bool masked,
                                       Sums& sums) const {
    constexpr bool kDq = kPart == BwdSm90Part::kBoth && !kFirst;
    const RingSlot<kConfig.kBuffers> buffer(count);
    const auto q = slot_of<true>(count, 0);
    Operand p, ds;
    typename Dq::Slice acc_dq;
    Scores acc_s, acc_dp;
    Statistics lse, delta;
    ptx::mbarrier_wait(memory.full_q(q.index), q.phase);
    if (any_odd_row(q.index)) clear_odd_rows(count);
    if constexpr (kSumsDv) {
      if constexpr (kM == 64) read(lse, memory.lse(q.index));
      issue_keys_by_queries<kD, true>(acc_s, count);
    }
    if constexpr (kSumsDk) {
      issue_keys_by_queries<kDv, false>(acc_dp, count);
    }
    if constexpr (kSumsDv) {
      ptx::wgmma_wait<kSumsDk ? 1 : 0>();
      ptx::wgmma_done(acc_s);
      if constexpr (!kSumsDk) release_rows<true>(count);
      if constexpr (kM != 64) read(lse, memory.lse(q.index));
      weigh(acc_s, lse);
      if (masked) mask(acc_s, work, n);
      to_operand(acc_s, p);
    }
    if constexpr (kPart == BwdSm90Part::kDv) hand_over(p, buffer.index, buffer.phase);
    if constexpr (kDq) issue_dq(acc_dq, count - 1);
    if constexpr (kSumsDk) {
      if constexpr (kPart == BwdSm90Part::kDk) take_over(p, buffer.index, buffer.phase);
      ptx::wgmma_wait<kDq ? 1 : 0>();
      ptx::wgmma_done(acc_dp);
      read(delta, memory.delta(slot_of<false>(count, 0).index));
      score_gradients(p, acc_dp, delta);
      if (masked) mask(acc_dp, work, n);
      to_operand(acc_dp, ds);
      ptx::mbarrier_wait(memory.empty_ds(buffer.index), buffer.phase ^ 1);
      store_ds(ds, buffer.index);
      __syncwarp();  // the warp's part is written
      release(memory.full_ds(buffer.index));
    }
    if constexpr (!kSumsDk) wait_for_do(count);
    ptx::wgmma_fence();
    if constexpr (kSumsDv) issue_gradient<kDv, false>(sums.dv, p, count);
    if constexpr (kSumsDk) issue_gradient<kD, true>(sums.dk, ds, count);
    if constexpr (kDq) finish_dq<2>(acc_dq, count - 1);
    if constexpr (kSumsDv) {
      ptx::wgmma_wait<kSumsDk ? kPieces : 0>();
      ptx::wgmma_done(sums.dv);
    }
    release_rows<false>(count);
    if constexpr (kSumsDk) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(sums.dk);
      release_rows<true>(count);
    }
  }
  __device__ __forceinline__ void wait_for_do(uint32_t count) const {
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const auto slot = slot_of<false>(count, piece);
      ptx::mbarrier_wait(memory.full_do(slot.index), slot.phase);
    }
  }
  /// Queues this consumer's slice of dQ of step number `count`.
  __device__ __forceinline__ void issue_dq(typename Dq::Slice& acc, uint32_t count) const {
    const RingSlot<kConfig.kBuffers> ds(count);
    ptx::mbarrier_wait(memory.full_ds(ds.index), ds.phase);
    ptx::async_proxy_fence();  // dS, which both consumers have written, for the product
    ptx::wgmma_fence();
    Dq{{args, memory, this->base16}}.issue(acc, ds.index, consumer);
  }
  /// Waits for it, with kBehind groups of products behind it, and stages it for the writer.
  template <int kBehind>
  __device__ __forceinline__ void finish_dq(typename Dq::Slice& acc, uint32_t count) const {
    ptx::wgmma_wait<kBehind>();
    ptx::wgmma_done(acc);
    release(memory.empty_ds(RingSlot<kConfig.kBuffers>(count).index));
    ptx::barrier_wait(kDqFree + consumer, kConsumerAndWriter);  // the last step's has been read
    Dq::stage(acc, memory.dq(consumer));
    ptx::barrier_arrive(kDqStaged + consumer, kConsumerAndWriter);
  }

  /// Rows of dK or dV of this consumer's keys, times `factor`.
  template <int kColumns>
  __device__ __forceinline__ void write(const tile::RowsView& view, uint32_t aligned_bit, int columns,
                                        const Work& work, const float (&acc)[kColumns / 2],
                                        float factor) const {
    const int row = work[BwdSm90Work::kFirstKey] + keys() * 64 + warp() * 16 + lane() / 4,
              used_k = work[BwdSm90Work::kUsedK];
    T* const rows =
        reinterpret_cast<T*>(view.data) +
        view.offset(work[BwdSm90Work::kBatch], work[BwdSm90Work::kRowK], work[BwdSm90Work::kHeadKv]);
    const bool aligned = (args.b.p.aligned16 & aligned_bit) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const to = rows + (row + 8 * half) * view.row;
      const int exist = row + 8 * half < used_k ? columns : 0;
      if (aligned) {
        store_row_vectors<kColumns>(to, exist, acc, half, factor, lane());
      } else {
        store_row_elements<kColumns>(to, exist, acc, half, factor, lane());
      }
    }
  }

  /// All tiles of this CTA.
  __device__ __forceinline__ void run() const {
    Sums sums;
    uint32_t count = 0, keys_read = 0;
    for (uint32_t tile = 0;; ++tile) {
      ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
      // Each lane leaves the loop of a wait for itself. Behind an .aligned instruction the compiler takes the warp for
      // whole again.
      ptx::wgmma_fence();
      const Work work = memory.work(tile);
      const int steps = uniform(work[BwdSm90Work::kSteps]);
      if (steps < 0) break;
      const int m_begin = uniform(work[BwdSm90Work::kMBegin]), m_end = uniform(work[BwdSm90Work::kMEnd]),
                full_begin = uniform(work[BwdSm90Work::kFullBegin]),
                full_end = uniform(work[BwdSm90Work::kFullEnd]);
#pragma unroll
      for (float& x : sums.dk) x = 0.0f;
#pragma unroll
      for (float& x : sums.dv) x = 0.0f;
      if (steps > 0) {
        if constexpr (kSumsDv) {
          ptx::mbarrier_wait(memory.full_k(), keys_read & 1);
          make_keys_finite();
        }
        if constexpr (kSumsDk) ptx::mbarrier_wait(memory.full_v(), keys_read & 1);
        ++keys_read;
        ptx::wgmma_fence();
        int n = m_begin;
        step<true>(work, n, count++, n < full_begin || n >= full_end, sums);
#pragma unroll 1
        for (int left = steps - 1; left > 0; --left, ++count) {
          if (++n == m_end) n = m_begin;
          step<false>(work, n, count, n < full_begin || n >= full_end, sums);
        }
        if constexpr (kPart == BwdSm90Part::kBoth) {
          typename Dq::Slice acc_dq;
          issue_dq(acc_dq, count - 1);
          finish_dq<0>(acc_dq, count - 1);
        }
        if constexpr (kSumsDv) release(memory.empty_k());
        if constexpr (kSumsDk) release(memory.empty_v());
      }
      if constexpr (kSumsDk)
        write<kD>(args.b.p.dk, tile::kAlignedDK, args.b.p.head_dim, work, sums.dk, args.b.p.scale);
      if constexpr (kSumsDv)
        write<kDv>(args.b.p.dv, tile::kAlignedDV, args.b.p.head_dim_v, work, sums.dv, 1.0f);
      __syncwarp();  // all lanes have read what the tile is
      release(memory.empty_work(tile));
    }
  }
};

}  // namespace fovea::cuda
