// A CTA of fwd_tf32 apart from its arithmetic: its configuration, what it works on, its copies to shared memory,
// and its rows on their way to global memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/fwd_work_tile.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/shared_tile.cuh"
#include "cuda/warp/tf32_product.cuh"
#include "cuda/warp/tf32_tile.cuh"
#include "tile/key_rows.hpp"
#include "tile/kv_blocks.hpp"
#include "tile/log2.hpp"
#include "tile/tile_scheduler.hpp"

namespace fovea::cuda {

/// What a CTA of fwd_tf32 works on. It lies in shared memory: the main loop needs the registers.
struct FwdTf32Place {
  FwdWorkTile work;
  int n_begin, n_end;  ///< blocks of keys
  const char *k, *v;   ///< of key_rows
};

struct FwdTf32Config {
  int head_dim;  ///< of Q, K and of V, O, padded to 32, 64, 128 or 256
  int tile_n;    ///< keys of a block
  int warp_m;    ///< rows of a warp, 16 or 32
  int num_warps;
  int min_ctas;          ///< CTAs an SM, for the register allocator
  bool general = false;  ///< every term of the score; else window, causal and lengths only, and scale > 0

  constexpr int threads() const { return 32 * num_warps; }
  constexpr int tile_m() const { return warp_m * num_warps; }
  // Offsets in shared memory.
  constexpr int offset_k() const { return tile_m() * head_dim * 4; }
  constexpr int offset_v() const { return offset_k() + tile_n * head_dim * 4; }
  constexpr int offset_place() const { return offset_v() + tile_n * head_dim * 4; }
  constexpr int offset_warps() const { return offset_place() + static_cast<int>(sizeof(FwdTf32Place)); }
  constexpr int shared_bytes() const {
    return offset_warps() + num_warps * static_cast<int>(sizeof(tile::KvBlocks));
  }
};

/// 1 / x within an ulp, for x of [1, 2^64) (or NaN, Inf); without the branches of an exact division.
__device__ __forceinline__ float reciprocal(float x) {
  const float r = __fdividef(1.0f, x);
  return fmaf(r, fmaf(-x, r, 1.0f), r);
}

/// The end of a row in natural units.
struct Tf32RowEnd {
  float factor = 0;       ///< normalises the weighted sum of values
  float lse = -INFINITY;  ///< natural logarithm
};
/// `sum` of exp(score - base); the sink is one more key of that score without a value.
__device__ __forceinline__ Tf32RowEnd end_of_tf32_row(float sum, float base, float sink) {
  if (sum == 0.0f) return {0.0f, sink};
  if (sink == -INFINITY) return {reciprocal(sum), base + logf(sum)};
  const float top = fmaxf(base, sink);  // so that neither exponential overflows
  const float weight = expf(base - top), with_sink = sum * weight + expf(sink - top);
  return {weight * reciprocal(with_sink), top + logf(with_sink)};
}

template <class Instance>
struct FwdTf32Cta {
  static constexpr FwdTf32Config kConfig = Instance::kConfig;
  static constexpr int kTileM = kConfig.tile_m(), kTileN = kConfig.tile_n, kWarpM = kConfig.warp_m;
  static constexpr int kThreads = kConfig.threads(), kDim = kConfig.head_dim;
  static constexpr int kMTiles = kWarpM / 16;                     ///< m16 tiles of a warp
  static constexpr int kSTiles = kTileN / 8, kOTiles = kDim / 8;  ///< n8 tiles of S and of O
  using TileQ = SharedTile<kTileM, kDim, 4>;
  using TileKv = SharedTile<kTileN, kDim, 4>;
  using Output = float[kMTiles][kOTiles][4];

  const ForwardArgs& args;
  const tile::AttentionParams& p;
  float *const sQ, *const sK, *const sV;
  FwdTf32Place& place;
  tile::KvBlocks* const blocks_of_warp;
  const int thread, warp, lane;
  const int g, t;  ///< as in ptx/mma.cuh

