// The forward in float32 on tensor cores, sm_80 and newer: every product is three of tf32
// (warp/tf32_split.cuh).
//
//   S = Q K^T        O = softmax(scale S + terms) V        lse = log sum exp
//
// A CTA owns kTileM rows of queries of one head and walks over the blocks of kTileN keys that they see. Each
// warp owns kWarpM of the rows: scores, weights and outputs of a row never leave the four lanes that hold it.
//
// Operands lie in shared memory as float32 and are split in registers by every warp that reads them: split
// tiles would take twice the room and twice the bandwidth, and three instructions an element are hidden
// behind six mma (kWarpM = 32).
//
// Shared memory
//   sQ (kTileM, D), sK (kTileN, D), sV (kTileN, D), one stage each: two or three CTAs share an SM
// Registers
//   acc_o kWarpM D / 32, acc_s and its corrections kWarpM kTileN / 32 each; the weights lie in acc_s, and a
//   quarter of P V (kWarpM x 32 of kTileN keys) in registers of its own, since the tensor core truncates what
//   it adds: acc_o = alpha acc_o + (P V) is rounded to nearest, and costs no more than the rescaling.
// Barriers
//   A  before Q K^T of block n: K (and Q) of block n have arrived for everyone (each thread waited for its
//      own copies), and nobody reads the V of block n - 1 any more, so that V of block n is fetched
//   B  before P V of block n: V has arrived for everyone, and nobody reads the K of block n any more, so that
//      K of block n + 1 is fetched
//
// NaN and Inf: a split Inf gives NaN, and the weight 0 of a key that a row does not see times NaN is NaN. So
// rows whose outputs are not all finite are computed once more without tensor cores (warp/exact_row.cuh).
//
// Launch
//   grid    (tiles of queries * heads * batch, num_splits): default_grid (launch/schedule.hpp)
//   block   threads()
//   shared  shared_bytes(), dynamic
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/fwd_tf32_cta.cuh"
#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/score_row.cuh"
#include "cuda/warp/tf32_product.cuh"
#include "cuda/warp/tf32_tile.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// The rows of a warp over the blocks of keys: scores become weights, and weights sum.
template <class Instance>
struct FwdTf32Rows {
  using Cta = FwdTf32Cta<Instance>;
  static constexpr bool kGeneral = Cta::kConfig.general;
  static constexpr int kMTiles = Cta::kMTiles, kSTiles = Cta::kSTiles, kTileN = Cta::kTileN;
  using Scores = float[kMTiles][kSTiles][4];

  const Cta& cta;
  /// Takes scores to exponents of 2; the general kernel's terms have done so already.
  const float scale_log2;
  const tile::Dropout dropout;
  typename Cta::Output acc_o;  ///< relative to 2^base
  /// The largest score so far as an exponent of 2. It is rounded, so that the weights of all blocks refer to the
  /// same number: OnlineRows, which keeps the score and rounds its exponent for each block, would drift.
  float base[kMTiles][2];
  float sum[kMTiles][2];     ///< of this lane's weights
  float factor[kMTiles][2];  ///< of the last block: multiplies what was summed before

  __device__ __forceinline__ explicit FwdTf32Rows(const Cta& c)
      : cta(c),
        scale_log2(kGeneral ? 1.0f : c.p.scale * tile::kLog2e),
        dropout(kGeneral ? tile::dropout_of(c.p) : tile::Dropout()) {}

  /// No key yet.
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        base[mt][half] = -INFINITY;
        sum[mt][half] = 0.0f;
      }
