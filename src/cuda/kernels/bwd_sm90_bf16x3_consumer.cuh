// A consumer of bwd_sm90_bf16x3: 64 keys of the tile, against all queries that see any of the tile's.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "cuda/kernels/bf16x3.hpp"
#include "cuda/kernels/bwd_sm90_config.cuh"
#include "cuda/kernels/bwd_sm90_dq.cuh"
#include "cuda/kernels/bwd_sm90_keys.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/operand_parts.cuh"
#include "cuda/warp/row_vectors.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

template <class Instance>
struct BwdSm90Bf16x3Consumer : BwdSm90Keys<Instance> {
  using Base = BwdSm90Keys<Instance>;
  using Base::args, Base::memory, Base::descriptor, Base::lane, Base::release, Base::warp;
  using Base::kConfig, Base::kM, Base::kN;
  static constexpr int kRowBytes = Base::Strips::kRowBytes;  ///< of all operands, and of dS
  static constexpr auto kSwizzle = Base::Strips::kSwizzle;
  using Base::mask, Base::read_tile;
  using Part = __nv_bfloat16;
  using Work = BwdSm90Work;
  using Scores = typename Base::Scores;
  using Tile = typename Base::Tile;
  using Statistics = typename Base::Statistics;
  using Dq = BwdSm90Dq<Instance>;
  static constexpr int kParts = kConfig.parts, kColumns = kConfig.strip;
  static constexpr int kSteps = 4;  ///< of 16: every product sums over 64 columns, queries or keys
  static_assert(kM == 64 && kConfig.head_dim == kColumns && kConfig.head_dim_v == kColumns);
  static_assert(kConfig.k_stages == 1);
  using Operand = uint32_t[kParts][kSteps][4];  ///< scores in parts, as operand A
  using Product = float[kColumns / 2];          ///< 64 x 64
  struct Sums {
    Product dk, dv;
  };
  int consumer;  ///< 0 or 1; uniform
  /// The same, looked up again: kept, it would take a register of the loop.
  __device__ __forceinline__ static int own() { return static_cast<int>(ptx::thread_index() / 128) - 1; }

  // --- products in parts, each queued as a group of its own: from zero, six of parts ---

