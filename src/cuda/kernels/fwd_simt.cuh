// The forward on CUDA cores: every GPU since sm_75, every head size, every term of the score, float32
// throughout.
//
//   S = Q K^T (+ QV V^T)      P = exp(score(S) - max)      O = P V / sum P      lse = max + log sum P
//
// A CTA owns 64 rows of queries of one head and a slice of kColumns columns of V and O, and walks over the
// keys that the rows see in blocks of 64. Wider heads take several CTAs, each of which computes the same
// weights.
//
// Grid     fwd_simt_ctas(args, kColumns). With pack_group, rows are (query, head of the group) pairs.
// Block    kSimtThreads threads.
// Shared   static, 28 KB (64 columns) or 37 KB (128).
//          X: 32 columns of Q or QV, Y: of K or V; W: weights, over X and Y; B: 32 rows of V.
// Workspace  part_o and part_lse when num_splits > 1.
//
// Barriers of a block of keys, for each chunk of the head size (of both, with QV):
//   1  X, Y, W, B are no longer read: they are filled
//   2  they are filled: S grows
// and then
//   3  X, Y are no longer read: W is written over them
//   4  W is complete, rows 0 to 31 of B have arrived
//   5  B is no longer read: it takes rows 32 to 63
//   6  which have arrived
//
// NaN and Inf in V must not reach rows that do not see their keys: the loads of B detect them, and the product of
// that half block skips weights of 0.
//
// With kLists a block of keys is one of entries of the list that the rows of a tile share (simt_lists.cuh).
#pragma once

#include <type_traits>

#include "cuda/kernels/simt_lists.cuh"
#include "tile/key_rows.hpp"
#include "tile/kv_blocks.hpp"
#include "tile/tile_scheduler.hpp"

namespace fovea::cuda {

inline constexpr int kSimtRows = 64;

/// CTAs of a launch. At least one query tile a (sequence, head), which also writes the rows that take no
/// part.
constexpr int64_t fwd_simt_tiles(const ForwardArgs& args) {
  const int64_t rows = static_cast<int64_t>(args.p.seqlen_q) * (args.pack_group ? args.p.group : 1);
  const int64_t tiles = (rows + kSimtRows - 1) / kSimtRows;
  return tiles > 0 ? tiles : 1;
}
constexpr int64_t fwd_simt_ctas(const ForwardArgs& args, int columns) {
  const int64_t heads = args.pack_group ? args.p.heads_kv : args.p.heads_q;
  const int64_t slices = (args.p.head_dim_v + columns - 1) / columns;
  return fwd_simt_tiles(args) * slices * args.num_splits * heads * args.p.batch;
}

/// Key: the element of K and V, T or E4M3.
template <class T, int kColumns, bool kLists = false, class Key = T>
struct FwdSimt {
  using Tile = SimtTile<kSimtThreads, kColumns, kLists>;
  using Shared = typename Tile::Shared;
  using Pairs = typename Tile::Pairs;
  using Output = typename Tile::Output;
  static constexpr int kThreads = Tile::kThreads, kRows = Tile::kRowsX, kBlock = Tile::kRows,
                       kRowsOf = Tile::kRowsOf, kColsOf = Tile::kColsOf, kChunk = Tile::kChunk,
                       kHalf = Tile::kHalf;

  /// CTAs an SM, for the register allocator: 3 warps of each of the 4 schedulers, so 168 registers; with lists 6, so 80.
  static constexpr int kMinCtas = kLists ? 6 : 3;

  const ForwardArgs& args;
  const tile::AttentionParams& p;
  Shared& s;

  const int &batch, &head, &slice;  // head: of queries, or of keys where the group is packed
  int tile, split;
  const tile::SequenceSpan& span;
  int row0;  // of the tile, rows being query * pack() + head

