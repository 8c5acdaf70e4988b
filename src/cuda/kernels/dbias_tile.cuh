// The gradient of a bias with an element for each query and key, on tensor cores: an element is the sum of dS over the sequences and
// heads that share it, or dS itself.
//
//   S = Q K^T      P = exp2(log2(e) score(S) - lse)      dP = dO V^T      dbias = sum P * (dP - delta)
//
// A CTA owns the elements of tile_m queries and 64 keys. It computes S and dP of every sequence and head that they belong to once
// more than the main kernel does, and adds in registers in a fixed order: it needs no memory and gives the same bits each
// time. For scores whose derivative by S times the scale is 1, so that dS is the gradient of the bias, too.
//
// What multiplies is the kernel's: dbias_sm90.cuh (wgmma), dbias_mma.cuh (mma.sync). Either leaves a warp 16 rows of 64 keys.
//
// Grid       dbias_tile_ctas(args, config).
// Block      a warp for each 16 queries. All threads copy, and all multiply. Two CTAs an SM hide what each waits for.
// Shared     two pairs of operands, Q and K for S, and dO and V for dP: rows in strips of 64 columns, swizzled. And for each
//            warp its rows of the bias, swizzled as well.
// Barriers   __syncthreads(): a pair's copies are there for all; nobody multiplies a pair any more.
// Registers  S, dP and the sum take 32 each of the 128 that two CTAs of eight warps leave.
// Reads      args.lse_log2 and args.delta, from bwd_preprocess.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/kernels/dbias_shape.hpp"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/warp/expression_objects.cuh"
#include "cuda/warp/mma_tile.cuh"
#include "cuda/warp/pair_bits.cuh"
#include "cuda/warp/pair_elements.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

struct DBiasConfig {
  int head_dim;  ///< of q, k, v and d_o, padded to a multiple of 64
  int tile_m = 128;

  static constexpr int kTileN = 64, kRowBytes = 128, kCtas = 2;
  constexpr int warps() const { return tile_m / 16; }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int queries_bytes() const { return head_dim / 64 * tile_m * kRowBytes; }
  constexpr int keys_bytes() const { return head_dim / 64 * kTileN * kRowBytes; }
  constexpr int stage_bytes() const { return queries_bytes() + keys_bytes(); }
  constexpr int bias_at() const { return 2 * stage_bytes(); }
  static constexpr int warp_bias_bytes() { return 16 * kTileN * 2; }
  constexpr int shared_bytes() const { return bias_at() + warps() * warp_bias_bytes(); }
};

constexpr int64_t dbias_tile_ctas(const BackwardArgs& args, const DBiasConfig& config) {
  return DBiasShape(args.p, config.tile_m, config.kTileN).tiles();
}

/// Products has
///   using Scores                        float[32]: element i is of row lane / 4 + i / 2 % 2 * 8 and key i / 4 * 8 + 2 (lane % 4) + i % 2
///   copies_are_there()                  this thread's copies may be multiplied, once it has passed a barrier
///   begin(scores, base, x_at, y_at)     scores = (the warp's rows of x) y^T, of operands at `base` plus these offsets
///   finish(scores)                      it can be read
template <class Instance, class Products>
struct DBiasTile {
  using T = typename Instance::Element;
  using Scores = typename Products::Scores;
  static constexpr DBiasConfig kConfig = Instance::kConfig;
  static constexpr int kTileM = kConfig.tile_m, kTileN = kConfig.kTileN, kD = kConfig.head_dim,
                       kSteps = kTileN / 16;
  /// The two pairs of operands.
  enum Stage { kScores, kWeights };

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  uint32_t base;  ///< of shared memory

  /// The CTA's elements.
  struct Place {
    int query0, key0, head, batch;
  };
  Place at;
  Scores sum;

  __device__ __forceinline__ static int warp() { return static_cast<int>(ptx::thread_index()) / 32; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(ptx::thread_index()) % 32; }

