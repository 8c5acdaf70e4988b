// What the two consumers of fwd_sm90_wide and of fwd_sm90_latent have in common: warpgroups that share 64 rows of queries, each with half
// of the columns of O, and make the weights of blocks of keys by turns.
#pragma once

#include <cstdint>

#include "cuda/kernels/fwd_sm90_epilogue.cuh"
#include "cuda/kernels/fwd_sm90_pairs.cuh"
#include "cuda/kernels/fwd_sm90_softmax.cuh"
#include "cuda/kernels/fwd_sm90_warpgroup.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/opaque.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

/// The registers of a consumer's thread, and the steps that do not depend on where K and V lie. All steps are inlined into the kernel, so
/// that the arrays stay in registers. Every thread of the warpgroup calls every step.
///
/// Blocks are counted over all tiles of the CTA, `block`: consumer block % 2 makes its weights. Consumer, which derives from this, has
///   first_step(blocks, n, block)   the weights of block n, of its own, and their P V, with nothing before
///   step(blocks, n, block)         the same, and before it P V of the block before, which is the other's
///   last_step(block)               P V of the tile's last block, which is the other's
template <class Consumer, class Instance, class MemoryType>
struct FwdSm90WideRows {
  using Element = typename Instance::Element;
  using Memory = MemoryType;
  using WgmmaMajor = ptx::WgmmaMajor;
  using WgmmaStart = ptx::WgmmaStart;
  static constexpr auto kConfig = Instance::kConfig;
  static constexpr int kTileN = kConfig.tile_n, kRowBytes = kConfig.kRowBytes;
  static constexpr int kColumnsO = kConfig.columns_o(), kStepsPv = kTileN / 16;
  static constexpr uint32_t kWholeWarp = 0xffffffffu;
  static_assert(kConfig.expression == (Expression::kHasScore || Expression::kHasSees));

  using AccS = float[kTileN / 2];
  using Rows = FwdSm90Rows<Element, kTileN, true, 1>;
  using ProductO = ptx::Wgmma<kColumnsO>;

  const TmaForwardArgs& args;
  const Memory& memory;
  const int c;     ///< number of this consumer
  const int lane;  ///< of its warp
  /// Start of shared memory in units of 16 bytes, warp-uniform; without the bits above 2^18, where addresses in a cluster have
  /// the rank of the CTA.
  const int base16;

  float acc_o[kColumnsO / 2];
  typename Rows::Weights weights;  ///< P as operand A
  Rows rows;
  const FwdSm90WorkTile* work = nullptr;  ///< in shared memory
  uint32_t blocks_before = 0;             ///< of earlier tiles
  tile::Dropout dropout;

  __device__ __forceinline__ FwdSm90WideRows(const TmaForwardArgs& args_, const Memory& memory_, int c_,
                                             int lane_)
      : args(args_),
        memory(memory_),
        c(c_),
        lane(lane_),
        base16(uniform(static_cast<int>(tile::wgmma_start_step(memory_.base)))),
        rows(args_.scale_log2),
        dropout(kConfig.dropout ? uniform_dropout(args_.f.p) : tile::Dropout()) {}

  /// Takes tiles until the planner says that there are no more.
  __device__ __forceinline__ void run() {
    for (uint32_t tile_count = 0; begin_tile(tile_count); ++tile_count) {
      const Blocks blocks = {uniform(work->load_begin), uniform(work->load_end),
                             uniform(work->blocks.full_begin), uniform(work->blocks.full_end)};
      if (blocks.begin < blocks.end) {
        mainloop(blocks);
      } else {
        __syncwarp();  // every lane has seen the phase of full_q
        release(memory.empty_q(0));
      }
      FwdSm90Epilogue<Instance>(args, *work, c * kColumnsO).write(acc_o, rows);
    }
  }

