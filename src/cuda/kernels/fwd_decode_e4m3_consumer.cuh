// Of fwd_decode_e4m3: a warpgroup that multiplies. A thread has, of the rows of the tile, every fourth from lane % 4 on, and of each
// product all pieces of them:
//
//   S^T, O^T    pieces of row 4 j + lane % 4 (tile/byte_strips.hpp); key or column: see below
//   keys        64 i + 16 warp + lane / 4 + 8 half of a block, half 2 i + half of the thread's
//   columns     64 m + 16 warp + 2 (lane / 4) + half of O
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_decode_e4m3_config.cuh"
#include "cuda/kernels/fwd_decode_results.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"
#include "tile/byte_strips.hpp"
#include "tile/key_columns.hpp"

namespace fovea::cuda {

template <class Instance>
struct FwdDecodeE4M3Consumer {
  using T = typename Instance::Element;
  static constexpr auto kConfig = Instance::kConfig;
  static constexpr int kRows = kConfig.tile_m, kColumns = kConfig.columns(), kOwnRows = kRows / 4;
  static constexpr int kSteps = kConfig.head_dim / 32, kParts = kConfig.head_dim_v / 64,
                       kBlockKeys = kConfig.block_keys, kKeySteps = kBlockKeys / 32,
                       kHalves = kBlockKeys / 32;
  static constexpr int kStages = kConfig.stages, kWarpgroups = kConfig.warpgroups, kWarps = kConfig.warps;
  // Copies of blocks may arrive in any order. Within a tile the blocks of a stage are those of one warpgroup, which waits for each; another
  // could ask for the phase behind one that has not ended, and be told of the one before that.
  static_assert(kStages % kWarpgroups == 0, "a stage belongs to one warpgroup");
  static constexpr uint32_t kWholeWarp = 0xffffffffu;
  static constexpr int kConsumers = 2, kConsumer = 3;  ///< barriers
  /// Weights are taken times 2^kHeadroomLog2, so that small ones keep bits, and maxima rise where one would be 2^kGrowthLog2 above
  /// that: below 448 in all.
  static constexpr float kHeadroomLog2 = 4.0f, kGrowthLog2 = 4.5f;

  using Strips = tile::ByteStrips<kConfig.head_dim>;
  using StripsOfV = tile::ByteStrips<kConfig.head_dim_v>;
  using Product = ptx::Wgmma<kColumns>;
  using Sums = float[kColumns / 2];
  using Scores = float[kHalves][kOwnRows];  ///< of the thread's keys

  const ForwardArgs& f;
  const FwdDecodeE4M3Memory<Instance>& memory;
  const int warp, lane;
  const int group = warp / 4, warp_in_group = warp % 4;
  DecodeRing<kStages> ring;  ///< blocks of a tile go to the warpgroups in turn
  int buffer = 0;
  /// Where the lane finds key `lane` of the warp's columns, and stores its words of a block's weights.
  const uint32_t lane_in_v = StripsOfV::chunk_at(0, kBlockKeys, lane, warp_in_group);
  const uint32_t lane_in_weights[2] = {weight_at(0), weight_at(1)};

  float o[kParts][2][kOwnRows];
  float row_max[kOwnRows], row_sum[kOwnRows], scale_log2[kOwnRows];
  bool have_maxima = false;

  __device__ __forceinline__ FwdDecodeE4M3Consumer(const ForwardArgs& args,
                                                   const FwdDecodeE4M3Memory<Instance>& memory_, int warp_,
                                                   int lane_)
      : f(args), memory(memory_), warp(warp_), lane(lane_) {}

  __device__ __forceinline__ FwdDecodeResults<Instance> results() const { return {f, memory, warp, lane}; }
  __device__ __forceinline__ void wait_for_all() const { ptx::barrier_wait(kConsumers, 32 * kWarps); }

