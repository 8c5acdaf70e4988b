// A consumer of bwd_sm90: 64 keys of the tile, against all queries that see any of its 128. The steps of step(), in the
// order in which they are called.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bwd_sm90_producers.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/finite_tile.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/row_vectors.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

template <class Instance>
struct BwdSm90Consumer {
  using T = typename Instance::Element;
  using Memory = BwdSm90Memory<Instance>;
  using Work = BwdSm90Work;
  static constexpr BwdSm90Config kConfig = Instance::kConfig;
  static constexpr int kM = kConfig.tile_m, kN = kConfig.kTileN, kD = kConfig.head_dim,
                       kDv = kConfig.head_dim_v;
  static constexpr int kDqN = kConfig.dq_columns(), kRowBytes = kConfig.kRowBytes;
  static constexpr auto kSwizzle = tile::SwizzleMode::k128;
  using Scores = float[kM / 2];          ///< (64 keys, kM queries): rows are keys
  using Operand = uint32_t[kM / 16][4];  ///< the same as operand A

  const TmaBackwardArgs& args;
  const Memory& memory;
  int w;       ///< of the consumers
  int base16;  ///< where shared memory starts, in units of 16 bytes; uniform

  static __device__ __forceinline__ int lane() { return static_cast<int>(ptx::thread_index() % 32); }
  static __device__ __forceinline__ int warp() { return static_cast<int>(ptx::thread_index() / 32 % 4); }
  /// A shuffle from lane 0 marks a value warp-uniform: loops bounded by it keep their counters, and descriptors made of
  /// these, in uniform registers.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

  /// `first` is as if shared memory began at 0.
  __device__ __forceinline__ uint64_t descriptor(const tile::WgmmaDescriptor& first, int offset) const {
    const uint64_t encoded = first.encode();
    return (encoded >> 32 << 32) |
           (static_cast<uint32_t>(encoded) + static_cast<uint32_t>(base16 + offset / 16));
  }
  /// After a wait for products or __syncwarp(): a lane that has not seen its phase yet would miss it.
  __device__ __forceinline__ static void release(uint32_t barrier) {
    if (lane() == 0) ptx::mbarrier_arrive(barrier);
  }

  // --- products, each queued as a group of its own ---