 protected:
  /// Blocks of keys that rows of the cluster see, warp-uniform: all its CTAs take all of these, as they share their loads.
  /// Those outside of [full_begin, full_end) need a mask.
  struct Blocks {
    int begin, end, full_begin, full_end;
    __device__ __forceinline__ bool need_mask(int n) const { return n < full_begin || n >= full_end; }
  };

  /// Waits for the tile and its Q; O and the rows' statistics start empty. False: there is no tile any more.
  __device__ __forceinline__ bool begin_tile(uint32_t tile_count) {
    wait_for_tile(memory.full_q(0), tile_count);
    work = memory.work_tile(0, tile_count);
#pragma unroll
    for (float& x : acc_o) x = 0.0f;
    rows.start();
    if (uniform(work->last) != 0) return false;
    clear_rows_of_others(args.f, *work, memory.q(0), kConfig.strips(), c);
    return true;
  }

  /// Blocks end - 1 to begin, by turns: a consumer makes the weights of every second one, and multiplies the weights
  /// of all with its half of V, in order.
  __device__ __forceinline__ void mainloop(const Blocks& blocks) {
    uint32_t block = blocks_before;
    int n = blocks.end - 1;
    if ((block & 1) == static_cast<uint32_t>(c)) {
      self().first_step(blocks, n, block);
      n -= 2, block += 2;
    } else {
      n -= 1, block += 1;
    }
    for (; n >= blocks.begin; n -= 2, block += 2) self().step(blocks, n, block);
    release(memory.empty_q(0));
    if (n == blocks.begin - 1) self().last_step(block - 1);
    blocks_before += static_cast<uint32_t>(blocks.end - blocks.begin);
  }

  __device__ __forceinline__ Consumer& self() {
    return static_cast<Consumer&>(*this);
  }

  // --- barriers ---

  /// Arrives for the warp. Call it after a wait for products or __syncwarp(): a lane that has not seen the
  /// barrier's phase yet would miss it.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  }
  /// The same at all CTAs that load pieces of K and V for this one.
  __device__ __forceinline__ void release_piece(uint32_t barrier) const {
    if constexpr (kConfig.cluster == 1) {
      release(barrier);
    } else {
      const uint32_t there = ptx::address_in_cta(barrier, lane % kConfig.cluster);  // of all lanes: no branch
      if (lane < kConfig.cluster) ptx::mbarrier_arrive_in_cta(there);
    }
  }

  // --- products with V ---

