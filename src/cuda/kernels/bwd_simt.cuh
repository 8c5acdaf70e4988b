// The backward on CUDA cores: every GPU since sm_75, every head size, every term of the score, float32
// throughout, and the same bits each time.
//
//   delta = rowsum(dO * O) - dlse
//   P = exp(score(Q K^T) - lse)      dP = keep * dO V^T      dS = P * (dP - delta) * cap'
//   dV = (keep * P)^T dO             dK = scale dS^T Q       dQ = scale dS K
//
// Each CTA owns one tile of one output, 64 rows by a slice of kColumns columns of dK, dV or dQ, and walks
// over the tiles of pairs that reach it, computing their P and dS anew: nothing is summed across CTAs, so
// there are no atomics and no workspace but delta. Separate CTAs compute dK and dV: that costs one product in
// eight, and lets slices of any head size use one set of accumulators.
//
// Grid     bwd_simt_ctas(args, kColumns).
// Block    kBwdSimtThreads threads.
// Shared   static, 28 KB (64 columns) or 37 KB (128).
//          X, Y: operands of Q K^T, then of dO V^T, 32 columns at a time; W: P or dS, over X and Y;
//          B: 32 rows of dO, Q or K.
// Reads    p.lse and, from bwd_preprocess, args.delta. There are no sums of dq: dq_columns is 0, and no
//          bwd_postprocess follows.
//
// Barriers as in fwd_simt.cuh. NaN and Inf must not reach gradients of rows that they do not belong to: where B
// is not finite, products skip weights of 0, and P and dS of pairs that take no part are set to 0, not
// multiplied by 0.
#pragma once

#include "cuda/kernels/simt_tile.cuh"
#include "cuda/warp/gradient.cuh"

namespace fovea::cuda {

inline constexpr int kBwdSimtThreads = kSimtThreads;

/// CTAs of each output. At least one tile a (sequence, head), which also clears the rows that take no part.
struct BwdSimtCtas {
  int64_t dk = 0, dv = 0, dq = 0;
  int tiles_q = 1, tiles_k = 1, slices = 1, slices_v = 1;

  constexpr BwdSimtCtas(const tile::AttentionParams& p, int columns)
      : tiles_q(p.seqlen_q > 64 ? (p.seqlen_q + 63) / 64 : 1),
        tiles_k(p.seqlen_k > 64 ? (p.seqlen_k + 63) / 64 : 1),
        slices((p.head_dim + columns - 1) / columns),
        slices_v((p.head_dim_v + columns - 1) / columns) {
    const int64_t of_keys = static_cast<int64_t>(p.batch) * p.heads_kv * tiles_k;
    dk = of_keys * slices;
    dv = of_keys * slices_v;
    dq = static_cast<int64_t>(p.batch) * p.heads_q * tiles_q * slices;
  }
};
constexpr int64_t bwd_simt_ctas(const BackwardArgs& args, int columns) {
  const BwdSimtCtas ctas(args.p, columns);
  return ctas.dk + ctas.dv + ctas.dq;
}

/// The slope of the score by which weights are multiplied.
enum class SimtSlope : uint8_t {
  kNone,
  kOfProduct,  ///< by scale * q.k
  kOfBias,     ///< by the bias
};

/// Tiles of P and dS. Their rows are queries, or keys with `by_keys`.
template <class T, class Tile>
struct SimtGradient {
  using Shared = typename Tile::Shared;
  using Pairs = typename Tile::Pairs;
  static constexpr int kThreads = Tile::kThreads, kRows = Tile::kRows, kRowsOf = Tile::kRowsOf,
                       kColsOf = Tile::kColsOf, kChunk = Tile::kChunk;

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  Shared& s;
  const tile::SequenceSpan& span;
  const int &batch, &head;  ///< head: of queries
  bool terms, by_keys;

  __device__ __forceinline__ SimtGradient(const BackwardArgs& a, Shared& shared, bool keys_are_rows)
      : args(a),
        p(a.p),
        s(shared),
        span(shared.span),
        batch(shared.batch),
        head(shared.query_head),
        terms(has_terms<T>(a.p)),
        by_keys(keys_are_rows) {}

