// Of fwd_decode_e4m3: a warpgroup that multiplies. Which keys, columns and rows a thread has: fwd_decode_e4m3_shape.cuh. Products of up to 8
// rows are made of pieces of Q and of weights (fwd_decode_e4m3_pieces.cuh), of more rows with K and V as float16
// (fwd_decode_e4m3_widened.cuh).
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/fwd_decode_e4m3_config.cuh"
#include "cuda/kernels/fwd_decode_e4m3_pieces.cuh"
#include "cuda/kernels/fwd_decode_e4m3_widened.cuh"
#include "cuda/kernels/fwd_decode_results.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/online_rows.cuh"

namespace fovea::cuda {

template <class Instance>
struct FwdDecodeE4M3Consumer {
  using T = typename Instance::Element;
  static constexpr auto kConfig = Instance::kConfig;
  /// The products, and what they want of Q and weights.
  using Operands =
      std::conditional_t<kConfig.widens, FwdDecodeE4M3Widened<Instance>, FwdDecodeE4M3Pieces<Instance>>;
  static constexpr int kRows = kConfig.tile_m, kOwnRows = Operands::kOwnRows, kParts = Operands::kParts,
                       kBlockKeys = kConfig.block_keys, kHalves = Operands::kHalves,
                       kOfLane = Operands::kOfLane;
  static constexpr int kStages = kConfig.stages, kWarpgroups = kConfig.warpgroups, kWarps = kConfig.warps;
  // Copies of blocks may arrive in any order. Within a tile the blocks of a stage are those of one warpgroup, which waits for each; another
  // could ask for the phase behind one that has not ended, and be told of the one before that.
  static_assert(kStages % kWarpgroups == 0, "a stage belongs to one warpgroup");
  static constexpr uint32_t kWholeWarp = 0xffffffffu;
  static constexpr int kConsumers = 2, kConsumer = 3;  ///< barriers
  /// Weights are taken times 2^kHeadroomLog2, so that small ones keep bits, and maxima rise where one would be 2^kGrowthLog2 above
  /// that: below 448 in all.
  static constexpr float kHeadroomLog2 = 4.0f, kGrowthLog2 = 4.5f;

  using Scores = typename Operands::Scores;

  const ForwardArgs& f;
  const FwdDecodeE4M3Memory<Instance>& memory;
  const int warp, lane;
  const int group = warp / 4, warp_in_group = warp % 4;
  DecodeRing<kStages> ring;  ///< blocks of a tile go to the warpgroups in turn
  int buffer = 0;
  const Operands operands;

  typename Operands::Results o;
  float row_max[kOwnRows], row_sum[kOwnRows];
  // Of more rows they stay in shared memory: registers are few.
  static constexpr bool kHoldsScales = kOwnRows <= 4;
  float scales[kHoldsScales ? kOwnRows : 1];
  bool have_maxima = false;

  __device__ __forceinline__ FwdDecodeE4M3Consumer(const ForwardArgs& args,
                                                   const FwdDecodeE4M3Memory<Instance>& memory_, int warp_,
                                                   int lane_)
      : f(args), memory(memory_), warp(warp_), lane(lane_), operands(memory_, warp_, lane_) {}

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
    if constexpr (kConfig.results_over_stages()) wait_for_all();  // nobody reads stages any more
    share_result();
    wait_for_all();  // the results are there
  }

 private:
  // --- Q ---