  __device__ __forceinline__ FwdSimt(const ForwardArgs& a, Shared& shared)
      : args(a),
        p(a.p),
        s(shared),
        batch(shared.batch),
        head(shared.head),
        slice(shared.slice),
        span(shared.span) {
    const int tiles = static_cast<int>(kLists ? list_tiles(p) : fwd_simt_tiles(args)),
              slices = tile::ceil_div(p.head_dim_v, kColumns);
    const int heads = args.pack_group ? p.heads_kv : p.heads_q;
    int index = static_cast<int>(blockIdx.x);
    const int slice_of = index % slices;
    index /= slices;
    // Neighbouring CTAs share K and V in the second-level cache; under a causal mask the longest come first.
    tile = tiles - 1 - index % tiles;
    index /= tiles;
    split = index % args.num_splits;
    index /= args.num_splits;
    if (threadIdx.x == 0) {
      s.slice = slice_of;
      s.head = index % heads;
      s.batch = index / heads;
      s.query_scale = p.q_descale.at(s.batch, head_kv());
      s.span = tile::cached_span(p, s.batch);
    }
    __syncthreads();  // where the CTA works is known
    row0 = kLists ? first_list_row(p, tile) : tile * kRows;
  }

  /// Query heads in a tile.
  __device__ __forceinline__ int pack() const { return args.pack_group ? p.group : 1; }
  __device__ __forceinline__ bool has_qv() const { return p.qv.data != nullptr; }
  __device__ __forceinline__ int head_kv() const { return args.pack_group ? head : head / p.group; }
  __device__ __forceinline__ int rows_used() const { return span.used_q * pack(); }
  /// One behind the last row of the tile, which may be more than it has rows where they are consecutive.
  __device__ __forceinline__ int rows_end() const {
    return kLists ? min(end_list_row(p, row0), rows_used()) : rows_used();
  }
  __device__ __forceinline__ int query_of(int row) const { return row / pack(); }
  __device__ __forceinline__ int head_of(int row) const {
    return args.pack_group ? head * p.group + row % p.group : head;
  }

  __device__ __forceinline__ void run() {
    if (blockIdx.x == 0 && threadIdx.x == 0 && p.rng_state != nullptr && !p.rng_state_is_input) {
      p.rng_state[0] = static_cast<int64_t>(p.seed);
      p.rng_state[1] = static_cast<int64_t>(p.offset);
    }
    if (args.num_splits == 1) clear_unused();
    if (row0 < rows_used()) attend();
  }

  __device__ __forceinline__ void attend() {
    const int last_row = min(row0 + kRows, rows_end()) - 1;
    // Blocks start at multiples of 64, so that four keys which share random numbers lie in one block.
    const tile::KvBlocks blocks =
        tile::split_blocks(kLists ? list_blocks(p, kBlock)
                                  : tile::kv_blocks(p, span, query_of(row0), query_of(last_row) + 1, kBlock),
                           split, args.num_splits);
    const bool terms = kLists || has_terms<T>(p);
    for (int r = static_cast<int>(threadIdx.x); r < kRows; r += kThreads) {
      const bool used = row0 + r < rows_end();
      const auto offset_in = [&](const tile::RowsView& rows) {
        return used ? rows.offset(batch, span.row_q + query_of(row0 + r), head_of(row0 + r)) : 0;
      };
      s.query[r] = offset_in(p.q);
      if (has_qv()) s.query_of_values[r] = offset_in(p.qv);
      s.row_max[r] = -INFINITY;
      s.seen[r] = used ? tile::keys_of(p, span, query_of(row0 + r)) : tile::Span32{0, 0};
    }
    __syncthreads();  // what the rows need is complete

    Output out;
    Tile::clear(out);
    float row_sum[kRowsOf];
    Tile::clear(row_sum);

    for (int block = blocks.begin; block < blocks.end; ++block) {
      const int key0 = block * kBlock;
      if constexpr (kLists)
        name_keys<Tile>(p, s, s.batch, head_kv(), query_of(row0), query_of(last_row), key0);
      Pairs pairs;
      Tile::clear(pairs);
      bool finite = scores(key0, pairs);
      __syncthreads();  // 3
      if (terms) {
        Tile::write_pairs(s, pairs);
        __syncthreads();  // dot products are complete
        apply_terms(key0);
        __syncthreads();  // scores are complete
        Tile::read_pairs(s, pairs);
      } else {
        scale_and_mask(key0, blocks.is_full(block), pairs);
      }
      softmax(pairs, row_sum, out);
      Tile::write_pairs(s, pairs);
      if (p.dropout_threshold != 0) {
        __syncthreads();  // weights are complete
        drop(key0);
      }
      const bool careful = __syncthreads_or(!finite);  // 4
      Tile::accumulate(s, 0, careful, out);
      __syncthreads();  // 5
      finite = load_v(key0, kHalf);
      const bool careful_too = __syncthreads_or(!finite);  // 6
      Tile::accumulate(s, kHalf, careful_too, out);
    }
    finish(row_sum, out);
  }