  __device__ __forceinline__ SimtRows q() const {
    return rows_of(p.q, batch, span.row_q, head, p.head_dim, (p.aligned16 & tile::kAlignedQ) != 0);
  }
  __device__ __forceinline__ SimtRows k() const {
    return rows_of(p.k, batch, span.row_k, head / p.group, p.head_dim, (p.aligned16 & tile::kAlignedK) != 0);
  }
  __device__ __forceinline__ SimtRows v() const {
    return rows_of(p.v, batch, span.row_k, head / p.group, p.head_dim_v,
                   (p.aligned16 & tile::kAlignedV) != 0);
  }
  __device__ __forceinline__ SimtRows d_o() const {
    return rows_of(p.d_o, batch, span.row_q, head, p.head_dim_v, (p.aligned16 & tile::kAlignedDO) != 0);
  }

  /// What the 64 queries from `query0` need. Read behind a barrier.
  __device__ __forceinline__ void set_queries(int query0) {
    for (int r = static_cast<int>(threadIdx.x); r < kRows; r += kThreads) {
      const int i = query0 + r;
      float lse = INFINITY, delta = 0;  // rows that take no part have weights exp(-inf) = 0
      tile::Span32 seen{0, 0};
      if (i < span.used_q) {
        lse = p.lse.data[p.lse.offset(batch, head, span.row_q + i)];
        if (lse == -INFINITY) lse = INFINITY;  // a row without keys
        delta = args.delta[(static_cast<int64_t>(batch) * p.heads_q + head) * args.rows + i];
        seen = tile::keys_of(p, span, i);
      }
      s.lse[r] = lse;
      s.delta[r] = delta;
      s.seen[r] = seen;
    }
  }

  /// pairs = queries keys^T over all columns. `beside` runs with the first loads, between their barriers.
  template <class Beside>
  __device__ __forceinline__ void product(const SimtRows& queries, int query0, const SimtRows& keys, int key0,
                                          Pairs& pairs, const Beside& beside) {
    Tile::clear(pairs);
    float* to_queries = by_keys ? s.y : s.x;
    float* to_keys = by_keys ? s.x : s.y;
#pragma unroll 1
    for (int column = 0; column < queries.columns; column += kChunk) {
      __syncthreads();  // X, Y, W, B are no longer read
      Tile::template load_rows<T, kRows, kChunk, Tile::kStrideXY>(to_queries, queries, query0,
                                                                  span.used_q - query0, column);
      Tile::template load_rows<T, kRows, kChunk, Tile::kStrideXY>(to_keys, keys, key0, span.used_k - key0,
                                                                  column);
      if (column == 0) beside();
      __syncthreads();  // they are filled
      Tile::multiply(s, min(queries.columns - column, kChunk), pairs);
    }
  }

  /// From dot products to weights P times the slope, which say what dropout did (dropped). Pairs that take no part are 0.
  __device__ __forceinline__ void weigh(int query0, int key0, SimtSlope slope, Pairs& pairs) {
    if (terms) {
      __syncthreads();  // X, Y are no longer read
      Tile::write_pairs(s, pairs);
      __syncthreads();  // dot products are complete
      apply_terms(query0, key0, slope);
      __syncthreads();  // weights are complete
      Tile::read_pairs(s, pairs);
      return;
    }
    if (by_keys) {
      scale_and_mask<true>(key0, pairs);
    } else {
      scale_and_mask<false>(key0, pairs);
    }
  }

  template <bool kByKeys>
  __device__ __forceinline__ void scale_and_mask(int key0, Pairs& pairs) const {
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
#pragma unroll
      for (int c = 0; c < kColsOf; ++c) {
        const int row = Tile::row_of(r), col = Tile::col_of(c);
        const int i = kByKeys ? col : row, j = key0 + (kByKeys ? row : col);
        const float score = pairs[r][c] * p.scale;
        const bool seen = j >= s.seen[i].begin && j < s.seen[i].end && score != -INFINITY;
        pairs[r][c] = seen ? fabsf(exp_of(score - s.lse[i])) : 0.0f;  // NaN, too, must not look dropped
      }
    }
  }