  /// What each warpgroup has found of a tile lies in shared memory then.
  template <class Meanwhile>
  __device__ __forceinline__ void sum_up(const FwdWorkTile& work, const tile::KvBlocks& blocks,
                                         const Meanwhile& meanwhile) {
    if (threadIdx.x == 0) *memory.work_tile(warp) = work;
    share_q(work);
    wait_for_all();  // Q and its scales are there, and the work tile
    begin_tile();
    meanwhile();
    ring.begin_tile(group);
    // What bounds the loop is the same for all lanes, which the compiler knows of what comes from one of them.
    add_blocks({from_lane_0(blocks.begin), from_lane_0(blocks.full_begin), from_lane_0(blocks.full_end),
                from_lane_0(blocks.end)});
    ring.end_tile(blocks.count());
    share_result();
    wait_for_all();  // the results are there
  }

 private:
  // --- Q ---

  /// Rows of Q go to shared memory in pieces, one by each warp in turn.
  __device__ __forceinline__ void share_q(const FwdWorkTile& work) const {
    const tile::AttentionParams& p = f.p;
    const float scale = p.scale * tile::kLog2e * descale_of_products(p, work.batch, head_of_keys(f, work));
#pragma unroll 1
    for (int row = warp; row < kRows; row += kWarps) {
      float x[kOfLane] = {};
      if (row < work.end_row) load_q(x, work, row);
      float largest = 0;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, distance));
      const float factor = tile::factor_to_e4m3(largest);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) x[i] *= factor;
      store_q(x, row);
      // Pieces know no infinities: all scores of such a row are NaN, and it is computed again.
      if (lane == 0) memory.scales()[row] = largest < INFINITY ? scale / factor : NAN;
    }
    ptx::async_proxy_fence();  // wgmma reads the pieces
  }
  static constexpr int kOfLane = kConfig.head_dim / 32;  ///< columns
  __device__ __forceinline__ void load_q(float (&x)[kOfLane], const FwdWorkTile& work, int row) const {
    const tile::AttentionParams& p = f.p;
    const QueryRow r = query_row(f, work, row);
    const int64_t at = p.q.offset(work.batch, work.span.row_q + r.query, r.head);
    const int bytes = p.e4m3_queries ? 1 : static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = 0; i < kOfLane; i += 2) {
      const int column = lane * kOfLane + i;
      if (column >= p.head_dim) break;
      const char* const from = p.q.data + (at + column) * bytes;
      const float2 two =
          p.e4m3_queries
              ? unpack<__half>(ptx::f16x2_of_e4m3x2(__ldg(reinterpret_cast<const uint16_t*>(from))))
              : unpack<T>(__ldg(reinterpret_cast<const uint32_t*>(from)));
      x[i] = two.x, x[i + 1] = two.y;
    }
  }
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

  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      scale_log2[j] = memory.scales()[4 * j + lane % 4];
      row_max[j] = -INFINITY, row_sum[j] = 0;