  /// Rows of Q go to shared memory as operands, some by each warp.
  __device__ __forceinline__ void share_q(const FwdWorkTile& work) const {
    const tile::AttentionParams& p = f.p;
    const float scale = p.scale * tile::kLog2e * descale_of_products(p, work.batch, head_of_keys(f, work));
#pragma unroll 1
    for (int first = warp; first < kRows; first += kRowsAtOnce * kWarps) {
      float x[kRowsAtOnce][kOfLane] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = first + i * kWarps;
        if (row < work.end_row) load_q(x[i], work, row);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = first + i * kWarps;
        if (row < kRows) share_row_of_q(x[i], row, scale);
      }
    }
    ptx::async_proxy_fence();  // wgmma reads the operands
  }
  /// Rows whose loads are under way together, of a warp.
  static constexpr int kRowsOfWarp = (kRows + kWarps - 1) / kWarps,
                       kRowsAtOnce = kRowsOfWarp < 4 ? kRowsOfWarp : 4;
  __device__ __forceinline__ void share_row_of_q(float (&x)[kOfLane], int row, float scale) const {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, distance));
    const float factor = Operands::factor_of_q(largest);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) x[i] *= factor;
    operands.store_q(x, row);
    // Operands know no infinities: all scores of such a row are NaN, and it is computed again.
    if (lane == 0) memory.scales()[row] = largest < INFINITY ? scale / factor : NAN;
  }
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
  __device__ __forceinline__ void begin_tile() {
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      if constexpr (kHoldsScales) scales[j] = memory.scales()[Operands::row(j, lane)];
      row_max[j] = -INFINITY, row_sum[j] = 0;
#pragma unroll
      for (int m = 0; m < kParts; ++m) o.at(m, 0, j) = o.at(m, 1, j) = 0;
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
    typename Operands::Products products;
    if constexpr (Operands::kAhead) {
      multiply_next(products);
      ptx::wgmma_wait<0>();
    }
#pragma unroll 1
    for (; n < blocks.end; n += kWarpgroups) {
      Scores s;
      if constexpr (!Operands::kAhead) {
        multiply_next(products);
        ptx::wgmma_wait<0>();
      }
      operands.take_scores(s, products);
      typename Operands::Values v;
      if constexpr (!Operands::kValuesLast) take_values(v);
      if constexpr (Operands::kAhead) {
        if (n + kWarpgroups < blocks.end) multiply_next(products);
      }
      if (!blocks.is_full(n)) mask(s, n * kBlockKeys);
      weigh(s);
      if constexpr (Operands::kValuesLast) take_values(v);
      operands.multiply_pv(o, v, memory.weights(group, buffer));
    }
  }

  /// Begins to multiply the keys of the next stage.
  __device__ __forceinline__ void multiply_next(typename Operands::Products& products) const {
    ptx::mbarrier_wait(memory.full(ring.stage), ring.parity);
    __syncwarp();  // the block is there for all lanes
    operands.multiply_qk(products, memory.stage(0, ring.stage));
  }
  /// The block's values go to registers, and its stage becomes free.
  __device__ __forceinline__ void take_values(typename Operands::Values& v) {
    operands.load_v(v, memory.stage(0, ring.stage) + kConfig.values_behind());
    __syncwarp();  // all lanes have read the stage
    if (lane == 0) ptx::mbarrier_arrive(memory.empty(ring.stage));
    ring.advance(kWarpgroups);
  }

  /// What rows see is found anew: registers are few, and few blocks need it.
  __device__ __forceinline__ void mask(Scores& s, int first_key) const {
    const FwdWorkTile& work = *memory.work_tile(warp);
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      const int row = Operands::row(j, lane);
      const tile::Span32 seen =
          row < work.end_row ? tile::keys_of(f.p, work.span, query_of_row(f, row)) : tile::Span32{};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int key = first_key + half / 2 * 64 + 16 * warp_in_group + lane / 4 + half % 2 * 8;
        if (key < seen.begin || key >= seen.end) s[half][j] = -INFINITY;
      }
    }
  }

  __device__ __forceinline__ float scale_log2(int j) const {
    if constexpr (kHoldsScales) {
      return scales[j];
    } else {
      return memory.scales()[Operands::row(j, lane)];
    }
  }
  __device__ __forceinline__ float base(int j) const {
    return base_of(row_max[j], scale_log2(j)) - kHeadroomLog2;
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
      for (int first = 0; first < kOwnRows; first += Operands::kRowsAtOnce) {
        typename Operands::Weights w;
#pragma unroll
        for (int r = 0; r < Operands::kRowsAtOnce; ++r) {
          const int j = first + r;
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            w[half][r] = ptx::ex2(fmaf(s[half][j], scale_log2(j), -base(j)));
            sums[j] = half == 0 ? w[0][r] : sums[j] + w[half][r];
          }
          grown =
              grown || largest_of_thread(s, j) * scale_log2(j) > fmaf(row_max[j], scale_log2(j), kGrowthLog2);
        }
        operands.store_weights(w, first, memory.weights(group, buffer));
      }
      ptx::async_proxy_fence();  // wgmma reads the weights
      // The weights of all warps are there, unless one of them asks for another maximum.
      maxima_hold = !ptx::barrier_wait_any(kConsumer + group, 128, grown);
      if (maxima_hold) break;
    }
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) row_sum[j] += sums[j];
  }

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
      if (lane < 4) memory.warp_rows(warp)[Operands::row(j, lane)] = largest;
    }
    ptx::barrier_wait(kConsumer + group, 128);  // the maxima of all warps are there
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      float now = row_max[j];
#pragma unroll
      for (int w = 0; w < 4; ++w) now = fmaxf(now, memory.warp_rows(4 * group + w)[Operands::row(j, lane)]);
      const float factor = now == -INFINITY ? 1.0f : ptx::ex2((row_max[j] - now) * scale_log2(j));
      row_max[j] = now;
      row_sum[j] *= factor;
#pragma unroll
      for (int m = 0; m < kParts; ++m) o.at(m, 0, j) *= factor, o.at(m, 1, j) *= factor;
    }
  }

  // --- the end of a tile ---

  __device__ __forceinline__ void share_result() const {
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      float sum = row_sum[j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(kWholeWarp, sum, distance);
      const int row = Operands::row(j, lane);
      if (lane < 4) memory.warp_rows(warp)[row] = sum;
      float* const to = memory.o(group) + row * kConfig.head_dim_v + 16 * warp_in_group + lane / 4 * 2;
#pragma unroll
      for (int m = 0; m < kParts; ++m)
        *reinterpret_cast<float2*>(to + 64 * m) = make_float2(o.at(m, 0, j), o.at(m, 1, j));
    }
    ptx::barrier_wait(kConsumer + group, 128);  // the sums of all warps are there
    if (warp_in_group == 0 && lane < 4) {
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) {
        const int row = Operands::row(j, lane);
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
