// Of fwd_decode_e4m3: products of K and V as they are, for up to 8 rows. Q and the weights are cut into pieces of 8 bits, each a column of
// the product (tile/byte_strips.hpp). A thread has all pieces of every fourth row, from lane % 4 on.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_decode_e4m3_shape.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "tile/byte_strips.hpp"
#include "tile/key_columns.hpp"

namespace fovea::cuda {

template <class Instance>
struct FwdDecodeE4M3Pieces : FwdDecodeE4M3Shape<Instance> {
  using Shape = FwdDecodeE4M3Shape<Instance>;
  using Shape::kConfig, Shape::kOwnRows, Shape::kParts, Shape::kBlockKeys, Shape::kKeySteps, Shape::kOfLane,
      Shape::kHalves;
  using Shape::memory, Shape::warp_in_group, Shape::lane;
  using typename Shape::Scores, typename Shape::Values, typename Shape::Strips;
  static constexpr int kColumns = kConfig.columns(), kSteps = kConfig.head_dim / 32;
  using Product = ptx::Wgmma<kColumns>;
  using Sums = float[kColumns / 2];

  /// Where the lane stores its words of a block's weights.
  const uint32_t lane_in_weights[2] = {weight_at(0), weight_at(1)};

  __device__ __forceinline__ FwdDecodeE4M3Pieces(const FwdDecodeE4M3Memory<Instance>& memory_, int warp,
                                                 int lane_)
      : Shape(memory_, warp, lane_) {}

  static __device__ __forceinline__ int row(int j, int lane) { return 4 * j + lane % 4; }

  // --- Q ---

  static __device__ __forceinline__ float factor_of_q(float largest) { return tile::factor_to_e4m3(largest); }
  /// The lane's columns of a row.
  __device__ __forceinline__ void store_q(float (&x)[kOfLane], int row) const {
#pragma unroll
    for (int piece = 0; piece < tile::kPieces; ++piece) {
      const uint32_t at =
          Strips::chunk_at(memory.base + kConfig.q_at(), kColumns, tile::column_of_piece(row, piece),
                           lane * kOfLane / tile::kChunkBytes) +
          static_cast<uint32_t>(lane * kOfLane % tile::kChunkBytes);
#pragma unroll
      for (int i = 0; i < kOfLane; i += 2) {
        const uint32_t two = ptx::e4m3x4_of(x[i], x[i + 1], 0, 0);
        const float2 taken = unpack<__half>(ptx::f16x2_of_e4m3x2(two));
        x[i] = (x[i] - taken.x) * tile::kPieceStep, x[i + 1] = (x[i + 1] - taken.y) * tile::kPieceStep;
        ptx::st_shared_2(at + i, static_cast<uint16_t>(two));
      }
    }
  }

  // --- S ---

  static constexpr bool kAhead = true;        ///< scores of the next block are multiplied beside the weights
  static constexpr bool kValuesLast = false;  ///< V is read behind the weights