  /// An operand in shared memory: descriptors of its parts, and of each 16 of what the product sums over.
  struct InParts {
    uint64_t first;
    int part_bytes, step_bytes;
    __device__ __forceinline__ uint64_t at(int part, int step) const {
      return first + tile::wgmma_start_step(part * part_bytes + step * step_bytes);
    }
  };
  /// Rows of 64 elements that the product sums over, the first at `at`; `rows` lie in a part.
  __device__ __forceinline__ InParts along(int at, int rows) const {
    return {descriptor(tile::wgmma_k_major(0, kSwizzle), at), rows * kRowBytes, 32};
  }
  /// Rows that the product sums over.
  __device__ __forceinline__ InParts down(int at, int rows) const {
    return {descriptor(tile::wgmma_mn_major(0, kSwizzle, rows), at), rows * kRowBytes, 16 * kRowBytes};
  }
  template <ptx::WgmmaMajor kMajorB>
  __device__ __forceinline__ static void multiply(Product& acc, const InParts& a, const InParts& b) {
#pragma unroll
    for (int i = 0; i < products_of_parts(kParts) * kSteps; ++i) {
      const PartPair part = part_pair(kParts, i / kSteps);
      const uint64_t a_step = a.at(part.a, i % kSteps), b_step = b.at(part.b, i % kSteps);
      if (i == 0) {
        ptx::Wgmma<kColumns>::template ss<Part, ptx::WgmmaStart::kZero, kMajorB>(acc, a_step, b_step);
      } else {
        ptx::Wgmma<kColumns>::template ss<Part, ptx::WgmmaStart::kAccumulate, kMajorB>(acc, a_step, b_step);
      }
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void multiply(Product& acc, const Operand& a, const InParts& b) {
    constexpr auto kMajorB = ptx::WgmmaMajor::kMN;
#pragma unroll
    for (int i = 0; i < products_of_parts(kParts) * kSteps; ++i) {
      const PartPair part = part_pair(kParts, i / kSteps);
      const uint32_t(&a_step)[4] = a[part.a][i % kSteps];
      const uint64_t b_step = b.at(part.b, i % kSteps);
      if (i == 0) {
        ptx::Wgmma<kColumns>::template rs<Part, ptx::WgmmaStart::kZero, kMajorB>(acc, a_step, b_step);
      } else {
        ptx::Wgmma<kColumns>::template rs<Part, ptx::WgmmaStart::kAccumulate, kMajorB>(acc, a_step, b_step);
      }
    }
    ptx::wgmma_commit();
  }
  /// (own 64 keys) (queries)^T.
  __device__ __forceinline__ void issue_keys_by_queries(Scores& acc, int keys_at, int queries_at) const {
    multiply<ptx::WgmmaMajor::kK>(acc, along(keys_at + consumer * 64 * kRowBytes, kN), along(queries_at, kM));
  }
  /// (64 queries) (own 64 keys) K.
  __device__ __forceinline__ void issue_dq(Product& acc) const {
    multiply<ptx::WgmmaMajor::kMN>(acc, along(kConfig.ds_at() + consumer * kConfig.ds_bytes(), kM),
                                   down(consumer * 64 * kRowBytes, kN));
  }

  // --- element by element ---

  /// S -> P = exp2(scale_log2 S - lse_log2).
  __device__ __forceinline__ void weigh(Scores& s, const Statistics& lse) const {
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      const float2 base = lse[i];
      s[i] = ptx::ex2(fmaf(s[i], args.scale_log2, -base.x));
      s[i + 1] = ptx::ex2(fmaf(s[i + 1], args.scale_log2, -base.y));
    }
  }
  /// dP -> dS = P (dP - delta).
  __device__ __forceinline__ static void score_gradients(const Scores& p, Scores& dp,
                                                         const Statistics& delta) {
#pragma unroll
    for (int i = 0; i < kM / 2; i += 2) {
      dp[i] = p[i] * (dp[i] - delta[i].x);
      dp[i + 1] = p[i + 1] * (dp[i + 1] - delta[i].y);
    }
  }
  __device__ __forceinline__ static void to_operand(const Scores& x, Operand& operand) {
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) set_parts<Part>(operand, i, x[2 * i], x[2 * i + 1]);
  }
  /// Transposed into this consumer's dS: (queries, own keys), a strip a part.
  __device__ __forceinline__ void store_ds(const Operand& ds) const {
    const int row = lane() % 8 + lane() / 16 * 8, chunk = 2 * warp() + lane() / 8 % 2;
    const uint32_t at = memory.ds(own(), 0) + row * kRowBytes + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ptx::stmatrix_x4_trans(at + (part * kM + i * 16) * kRowBytes, ds[part][i]);
    }
  }
  /// Tensor cores truncate what they add to, so that long sums would be too small: those of a step are added here.
  __device__ __forceinline__ static void add(Product& sum, const Product& of_step) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[i] += of_step[i];
  }
  /// Adds dQ of a step: each warp its 16 queries, straight from registers.
  __device__ __forceinline__ void add_dq(const Product& acc, const Work& work,
                                         const BwdSm90Steps<Instance>& at) const {
    const BackwardArgs& b = args.b;
    const int head = at.head(work);
    const BwdSm90Turn turn = BwdSm90Turn::of<Instance>(b, work, head, at.n(), warp()).of_half(own());
    if (BwdSm90Turn::wanted(b)) {
      if (lane() == 0) turn.acquire();
      __syncwarp();  // the warp may add
    }
    Dq::add_registers(acc, Dq::sums_of(b, head, at.n()), 0);
    if (BwdSm90Turn::wanted(b)) {
      __syncwarp();  // the warp has added
      if (lane() == 0) turn.release();
    }
  }

  // --- the mainloop ---

  /// A step, number `count` of the CTA.
  __device__ __forceinline__ void step(Sums& sums, const Work& work, uint32_t count,
                                       const BwdSm90Steps<Instance>& at) const {
    const RingSlot<kConfig.q_stages> q(count);
    const RingSlot<kConfig.do_stages> d_o(count);
    const int q_at = kConfig.q_at() + q.index * kConfig.q_bytes(),
              do_at = kConfig.do_at() + d_o.index * kConfig.do_bytes();
    const bool masked = Base::uniform(at.n() < work[Work::kFullBegin] || at.n() >= work[Work::kFullEnd]) != 0;
    const bool last = at.left == 1;
    Scores s, dp;  // then P, dS
    Operand p, ds;
    Product acc_dv, acc_dk, acc_dq;
    Statistics lse, delta;

    ptx::mbarrier_wait(memory.full_q(q.index), q.phase);
    ptx::wgmma_fence();
    issue_keys_by_queries(s, 0, q_at);
    lse.read(memory.lse(q.index));
    ptx::mbarrier_wait(memory.full_do(d_o.index), d_o.phase);
    ptx::wgmma_fence();
    issue_keys_by_queries(dp, kConfig.v_at(), do_at);
    ptx::wgmma_wait<1>();
    ptx::wgmma_done(s);
    weigh(s, lse);
    if (masked) mask(s, work, own(), at.n());
    to_operand(s, p);
    // dS of the step before has been read long ago. The wait stands here as the compiler moves nothing behind it: P is in
    // parts before the wait for dP.
    ptx::mbarrier_wait(memory.empty_ds(own()), (count & 1) ^ 1);

    ptx::wgmma_wait<0>();
    ptx::wgmma_done(dp);
    delta.read(memory.delta(d_o.index));
    if (last) release(memory.empty_v());
    score_gradients(s, dp, delta);
    if (masked) mask(dp, work, own(), at.n());
    ptx::wgmma_fence();
    multiply(acc_dv, p, down(do_at, kM));
    to_operand(dp, ds);
    store_ds(ds);
    release(memory.full_ds(own()));
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_dv);
    release(memory.empty_do(d_o.index));
    add(sums.dv, acc_dv);

    ptx::mbarrier_wait(memory.full_ds(own()), count & 1);
    ptx::async_proxy_fence();  // dS, which all four warps have written, for the product
    ptx::wgmma_fence();
    issue_dq(acc_dq);
    multiply(acc_dk, ds, down(q_at, kM));
    ptx::wgmma_wait<1>();
    ptx::wgmma_done(acc_dq);
    release(memory.empty_ds(own()));
    if (last) release(memory.empty_k(0));
    add_dq(acc_dq, work, at);
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(acc_dk);
    release(memory.empty_q(q.index));
    add(sums.dk, acc_dk);
  }

  /// Rows of dK or dV of this consumer's keys, times `factor`. Says so where one is not finite.
  __device__ __forceinline__ void write(const tile::RowsView& view, uint32_t aligned_bit, int columns,
                                        const Work& work, const Product& acc, float factor) const {
    const int row = work[Work::kFirstKey] + own() * 64 + warp() * 16 + lane() / 4,
              used_k = work[Work::kUsedK];
    float* const rows = reinterpret_cast<float*>(view.data) +
                        view.offset(work[Work::kBatch], work[Work::kRowK], work[Work::kHeadKv]);
    const bool aligned = (args.b.p.aligned16 & aligned_bit) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= used_k) continue;
      float* const to = rows + (row + 8 * half) * view.row;
      float zero = 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 4)
        zero = fmaf(0.0f, acc[i + 2 * half], fmaf(0.0f, acc[i + 2 * half + 1], zero));
      if (!(zero == 0.0f)) *args.b.not_finite = 1;
      if (aligned) {
        store_row_pairs<kColumns>(to, columns, acc, half, factor, lane());
      } else {
        store_row_elements<kColumns>(to, columns, acc, half, factor, lane());
      }
    }
  }

  /// All tiles of this CTA.
  __device__ __forceinline__ void run() const {
    const tile::AttentionParams& p = args.b.p;
    uint32_t count = 0;  // steps that this CTA has done
    // Twice its tiles, plus the phase of K and V: two counters would take two registers of the loop.
    for (uint32_t tiles = 0;; tiles += 2) {
      const Tile tile = read_tile(tiles / 2);
      if (tile.steps < 0) break;
      Sums sums;
#pragma unroll
      for (float& x : sums.dk) x = 0.0f;
#pragma unroll
      for (float& x : sums.dv) x = 0.0f;
      if (tile.steps > 0) {
        ptx::mbarrier_wait(memory.full_k(0), tiles & 1);
        ptx::mbarrier_wait(memory.full_v(), tiles & 1);
        tiles ^= 1;
        ptx::wgmma_fence();  // .aligned: the compiler takes the warp for whole again
        BwdSm90Steps<Instance> steps(args.b, tile.work);
        steps.left = Base::uniform(steps.left), steps.at.round = Base::uniform(steps.at.round);
#pragma unroll 1
        for (; steps.left > 0; steps.next(tile.work), ++count) step(sums, tile.work, count, steps);
      }
      write(p.dk, tile::kAlignedDK, p.head_dim, tile.work, sums.dk, p.scale);
      write(p.dv, tile::kAlignedDV, p.head_dim_v, tile.work, sums.dv, 1.0f);
      release(memory.empty_work(tiles / 2));
    }
  }
};

}  // namespace fovea::cuda