  /// `count` rows of k or v, from that of key key0 + first, or of entry `first` of the block; from column `column` on.
  template <int kCount, int kWidth, int kStride>
  __device__ __forceinline__ bool load_keys(float* to, const tile::RowsView& view, int columns, uint32_t bit,
                                            const tile::DescaleView& descale, int key0, int first,
                                            int column) const {
    const bool vector = (p.aligned16 & bit) != 0;
    if constexpr (kLists) {
      const SimtRows rows = rows_of(view, batch, span.row_k, head_kv(), columns, vector);
      return load_named<Tile, T, kCount, kWidth, kStride>(to, rows, s, first, span.used_k, column);
    }
    const tile::KeyRows keys = tile::key_rows(p, view, span, batch, head_kv(), sizeof(Key));
    SimtRows rows = {keys.data, 0, view.row, columns, vector};
    if (sizeof(Key) == 1) rows.scale = descale.at(batch, head_kv());
    const int count = span.used_k - key0 - first;
    // Rows without pages have a loop of their own: with one for both, places of rows took a sixth of the time. Not so of elements of 8
    // bits, whose loop is the conversions.
    if (sizeof(Key) != 1 && !keys.paged())
      return Tile::template load_rows<Key, kCount, kWidth, kStride>(to, rows, key0 + first, count, column);
    return Tile::template load<Key, kCount, kWidth, kStride>(to, rows, count, column, [&](int r) {
      return keys.offset(key0 + first + r) / static_cast<int>(sizeof(Key));
    });
  }
  __device__ __forceinline__ bool load_v(int key0, int first) const {
    return load_keys<kHalf, kColumns, kColumns>(s.b, p.v, p.head_dim_v, tile::kAlignedV, p.v_descale, key0,
                                                first, slice * kColumns);
  }

  /// A chunk of the rows of Q or QV.
  __device__ __forceinline__ void load_queries(const SimtRows& rows, const int64_t* offsets, bool of_values,
                                               int column) const {
    if constexpr (sizeof(Key) == 1) {
      load_queries_of_any_type(rows, offsets, p.e4m3_queries && !of_values, column);
    } else {
      Tile::template load<T, kRows, kChunk, Tile::kStrideXY>(s.x, rows, rows_end() - row0, column,
                                                             [&](int r) { return offsets[r]; });
    }
  }
  /// The same of elements of T or of 8 bits, four at a time: beside two of Tile's loops for keys there are no registers for one.
  __device__ __forceinline__ void load_queries_of_any_type(const SimtRows& rows, const int64_t* offsets,
                                                           bool e4m3, int column) const {
    const float scale = e4m3 ? s.query_scale : 1.0f;
#pragma unroll 2
    for (int item = 0; item < kRows * kChunk / 4 / kThreads; ++item) {
      const int at = static_cast<int>(threadIdx.x) + item * kThreads, row = at / (kChunk / 4),
                c = at % (kChunk / 4) * 4;
      const int count = row < rows_end() - row0 ? rows.columns - column - c : 0;
      const int64_t first = offsets[row] + column + c;
      float x[4] = {};
      if (e4m3) {
        four_of(reinterpret_cast<const E4M3*>(rows.data) + first, rows.vector, count, x);
      } else {
        four_of(reinterpret_cast<const T*>(rows.data) + first, rows.vector, count, x);
      }
      *reinterpret_cast<float4*>(s.x + row * Tile::kStrideXY + c) =
          make_float4(scale * x[0], scale * x[1], scale * x[2], scale * x[3]);
    }
  }
  /// `count` elements, at most four.
  template <class Element>
  static __device__ __forceinline__ void four_of(const Element* from, bool vector, int count, float (&x)[4]) {
    if (vector && count > 0) {
      using Words = std::conditional_t<sizeof(Element) == 4, uint4,
                                       std::conditional_t<sizeof(Element) == 2, uint2, uint32_t>>;
      const Words words = __ldg(reinterpret_cast<const Words*>(from));
      const Element* const values = reinterpret_cast<const Element*>(&words);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = to_float(values[e]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < count) x[e] = to_float(Tile::load_one(from + e));
      }
    }
  }