  __device__ __forceinline__ FwdTf32Cta(const ForwardArgs& arguments, unsigned char* shared)
      : args(arguments),
        p(arguments.p),
        sQ(reinterpret_cast<float*>(shared)),
        sK(reinterpret_cast<float*>(shared + kConfig.offset_k())),
        sV(reinterpret_cast<float*>(shared + kConfig.offset_v())),
        place(*reinterpret_cast<FwdTf32Place*>(shared + kConfig.offset_place())),
        blocks_of_warp(reinterpret_cast<tile::KvBlocks*>(shared + kConfig.offset_warps())),
        thread(static_cast<int>(threadIdx.x)),
        warp(thread / 32),
        lane(thread % 32),
        g(lane / 4),
        t(lane % 4) {}

  /// Finds what the CTA works on, and writes its share of the rows that take no part. Returns whether any row
  /// does; then all threads can read `place` and `blocks_of_warp`.
  __device__ __forceinline__ bool find_place() const {
    const int m_blocks = max(1, tile::ceil_div(p.seqlen_q * packed_heads(args), kTileM));
    const FwdWorkTile work = work_tile(m_blocks);
    if (args.num_splits == 1)
      write_unused_rows<float, kThreads>(args, work, work.first_row / kTileM, m_blocks, 0, p.head_dim_v);
    write_rng_state(p);
    if (work.first_row >= work.end_row) return false;

    const tile::KvBlocks blocks =
        tile::split_blocks(key_blocks_of_rows(args, work.span, work.first_row, work.end_row, kTileN),
                           work.split, args.num_splits);
    const int head_kv = args.pack_group ? work.head : work.head / p.group;
    if (thread == 0) {
      place = {work, blocks.begin, blocks.end, tile::key_rows(p, p.k, work.span, work.batch, head_kv, 4).data,
               tile::key_rows(p, p.v, work.span, work.batch, head_kv, 4).data};
    }
    const int warp_row = work.first_row + warp * kWarpM;
    if (lane == 0) {
      blocks_of_warp[warp] =
          key_blocks_of_rows(args, work.span, warp_row, min(warp_row + kWarpM, work.end_row), kTileN);
    }
    __syncthreads();  // place and blocks_of_warp can be read
    return true;
  }

  /// Row of the tile that this lane holds in half `half` of m16 tile `mt`.
  __device__ __forceinline__ int row_at(int mt, int half) const {
    return place.work.first_row + warp * kWarpM + mt * 16 + half * 8 + g;
  }
  /// Blocks of keys that rows of this warp see, and which of them need a mask.
  __device__ __forceinline__ const tile::KvBlocks& warp_blocks() const { return blocks_of_warp[warp]; }

  /// Starts copying Q; the next copy_k commits it.
  __device__ __forceinline__ void copy_q() const {
    gather_tile<TileQ, kThreads>(ptx::shared_address(sQ), p.head_dim, (p.aligned16 & tile::kAlignedQ) != 0,
                                 thread, [&](int r) -> const char* {
                                   const FwdWorkTile& work = place.work;
                                   const int row = work.first_row + r;
                                   if (row >= work.end_row) return nullptr;
                                   const QueryRow q = query_row(args, work, row);
                                   return p.q.data +
                                          p.q.offset(work.batch, work.span.row_q + q.query, q.head) * 4;
                                 });
  }
  /// Starts copying block n of K, or V.
  __device__ __forceinline__ void copy_k(int n) const {
    copy_keys(sK, place.k, p.k, p.head_dim, tile::kAlignedK, n);
  }
  __device__ __forceinline__ void copy_v(int n) const {
    copy_keys(sV, place.v, p.v, p.head_dim_v, tile::kAlignedV, n);
  }

