// The backward where queries have lists of keys: the equations of bwd_simt.cuh over the tiles of simt_lists.cuh.
//
// A CTA owns the rows of a tile and a slice of kColumns columns of dQ, dK and dV. It finishes its columns of dQ, and adds
// what its rows give to the keys of their list to float32 sums of dK and dV in global memory (BackwardArgs::key_sums): in any
// order, so that the last bits differ from run to run. list_gradients makes dK and dV of them. Where the same bits are asked for
// there are no such sums: bwd_list_keys computes dK and dV. Wider heads take several CTAs, each of which computes the same
// weights; the first also adds to the gradients of named tensors (adds_named).
//
// Grid     bwd_lists_ctas(args).
// Block    kSimtThreads threads.
// Shared   static, 32 KB.
//          X, Y: operands of Q K^T, then of dO V^T, 32 columns at a time; W: dot products, then dS, over X and Y;
//          B: 32 rows of K; P and dS once more, the rows of an entry side by side.
// Reads    p.lse and, from bwd_preprocess, args.delta; from list_zeros, zeros in key_sums.
//
// named_list_sums is the part of it that adds to the gradients of named tensors, in integers (named_gradients.cuh).
//
// NaN and Inf must not reach gradients that they do not belong to: weights of 0 are not multiplied.
#pragma once

#include "cuda/kernels/named_sums_args.hpp"
#include "cuda/kernels/simt_lists.cuh"
#include "cuda/ptx/red.cuh"
#include "cuda/warp/gradient.cuh"
#include "cuda/warp/gradient_sums.cuh"

namespace fovea::cuda {

inline constexpr int kBwdListColumns = 128;  ///< a warp adds a row of a slice at a time, 16 bytes a lane

constexpr int bwd_list_slices(const tile::AttentionParams& p) {
  return tile::ceil_div(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v, kBwdListColumns);
}
constexpr int64_t bwd_lists_ctas(const BackwardArgs& args) {
  return list_tiles(args.p) * bwd_list_slices(args.p) * args.p.heads_kv * args.p.batch;
}

constexpr int64_t named_list_sums_ctas(const BackwardArgs& args) {
  return list_tiles(args.p) * args.p.heads_kv * args.p.batch;
}

/// `Add`: how it adds to the gradients of named tensors. With AddFixed it does nothing else.
template <class T, class Add = AddInAnyOrder>
struct BwdLists {
  static constexpr bool kNamedAlone = std::is_same_v<Add, AddFixed>;
  static constexpr int kColumns = kBwdListColumns;
  using Tile = SimtTile<kSimtThreads, kColumns, true>;
  using Pairs = typename Tile::Pairs;
  using Output = typename Tile::Output;
  static constexpr int kRows = Tile::kRowsX, kBlock = Tile::kRows, kThreads = Tile::kThreads,
                       kColsOf = Tile::kColsOf, kChunk = Tile::kChunk, kHalf = Tile::kHalf,
                       kWarps = kThreads / 32;
  static_assert(Tile::kRowsOf == 1 && kRows == kListRows && kColumns == 4 * 32);

  struct Shared : Tile::Shared {
    int64_t d_o[kRows];                        ///< element offset of the row in d_o
    alignas(16) float weight[kBlock * kRows];  ///< of V, by entry
    alignas(16) float ds[kBlock * kRows];      ///< P, then dS before `scale`, by entry
  };
  /// Four columns of all rows: a lane's part of what dK and dV are made of.
  using RowColumns = float[kRows][4];

  /// CTAs an SM, for the register allocator: 3 warps of each of the 4 schedulers, so 168 registers.
  static constexpr int kMinCtas = 3;

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  Shared& s;
  const tile::SequenceSpan& span;
  const int &batch, &head, &slice, &row0;  // head: of keys
  const Add& add_named;

  __device__ __forceinline__ BwdLists(const BackwardArgs& a, Shared& shared, const Add& add_to_named)
      : args(a),
        p(a.p),
        s(shared),
        span(shared.span),
        batch(shared.batch),
        head(shared.head),
        slice(shared.slice),
        row0(shared.row0),
        add_named(add_to_named) {}

