// The gradient of a bias with an element for each query and key, on Hopper: an element is the sum of dS over the sequences and
// heads that share it, or dS itself.
//
//   S = Q K^T      P = exp2(log2(e) score(S) - lse)      dP = dO V^T      dbias = sum P * (dP - delta)
//
// A CTA owns 128 x 128 elements and computes S and dP of every sequence and head that they belong to, once more than the
// main kernel: it adds in registers, in a fixed order, so it needs no memory and gives the same bits each time. For scores
// whose derivative by S times the scale is 1, so that dS is the gradient of the bias, too.
//
// Grid       dbias_sm90_ctas(args).
// Block      two warpgroups of 64 queries each. All threads copy, and all multiply.
// Shared     kStages pairs of operands, of which S needs one, Q and K, and dP the next, dO and V, all 128 rows in strips of 64
//            columns, swizzled; and for each warp its rows of the bias.
// Barriers   __syncthreads(): a stage's copies are there for all; nobody multiplies from a stage any more.
// Registers  S, dP and the sum take 64 each.
// Reads      args.lse_log2 and args.delta, from bwd_preprocess.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/dbias_shape.hpp"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/pair_bits.cuh"
#include "cuda/warp/pair_elements.cuh"
#include "cuda/warp/score_terms.cuh"
#include "tile/log2.hpp"
#include "tile/wgmma_map.hpp"

namespace fovea::cuda {

struct DBiasSm90Config {
  int head_dim;  ///< of q, k, v and d_o, padded to a multiple of 64

  static constexpr int kTile = 128, kRowBytes = 128, kStages = 3, kWarps = 8;
  static constexpr int threads() { return 32 * kWarps; }
  constexpr int operand_bytes() const { return head_dim / 64 * kTile * kRowBytes; }
  constexpr int stage_bytes() const { return 2 * operand_bytes(); }
  constexpr int pairs_at() const { return kStages * stage_bytes(); }
  /// 16 bytes more than a row has, so that eight rows begin in different banks.
  static constexpr int pair_row_bytes() { return kTile * 2 + 16; }
  static constexpr int warp_pairs_bytes() { return 16 * pair_row_bytes(); }
  constexpr int shared_bytes() const { return pairs_at() + kWarps * warp_pairs_bytes(); }
};

constexpr int64_t dbias_sm90_ctas(const BackwardArgs& args) {
  return DBiasShape(args.p, DBiasSm90Config::kTile).tiles();
}

template <class Instance>
struct DBiasSm90 {
  using T = typename Instance::Element;
  static constexpr DBiasSm90Config kConfig = Instance::kConfig;
  static constexpr int kTile = kConfig.kTile, kD = kConfig.head_dim, kSteps = kTile / 16;
  static constexpr auto kSwizzle = tile::SwizzleMode::k128;
  using Scores = float[kTile / 2];  ///< (64 queries, 128 keys) of a warpgroup

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  uint32_t base;  ///< of shared memory

  /// The CTA's elements.
  struct Place {
    int query0, key0, head, batch;
  };
  Place at;
  Scores sum;

  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int warpgroup() {
    return __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  }

  __device__ __forceinline__ void run() {
    find_place();
#pragma unroll
    for (float& x : sum) x = 0.0f;
    copy_pairs();
    int index = first_from(0), next = 0;
    begin_scores(index, 0);
    begin_weights(index, 1);
    for (int stage = 0; index < items(); index = next) {
      next = first_from(index + 1);
      begin_scores(next, after(stage, 2));
      Scores s, dp;
      ptx::cp_async_wait<2>();
      multiply(s, stage);
      ptx::wgmma_wait<0>();
      ptx::wgmma_done(s);
      __syncthreads();  // nobody multiplies Q and K any more
      begin_weights(next, stage);
      ptx::cp_async_wait<2>();
      multiply(dp, after(stage, 1));
      add(item_at(index), s, dp);
      __syncthreads();  // nobody multiplies dO and V any more
      stage = after(stage, 2);
    }
    ptx::cp_async_wait<0>();
    write();
  }

 private:
  // --- what there is to add ---

  /// A sequence and a head, whose pairs are added to the CTA's elements.
  struct Item {
    int batch, head;
    tile::SequenceSpan span;
  };
  __device__ __forceinline__ int batches() const {
    return p.dbias.batch == 0 ? p.batch : 1;
  }
  __device__ __forceinline__ int heads() const {
    return p.dbias.head == 0 ? p.heads_q : 1;
  }
  __device__ __forceinline__ int items() const {
    return batches() * heads();
  }
  __device__ __forceinline__ Item item_at(int index) const {
    const int batch = p.dbias.batch == 0 ? index / heads() : at.batch;
    return {batch, p.dbias.head == 0 ? index % heads() : at.head, tile::sequence_span(p, batch)};
  }
  /// The first item from `index` on with a pair that the window leaves; items() where there is none.
  __device__ __forceinline__ int first_from(int index) const {
#pragma unroll 1
    for (; index < items(); ++index) {
      const tile::SequenceSpan span = item_at(index).span;
      const int last = min(at.query0 + kTile, span.used_q) - 1;
      if (last < at.query0 || at.key0 >= span.used_k) continue;
      const int begin = tile::keys_of(p, span, at.query0).begin;
      if (begin < at.key0 + kTile && tile::keys_of(p, span, last).end > at.key0) break;
    }
    return index;
  }
  __device__ __forceinline__ void find_place() {
    const DBiasShape shape(p, kTile);
    int64_t index = blockIdx.x;
    at.key0 = static_cast<int>(index % shape.tiles_k) * kTile;
    index /= shape.tiles_k;
    at.query0 = static_cast<int>(index % shape.tiles_q) * kTile;
    index /= shape.tiles_q;
    at.head = static_cast<int>(index % shape.heads);
    at.batch = static_cast<int>(index / shape.heads);
  }