  /// Writes O and lse of the rows that are finite. base[mt][half], in exponents of 2, and sum[mt][half], of
  /// this lane's weights, are those of row_at(mt, half). Bit 4 g + t of `broken`: lane t of row g has an output
  /// that is not finite.
  __device__ __forceinline__ void write_finite_rows(const Output& acc_o, const float (&base)[kMTiles][2],
                                                    const float (&sum)[kMTiles][2],
                                                    uint32_t (&broken)[kMTiles][2]) const {
    const bool vectors =
        p.head_dim_v % 4 == 0 && (args.num_splits > 1 || (p.aligned16 & tile::kAlignedO) != 0);
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = row_total(sum[mt][half]);
        const int row = row_at(mt, half);
        const bool exists = row < place.work.end_row;
        broken[mt][half] = __ballot_sync(0xffffffffu, exists && !half_is_finite(acc_o[mt], half));
        if (!exists || (broken[mt][half] >> (4 * g) & 15u) != 0) continue;
        const QueryRow r = query_row(args, place.work, row);
        const float sink = p.sink != nullptr && args.num_splits == 1 ? p.sink[r.head] : -INFINITY;
        const Tf32RowEnd end = end_of_tf32_row(total, base[mt][half] * tile::kLn2, sink);
        float* const to = f32_row(args, place.work, r);
        if (t == 0) write_lse(args, place.work, r, end.lse);
        store_half(acc_o[mt], half, t, to, p.head_dim_v, vectors, end.factor);
      }
    }
  }

  /// Computes the `broken` rows again, without tensor cores.
  __device__ __forceinline__ void write_exact_rows(uint32_t (&broken)[kMTiles][2]) const {
    for_each_broken_row(broken, [&](int row_of_warp) {
      write_exact_row<float, kDim>(args, place.work, tile::dropout_of(p),
                                   place.work.first_row + warp * kWarpM + row_of_warp, 0, p.head_dim_v,
                                   place.n_begin * kTileN, place.n_end * kTileN);
    });
  }

 private:
  /// The tile of this CTA. Tiles of `heads_at_once` heads, whose K and V fit the L2 cache together, run at the
  /// same time, the last rows first (under causal they see most keys).
  __device__ __forceinline__ FwdWorkTile work_tile(int m_blocks) const {
    const unsigned heads = args.pack_group ? p.heads_kv : p.heads_q, blocks = m_blocks;
    const unsigned at_once = args.heads_at_once, planes = heads * p.batch;
    const unsigned first = blockIdx.x / (at_once * blocks) * at_once, rest = blockIdx.x - first * blocks;
    const unsigned width = min(at_once, planes - first);  // the last section may be smaller
    const unsigned block = rest / width, plane = first + rest % width;
    const int batch = static_cast<int>(plane / heads), head = static_cast<int>(plane % heads);
    const int first_row = static_cast<int>(blocks - 1 - block) * kTileM;
    const tile::SequenceSpan span = tile::cached_span(p, batch);
    return {span,      batch,
            head,      static_cast<int>(blockIdx.y),
            first_row, min(first_row + kTileM, span.used_q * packed_heads(args))};
  }
  __device__ __forceinline__ void copy_keys(float* to, const char* from, const tile::RowsView& view,
                                            int columns, uint32_t bit, int n) const {
    const bool aligned = opaque((p.aligned16 & bit) != 0);
    if (kConfig.general && p.page_table.data != nullptr) {
      const FwdWorkTile& work = place.work;
      const tile::KeyRows rows = {p, view, from, work.batch, 4, static_cast<int>(work.span.row_k)};
      gather_tile<TileKv, kThreads>(ptx::shared_address(to), columns, aligned, opaque(thread),
                                    [&](int r) -> const char* {
                                      const int j = n * kTileN + r;
                                      return j < work.span.used_k ? rows.row(j) : nullptr;
                                    });
    } else {
      const RowSource rows = {from, view.row * 4, place.work.span.used_k, columns, aligned};
      copy_tile_either<TileKv, kThreads>(ptx::shared_address(to), rows, n * kTileN, opaque(thread));
    }
    ptx::cp_async_commit();
  }
};

}  // namespace fovea::cuda
