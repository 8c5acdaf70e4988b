// A CTA of bwd_tf32 apart from its products: what it works on, its copies to shared memory, and its gradients on
// their way to global memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/bwd_tf32_pairs.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "cuda/warp/tf32_product.cuh"
#include "cuda/warp/tf32_tile.cuh"
#include "tile/kv_blocks.hpp"

namespace fovea::cuda {

/// Rows are keys and columns queries, or the other way round.
template <class Instance, bool kByKeys>
struct BwdTf32Cta {
  static constexpr BwdTf32Config kConfig = Instance::kConfig;
  static constexpr int kTileM = kConfig.tile_m(), kTileN = kConfig.tile_n, kWarpM = kConfig.warp_m;
  static constexpr int kThreads = kConfig.threads(), kDim = kConfig.head_dim;
  static constexpr int kMTiles = kWarpM / 16, kNTiles = kTileN / 8, kOTiles = kDim / 8;
  static constexpr int kVTiles = kByKeys ? kOTiles : 1;  ///< a query has no gradient of v
  using RowTile = SharedTile<kTileM, kDim, 4>;
  using ColumnTile = SharedTile<kTileN, kDim, 4>;
  static constexpr int kRowFloats = RowTile::kBytes / 4, kColumnFloats = ColumnTile::kBytes / 4;
  static_assert(BackwardArgs::kRowPadding % kTileM == 0 && BackwardArgs::kRowPadding % kTileN == 0,
                "statistics are read without a look at their number");
  static_assert(2 * kTileN <= kThreads, "a thread copies one statistic of a block");

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  float* const s_rows;        ///< K or Q, then V or dO
  float* const s_columns;     ///< a stage: Q or K, then dO or V
  float* const s_statistics;  ///< a stage: lse_log2, delta
  BwdTf32Place& place;
  const int thread, warp, lane;
  const int g, t;  ///< as in ptx/mma.cuh

  __device__ __forceinline__ BwdTf32Cta(const BackwardArgs& arguments, unsigned char* shared)
      : args(arguments),
        p(arguments.p),
        s_rows(reinterpret_cast<float*>(shared)),
        s_columns(reinterpret_cast<float*>(shared + kConfig.offset_columns())),
        s_statistics(reinterpret_cast<float*>(shared + kConfig.offset_statistics())),
        place(*reinterpret_cast<BwdTf32Place*>(shared + kConfig.offset_place())),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / 32),
        lane(thread % 32),
        g(lane / 4),
        t(lane % 4) {}

  __device__ __forceinline__ const tile::RowsView& view_qk() const { return kByKeys ? p.dk : p.dq; }

  /// Finds the place of CTA `index` of `blocks` a head, and writes zeros to its share of the rows that take no part.
  /// Returns whether any row does; then all threads can read `place`.
  __device__ __forceinline__ bool find_place(unsigned index, unsigned blocks) const {
    const unsigned heads = kByKeys ? p.heads_kv : p.heads_q;
    const unsigned plane = index / blocks, batch = plane / heads;
    // Longest first under causal: the first keys, the last queries.
    const int block = static_cast<int>(kByKeys ? index % blocks : blocks - 1 - index % blocks);
    const int head = static_cast<int>(plane % heads);
    const tile::SequenceSpan span = tile::sequence_span(p, static_cast<int>(batch));
    const int used = kByKeys ? span.used_k : span.used_q, length = kByKeys ? span.length_k : span.length_q;
    const int64_t row0 = kByKeys ? span.row_k : span.row_q;
    const int share = tile::ceil_div(max(kByKeys ? p.seqlen_k : p.seqlen_q, 1), static_cast<int>(blocks));
    const int stop = block + 1 == static_cast<int>(blocks) ? length : min(length, (block + 1) * share);
    for (int row = max(used, block * share); row < stop; ++row) {
      float* const to = reinterpret_cast<float*>(view_qk().data) + view_qk().offset(batch, row0 + row, head);
      for (int c = thread; c < p.head_dim; c += kThreads) to[c] = 0.0f;
      if (kByKeys) {
        float* const to_v = reinterpret_cast<float*>(p.dv.data) + p.dv.offset(batch, row0 + row, head);
        for (int c = thread; c < p.head_dim_v; c += kThreads) to_v[c] = 0.0f;
      }
    }
    const int first = block * kTileM, end = min(first + kTileM, used);
    if (first >= end) return false;
    if (thread == 0) {
      const tile::Span32 columns =
          kByKeys ? tile::queries_of_any(p, span, first, end)
                  : tile::Span32{tile::keys_of(p, span, first).begin, tile::keys_of(p, span, end - 1).end};
      const bool any = !columns.empty();
      place = {span,
               static_cast<int>(batch),
               head,
               first,
               end,
               any ? columns.begin / kTileN : 0,
               any ? tile::ceil_div(columns.end, kTileN) : 0,
               span.used_k - span.used_q};
    }
    __syncthreads();  // place can be read
    return true;
  }