  // --- copies ---

  __device__ __forceinline__ static int after(int stage, int n) {
    return (stage + n) % kConfig.kStages;
  }
  /// 128 rows of a tensor from `row` on, with zeros for those from `exist` on and for columns behind the last.
  __device__ __forceinline__ void copy_rows(uint32_t to, const tile::RowsView& view, const Item& item,
                                            int64_t row, int head, int exist, int columns) const {
    constexpr int kChunks = kD / 8;  // of a row
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    constexpr int kRowsAtOnce = kConfig.threads() / kChunks;
    static_assert(kRowsAtOnce % 8 == 0, "rows of a thread have one place in the swizzle");
    const int first = static_cast<int>(threadIdx.x) / kChunks;
    const T* from =
        reinterpret_cast<const T*>(view.data) + view.offset(item.batch, row + first, head) + 8 * chunk;
    to += chunk / 8 * kTile * kConfig.kRowBytes + first * kConfig.kRowBytes + (chunk % 8 ^ first % 8) * 16;
    if (8 * chunk >= columns) exist = 0;
#pragma unroll
    for (int i = 0; i < kTile / kRowsAtOnce; ++i) {
      const bool valid = first + i * kRowsAtOnce < exist;
      ptx::cp_async_16(to + i * kRowsAtOnce * kConfig.kRowBytes, from, valid);
      from += kRowsAtOnce * view.row;
    }
  }
  /// Begins to copy X of the tile's queries and Y of its keys.
  __device__ __forceinline__ void begin(int index, int stage, const tile::RowsView& x,
                                        const tile::RowsView& y, int columns) const {
    if (index < items()) {
      const Item item = item_at(index);
      const uint32_t to = base + stage * kConfig.stage_bytes();
      copy_rows(to, x, item, item.span.row_q + at.query0, item.head, item.span.used_q - at.query0, columns);
      copy_rows(to + kConfig.operand_bytes(), y, item, item.span.row_k + at.key0, item.head / p.group,
                item.span.used_k - at.key0, columns);
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void begin_scores(int index, int stage) const {
    begin(index, stage, p.q, p.k, p.head_dim);
  }
  __device__ __forceinline__ void begin_weights(int index, int stage) const {
    begin(index, stage, p.d_o, p.v, p.head_dim_v);
  }
  /// Each warp's rows of the bias, which all items share; with the copies of the first Q and K.
  __device__ __forceinline__ void copy_pairs() const {
    tile::SequenceSpan all;
    all.used_q = p.seqlen_q, all.used_k = p.seqlen_k;
    const Expression::Head head = expression_head(p, all, at.batch, at.head);
    copy_pair_elements<16, kTile / 8>(head, all, first_query(), at.key0, lane(), [&](int row, int chunk) {
      return pairs() + row * kConfig.pair_row_bytes() + chunk * 16;
    });
  }
  __device__ __forceinline__ uint32_t pairs() const {
    return base + kConfig.pairs_at() + warp() * kConfig.warp_pairs_bytes();
  }
  /// The first of the warp's 16.
  __device__ __forceinline__ int first_query() const {
    return at.query0 + 16 * warp();
  }

  // --- products ---

  /// acc = (own 64 rows of X) (128 rows of Y)^T, queued. Waits until all threads' copies are there.
  __device__ __forceinline__ void multiply(Scores& acc, int stage) const {
    ptx::async_proxy_fence();  // this thread's copies, for products
    __syncthreads();           // all threads' copies are there
    const int base16 = __shfl_sync(~0u, static_cast<int>(base / 16), 0);
    const auto descriptor = [&](int offset) {
      const uint64_t encoded = tile::wgmma_k_major(0, kSwizzle).encode();
      return (encoded >> 32 << 32) |
             (static_cast<uint32_t>(encoded) + static_cast<uint32_t>(base16 + offset / 16));
    };
    const int x_at = stage * kConfig.stage_bytes();
    const uint64_t a = descriptor(x_at + warpgroup() * 64 * kConfig.kRowBytes),
                   b = descriptor(x_at + kConfig.operand_bytes());
    ptx::wgmma_fence();
    using Product = ptx::Wgmma<kTile>;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      const auto step = tile::wgmma_start_step(i / 4 * kTile * kConfig.kRowBytes + i % 4 * 32);
      if (i == 0) {
        Product::template ss<T, ptx::WgmmaStart::kZero, ptx::WgmmaMajor::kK>(acc, a + step, b + step);
      } else {
        Product::template ss<T, ptx::WgmmaStart::kAccumulate, ptx::WgmmaMajor::kK>(acc, a + step, b + step);
      }
    }
    ptx::wgmma_commit();
  }

  // --- element by element ---

  /// sum += P * (dP - delta) of an item: P while dP is computed.
  __device__ __forceinline__ void add(const Item& item, Scores& s, Scores& dp) {
    const int row = first_query() + lane() / 4, key = at.key0 + 2 * (lane() % 4);
    const int64_t statistics = (static_cast<int64_t>(item.batch) * p.heads_q + item.head) * args.rows + row;
    const float lse[2] = {__ldg(args.lse_log2 + statistics), __ldg(args.lse_log2 + statistics + 8)};
    const float delta[2] = {__ldg(args.delta + statistics), __ldg(args.delta + statistics + 8)};
    const Expression::Head head = expression_head(p, item.span, item.batch, item.head);
    const Expression::Query query[2] = {Expression::Query(head, query_in_use(item.span, row)),
                                        Expression::Query(head, query_in_use(item.span, row + 8))};
    const auto key_of = [&](int i) {
      const int k = key + i / 4 * 8 + i % 2;
      return Expression::Key(head, Expression::kReadsByKey ? min(k, item.span.used_k - 1) : k);
    };
    PairBits<kSteps> seen;
    const bool cuts = find_seen(seen, item, lse, head, query, key_of);
    const uint32_t from = pairs() + lane() % 16 * kConfig.pair_row_bytes() + lane() / 16 * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t elements[4];
      ptx::ldmatrix_x4(elements, from + step * 32);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 pair = unpack<Expression::PairElement>(elements[x]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 8 * step + 2 * x + e;
          const float score = Expression::score_with(head, query[x % 2], key_of(i & ~2), s[i] * p.scale,
                                                     e == 0 ? pair.x : pair.y);
          s[i] = ptx::ex2(fmaf(score, tile::kLog2e, -lse[x % 2]));
        }
      }
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_done(dp);
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) s[i] *= dp[i] - delta[i / 2 % 2];
    if (cuts) seen.keep(s, 0.0f);
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) sum[i] += s[i];
  }
  /// Which pairs count, where not all do: those of rows that take part, and whose window and expression see each other.
  template <class KeyOf>
  __device__ __forceinline__ bool find_seen(PairBits<kSteps>& seen, const Item& item, const float (&lse)[2],
                                            const Expression::Head& head, const Expression::Query (&query)[2],
                                            KeyOf&& key_of) const {
    const int row = first_query() + lane() / 4, key = at.key0 + 2 * (lane() % 4);
    tile::Span32 window[2];
    bool all = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool takes_part = lse[half] != INFINITY;
      window[half] = takes_part ? tile::keys_of(p, item.span, row + 8 * half) : tile::Span32{};
      all = all && window[half].begin <= at.key0 && window[half].end >= at.key0 + kTile;
    }
    if (!Expression::kHasSees && __all_sync(~0u, all)) return false;
    seen.template ask<8>([&](int i) {
      const int k = key + i / 4 * 8 + i % 2, half = i / 2 % 2;
      return k >= window[half].begin && k < window[half].end &&
             Expression::sees(head, query[half], key_of(i & ~2));
    });
    return true;
  }

  // --- the end ---

  /// Writes the sums, by way of the place of the bias: 16 bytes a lane.
  __device__ __forceinline__ void write() const {
    const uint32_t to = pairs() + lane() % 16 * kConfig.pair_row_bytes() + lane() / 16 * 16;
    __syncwarp();  // every lane has read the bias
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t packed[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) packed[x] = pack<T>(sum[8 * step + 2 * x], sum[8 * step + 2 * x + 1]);
      ptx::stmatrix_x4(to + step * 32, packed);
    }
    __syncwarp();  // the warp's rows are there
    const int chunk = lane() % 16, column = at.key0 + 8 * chunk, exist = min(p.seqlen_k - column, 8);
#pragma unroll 1
    for (int r = lane() / 16; r < 16 && first_query() + r < p.seqlen_q; r += 2) {
      const uint4 x = ptx::ld_shared_16(pairs() + r * kConfig.pair_row_bytes() + chunk * 16);
      T* const elements =
          reinterpret_cast<T*>(p.dbias.data) + p.dbias.offset(at.batch, at.head, first_query() + r, column);
      if (exist == 8 && reinterpret_cast<uintptr_t>(elements) % 16 == 0) {
        *reinterpret_cast<uint4*>(elements) = x;
      } else {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (i < exist)
            reinterpret_cast<unsigned short*>(elements)[i] =
                static_cast<unsigned short>(words[i / 2] >> (16 * (i % 2)));
      }
    }
  }
};

template <class Instance>
__global__ void __launch_bounds__(Instance::kConfig.threads(), 1)
    dbias_sm90(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  DBiasSm90<Instance>{args, args.p, ptx::shared_address(shared), {}, {}}.run();
}

}  // namespace fovea::cuda