  __device__ __forceinline__ void apply_terms(int query0, int key0, SimtSlope slope) {
    const tile::Dropout dropout = tile::dropout_of(p);
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < kRows * kRows / 4; item += kThreads) {
      // Four keys that share random numbers; neighbouring threads take neighbours in shared memory.
      const int r = by_keys ? item % kRows : item / (kRows / 4);
      const int c = 4 * (by_keys ? item / kRows : item % (kRows / 4));
      float* w = s.w + (by_keys ? c * Tile::kStrideW + r : r * Tile::kStrideW + c);
      const int next = by_keys ? Tile::kStrideW : 1;
      const int i = query0 + r;
      const tile::Span32 seen = s.seen[r];
      const ScoreRow<T> row(p, span, batch, head, i);
      const uint32_t kept =
          dropout.threshold != 0 ? DropoutRow(dropout, p, batch, head, i).kept_four(key0 + c) : ~0u;
#pragma unroll 1
      for (int e = 0; e < 4; ++e, w += next) {
        const int j = key0 + c + e;
        float weight = 0;
        if (j >= seen.begin && j < seen.end && row.sees(j)) {
          const float score = row.score(*w, j);
          if (score != -INFINITY) weight = fabsf(exp_of(score - s.lse[r]));
          if (slope == SimtSlope::kOfProduct) weight *= row.slope(*w, j);
          if (slope == SimtSlope::kOfBias) weight *= row.bias_slope(*w, j);
        }
        *w = marked(weight, (kept >> (8 * e + 7) & 1) != 0);
      }
    }
  }

  /// weights = dS (before scale) from the weights and dP.
  __device__ __forceinline__ void differentiate(const Pairs& d_weights, Pairs& weights) const {
    if (by_keys) {
      differentiate<true>(d_weights, weights);
    } else {
      differentiate<false>(d_weights, weights);
    }
  }
  template <bool kByKeys>
  __device__ __forceinline__ void differentiate(const Pairs& d_weights, Pairs& weights) const {
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
#pragma unroll
      for (int c = 0; c < kColsOf; ++c) {
        const float w = weights[r][c];
        const float d_weight = dropped(w) ? 0.0f : d_weights[r][c] * p.dropout_keep_scale;
        const float delta = s.delta[kByKeys ? Tile::col_of(c) : Tile::row_of(r)];
        weights[r][c] = value_of(w) == 0 ? 0.0f : value_of(w) * (d_weight - delta);
      }
    }
  }
  /// weights = the weights of V from those of the softmax.
  __device__ __forceinline__ void drop(Pairs& weights) const {
#pragma unroll
    for (int r = 0; r < kRowsOf; ++r) {
#pragma unroll
      for (int c = 0; c < kColsOf; ++c) {
        weights[r][c] = dropped(weights[r][c]) ? 0.0f : weights[r][c] * p.dropout_keep_scale;
      }
    }
  }

  static constexpr bool kHasSign = ScoreOf<T>::kSlopeHasSign;
  /// A weight, and whether dropout kept it: by its sign, or where slopes have signs by its last bit.
  static __device__ __forceinline__ float marked(float weight, bool kept) {
    if constexpr (!kHasSign) return kept ? weight : -weight;
    return __int_as_float((__float_as_int(weight) & ~1) | (kept ? 0 : 1));
  }
  static __device__ __forceinline__ bool dropped(float weight) {
    return kHasSign ? (__float_as_int(weight) & 1) != 0 : __float_as_int(weight) < 0;
  }
  static __device__ __forceinline__ float value_of(float weight) {
    return kHasSign ? __int_as_float(__float_as_int(weight) & ~1) : fabsf(weight);
  }
};