  /// Dot products of the block; on the way, the first half of its V. Returns whether that is finite.
  __device__ __forceinline__ bool scores(int key0, Pairs& pairs) {
    bool finite = true;
    // One loop for both products: a second one would be a copy of all of its code.
    const int all = p.head_dim + (has_qv() ? p.head_dim_v : 0);
#pragma unroll 1
    for (int done = 0; done < all;) {
      const bool of_values = done >= p.head_dim;
      const int column = of_values ? done - p.head_dim : done,
                columns = of_values ? p.head_dim_v : p.head_dim;
      const tile::RowsView &queries = of_values ? p.qv : p.q, &keys = of_values ? p.v : p.k;
      const uint32_t query_bit = of_values ? tile::kAlignedQV : tile::kAlignedQ,
                     key_bit = of_values ? tile::kAlignedV : tile::kAlignedK;
      const int64_t* offsets = of_values ? s.query_of_values : s.query;
      const SimtRows q = rows_of(queries, 0, 0, 0, columns, (p.aligned16 & query_bit) != 0);
      __syncthreads();  // 1
      load_queries(q, offsets, of_values, column);
      load_keys<kBlock, kChunk, Tile::kStrideXY>(s.y, keys, columns, key_bit,
                                                 of_values ? p.v_descale : p.k_descale, key0, 0, column);
      if (done == 0) finite = load_v(key0, 0);
      __syncthreads();  // 2
      Tile::multiply(s, min(columns - column, kChunk), pairs);
      done += min(columns - column, kChunk);
    }
    return finite;
  }