#pragma unroll
      for (int m = 0; m < kParts; ++m) o[m][0][j] = o[m][1][j] = 0;
    }
    have_maxima = false;
  }

  // --- a block ---

  static __device__ __forceinline__ int from_lane_0(int x) {
    return __shfl_sync(kWholeWarp, x, 0);
  }
  /// Every kWarpgroups-th block. The scores of the next are multiplied while those of one become weights.
  __device__ __forceinline__ void add_blocks(const tile::KvBlocks& blocks) {
    int n = blocks.begin + group;
    if (n >= blocks.end) return;
    Sums products[kBlockKeys / 64];
    multiply_qk(products);
    ptx::wgmma_wait<0>();
#pragma unroll 1
    for (; n < blocks.end; n += kWarpgroups) {
      Scores s;
      sum_pieces(s, products);
      uint32_t v[kParts][kKeySteps][4];
      load_v(v, memory.stage(0, ring.stage) + kConfig.values_behind());
      permute_v(v);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) ptx::mbarrier_arrive(memory.empty(ring.stage));
      ring.advance(kWarpgroups);
      if (n + kWarpgroups < blocks.end) multiply_qk(products);
      if (!blocks.is_full(n)) mask(s, n * kBlockKeys);
      weigh(s);
      multiply_pv(v);
    }
  }

  /// Begins to multiply the keys of the next stage.
  __device__ __forceinline__ void multiply_qk(Sums (&products)[kBlockKeys / 64]) const {
    const int all = static_cast<int>(memory.base >> 4),
              keys = static_cast<int>(memory.stage(0, ring.stage) >> 4);
    ptx::mbarrier_wait(memory.full(ring.stage), ring.parity);
    __syncwarp();  // the block is there for all lanes
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kBlockKeys / 64; ++i) {
        const uint64_t a = Strips::step_of(64 * i * Strips::kStripColumns, kBlockKeys, step)
                               .encode_from(keys),
                       b = Strips::step_of(kConfig.q_at(), kColumns, step).encode_from(all);
        if (step == 0) {
          Product::template ss<E4M3, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(products[i], a, b);
        } else {
          Product::template ss<E4M3, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(products[i], a, b);
        }
      }
    }
    ptx::wgmma_commit();
  }

  /// Keys 32 step + 8 i + 2 (lane % 4) and the next: columns 2 (lane / 4) and the next of each.
  __device__ __forceinline__ void load_v(uint32_t (&v)[kParts][kKeySteps][4], uint32_t values) const {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
      constexpr int kOfStrip = StripsOfV::kStripColumns / 64;
      const uint32_t part = values + m / kOfStrip * (kBlockKeys * StripsOfV::kStripColumns) +
                            (m % kOfStrip == 0 ? lane_in_v : lane_in_v ^ 64u);
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step)
        ptx::ldmatrix_x4_trans(v[m][step], part + 32 * step * StripsOfV::kStripColumns);
    }
  }
  /// They become operand A, V^T: places of keys are those of tile::key_at_place, and rows those of `columns` above.
  static __device__ __forceinline__ void permute_v(uint32_t (&v)[kParts][kKeySteps][4]) {
#pragma unroll
    for (int m = 0; m < kParts; ++m) {
#pragma unroll
      for (int step = 0; step < kKeySteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const uint32_t first = v[m][step][i], second = v[m][step][i + 1];
          v[m][step][i] = __byte_perm(first, second, 0x6420);
          v[m][step][i + 1] = __byte_perm(first, second, 0x7531);
        }
      }
    }
  }

  /// Element `half` of own row `j`, from the products of all of its pieces.
  static __device__ __forceinline__ float sum_of_pieces(const Sums& x, int j, int half) {
    constexpr float kDown = 1 / tile::kPieceStep;
    const auto piece = [&](int i) { return x[tile::register_of_piece(j, i, half)]; };
    return fmaf(fmaf(fmaf(piece(3), kDown, piece(2)), kDown, piece(1)), kDown, piece(0));
  }
  static __device__ __forceinline__ void sum_pieces(Scores& s, Sums (&products)[kBlockKeys / 64]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (half % 2 == 0) ptx::wgmma_done(products[half / 2]);
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) s[half][j] = sum_of_pieces(products[half / 2], j, half % 2);
    }
  }
  /// What rows see is found anew: registers are few, and few blocks need it.
  __device__ __forceinline__ void mask(Scores& s, int first_key) const {
    const FwdWorkTile& work = *memory.work_tile(warp);
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      const int row = 4 * j + lane % 4;
      const tile::Span32 seen =
          row < work.end_row ? tile::keys_of(f.p, work.span, query_of_row(f, row)) : tile::Span32{};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int key = first_key + half / 2 * 64 + 16 * warp_in_group + lane / 4 + half % 2 * 8;
        if (key < seen.begin || key >= seen.end) s[half][j] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ float base(int j) const {
    return base_of(row_max[j], scale_log2[j]) - kHeadroomLog2;
  }
  /// Weights of the block go to shared memory. Maxima rise where one outgrows its place, for all warps at once: weights are
  /// made again then.
  __device__ __forceinline__ void weigh(const Scores& s) {
    float sums[kOwnRows];
    bool maxima_hold = have_maxima;
    buffer ^= 1;
#pragma unroll 1
    while (true) {
      if (!maxima_hold) raise(s);
      have_maxima = true;
      bool grown = false;
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) {
        float w[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          w[half] = ptx::ex2(fmaf(s[half][j], scale_log2[j], -base(j)));
          sums[j] = half == 0 ? w[0] : sums[j] + w[half];
        }
        grown =
            grown || largest_of_thread(s, j) * scale_log2[j] > fmaf(row_max[j], scale_log2[j], kGrowthLog2);
#pragma unroll
        for (int i = 0; i < kBlockKeys / 64; ++i) store_weights(w[2 * i], w[2 * i + 1], j, i);
      }
      ptx::async_proxy_fence();  // wgmma reads the weights
      // The weights of all warps are there, unless one of them asks for another maximum.
      maxima_hold = !ptx::barrier_wait_any(kConsumer + group, 128, grown);
      if (maxima_hold) break;
    }
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) row_sum[j] += sums[j];
  }

  /// The pieces of two weights. Two lanes with neighbouring keys have four bytes side by side of each: one stores those of the
  /// first two pieces, the other those of the last two.
  __device__ __forceinline__ void store_weights(float w0, float w1, int j, int i) const {
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
    const uint32_t other = __shfl_xor_sync(kWholeWarp, odd ? first : last, 4);
    // Keys g, g + 1, g + 8, g + 9 with g even, which are at four places side by side.
    const uint32_t even_keys = odd ? other : kept, odd_keys = odd ? kept : other;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece)
      ptx::st_shared_4(memory.weights(group, buffer) + 16 * j * kBlockKeys +
                           (i == 0 ? lane_in_weights[piece] : lane_in_weights[piece] ^ 64u),
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

  static __device__ __forceinline__ float largest_of_thread(const Scores& s, int j) {
    float largest = s[0][j];
#pragma unroll
    for (int half = 1; half < kHalves; ++half) largest = fmaxf(largest, s[half][j]);
    return largest;
  }
  /// Raises the maxima to those of the block, and scales what was summed before.
  __device__ __forceinline__ void raise(const Scores& s) {
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      float largest = largest_of_thread(s, j);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, distance));
      if (lane < 4) memory.warp_rows(warp)[4 * j + lane] = largest;
    }
    ptx::barrier_wait(kConsumer + group, 128);  // the maxima of all warps are there
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      float now = row_max[j];
#pragma unroll
      for (int w = 0; w < 4; ++w) now = fmaxf(now, memory.warp_rows(4 * group + w)[4 * j + lane % 4]);
      const float factor = now == -INFINITY ? 1.0f : ptx::ex2((row_max[j] - now) * scale_log2[j]);
      row_max[j] = now;
      row_sum[j] *= factor;