template <class T, int kColumns>
struct BwdSimt {
  using Tile = SimtTile<kBwdSimtThreads, kColumns>;
  using Shared = typename Tile::Shared;
  using Pairs = typename Tile::Pairs;
  using Output = typename Tile::Output;
  static constexpr int kRows = Tile::kRows, kHalf = Tile::kHalf;

  /// CTAs an SM, for the register allocator: 3 or 2 warps of each of the 4 schedulers, so 168 or 255
  /// registers.
  static constexpr int kMinCtas = kColumns == 64 ? 3 : 2;

  enum What : int { kDK, kDV, kDQ };

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  Shared& s;
  const tile::SequenceSpan& span;
  const int &batch, &head, &slice, &row0;  // head: of queries for dQ, else of keys; row0: of the tile
  const int& what;                         // one of What

  __device__ __forceinline__ BwdSimt(const BackwardArgs& a, Shared& shared)
      : args(a),
        p(a.p),
        s(shared),
        span(shared.span),
        batch(shared.batch),
        head(shared.head),
        slice(shared.slice),
        row0(shared.row0),
        what(shared.what) {
    // The outputs of keys first: under a group of heads they take longest.
    const BwdSimtCtas ctas(p, kColumns);
    int64_t index = blockIdx.x;
    What which;
    if (index < ctas.dk) {
      which = kDK;
    } else if (index -= ctas.dk; index < ctas.dv) {
      which = kDV;
    } else {
      index -= ctas.dv;
      which = kDQ;
    }
    const int slices = which == kDV ? ctas.slices_v : ctas.slices;
    const int tiles = which == kDQ ? ctas.tiles_q : ctas.tiles_k;
    const int heads = which == kDQ ? p.heads_q : p.heads_kv;
    const int slice_of = static_cast<int>(index % slices);
    index /= slices;
    int tile = static_cast<int>(index % tiles);
    if (which == kDQ) tile = tiles - 1 - tile;  // under a causal mask the longest come first
    index /= tiles;
    if (threadIdx.x == 0) {
      s.what = which;
      s.slice = slice_of;
      s.row0 = tile * kRows;
      s.head = static_cast<int>(index % heads);
      s.batch = static_cast<int>(index / heads);
      s.span = tile::sequence_span(p, s.batch);
    }
    __syncthreads();  // the span is complete
  }

  __device__ __forceinline__ void run() {
    const bool of_queries = what == kDQ;
    const int used = of_queries ? span.used_q : span.used_k;
    clear_unused();
    if (row0 >= used) return;

    if (threadIdx.x == 0) {
      s.others = of_queries ? tile::Span32{tile::keys_of(p, span, row0).begin,
                                           tile::keys_of(p, span, min(row0 + kRows, used) - 1).end}
                            : tile::queries_of_any(p, span, row0, min(row0 + kRows, used));
    }
    SimtGradient<T, Tile> gradient(args, s, !of_queries);
    Output out;
    Tile::clear(out);
#pragma unroll 1
    for (int h = 0; h < (of_queries ? 1 : p.group); ++h) {
      __syncthreads();  // the last head is no longer in work
      if (threadIdx.x == 0) s.query_head = of_queries ? head : head * p.group + h;
      __syncthreads();  // query_head and others are known
#pragma unroll 1
      for (int first = s.others.begin / kRows * kRows; first < s.others.end; first += kRows) {
        add(gradient, of_queries ? row0 : first, of_queries ? first : row0, out);
      }
    }
    finish(used, out);
  }