  __device__ __forceinline__ void scale_and_mask(int key0, bool all_seen, Pairs& pairs) const {
    if (all_seen) {
#pragma unroll
      for (int r = 0; r < kRowsOf; ++r) {
#pragma unroll
        for (int c = 0; c < kColsOf; ++c) pairs[r][c] *= p.scale;
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
      const tile::Span32 seen = s.seen[Tile::row_of(r)];
#pragma unroll
      for (int c = 0; c < kColsOf; ++c) {
        const int j = key0 + Tile::col_of(c);
        pairs[r][c] = j >= seen.begin && j < seen.end ? pairs[r][c] * p.scale : -INFINITY;
      }
    }
  }

  __device__ __forceinline__ int key_of(int key0, int c) const {
    if constexpr (kLists) return s.key[c];
    return key0 + c;
  }

  /// W: dot products become scores. Each thread does four neighbouring keys at a time.
  __device__ __forceinline__ void apply_terms(int key0) {
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < kRows * kBlock / 4; item += kThreads) {
      const int r = item / (kBlock / 4), c = item % (kBlock / 4) * 4, row = row0 + r;
      float* w = s.w + r * Tile::kStrideW + c;
      const tile::Span32 seen = s.seen[r];
      const ScoreRow<T> scores(p, span, batch, head_of(row), query_of(row));
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        const int j = key_of(key0, c + e);
        const bool sees = j >= seen.begin && j < seen.end && scores.sees(j);
        w[e] = sees ? scores.score(w[e], j) : kLists && j == kNoSuchKey ? NAN : -INFINITY;
      }
    }
  }

  /// W: weights meet dropout.
  __device__ __forceinline__ void drop(int key0) {
    const tile::Dropout dropout = tile::dropout_of(p);
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < kRows * kBlock / 4; item += kThreads) {
      const int r = item / (kBlock / 4), c = item % (kBlock / 4) * 4, row = row0 + r;
      const DropoutRow kept(dropout, p, batch, head_of(row), query_of(row));
      float* w = s.w + r * Tile::kStrideW + c;
      if constexpr (kLists) {
#pragma unroll 1
        for (int e = 0; e < 4; ++e) w[e] = kept.keeps(s.key[c + e]) ? w[e] * dropout.keep_scale : 0.0f;
      } else {
        const uint32_t four = kept.kept_four(key0 + c);
#pragma unroll
        for (int e = 0; e < 4; ++e) w[e] = (four >> (8 * e + 7) & 1) != 0 ? w[e] * dropout.keep_scale : 0.0f;
      }
    }
  }

  /// Scores become weights against the maximum so far; what was summed against the old one is scaled.
  __device__ __forceinline__ void softmax(Pairs& pairs, float (&row_sum)[kRowsOf], Output& out) {
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
      float largest = pairs[r][0];
#pragma unroll
      for (int c = 1; c < kColsOf; ++c) largest = fmaxf(largest, pairs[r][c]);
      largest = Tile::over_row(largest, [](float x, float y) { return fmaxf(x, y); });
      float& row_max = s.row_max[Tile::row_of(r)];  // all lanes of the row lie in this warp
      const float before = row_max;
      largest = fmaxf(before, largest);
      const float reference = largest == -INFINITY ? 0.0f : largest;
      const float alpha = exp_of(before - reference);
      __syncwarp();  // everyone has the old maximum
      if (Tile::tx() == 0) row_max = largest;
      float sum = 0;
#pragma unroll
      for (int c = 0; c < kColsOf; ++c) {
        pairs[r][c] = exp_of(pairs[r][c] - reference);
        sum += pairs[r][c];
      }
      row_sum[r] = row_sum[r] * alpha + sum;
#pragma unroll
      for (int g = 0; g < Tile::kGroups; ++g) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[r][g][e] *= alpha;
      }
    }
  }

  /// Writes O and lse. A lane ends each of the 2 kRowsOf rows of its warp, so that there is one copy of that code for all of them.
  __device__ __forceinline__ void finish(const float (&row_sum)[kRowsOf], const Output& out) {
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
      const float sum = Tile::over_row(row_sum[r], [](float x, float y) { return x + y; });
      if (Tile::tx() == 0) s.row_sum[Tile::row_of(r)] = sum;
    }
    __syncwarp();  // sums of the warp's rows are there
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int own = lane % 2 + thread / 32 * 2 + lane / 2 * Tile::kLanesY;
    if (lane < 2 * kRowsOf && row0 + own < rows_end()) end_row(own);
    __syncwarp();  // their factors and places are there
    const bool parts = args.num_splits > 1;
    const bool vector = parts ? p.head_dim_v % 4 == 0 : (p.aligned16 & tile::kAlignedO) != 0;
    char* const o_to = parts ? reinterpret_cast<char*>(args.part_o) : p.o.data;
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
      const int row = Tile::row_of(r);
      if (row0 + row >= rows_end()) continue;
      const float factor = s.row_max[row];