  /// Registers of the products of a block.
  struct Products {
    Sums sums[kBlockKeys / 64];
  };
  /// Begins to multiply the keys at `keys`.
  __device__ __forceinline__ void multiply_qk(Products& products, uint32_t keys) const {
    const int all = static_cast<int>(memory.base >> 4), first = static_cast<int>(keys >> 4);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kBlockKeys / 64; ++i) {
        const uint64_t a = Strips::step_of(64 * i * Strips::kStripColumns, kBlockKeys, step)
                               .encode_from(first),
                       b = Strips::step_of(kConfig.q_at(), kColumns, step).encode_from(all);
        if (step == 0) {
          Product::template ss<E4M3, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(products.sums[i], a, b);
        } else {
          Product::template ss<E4M3, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(products.sums[i], a,
                                                                                        b);
        }
      }
    }
    ptx::wgmma_commit();
  }
  /// Scores, once the products are done.
  __device__ __forceinline__ void take_scores(Scores& s, Products& products) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half % 2 == 0) ptx::wgmma_done(products.sums[half / 2]);
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) s[half][j] = sum_of_pieces(products.sums[half / 2], j, half % 2);
    }
  }

  // --- weights ---

  static constexpr int kRowsAtOnce = 1;
  using Weights = float[kHalves][kRowsAtOnce];
  /// Those of own row `j`.
  __device__ __forceinline__ void store_weights(const Weights& w, int j, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 64; ++i) store_two(w[2 * i][0], w[2 * i + 1][0], to, j, i);
  }

  // --- O ---

  /// Sums of a thread's columns and rows.
  struct Results {
    float x[kParts][2][kOwnRows];
    __device__ __forceinline__ float& at(int m, int half, int j) { return x[m][half][j]; }
    __device__ __forceinline__ const float& at(int m, int half, int j) const { return x[m][half][j]; }
  };
  /// Sums of a block start from zero: accumulators of 8-bit products keep 13 bits.
  __device__ __forceinline__ void multiply_pv(Results& o, const Values& v, uint32_t at) const {
    constexpr int kMostRegisters = 32, kOfPart = kColumns / 2,
                  kAtOnce = kParts * kOfPart <= kMostRegisters ? kParts : kMostRegisters / kOfPart;
    static_assert(kParts % kAtOnce == 0);
    const int weights = static_cast<int>(at >> 4);
#pragma unroll
    for (int first = 0; first < kParts; first += kAtOnce) {
      Sums products[kAtOnce];
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (int m = 0; m < kAtOnce; ++m) {
          const uint64_t b = tile::wgmma_k_major(32 * step, kWeightsMode).encode_from(weights);
          if (step == 0) {
            Product::template rs<E4M3, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(products[m],
                                                                                    v[first + m][step], b);
          } else {
            Product::template rs<E4M3, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(
                products[m], v[first + m][step], b);
          }
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        ptx::wgmma_done(products[m]);
#pragma unroll
        for (int j = 0; j < kOwnRows; ++j) {
          o.x[first + m][0][j] += sum_of_pieces(products[m], j, 0);
          o.x[first + m][1][j] += sum_of_pieces(products[m], j, 1);
        }
      }
    }
  }

 private:
  /// Element `half` of own row `j`, from the products of all of its pieces.
  static __device__ __forceinline__ float sum_of_pieces(const Sums& x, int j, int half) {
    constexpr float kDown = 1 / tile::kPieceStep;
    const auto piece = [&](int i) { return x[tile::register_of_piece(j, i, half)]; };
    return fmaf(fmaf(fmaf(piece(3), kDown, piece(2)), kDown, piece(1)), kDown, piece(0));
  }
  /// The pieces of two weights. Two lanes with neighbouring keys have four bytes side by side of each: one stores those of the
  /// first two pieces, the other those of the last two.
  __device__ __forceinline__ void store_two(float w0, float w1, uint32_t to, int j, int i) const {
    uint32_t x = ptx::f16x2_of(w0, w1), pieces[tile::kPieces];
#pragma unroll
    for (int piece = 0; piece < tile::kPieces; ++piece) {
      constexpr uint32_t kUp = 0x4c004c00, kDown = 0xcc00cc00;  // 16 and -16, twice
      pieces[piece] = ptx::e4m3x2_of_f16x2(x);
      if (piece + 1 < tile::kPieces)
        x = ptx::fma_f16x2(ptx::f16x2_of_e4m3x2(pieces[piece]), kDown, ptx::fma_f16x2(x, kUp, 0x80008000));
    }
    const bool odd = lane & 4;
    const uint32_t first = __byte_perm(pieces[0], pieces[1], 0x5410),
                   last = __byte_perm(pieces[2], pieces[3], 0x5410), kept = odd ? last : first;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? first : last, 4);
    // Keys g, g + 1, g + 8, g + 9 with g even, which are at four places side by side.
    const uint32_t even_keys = odd ? other : kept, odd_keys = odd ? kept : other;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece)
      ptx::st_shared_4(
          to + 16 * j * kBlockKeys + (i == 0 ? lane_in_weights[piece] : lane_in_weights[piece] ^ 64u),
          __byte_perm(even_keys, odd_keys, piece == 0 ? 0x5140 : 0x7362));
  }
  /// The lane's word of the first or second of the pieces that it stores, of keys below 64 and own row 0.
  __device__ __forceinline__ uint32_t weight_at(int piece) const {
    const int column = tile::column_of_piece(lane % 4, (lane & 4) != 0 ? 2 + piece : piece);
    return tile::swizzled_address(kWeightsMode,
                                  static_cast<uint32_t>(column * kBlockKeys + 16 * warp_in_group)) +
           static_cast<uint32_t>(lane / 8 * 4);
  }
  static constexpr tile::SwizzleMode kWeightsMode =
      kBlockKeys == 128 ? tile::SwizzleMode::k128 : tile::SwizzleMode::k64;
  static_assert(tile::swizzle_row_bytes(kWeightsMode) == kBlockKeys);
};

}  // namespace fovea::cuda