  /// out += the share of one tile of pairs.
  __device__ __forceinline__ void add(SimtGradient<T, Tile>& gradient, int query0, int key0, Output& out) {
    // B: what the weights multiply.
    const SimtRows b = what == kDQ ? gradient.k() : what == kDV ? gradient.d_o() : gradient.q();
    const int b0 = what == kDQ ? key0 : query0, b_used = what == kDQ ? span.used_k : span.used_q;
    const auto load_b = [&](int first) {
      return Tile::template load_rows<T, kHalf, kColumns, kColumns>(s.b, b, b0 + first, b_used - b0 - first,
                                                                    slice * kColumns);
    };
    bool finite = true;
    Pairs weights;
    gradient.product(gradient.q(), query0, gradient.k(), key0, weights, [&] {
      gradient.set_queries(query0);
      finite = load_b(0);
    });
    const bool has_slope = what != kDV && ScoreOf<T>::has_slope(p);
    gradient.weigh(query0, key0, has_slope ? SimtSlope::kOfProduct : SimtSlope::kNone, weights);
    if (what == kDV) {
      gradient.drop(weights);
    } else {
      Pairs d_weights;
      gradient.product(gradient.d_o(), query0, gradient.v(), key0, d_weights, [] {});
      gradient.differentiate(d_weights, weights);
    }
    __syncthreads();  // X, Y are no longer read
    Tile::write_pairs(s, weights);
    const bool careful = __syncthreads_or(!finite);  // W and the first half of B are complete
    Tile::accumulate(s, 0, careful, out);
    __syncthreads();  // B is no longer read
    finite = load_b(kHalf);
    const bool careful_too = __syncthreads_or(!finite);  // its second half has arrived
    Tile::accumulate(s, kHalf, careful_too, out);
  }

  __device__ __forceinline__ const tile::RowsView& view() const {
    return what == kDQ ? p.dq : what == kDV ? p.dv : p.dk;
  }
  __device__ __forceinline__ bool is_f32() const {
    return what == kDQ ? p.dq_is_f32 : p.dk_is_f32;
  }
  __device__ __forceinline__ int64_t offset_of(int row) const {
    return view().offset(batch, (what == kDQ ? span.row_q : span.row_k) + row, head);
  }

  __device__ __forceinline__ void finish(int used, const Output& out) const {
    const int columns = what == kDV ? p.head_dim_v : p.head_dim;
    const float factor = what == kDV ? 1.0f : p.scale;
    const uint32_t bit = what == kDQ ? tile::kAlignedDQ : what == kDV ? tile::kAlignedDV : tile::kAlignedDK;
    const bool vector = (p.aligned16 & bit) != 0;
#pragma unroll
    for (int r = 0; r < Tile::kRowsOf; ++r) {
      const int row = row0 + Tile::row_of(r);
      if (row >= used) continue;
      const int64_t offset = offset_of(row);
#pragma unroll
      for (int g = 0; g < Tile::kGroups; ++g) {
        const int column = slice * kColumns + Tile::out_column(g);
        float values[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = out[r][g][e] * factor;
        store_four<T>(view().data, offset + column, values, columns - column, is_f32(), vector);
      }
    }
  }

  /// Rows that take no part: of this tile, and of what lies beyond the last tile in steps of all tiles.
  __device__ __forceinline__ void clear_unused() const {
    const BwdSimtCtas ctas(p, kColumns);
    const bool of_queries = what == kDQ;
    const int used = of_queries ? span.used_q : span.used_k,
              length = of_queries ? span.length_q : span.length_k;
    const int step = (of_queries ? ctas.tiles_q : ctas.tiles_k) * kRows;
    const int end = min((what == kDV ? p.head_dim_v : p.head_dim) - slice * kColumns, kColumns);
    for (int64_t begin = row0; begin < length; begin += step) {
      for (int r = Tile::ty(); r < kRows; r += Tile::kLanesY) {
        const int64_t row = begin + r;
        if (row < used || row >= length) continue;
        const int64_t offset = offset_of(static_cast<int>(row)) + slice * kColumns;
        for (int c = Tile::tx(); c < end; c += Tile::kLanesX)
          store_gradient<T>(view().data, offset + c, is_f32(), 0.0f);
      }
    }
  }
};

/// T: float, __half or __nv_bfloat16. kColumns: 64 or 128.
template <class T, int kColumns>
__global__ void __launch_bounds__(kBwdSimtThreads, BwdSimt<T, kColumns>::kMinCtas)
    bwd_simt(const __grid_constant__ BackwardArgs args) {
  __shared__ typename BwdSimt<T, kColumns>::Shared shared;
  BwdSimt<T, kColumns>(args, shared).run();
}

}  // namespace fovea::cuda
