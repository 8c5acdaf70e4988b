// Of fwd_decode_e4m3: products for more than 8 rows. Pieces of so many rows would be more columns than there are registers for, so that it
// is K and V that are converted: in registers, as operand A of 16 bits, 64 of their elements for each lane and block of 64 keys at head size
// 128. Q and the weights are float16 in shared memory, a column a row. A thread has rows 8 i + 2 (lane % 4) and the next.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "cuda/kernels/fwd_decode_e4m3_shape.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/byte_strips.hpp"
#include "tile/key_columns.hpp"
#include "tile/swizzle.hpp"

namespace fovea::cuda {

template <class Instance>
struct FwdDecodeE4M3Widened : FwdDecodeE4M3Shape<Instance> {
  using Shape = FwdDecodeE4M3Shape<Instance>;
  using Shape::kConfig, Shape::kOwnRows, Shape::kParts, Shape::kBlockKeys, Shape::kKeySteps, Shape::kOfLane,
      Shape::kHalves;
  using Shape::memory, Shape::warp_in_group, Shape::lane;
  using typename Shape::Scores, typename Shape::Values, typename Shape::Strips;
  static constexpr int kRows = kConfig.tile_m, kSteps = kConfig.head_dim / 16;
  static_assert(kRows % 16 == 0, "stmatrix stores 16 rows at a time");
  using Product = ptx::Wgmma<kRows>;
  using Sums = float[kRows / 2];
  static constexpr tile::SwizzleMode kMode = tile::SwizzleMode::k128;
  static constexpr int kStripBytes = kRows * tile::swizzle_row_bytes(kMode);  ///< 64 columns of all rows

  /// Where the lane finds its row of 16 keys, and stores weights of 16 keys of a row.
  const uint32_t lane_in_k = Strips::chunk_at(0, kBlockKeys, 16 * warp_in_group + lane % 16, lane / 16);
  const uint32_t lane_in_weights = tile::swizzled_address(
      kMode,
      static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * 128 + (2 * warp_in_group + lane / 8 % 2) * 16));

  __device__ __forceinline__ FwdDecodeE4M3Widened(const FwdDecodeE4M3Memory<Instance>& memory_, int warp,
                                                  int lane_)
      : Shape(memory_, warp, lane_) {}