  __device__ __forceinline__ int rows_used() const { return span.used_q * p.group; }
  __device__ __forceinline__ int rows_end() const { return min(end_list_row(p, row0), rows_used()); }
  __device__ __forceinline__ int query_of(int row) const { return row / p.group; }
  __device__ __forceinline__ int head_of(int row) const { return head * p.group + row % p.group; }

  __device__ __forceinline__ void run() {
    const auto tiles = static_cast<int>(list_tiles(p));
    const int slices = kNamedAlone ? 1 : bwd_list_slices(p);
    int64_t index = blockIdx.x;
    const int slice_of = static_cast<int>(index % slices);
    index /= slices;
    const int tile =
        tiles - 1 - static_cast<int>(index % tiles);  // under a causal mask the longest come first
    index /= tiles;
    if (threadIdx.x == 0) {
      s.slice = slice_of;
      s.row0 = first_list_row(p, tile);
      s.head = static_cast<int>(index % p.heads_kv);
      s.batch = static_cast<int>(index / p.heads_kv);
      s.span = tile::sequence_span(p, s.batch);
    }
    __syncthreads();  // where the CTA works is known
    if constexpr (!kNamedAlone) clear_unused(tile, tiles);
    if (row0 < rows_used()) attend();
  }

  __device__ __forceinline__ void attend() {
    if (static_cast<int>(threadIdx.x) < kRows) set_row(static_cast<int>(threadIdx.x));
    __syncthreads();  // what the rows need is complete
    RowColumns q, d_o;
    if (adds_to_keys()) {
      load_columns(p.q.data, s.query, p.head_dim, q);
      load_columns(p.d_o.data, s.d_o, p.head_dim_v, d_o);
    }
    const int first_query = query_of(row0), last_query = query_of(rows_end() - 1);
    Output out;
    Tile::clear(out);
#pragma unroll 1
    for (int first = 0; first < p.list_size; first += kBlock) {
      name_keys<Tile>(p, s, batch, head, first_query, last_query, first);
      add(q, d_o, out);
    }
    if constexpr (!kNamedAlone) finish(out);
  }
  __device__ __forceinline__ bool adds_to_keys() const {
    return !kNamedAlone && args.key_sums != nullptr;
  }

  /// What a row needs. Those that take no part have weights exp(-inf) = 0.
  __device__ __forceinline__ void set_row(int r) {
    const int row = row0 + r;
    const bool used = row < rows_end();
    float lse = INFINITY, delta = 0;
    tile::Span32 seen{0, 0};
    int64_t q = 0, d_o = 0;
    if (used) {
      const int i = query_of(row), h = head_of(row);
      q = p.q.offset(batch, span.row_q + i, h);
      d_o = p.d_o.offset(batch, span.row_q + i, h);
      lse = p.lse.data[p.lse.offset(batch, h, span.row_q + i)];
      if (lse == -INFINITY) lse = INFINITY;  // a row without keys
      delta = args.delta[(static_cast<int64_t>(batch) * p.heads_q + h) * args.rows + i];
      seen = tile::keys_of(p, span, i);
    }
    s.query[r] = q;
    s.d_o[r] = d_o;
    s.lse[r] = lse;
    s.delta[r] = delta;
    s.seen[r] = seen;
  }