#pragma unroll
      for (int ot = 0; ot < Cta::kOTiles; ++ot) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_o[mt][ot][e] = 0.0f;
      }
    }
  }

  /// Scores of keys of block n that a row does not see become -inf.
  __device__ __forceinline__ void mask(Scores& acc_s, int n) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = query_of_row(cta.args, cta.row_at(mt, half));
        mask_row(acc_s[mt], half, first_key(n), tile::keys_of(cta.p, cta.place.work.span, query));
      }
    }
  }

  /// From q.k to exponents of 2 with every term of the score.
  __device__ __forceinline__ void add_terms(Scores& acc_s, int n) const {
    const FwdWorkTile& work = cta.place.work;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = cta.row_at(mt, half);
        const QueryRow r = query_row(cta.args, work, row);
        const tile::Span32 seen =
            row < work.end_row ? tile::keys_of(cta.p, work.span, r.query) : tile::Span32{};
        apply_terms(acc_s[mt], half, first_key(n), seen,
                    ScoreRow<float>(cta.p, work.span, work.batch, r.head, r.query));
      }
    }
  }

  /// From scores to weights relative to the new base; sets `factor`.
  __device__ __forceinline__ void softmax(Scores& acc_s) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float largest = largest_of<kSTiles>(acc_s[mt], half);
        const float raised = fmaxf(base[mt][half], __fmul_rn(largest, scale_log2));
        const float origin = raised == -INFINITY ? 0.0f : raised;  // no key so far: weights of 0, not NaN
        factor[mt][half] = ptx::ex2(base[mt][half] - origin);
        base[mt][half] = raised;
        float block_sum = 0;
#pragma unroll
        for (int nt = 0; nt < kSTiles; ++nt) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& s = acc_s[mt][nt][2 * half + e];
            s = ptx::ex2(fmaf(s, scale_log2, -origin));
            block_sum += s;
          }
        }
        sum[mt][half] = fmaf(sum[mt][half], factor[mt][half], block_sum);
      }
    }
  }

  /// Dropout of the weights of block n.
  __device__ __forceinline__ void drop(Scores& weights, int n) const {
    const FwdWorkTile& work = cta.place.work;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const QueryRow r = query_row(cta.args, work, cta.row_at(mt, half));
        drop_weights(weights[mt], half, first_key(n),
                     DropoutRow(dropout, cta.p, work.batch, r.head, r.query));
      }
    }
  }

  /// O = factor O + P V of a block.
  __device__ __forceinline__ void add_values(const Scores& weights, const Tf32DownRows<Cta::kDim>& v_rows) {
    multiply_weights(acc_o, weights, v_rows, cta.p.head_dim_v,
                     [&](float o, float pv, int mt, int half) { return fmaf(o, factor[mt][half], pv); });
  }

 private:
  /// This lane's first key of block n.
  __device__ __forceinline__ int first_key(int n) const {
    return n * kTileN + 2 * cta.t;
  }
};

/// An instance is a type that names its configuration:
///   struct Example { static constexpr FwdTf32Config kConfig = {...}; };
template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), Instance::kConfig.min_ctas)
    fwd_tf32(const __grid_constant__ ForwardArgs args) {
  using Cta = FwdTf32Cta<Instance>;
  using Rows = FwdTf32Rows<Instance>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const Cta cta(args, shared);
  if (!cta.find_place()) return;
  const FwdTf32Place& place = cta.place;

  const Tf32AlongRows<Cta::kDim> q_rows(cta.sQ, cta.warp * Cta::kWarpM, cta.lane),
      k_rows(cta.sK, 0, cta.lane);
  const Tf32DownRows<Cta::kDim> v_rows(cta.sV, cta.lane);
  cta.copy_q();
  if (place.n_begin < place.n_end) cta.copy_k(place.n_begin);
  Rows rows(cta);
  rows.start();
#pragma unroll 1
  for (int n = place.n_begin; n < place.n_end; ++n) {
    const bool visible = cta.warp_blocks().begin <= n && n < cta.warp_blocks().end;
    typename Rows::Scores acc_s;
    ptx::cp_async_wait<0>();
    __syncthreads();  // A: K has arrived, V of the block before is free
    cta.copy_v(n);
    if (visible) multiply_rows(acc_s, q_rows, k_rows, args.p.head_dim);
    ptx::cp_async_wait<0>();
    __syncthreads();  // B: V has arrived, K is free
    if (n + 1 < place.n_end) cta.copy_k(n + 1);
    if (!visible) continue;
    if constexpr (Rows::kGeneral) {
      rows.add_terms(acc_s, n);
    } else if (!cta.warp_blocks().is_full(n)) {
      rows.mask(acc_s, n);
    }
    rows.softmax(acc_s);
    if (Rows::kGeneral && args.p.dropout_threshold != 0) rows.drop(acc_s, n);
    rows.add_values(acc_s, v_rows);
  }

  uint32_t broken[Cta::kMTiles][2];
  cta.write_finite_rows(rows.acc_o, rows.base, rows.sum, broken);
  cta.write_exact_rows(broken);
}

}  // namespace fovea::cuda