  static __device__ __forceinline__ int row(int j, int lane) { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
  /// The register of an accumulator with own row `j`, in row lane / 4 + 8 half of the warp's.
  static constexpr int register_of(int j, int half) { return j / 2 * 4 + 2 * half + j % 2; }

  // --- Q ---

  static __device__ __forceinline__ float factor_of_q(float largest) {
    return tile::factor_to_float16(largest);
  }
  /// The lane's columns of a row.
  __device__ __forceinline__ void store_q(const float (&x)[kOfLane], int row) const {
#pragma unroll
    for (int i = 0; i < kOfLane; i += 2) {
      const int column = lane * kOfLane + i, place = tile::place_of_widened(column % 64);
      ptx::st_shared_4(memory.base + kConfig.q_at() + column / 64 * kStripBytes +
                           tile::swizzled_address(kMode, static_cast<uint32_t>(row * 128 + place * 2)),
                       ptx::f16x2_of(x[i], x[i + 1]));
    }
  }

  // --- S ---

  /// Scores of the next block beside the weights take too many registers, and gain nothing.
  static constexpr bool kAhead = false;
  static constexpr bool kValuesLast = kConfig.values_last;  ///< V is read behind the weights

  /// Registers of the products of a block: operands stay until the products are done. Those of eight steps are 32 registers, as many as there
  /// are beside O.
  static constexpr int kStepsAtOnce = kSteps < 8 ? kSteps : 8;
  struct Products {
    Sums sums[kBlockKeys / 64];
    uint32_t k[kBlockKeys / 64][kStepsAtOnce][4];
  };
  /// Begins to multiply the keys at `keys`.
  __device__ __forceinline__ void multiply_qk(Products& products, uint32_t keys) const {
    const int q = static_cast<int>((memory.base + kConfig.q_at()) >> 4);
#pragma unroll
    for (int i = 0; i < kBlockKeys / 64; ++i) {
#pragma unroll
      for (int first = 0; first < kSteps; first += kStepsAtOnce) {
        if (first > 0) ptx::wgmma_wait<0>();  // operands are free
        load_k(products.k[i], keys + 64 * i * Strips::kStripColumns, first);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = first; step < first + kStepsAtOnce; ++step) {
          const uint64_t b = step_of(step).encode_from(q);
          if (step == 0) {
            Product::template rs<__half, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(
                products.sums[i], products.k[i][step - first], b);
          } else {
            Product::template rs<__half, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(
                products.sums[i], products.k[i][step - first], b);
          }
        }
        ptx::wgmma_commit();
      }
    }
  }
  /// Scores, once the products are done.
  __device__ __forceinline__ void take_scores(Scores& s, Products& products) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half % 2 == 0) ptx::wgmma_done(products.sums[half / 2]);
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) s[half][j] = products.sums[half / 2][register_of(j, half % 2)];
    }
  }

  // --- weights ---

  static constexpr int kRowsAtOnce = 4;
  using Weights = float[kHalves][kRowsAtOnce];
  /// Those of own rows from `first` on.
  __device__ __forceinline__ void store_weights(const Weights& w, int first, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 64; ++i) {
      const float *const upper = w[2 * i], *const lower = w[2 * i + 1];  // keys, eight apart
      const uint32_t x[4] = {ptx::f16x2_of(upper[0], upper[1]), ptx::f16x2_of(lower[0], lower[1]),
                             ptx::f16x2_of(upper[2], upper[3]), ptx::f16x2_of(lower[2], lower[3])};
      ptx::stmatrix_x4_trans(to + lane_in_weights + i * kStripBytes + first / 2 * 8 * 128, x);
    }
  }

  // --- O ---

  /// Sums of a thread's columns and rows: accumulators.
  struct Results {
    Sums x[kParts];
    __device__ __forceinline__ float& at(int m, int half, int j) { return x[m][register_of(j, half)]; }
    __device__ __forceinline__ const float& at(int m, int half, int j) const {
      return x[m][register_of(j, half)];
    }
  };
  __device__ __forceinline__ void multiply_pv(Results& o, const Values& v, uint32_t at) const {
    // Of operand A at once: O of 256 columns leaves fewer.
    constexpr int kMostRegisters = kConfig.head_dim_v > 128 ? 16 : 32, kOfPart = 8 * kKeySteps,
                  kAtOnce = kParts * kOfPart <= kMostRegisters ? kParts : kMostRegisters / kOfPart;
    static_assert(kParts % kAtOnce == 0);
    const int weights = static_cast<int>(at >> 4);
#pragma unroll
    for (int first = 0; first < kParts; first += kAtOnce) {
      uint32_t a[kAtOnce][2 * kKeySteps][4];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step) {
          widen(a[m][2 * step], v[first + m][step][0], v[first + m][step][1]);
          widen(a[m][2 * step + 1], v[first + m][step][2], v[first + m][step][3]);
        }
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2 * kKeySteps; ++step) {
        const uint64_t b = step_of(step).encode_from(weights);
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m)
          Product::template rs<__half, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(o.x[first + m],
                                                                                          a[m][step], b);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) ptx::wgmma_done(o.x[first + m]);
    }
  }

 private:
  /// Steps of 16 columns of K, from `first` on, of the warp's 16 keys of 64.
  __device__ __forceinline__ void load_k(uint32_t (&k)[kStepsAtOnce][4], uint32_t keys, int first) const {
    uint32_t raw[kStepsAtOnce / 2][4];
#pragma unroll
    for (int i = 0; i < kStepsAtOnce / 2; ++i) {
      const int column = 16 * first + 32 * i;
      ptx::ldmatrix_x4(raw[i], keys + column / Strips::kStripColumns * kBlockKeys * Strips::kStripColumns +
                                   (lane_in_k ^ static_cast<uint32_t>(column % Strips::kStripColumns)));
    }
#pragma unroll
    for (int i = 0; i < kStepsAtOnce / 2; ++i) {
      widen(k[2 * i], raw[i][0], raw[i][1]);
      widen(k[2 * i + 1], raw[i][2], raw[i][3]);
    }
  }
  /// Operand A of 16 bits from four elements of row lane / 4 and four of the row 8 below.
  static __device__ __forceinline__ void widen(uint32_t (&a)[4], uint32_t upper, uint32_t lower) {
    ptx::f16x4_of_e4m3x4(a[0], a[2], upper);
    ptx::f16x4_of_e4m3x4(a[1], a[3], lower);
  }
  /// Step `step` of 16 columns of Q, or of 16 keys of weights.
  static constexpr tile::WgmmaDescriptor step_of(int step) {
    return tile::wgmma_k_major(static_cast<uint32_t>(step / 4 * kStripBytes + step % 4 * 32), kMode);
  }
};

}  // namespace fovea::cuda