  /// This lane's columns of the slice.
  __device__ __forceinline__ int lane_column() const {
    return slice * kColumns + static_cast<int>(threadIdx.x) % 32 * 4;
  }
  __device__ __forceinline__ void load_columns(const char* data, const int64_t* offsets, int columns,
                                               RowColumns& to) const {
    const T* from = reinterpret_cast<const T*>(data);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int column = lane_column() + c;
        const bool exists = row0 + r < rows_end() && column < columns;
        to[r][c] = exists ? to_float(__ldg(from + offsets[r] + column)) : 0.0f;
      }
    }
  }

  /// Adds what the pairs of a block of entries give.
  __device__ __forceinline__ void add(const RowColumns& q, const RowColumns& d_o, Output& out) {
    const SimtRows k =
        rows_of(p.k, batch, span.row_k, head, p.head_dim, (p.aligned16 & tile::kAlignedK) != 0);
    const SimtRows v =
        rows_of(p.v, batch, span.row_k, head, p.head_dim_v, (p.aligned16 & tile::kAlignedV) != 0);
    const auto load_b = [&](int first) {
      return load_named<Tile, T, kHalf, kColumns, kColumns>(s.b, k, s, first, span.used_k, slice * kColumns);
    };
    Pairs dots, ds;
    product(rows_of(p.q, 0, 0, 0, p.head_dim, (p.aligned16 & tile::kAlignedQ) != 0), s.query, k, dots);
    __syncthreads();  // X, Y are no longer read
    Tile::write_pairs(s, dots);
    __syncthreads();  // dot products are complete
    weigh();
    product(rows_of(p.d_o, 0, 0, 0, p.head_dim_v, (p.aligned16 & tile::kAlignedDO) != 0), s.d_o, v, ds);
    const bool finite = kNamedAlone || load_b(0);
    differentiate(dots, ds);
    if constexpr (kNamedAlone) {
      __syncthreads();  // the keys are no longer read
      return;
    }
    __syncthreads();  // X, Y are no longer read
    Tile::write_pairs(s, ds);
    const bool careful = __syncthreads_or(!finite);  // W, dS and the first half of B are complete
    Tile::accumulate(s, 0, careful, out);
    if (adds_to_keys()) add_to_keys(q, d_o);
    __syncthreads();  // B is no longer read
    const bool finite_too = load_b(kHalf);
    const bool careful_too = __syncthreads_or(!finite_too);  // its second half has arrived
    Tile::accumulate(s, kHalf, careful_too, out);
  }

  /// pairs = rows keys^T over all columns. Its first barrier also says that W and B are no longer read, and that what
  /// was written before is complete.
  __device__ __forceinline__ void product(const SimtRows& rows, const int64_t* offsets, const SimtRows& keys,
                                          Pairs& pairs) {
    Tile::clear(pairs);
#pragma unroll 1
    for (int column = 0; column < rows.columns; column += kChunk) {
      __syncthreads();  // X, Y are no longer read
      Tile::template load<T, kRows, kChunk, Tile::kStrideXY>(s.x, rows, rows_end() - row0, column,
                                                             [&](int r) { return offsets[r]; });
      load_named<Tile, T, kBlock, kChunk, Tile::kStrideXY>(s.y, keys, s, 0, span.used_k, column);
      __syncthreads();  // they are filled
      Tile::multiply(s, min(rows.columns - column, kChunk), pairs);
    }
  }

  /// From dot products to P, and to the weights of V that dropout leaves. Pairs that take no part are 0.
  __device__ __forceinline__ void weigh() {
    const tile::Dropout dropout = tile::dropout_of(p);
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < kRows * kBlock / 4; item += kThreads) {
      const int r = item / (kBlock / 4), c = item % (kBlock / 4) * 4, row = row0 + r;
      const tile::Span32 seen = s.seen[r];
      const ScoreRow<T> scores(p, span, batch, head_of(row), query_of(row));
      const DropoutRow of_row(dropout, p, batch, head_of(row), query_of(row));
#pragma unroll 1
      for (int e = c; e < c + 4; ++e) {
        const int j = s.key[e];
        float weight = 0;
        if (j == kNoSuchKey) {
          weight = NAN;
        } else if (j >= seen.begin && j < seen.end && scores.sees(j)) {
          const float score = scores.score(s.w[r * Tile::kStrideW + e], j);
          if (score != -INFINITY) weight = exp_of(score - s.lse[r]);
        }
        const bool kept = dropout.threshold == 0 || of_row.keeps(j);
        s.ds[e * kRows + r] = weight;
        s.weight[e * kRows + r] = kept ? weight * p.dropout_keep_scale : 0.0f;
      }
    }
  }

  /// ds = dS, from dP and from P in shared memory, which gets dS, too.
  __device__ __forceinline__ void differentiate(const Pairs& dots, Pairs& ds) {
    const int r = Tile::row_of(0), row = row0 + r;
    const bool has_slope = ScoreOf<T>::has_slope(p);
    const ScoreRow<T> scores(p, span, batch, head_of(row), query_of(row));
#pragma unroll
    for (int c = 0; c < kColsOf; ++c) {
      const int e = Tile::col_of(c), j = s.key[e];
      float& place = s.ds[e * kRows + r];
      const float weight = place;
      const float d_weight = s.weight[e * kRows + r] == 0 ? 0.0f : ds[0][c] * p.dropout_keep_scale;
      float d_score = weight == 0 ? 0.0f : weight * (d_weight - s.delta[r]);
      if (d_score != 0 && j >= 0) {
        if (ScoreOf<T>::kHasGradients && slice == 0 && (kNamedAlone || args.adds_named))
          scores.add_gradients(dots[0][c], j, d_score, add_named);
        if (has_slope) d_score *= scores.slope(dots[0][c], j);
      }
      place = ds[0][c] = d_score;
    }
  }

  /// Adds to dK and dV of the keys of the block: a warp takes every kWarps-th.
  __device__ __forceinline__ void add_to_keys(const RowColumns& q, const RowColumns& d_o) const {
    const int column = lane_column();
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x) / 32; e < kBlock; e += kWarps) {
      const int j = s.key[e];
      if (j < 0) continue;
      const int64_t row = args.key_row(span, batch, head, j);
      if (slice * kColumns < p.head_dim)
        add_rows(s.ds + e * kRows, q, args.dk_sums(row) + column, column < args.dk_columns);
      if (slice * kColumns < p.head_dim_v)
        add_rows(s.weight + e * kRows, d_o, args.dv_sums(row) + column, column < args.dv_columns);
    }
  }
  __device__ __forceinline__ void add_rows(const float* weights, const RowColumns& rows, float* to,
                                           bool exists) const {
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const float4 four = *reinterpret_cast<const float4*>(weights + r);
      const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (w[n] == 0) continue;  // the same in all lanes
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] = fmaf(w[n], rows[r + n][c], sum[c]);
      }
    }
    if (exists) ptx::red_add_v4(to, sum[0], sum[1], sum[2], sum[3]);
  }

  __device__ __forceinline__ void finish(const Output& out) const {
    const int row = row0 + Tile::row_of(0);
    if (row >= rows_end()) return;
    const int64_t offset = p.dq.offset(batch, span.row_q + query_of(row), head_of(row));
#pragma unroll
    for (int g = 0; g < Tile::kGroups; ++g) {
      const int column = slice * kColumns + Tile::out_column(g);
      float values[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) values[e] = out[0][g][e] * p.scale;
      store_four<T>(p.dq.data, offset + column, values, p.head_dim - column, p.dq_is_f32,
                    (p.aligned16 & tile::kAlignedDQ) != 0);
    }
  }

  /// Rows of dq that take no part: of this tile, and of what lies beyond the last tile in steps of all tiles.
  __device__ __forceinline__ void clear_unused(int tile, int tiles) const {
    const int64_t rows = static_cast<int64_t>(span.length_q) * p.group, step = int64_t{tiles} * kRows;
    const int end = min(p.head_dim - slice * kColumns, kColumns);
    for (int64_t row = int64_t{tile} * kRows + Tile::ty(); row < rows; row += step) {
      if (row < rows_used()) continue;
      const int64_t query = row / p.group;
      const int64_t offset =
          p.dq.offset(batch, span.row_q + query, head * p.group + row % p.group) + slice * kColumns;
      for (int c = Tile::tx(); c < end; c += Tile::kLanesX)
        store_gradient<T>(p.dq.data, offset + c, p.dq_is_f32, 0.0f);
    }
  }
};

/// T: float, __half or __nv_bfloat16.
template <class T>
__global__ void __launch_bounds__(kSimtThreads, BwdLists<T>::kMinCtas)
    bwd_lists(const __grid_constant__ BackwardArgs args) {
  __shared__ typename BwdLists<T>::Shared shared;
  const AddInAnyOrder add;
  BwdLists<T>(args, shared, add).run();
}

template <class T>
__global__ void __launch_bounds__(kSimtThreads, BwdLists<T>::kMinCtas)
    named_list_sums(const __grid_constant__ NamedSumsArgs args) {
  using Sums = BwdLists<T, AddFixed>;
  __shared__ typename Sums::Shared shared;
  const AddFixed add{args.peaks, args.sums, args.format, args.adds};
  Sums(args.b, shared, add).run();
}

}  // namespace fovea::cuda