#pragma unroll
      for (int g = 0; g < Tile::kGroups; ++g) {
        const int column = slice * kColumns + Tile::out_column(g);
        float values[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = out[r][g][e] * factor;
        store_four<T>(o_to, s.query[row] + column, values, p.head_dim_v - column, parts || p.o_is_f32(),
                      vector);
      }
    }
  }
  /// Writes lse of a row of the tile. In the place of its maximum goes the factor of its outputs, in that of its query where they go.
  __device__ __forceinline__ void end_row(int row) {
    const bool parts = args.num_splits > 1;
    const int i = query_of(row0 + row), h = head_of(row0 + row);
    float largest = s.row_max[row], sum = s.row_sum[row], factor = 1, lse;
    if (sum == 0) {  // no key: a sum that has one is at least 1, or NaN
      factor = 0;
      lse = !parts && p.sink != nullptr ? p.sink[h] : -INFINITY;
    } else {
      if (!parts && p.sink != nullptr) {
        const float sink = p.sink[h];
        const float with_sink = fmaxf(largest, sink);
        factor = exp_of(largest - with_sink);
        sum = sum * factor + exp_of(sink - with_sink);
        largest = with_sink;
      }
      factor /= sum;
      lse = largest + logf(sum);
    }
    s.row_max[row] = factor;
    float* lse_to = nullptr;
    if (parts) {
      const int64_t part = ((static_cast<int64_t>(split) * p.batch + batch) * p.heads_q + h) * p.seqlen_q + i;
      lse_to = args.part_lse + part;
      s.query[row] = part * p.head_dim_v;
    } else {
      if (p.lse.data != nullptr) lse_to = p.lse.data + p.lse.offset(batch, h, span.row_q + i);
      s.query[row] = p.o.offset(batch, span.row_q + i, h);
    }
    if (slice == 0 && lse_to != nullptr) *lse_to = lse;
  }

  /// Rows that take no part: of this tile, and of what lies beyond the last tile in steps of all tiles.
  __device__ __forceinline__ void clear_unused() {
    const int64_t step = (kLists ? list_tiles(p) : fwd_simt_tiles(args)) * kRows;
    const int64_t rows = static_cast<int64_t>(span.length_q) * pack();
    const int columns = min(p.head_dim_v - slice * kColumns, kColumns);
    for (int64_t row_begin = int64_t{tile} * kRows; row_begin < rows; row_begin += step) {
      for (int r = Tile::ty(); r < kRows; r += Tile::kLanesY) {
        const int64_t row = row_begin + r;
        if (row < rows_used() || row >= rows) continue;
        const int h = head_of(static_cast<int>(row));
        const int64_t at = span.row_q + query_of(static_cast<int>(row));
        const int64_t offset = p.o.offset(batch, at, h) + slice * kColumns;
        for (int c = Tile::tx(); c < columns; c += Tile::kLanesX) {
          if (p.o_is_f32()) {
            reinterpret_cast<float*>(p.o.data)[offset + c] = 0;
          } else {
            reinterpret_cast<T*>(p.o.data)[offset + c] = T(0.0f);
          }
        }
        if (slice == 0 && Tile::tx() == 0 && p.lse.data != nullptr)
          p.lse.data[p.lse.offset(batch, h, at)] = -INFINITY;
      }
    }
  }
};

/// T: float, __half or __nv_bfloat16. kColumns: 64 or 128.
template <class T, int kColumns>
__global__ void __launch_bounds__(FwdSimt<T, kColumns>::kThreads, FwdSimt<T, kColumns>::kMinCtas)
    fwd_simt(const __grid_constant__ ForwardArgs args) {
  __shared__ typename FwdSimt<T, kColumns>::Shared shared;
  FwdSimt<T, kColumns>(args, shared).run();
}

/// The same for keys and values of 8 bits.
template <class T, int kColumns>
__global__ void __launch_bounds__(FwdSimt<T, kColumns>::kThreads, FwdSimt<T, kColumns>::kMinCtas)
    fwd_simt_e4m3(const __grid_constant__ ForwardArgs args) {
  using Kernel = FwdSimt<T, kColumns, false, E4M3>;
  __shared__ typename Kernel::Shared shared;
  Kernel(args, shared).run();
}

}  // namespace fovea::cuda