  /// One head's rows of a tensor, of keys or of queries.
  __device__ __forceinline__ RowSource source(const tile::RowsView& view, bool keys, int head, int columns,
                                              uint32_t bit) const {
    const int64_t row = keys ? place.span.row_k : place.span.row_q;
    return {view.data + view.offset(place.batch, row, head) * 4, view.row * 4,
            keys ? place.span.used_k : place.span.used_q, columns, opaque((p.aligned16 & bit) != 0)};
  }
  /// Starts copying a block of columns of a head of queries, with their statistics where they are queries.
  __device__ __forceinline__ void copy_columns(int head, int n, int stage) const {
    float* const to = s_columns + stage * 2 * kColumnFloats;
    const uint32_t to_qk = ptx::shared_address(to), to_v = ptx::shared_address(to + kColumnFloats);
    const int first = n * kTileN;
    if constexpr (kByKeys) {
      copy_tile_either<ColumnTile, kThreads>(to_qk, source(p.q, false, head, p.head_dim, tile::kAlignedQ),
                                             first, opaque(thread));
      copy_tile_either<ColumnTile, kThreads>(to_v, source(p.d_o, false, head, p.head_dim_v, tile::kAlignedDO),
                                             first, opaque(thread));
      if (thread < 2 * kTileN) {
        const float* const from = thread < kTileN ? args.lse_log2 : args.delta;
        ptx::cp_async_4(ptx::shared_address(s_statistics + stage * 2 * kTileN + thread),
                        from + (static_cast<int64_t>(place.batch) * p.heads_q + head) * args.rows + first +
                            thread % kTileN,
                        true);
      }
    } else {
      const int key_head = static_cast<int>(static_cast<unsigned>(head) / p.group);
      copy_tile_either<ColumnTile, kThreads>(to_qk, source(p.k, true, key_head, p.head_dim, tile::kAlignedK),
                                             first, opaque(thread));
      copy_tile_either<ColumnTile, kThreads>(to_v, source(p.v, true, key_head, p.head_dim_v, tile::kAlignedV),
                                             first, opaque(thread));
    }
    ptx::cp_async_commit();
  }
  /// Starts copying the CTA's rows; the next copy_columns commits them.
  __device__ __forceinline__ void copy_rows() const {
    const RowSource rows = source(kByKeys ? p.k : p.q, kByKeys, place.head, p.head_dim,
                                  kByKeys ? tile::kAlignedK : tile::kAlignedQ);
    const RowSource rows_v = source(kByKeys ? p.v : p.d_o, kByKeys, place.head, p.head_dim_v,
                                    kByKeys ? tile::kAlignedV : tile::kAlignedDO);
    copy_tile_either<RowTile, kThreads>(ptx::shared_address(s_rows), rows, place.first, opaque(thread));
    copy_tile_either<RowTile, kThreads>(ptx::shared_address(s_rows + kRowFloats), rows_v, place.first,
                                        opaque(thread));
  }

  /// The row that this lane holds in half `half` of m16 tile `mt`.
  __device__ __forceinline__ int row_at(int mt, int half) const {
    return place.first + warp * kWarpM + mt * 16 + half * 8 + g;
  }

  /// Where a row's gradient goes.
  __device__ __forceinline__ float* output(const tile::RowsView& view, int row) const {
    return reinterpret_cast<float*>(view.data) +
           view.offset(place.batch, (kByKeys ? place.span.row_k : place.span.row_q) + row, place.head);
  }
  /// Writes the gradients of rows that are finite. Bit 4 g + t of `broken`: lane t of row g has something that is
  /// not finite.
  __device__ __forceinline__ void write_finite_rows(const float (&acc_qk)[kMTiles][kOTiles][4],
                                                    const float (&acc_v)[kMTiles][kVTiles][4],
                                                    uint32_t (&broken)[kMTiles][2]) const {
    const auto aligned = [&](uint32_t bit) { return (p.aligned16 & bit) != 0; };
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_at(mt, half);
        const bool finite = half_is_finite(acc_qk[mt], half) && half_is_finite(acc_v[mt], half);
        broken[mt][half] = __ballot_sync(0xffffffffu, row < place.end && !finite);
        if (row >= place.end || (broken[mt][half] >> (4 * g) & 15u) != 0) continue;
        store_half(acc_qk[mt], half, t, output(view_qk(), row), p.head_dim,
                   aligned(kByKeys ? tile::kAlignedDK : tile::kAlignedDQ), p.scale);
        if constexpr (kByKeys)
          store_half(acc_v[mt], half, t, output(p.dv, row), p.head_dim_v, aligned(tile::kAlignedDV), 1.0f);
      }
    }
  }
  /// Computes the gradients of `broken` rows once more, pair by pair.
  __device__ __forceinline__ void write_exact_rows(uint32_t (&broken)[kMTiles][2]) const {
    for_each_broken_row(broken, [&](int row_of_warp) {
      const int row = place.first + warp * kWarpM + row_of_warp;
      ExactGradient<kByKeys, kDim> exact;
      exact.sum(args, place, row);
      exact.write(exact.of_qk, output(view_qk(), row), p.head_dim, p.scale);
      if constexpr (kByKeys) exact.write(exact.of_v, output(p.dv, row), p.head_dim_v, 1.0f);
    });
  }
};

}  // namespace fovea::cuda