  /// O += P V of a block, P in the registers of the consumer that made it; `v`: this consumer's half of V. The first of all starts O.
  template <WgmmaStart kStart = WgmmaStart::kAccumulate>
  __device__ __forceinline__ void issue_own_pv(uint64_t v) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsPv; ++step) {
      const uint64_t of_step = v + tile::wgmma_start_step(step * 16 * kRowBytes);
      if (kStart == WgmmaStart::kZero && step == 0) {
        ProductO::template rs<Element, WgmmaStart::kZero, WgmmaMajor::kMN>(acc_o, weights[0][step], of_step);
      } else {
        ProductO::template rs<Element, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(acc_o, weights[0][step],
                                                                                 of_step);
      }
    }
    ptx::wgmma_commit();
  }
  /// The same where the other has made P: it lies in shared memory, at `p`.
  __device__ __forceinline__ void issue_other_pv(uint64_t p, uint64_t v) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kStepsPv; ++step) {
      ProductO::template ss<Element, WgmmaStart::kAccumulate, WgmmaMajor::kMN>(
          acc_o, p + tile::wgmma_start_step(step * 32), v + tile::wgmma_start_step(step * 16 * kRowBytes));
    }
    ptx::wgmma_commit();
  }

  // --- softmax ---

  /// O follows the last raise of the maxima.
  __device__ __forceinline__ void rescale_o() {
#pragma unroll
    for (int i = 0; i < kColumnsO / 2; ++i) acc_o[i] *= rows.factor[i / 2 % 2];
  }

  /// From Q K^T of block n to packed weights. Whether rescale_o() is due once no P V is under way.
  __device__ __forceinline__ bool softmax(AccS& acc_s, const Blocks& blocks, int n) {
    if (kConfig.values_in_keys && has_no_rows()) {
      clear_weights();
      return false;
    }
    if constexpr (kConfig.expression) apply_terms(acc_s, n * kTileN);
    if (blocks.need_mask(n)) mask_window(acc_s, args.f, *work, n * kTileN);
    const bool raised = rows.raise(acc_s);
    rows.weigh(acc_s);
    rows.pack_weights(acc_s, weights);
    if constexpr (kConfig.dropout) drop(n * kTileN);
    return raised;
  }
  /// From Q K^T to what the expression makes of it.
  __device__ __forceinline__ void apply_terms(AccS& acc_s, int first_key) const {
    const LaneQueries queries = lane_queries(args.f, *work);
    if constexpr (Expression::kHasScore) apply_expression(acc_s, args.f, *work, queries, first_key);
    if constexpr (Expression::kHasSees) {
#pragma unroll
      for (int i = 0; i < kTileN / 2; ++i) {
        if (!Expression::sees(queries.head, queries.query[i / 2 % 2],
                              lane_key(*work, queries.head, first_key, i & ~2)))
          acc_s[i] = -INFINITY;
      }
    }
  }
  /// Weights that dropout leaves out become 0: they are in the sums.
  __device__ __forceinline__ void drop(int first_key) {
    KeptWeights<kStepsPv> kept;
    find_kept_weights<1>(kept, dropout, args.f, *work, first_key);
    kept.keep(weights[0]);
  }

  /// Whether the warp's rows of the tile do not exist: of 16 query heads three warps have none. Weights of zero cost the tensor cores less of
  /// the power that bounds them.
  __device__ __forceinline__ bool has_no_rows() const {
    return work->first_row + 16 * warp_index() >= work->end_row;
  }
  __device__ __forceinline__ void clear_weights() {
#pragma unroll
    for (auto& step : weights[0]) {
#pragma unroll
      for (uint32_t& pair : step) {
        pair = 0;
        ptx::make_opaque(pair);  // products from known zeros would need a fence of their own (C7519)
      }
    }
  }

  /// Gives weights, maxima and sums of a block to the other consumer. There is room for them.
  __device__ __forceinline__ void hand_over() const {
    const int first_row = 16 * warp_index(), row = first_row + lane % 16;
#pragma unroll
    for (int step = 0; step < kStepsPv; ++step) {
      const int chunk = 2 * step + lane / 16;
      ptx::stmatrix_x4(memory.p(c) + row * kRowBytes + (chunk ^ row % 8) * 16, weights[0][step]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = row_total(rows.row_sum[half]);
      if (lane % 4 == 0) {
        ptx::st_shared_8(memory.statistics(c, first_row + lane / 4 + 8 * half),
                         {__float_as_uint(rows.row_max[half]), __float_as_uint(sum)});
      }
    }
    ptx::async_proxy_fence();  // products of the other consumer read P
    __syncwarp();
    release(memory.full_p(c));
  }

  /// Waits for the other consumer's weights of a block; maxima and sums go on from there, and O follows. No P V is
  /// under way.
  __device__ __forceinline__ void take_statistics(uint32_t block) {
    ptx::mbarrier_wait(memory.full_p(1 - c), block / 2 & 1);
    ptx::wgmma_fence();  // .aligned, as in wait_for_tile
    const int row = 16 * warp_index() + lane / 4;
    bool raised = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 of_row = ptx::ld_shared_8(memory.statistics(1 - c, row + 8 * half));
      const float maximum = __uint_as_float(of_row.x);
      raised = raised || maximum != rows.row_max[half];
      rows.raise_to(half, maximum, args.scale_log2);
      rows.row_sum[half] = lane % 4 == 0 ? __uint_as_float(of_row.y) : 0.0f;
    }
    if (__any_sync(kWholeWarp, raised)) rescale_o();
  }
};

}  // namespace fovea::cuda