  /// acc = (own 64 rows of the 128 x kColumns tile of keys) (kM x kColumns tile of queries)^T.
  template <int kColumns>
  __device__ __forceinline__ void issue_keys_by_queries(Scores& acc, int keys_at, int queries_at) const {
    const uint64_t a = descriptor(tile::wgmma_k_major(0, kSwizzle), keys_at + w * 64 * kRowBytes);
    const uint64_t b = descriptor(tile::wgmma_k_major(0, kSwizzle), queries_at);
    using Product = ptx::Wgmma<kM>;
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      const uint64_t a_step = a + tile::wgmma_start_step(i / 4 * kN * kRowBytes + i % 4 * 32);
      const uint64_t b_step = b + tile::wgmma_start_step(i / 4 * kM * kRowBytes + i % 4 * 32);
      if (i == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(acc, a_step, b_step);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(acc, a_step, b_step);
      }
    }
    ptx::wgmma_commit();
  }
  /// acc (64 keys, kColumns) += operand (64 keys, kM queries) (kM x kColumns tile of queries).
  template <int kColumns>
  __device__ __forceinline__ void issue_gradient(float (&acc)[kColumns / 2], const Operand& operand,
                                                 int queries_at) const {
    const uint64_t b = descriptor(tile::wgmma_mn_major(0, kSwizzle, kM), queries_at);
#pragma unroll
    for (int i = 0; i < kM / 16; ++i)
      ptx::Wgmma<kColumns>::template rs<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kMN>(
          acc, operand[i], b + tile::wgmma_start_step(i * 16 * kRowBytes));
    ptx::wgmma_commit();
  }
  /// This consumer's part of dQ = dS K over all 128 keys: 64 queries by half of the columns, or half of 128 queries.
  __device__ __forceinline__ void issue_dq(float (&acc)[kDqN / 2], int buffer) const {
    const int rows = kConfig.splits_columns() ? 0 : w * 64 * kRowBytes;
    const int columns = !kConfig.splits_columns() ? 0 : w * (kDqN == 32 ? 64 : kDqN / 64 * kN * kRowBytes);
    const uint64_t a =
        descriptor(tile::wgmma_k_major(0, kSwizzle), kConfig.ds_at() + buffer * kConfig.ds_bytes() + rows);
    const uint64_t b = descriptor(tile::wgmma_mn_major(0, kSwizzle, kN), columns);
    using Product = ptx::Wgmma<kDqN>;
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      const uint64_t a_step = a + tile::wgmma_start_step(i / 4 * kM * kRowBytes + i % 4 * 32);
      const uint64_t b_step = b + tile::wgmma_start_step(i * 16 * kRowBytes);
      if (i == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kMN>(acc, a_step, b_step);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kMN>(acc, a_step, b_step);
      }
    }
    ptx::wgmma_commit();
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
      const int j = work[BwdSm90Work::kFirstKey] + w * 64 + warp() * 16 + lane() / 4 + 8 * half;
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
  /// S -> P = exp2(scale_log2 S - lse_log2).
  __device__ __forceinline__ void weigh(Scores& s, int stage) const {
    const uint32_t at = memory.lse(stage) + lane() % 4 * 8;
#pragma unroll
    for (int t = 0; t < kM / 8; ++t) {
      const uint2 lse = ptx::ld_shared_8(at + t * 32);
#pragma unroll
      for (int i = 4 * t; i < 4 * t + 4; ++i)
        s[i] = ptx::ex2(fmaf(s[i], args.scale_log2, -__uint_as_float(i % 2 == 0 ? lse.x : lse.y)));
    }
  }
  /// dP -> dS = P (dP - delta).
  __device__ __forceinline__ void score_gradients(const Scores& weights, Scores& dp, int stage) const {
    const uint32_t at = memory.delta(stage) + lane() % 4 * 8;
#pragma unroll
    for (int t = 0; t < kM / 8; ++t) {
      const uint2 delta = ptx::ld_shared_8(at + t * 32);
#pragma unroll
      for (int i = 4 * t; i < 4 * t + 4; ++i)
        dp[i] = weights[i] * (dp[i] - __uint_as_float(i % 2 == 0 ? delta.x : delta.y));
    }
  }
  __device__ __forceinline__ static void to_operand(const Scores& x, Operand& operand) {
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) operand[i / 4][i % 4] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
  /// Transposed into this consumer's strip of dS.
  __device__ __forceinline__ void store_ds(const Operand& ds, int buffer) const {
    const int row = lane() % 8 + lane() / 16 * 8, chunk = 2 * warp() + lane() / 8 % 2;
    const uint32_t at = memory.ds(buffer, w) + row * kRowBytes + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) ptx::stmatrix_x4_trans(at + i * 16 * kRowBytes, ds[i]);
    ptx::async_proxy_fence();
  }
  /// dQ into the staging area, as bwd_postprocess reads it: fragments of 16 queries x 8 columns, 16 bytes a lane.
  __device__ __forceinline__ void stage_dq(const float (&acc)[kDqN / 2]) const {
    constexpr int kFragment = 512, kRow16 = kD / 8 * kFragment;
    const int row16 = kConfig.splits_columns() ? warp() : 4 * w + warp();
    const int column8 = kConfig.splits_columns() ? w * kDqN / 8 : 0;
    const uint32_t to = memory.dq() + row16 * kRow16 + column8 * kFragment + lane() * 16;
    ptx::barrier_wait(kDqFree + w, kConsumerAndWriter);  // the last step's has been read
#pragma unroll
    for (int t = 0; t < kDqN / 8; ++t)
      ptx::st_shared_16(to + t * kFragment,
                        uint4{__float_as_uint(acc[4 * t]), __float_as_uint(acc[4 * t + 1]),
                              __float_as_uint(acc[4 * t + 2]), __float_as_uint(acc[4 * t + 3])});
    ptx::async_proxy_fence();
    ptx::barrier_arrive(kDqStaged + w, kConsumerAndWriter);
  }

  // --- what is not finite (bwd_sm90.cuh) ---

  /// Makes this consumer's rows of K finite.
  __device__ __forceinline__ void make_keys_finite() const {
    const int thread = static_cast<int>(ptx::thread_index()) % 128;
    const uint32_t own = memory.k() + w * 64 * kRowBytes;
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
    ptx::barrier_wait(kOwnKeys + w,
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
  __device__ __forceinline__ void clear_odd_rows(int s, uint32_t phase) const {
    ptx::mbarrier_wait(memory.full_do(s), phase);
    constexpr int kChunksOfRow = (kConfig.strips(kD) + kConfig.strips(kDv)) * kRowBytes / 16;
    int first = w * 128 + static_cast<int>(ptx::thread_index()) % 128;
#pragma unroll 1
    for (int i = first; i < kM * kChunksOfRow; i += kBothConsumers) {
      const int row = i % kM, chunk = i / kM, strip = chunk / 8;
      if (fabsf(__uint_as_float(ptx::ld_shared_4(memory.lse(s) + row * 4))) < INFINITY) continue;
      const uint32_t tile = strip < kConfig.strips(kD)
                                ? memory.q(s) + strip * kM * kRowBytes
                                : memory.d_o(s) + (strip - kConfig.strips(kD)) * kM * kRowBytes;
      ptx::st_shared_16(tile + row * kRowBytes + chunk % 8 * 16, uint4{0, 0, 0, 0});
    }
    ptx::async_proxy_fence();
    ptx::barrier_wait(kOddRows, kBothConsumers);  // the rows are zeros for the products of both consumers
  }

  // --- the mainloop ---

  /// One block of queries of one head.
  __device__ __forceinline__ void step(const Work& work, int n, int s, uint32_t phase, bool masked,
                                       float (&acc_dk)[kD / 2], float (&acc_dv)[kDv / 2]) const {
    const int buffer = kConfig.ds_buffers() == 1 ? 0 : s;
    Scores acc_s, acc_dp;
    ptx::mbarrier_wait(memory.full_q(s), phase);
    if (any_odd_row(s)) clear_odd_rows(s, phase);
    ptx::wgmma_fence();
    issue_keys_by_queries<kD>(acc_s, 0, kConfig.q_at() + s * kConfig.q_bytes());
    ptx::mbarrier_wait(memory.full_do(s), phase);
    ptx::wgmma_fence();
    issue_keys_by_queries<kDv>(acc_dp, kConfig.v_at(), kConfig.do_at() + s * kConfig.do_bytes());
    ptx::wgmma_wait<1>();  // S
    ptx::wgmma_done(acc_s);
    weigh(acc_s, s);
    if (masked) mask(acc_s, work, n);
    ptx::wgmma_wait<0>();  // dP
    ptx::wgmma_done(acc_dp);
    score_gradients(acc_s, acc_dp, s);
    if (masked) mask(acc_dp, work, n);
    Operand p, ds;
    to_operand(acc_s, p);
    to_operand(acc_dp, ds);
    if constexpr (kConfig.ds_buffers() == 1)
      ptx::barrier_wait(kFreeDs, kBothConsumers);  // dQ of the last step is done: nobody reads its dS
    store_ds(ds, buffer);
    ptx::wgmma_fence();
    issue_gradient<kDv>(acc_dv, p, kConfig.do_at() + s * kConfig.do_bytes());
    ptx::barrier_wait(kShareDs, kBothConsumers);  // dS of both consumers can be read
    float acc_dq[kDqN / 2];
    ptx::wgmma_fence();
    issue_dq(acc_dq, buffer);
    issue_gradient<kD>(acc_dk, ds, kConfig.q_at() + s * kConfig.q_bytes());
    ptx::wgmma_wait<1>();  // dV and dQ
    ptx::wgmma_done(acc_dv);
    ptx::wgmma_done(acc_dq);
    release(memory.empty_do(s));
    stage_dq(acc_dq);  // beside dK
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_dk);
    release(memory.empty_q(s));
  }

  /// Rows of dK or dV of this consumer's keys, times `factor`.
  template <int kColumns>
  __device__ __forceinline__ void write(const tile::RowsView& view, uint32_t aligned_bit, int columns,
                                        const Work& work, const float (&acc)[kColumns / 2],
                                        float factor) const {
    const int row = work[BwdSm90Work::kFirstKey] + w * 64 + warp() * 16 + lane() / 4,
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
    float acc_dk[kD / 2], acc_dv[kDv / 2];
    uint32_t phase = 0, keys = 0;
    int s = 0;
    for (uint32_t tile = 0;; ++tile) {
      ptx::mbarrier_wait(memory.full_work(tile), tile / 2 & 1);
      // Each lane leaves the loop of a wait for itself. Behind an .aligned instruction the compiler takes the warp for
      // whole again.
      ptx::wgmma_fence();
      const Work work = memory.work(tile);
      const int steps = uniform(work[BwdSm90Work::kSteps]);
      if (steps < 0) return;
      const int m_begin = uniform(work[BwdSm90Work::kMBegin]), m_end = uniform(work[BwdSm90Work::kMEnd]),
                full_begin = uniform(work[BwdSm90Work::kFullBegin]),
                full_end = uniform(work[BwdSm90Work::kFullEnd]);
#pragma unroll
      for (float& x : acc_dk) x = 0.0f;
#pragma unroll
      for (float& x : acc_dv) x = 0.0f;
      if (steps > 0) {
        ptx::mbarrier_wait(memory.full_k(), keys & 1);
        make_keys_finite();
        ptx::mbarrier_wait(memory.full_v(), keys & 1);
        ++keys;
        ptx::wgmma_fence();
#pragma unroll 1
        for (int left = steps, n = m_begin; left > 0; --left) {
          step(work, n, s, phase, n < full_begin || n >= full_end, acc_dk, acc_dv);
          if (++n == m_end) n = m_begin;
          if (++s == kConfig.kStages) s = 0, phase ^= 1;
        }
        release(memory.empty_kv());
      }
      write<kD>(args.b.p.dk, tile::kAlignedDK, args.b.p.head_dim, work, acc_dk, args.b.p.scale);
      write<kDv>(args.b.p.dv, tile::kAlignedDV, args.b.p.head_dim_v, work, acc_dv, 1.0f);
      __syncwarp();  // all lanes have read what the tile is
      release(memory.empty_work(tile));
    }
  }
};

}  // namespace fovea::cuda