  __device__ __forceinline__ void run() {
    find_place();
#pragma unroll
    for (float& x : sum) x = 0.0f;
    copy_bias();
    int index = first_from(0), next = 0;
    copy(index, kScores);
    copy(index, kWeights);
    for (; index < items(); index = next) {
      next = first_from(index + 1);
      Scores s, dp;
      multiply(s, kScores);
      Products::finish(s);
      __syncthreads();  // nobody multiplies Q and K any more
      copy(next, kScores);
      multiply(dp, kWeights);
      add(item_at(index), s, dp);
      __syncthreads();  // nobody multiplies dO and V any more
      copy(next, kWeights);
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
      const int last = min(at.query0 + kTileM, span.used_q) - 1;
      if (last < at.query0 || at.key0 >= span.used_k) continue;
      const int begin = tile::keys_of(p, span, at.query0).begin;
      if (begin < at.key0 + kTileN && tile::keys_of(p, span, last).end > at.key0) break;
    }
    return index;
  }
  __device__ __forceinline__ void find_place() {
    const DBiasShape shape(p, kTileM, kTileN);
    int64_t index = blockIdx.x;
    at.key0 = static_cast<int>(index % shape.tiles_k) * kTileN;
    index /= shape.tiles_k;
    at.query0 = static_cast<int>(index % shape.tiles_q) * kTileM;
    index /= shape.tiles_q;
    at.head = static_cast<int>(index % shape.heads);
    at.batch = static_cast<int>(index / shape.heads);
  }

  // --- copies ---

  /// kRows rows of a tensor from `row` on, with zeros for those from `exist` on and for columns behind the last.
  template <int kRows>
  __device__ __forceinline__ void copy_rows(uint32_t to, const tile::RowsView& view, const Item& item,
                                            int64_t row, int head, int exist, int columns) const {
    constexpr int kChunks = kD / 8;  // of a row
    const int chunk = static_cast<int>(ptx::thread_index()) % kChunks;
    constexpr int kRowsAtOnce = kConfig.threads() / kChunks;
    static_assert(kRowsAtOnce % 8 == 0, "rows of a thread have one place in the swizzle");
    const int first = static_cast<int>(ptx::thread_index()) / kChunks;
    const T* from =
        reinterpret_cast<const T*>(view.data) + view.offset(item.batch, row + first, head) + 8 * chunk;
    to += chunk / 8 * kRows * kConfig.kRowBytes + first * kConfig.kRowBytes + (chunk % 8 ^ first % 8) * 16;
    if (8 * chunk >= columns) exist = 0;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      const bool valid = first + i * kRowsAtOnce < exist;
      ptx::cp_async_16(to + i * kRowsAtOnce * kConfig.kRowBytes, from, valid);
      from += kRowsAtOnce * view.row;
    }
  }
  /// Begins to copy a pair of operands of an item, if there is one.
  __device__ __forceinline__ void copy(int index, Stage stage) const {
    if (index < items()) {
      const Item item = item_at(index);
      const tile::RowsView &x = stage == kScores ? p.q : p.d_o, &y = stage == kScores ? p.k : p.v;
      const int columns = stage == kScores ? p.head_dim : p.head_dim_v;
      const uint32_t to = base + stage * kConfig.stage_bytes();
      copy_rows<kTileM>(to, x, item, item.span.row_q + at.query0, item.head, item.span.used_q - at.query0,
                        columns);
      copy_rows<kTileN>(to + kConfig.queries_bytes(), y, item, item.span.row_k + at.key0, item.head / p.group,
                        item.span.used_k - at.key0, columns);
    }
    ptx::cp_async_commit();
  }
  /// Each warp's rows of the bias, which all items share; with the copies of the first Q and K.
  __device__ __forceinline__ void copy_bias() const {
    tile::SequenceSpan all;
    all.used_q = p.seqlen_q, all.used_k = p.seqlen_k;
    const Expression::Head head = expression_head(p, all, at.batch, at.head);
    copy_pair_elements<16, kTileN / 8>(head, all, first_query(), at.key0, lane(),
                                       [&](int row, int chunk) { return bias(row, chunk); });
  }
  /// Eight keys of one of the warp's rows.
  __device__ __forceinline__ uint32_t bias(int row, int chunk) const {
    return base + kConfig.bias_at() + warp() * kConfig.warp_bias_bytes() + row * kTileN * 2 +
           (chunk ^ row % 8) * 16;
  }
  /// The first of the warp's 16.
  __device__ __forceinline__ int first_query() const {
    return at.query0 + 16 * warp();
  }

  // --- products ---

  /// scores = (own rows of X) (rows of Y)^T, begun. Waits until all threads' copies of the pair are there.
  __device__ __forceinline__ void multiply(Scores& scores, Stage stage) const {
    ptx::cp_async_wait<1>();  // the other pair's copies come later
    Products::copies_are_there();
    __syncthreads();  // all threads' copies are there
    const int x_at = stage * kConfig.stage_bytes();
    Products::begin(scores, base, x_at, x_at + kConfig.queries_bytes());
  }

  // --- element by element ---

  /// sum += P * (dP - delta) of an item: P while dP is computed.
  __device__ __forceinline__ void add(const Item& item, Scores& s, Scores& dp) {
    const int row = first_query() + lane() / 4, key = at.key0 + 2 * (lane() % 4);
    const int64_t statistics = (static_cast<int64_t>(item.batch) * p.heads_q + item.head) * args.rows + row;
    const float lse[2] = {__ldg(args.lse_log2 + statistics), __ldg(args.lse_log2 + statistics + 8)};
    const Expression::Head head = expression_head(p, item.span, item.batch, item.head);
    const Expression::Query query[2] = {Expression::Query(head, query_in_use(item.span, row)),
                                        Expression::Query(head, query_in_use(item.span, row + 8))};
    const auto key_of = [&](int i) {
      const int k = key + i / 4 * 8 + i % 2;
      return Expression::Key(head, Expression::kReadsByKey ? min(k, item.span.used_k - 1) : k);
    };
    PairBits<kSteps> seen;
    const bool cuts = find_seen(seen, item, lse, head, query, key_of);
    const auto row_address = [&](int step) { return bias(lane() % 16, 2 * step + lane() / 16); };
    for_each_pair_element<kSteps>(row_address, [&](int i, float pair) {
      const int half = i / 2 % 2;
      const float score = Expression::score_with(head, query[half], key_of(i & ~2), s[i] * p.scale, pair);
      s[i] = ptx::ex2(fmaf(score, tile::kLog2e, -lse[half]));
    });
    Products::finish(dp);
    const float delta[2] = {__ldg(args.delta + statistics), __ldg(args.delta + statistics + 8)};
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) s[i] *= dp[i] - delta[i / 2 % 2];
    if (cuts) seen.keep(s, 0.0f);
