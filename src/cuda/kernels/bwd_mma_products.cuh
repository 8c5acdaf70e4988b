// The products of bwd_mma in a warp's registers, whose left operand has the warp's 32 keys in rows.
#pragma once

#include <cstdint>

#include "cuda/kernels/bwd_mma_config.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/shared_tile.cuh"

namespace fovea::cuda {

/// acc += L R^T: 32 rows of the tile at `left` (keys) by the chunk's rows of the tile at `right` (queries), over
/// the columns of both.
template <class Instance, class Left, class Right>
__device__ __forceinline__ void multiply_across(const typename BwdMma<Instance>::Place& at, uint32_t left,
                                                uint32_t right, int chunk,
                                                float (&acc)[2][BwdMma<Instance>::kChunkN8][4]) {
  using B = BwdMma<Instance>;
  static_assert(Left::kColumns == Right::kColumns);
  const FragmentAddresses<Left, LdmatrixOrder::kDownFirst> of_left(at.lane, at.warp_n * 32);
  const FragmentAddresses<Right, LdmatrixOrder::kAcrossFirst> of_right(at.lane, at.column0(chunk));
  multiply<typename Instance::Element, B::kC.mma, 2, B::kChunkN8 / 2, Left::kColumns / 16>(
      acc, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, of_left.at(left, m * 16, k)); },
      [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4(b, of_right.at(right, n * 16, k)); });
}

/// acc += L R over the chunk's queries: L are rounded accumulators (P^T or dS^T), R rows of the tile at `right`
/// (dO or Q) with all their columns.
template <class Instance, class Right, int kN8>
__device__ __forceinline__ void add_from_registers(const typename BwdMma<Instance>::Place& at,
                                                   const uint32_t (&left)[2][BwdMma<Instance>::kChunkN8][2],
                                                   uint32_t right, int chunk, float (&acc)[2][kN8][4]) {
  using B = BwdMma<Instance>;
  const FragmentAddresses<Right, LdmatrixOrder::kDownFirst> of_right(at.lane, at.column0(chunk));
  multiply<typename Instance::Element, B::kC.mma, 2, kN8 / 2, B::kChunkN8 / 2>(
      acc,
      [&](uint32_t(&a)[4], int k, int m) {
        a[0] = left[m][2 * k][0], a[1] = left[m][2 * k][1];
        a[2] = left[m][2 * k + 1][0], a[3] = left[m][2 * k + 1][1];
      },
      [&](uint32_t(&b)[4], int k, int n) { ptx::ldmatrix_x4_trans(b, of_right.at(right, k * 16, n)); });
}

/// acc += L R over all queries of the step: L is the tile of P^T or dS^T at `left`, R the tile of dO or Q at
/// `right`, of which the warp takes every kWarpsQ-th 16 columns.
template <class Instance, class Right, int kN8>
__device__ __forceinline__ void add_from_tile(const typename BwdMma<Instance>::Place& at, uint32_t left,
                                              uint32_t right, float (&acc)[2][kN8][4]) {
  using B = BwdMma<Instance>;
  const FragmentAddresses<typename B::TileP, LdmatrixOrder::kDownFirst> of_left(at.lane, at.warp_n * 32);
  const FragmentAddresses<Right, LdmatrixOrder::kDownFirst> of_right(at.lane, 0, 2 * at.warp_q);
  multiply<typename Instance::Element, B::kC.mma, 2, kN8 / 2, B::kM / 16>(
      acc, [&](uint32_t(&a)[4], int k, int m) { ptx::ldmatrix_x4(a, of_left.at(left, m * 16, k)); },
      [&](uint32_t(&b)[4], int k, int n) {
        ptx::ldmatrix_x4_trans(b, of_right.at(right, k * 16, B::kC.warps_q * n));
      });
}

}  // namespace fovea::cuda