#pragma unroll
      for (int m = 0; m < kParts; ++m) o[m][0][j] *= factor, o[m][1][j] *= factor;
    }
  }

  __device__ __forceinline__ void multiply_pv(const uint32_t (&v)[kParts][kKeySteps][4]) {
    constexpr int kMostRegisters = 32, kOfPart = kColumns / 2,
                  kAtOnce = kParts * kOfPart <= kMostRegisters ? kParts : kMostRegisters / kOfPart;
    static_assert(kParts % kAtOnce == 0);
    const int weights = static_cast<int>(memory.weights(group, buffer) >> 4);
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
          o[first + m][0][j] += sum_of_pieces(products[m], j, 0);
          o[first + m][1][j] += sum_of_pieces(products[m], j, 1);
        }
      }
    }
  }

  // --- the end of a tile ---

  __device__ __forceinline__ void share_result() const {
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      float sum = row_sum[j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(kWholeWarp, sum, distance);
      const int row = 4 * j + lane % 4;
      if (lane < 4) memory.warp_rows(warp)[row] = sum;
      float* const to = memory.o(group) + row * kConfig.head_dim_v + 16 * warp_in_group + lane / 4 * 2;
#pragma unroll
      for (int m = 0; m < kParts; ++m)
        *reinterpret_cast<float2*>(to + 64 * m) = make_float2(o[m][0][j], o[m][1][j]);
    }
    ptx::barrier_wait(kConsumer + group, 128);  // the sums of all warps are there
    if (warp_in_group == 0 && lane < 4) {
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) {
        const int row = 4 * j + lane;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) sum += memory.warp_rows(warp + w)[row];
        memory.states(group)[row] = {row_max[j] == -INFINITY ? -INFINITY : base(j), sum};
      }
    }
    __syncwarp();  // no lane comes to the next barrier before those that write
  }
};

}  // namespace fovea::cuda