#pragma unroll
    for (int i = 0; i < kTileN / 2; ++i) sum[i] += s[i];
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
      all = all && window[half].begin <= at.key0 && window[half].end >= at.key0 + kTileN;
    }
    if (!Expression::kHasSees && __all_sync(~0u, all)) return false;
    seen.template ask<4>([&](int i) {
      const int k = key + i / 4 * 8 + i % 2, half = i / 2 % 2;
      return k >= window[half].begin && k < window[half].end &&
             Expression::sees(head, query[half], key_of(i & ~2));
    });
    return true;
  }

  // --- the end ---

  /// Rounded sums of 16 keys to the place of the bias.
  __device__ __forceinline__ void store(int step, const uint32_t (&packed)[4]) const {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    ptx::stmatrix_x4(bias(lane() % 16, 2 * step + lane() / 16), packed);
#else
#pragma unroll
    for (int x = 0; x < 4; ++x)
      ptx::st_shared_4(bias(lane() / 4 + x % 2 * 8, 2 * step + x / 2) + lane() % 4 * 4, packed[x]);
#endif
  }

  /// Writes the sums, by way of the place of the bias: 16 bytes a lane.
  __device__ __forceinline__ void write() const {
    __syncwarp();  // every lane has read the bias
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t packed[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) packed[x] = pack<T>(sum[8 * step + 2 * x], sum[8 * step + 2 * x + 1]);
      store(step, packed);
    }
    __syncwarp();  // the warp's rows are there
    const int chunk = lane() % 8, column = at.key0 + 8 * chunk, exist = min(p.seqlen_k - column, 8);
#pragma unroll 1
    for (int r = lane() / 8; r < 16 && first_query() + r < p.seqlen_q; r += 4) {
      const uint4 x = ptx::ld_shared_16(bias(r, chunk));
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

template <class Instance, class Products>
__device__ __forceinline__ void run_dbias_tile(const BackwardArgs& args) {
  extern __shared__ __align__(1024) unsigned char shared[];
  DBiasTile<Instance, Products>{args, args.p, ptx::shared_address(shared), {}, {}}.run();
}

}  // namespace fovea::cuda
