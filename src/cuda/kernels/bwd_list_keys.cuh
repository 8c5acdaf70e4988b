// dK and dV where queries have lists of keys, the same bits each time: of each key over the queries that name it
// (list_inverse.cuh).
//
//   dV[j] = sum over rows of P dO      dK[j] = scale * sum over rows of dS Q      rows: (query, head of the group)
//
// A CTA owns a key and a slice of kColumns columns of its dK and dV. A warp takes eight rows at a time, every kWarps-th eight, and
// four lanes a row, each with a quarter of the columns: the lanes of a row shuffle what they have of Q K^T and dO V^T, and each
// adds to its columns of dK and dV in registers. At the end the eight rows of a warp, and then the warps, are added in their
// order. Wider heads take several CTAs, each of which computes the same weights.
//
// Grid     (any number but 0, heads_kv * slices, batch), best list_keys_grid.
// Block    kSimtThreads threads.
// Shared   static, 5 KB: the key's row of K and V (of one slice), and sums of warps.
// Reads    p.lse and, from bwd_preprocess, args.delta; from list_inverse, args.inverse.
//
// NaN and Inf must not reach gradients that they do not belong to: weights of 0 are not multiplied.
#pragma once

#include "cuda/kernels/simt_lists.cuh"
#include "cuda/warp/gradient.cuh"

namespace fovea::cuda {

inline constexpr int kListKeyColumns =
    128;  ///< of a slice: 32 sums of dK and 32 of dV in the registers of a lane

constexpr int list_key_slices(const tile::AttentionParams& p) {
  return tile::ceil_div(p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v, kListKeyColumns);
}
template <class Grid>
Grid list_keys_grid(const BackwardArgs& args) {
  const int64_t keys = args.p.seqlen_k > 0 ? args.p.seqlen_k : 1;
  return {keys, int64_t{args.p.heads_kv} * list_key_slices(args.p), args.p.batch};
}

/// `kOneSlice`: heads have up to kColumns columns.
template <class T, bool kOneSlice>
struct BwdListKeys {
  static constexpr int kColumns = kListKeyColumns, kThreads = kSimtThreads, kWarps = kThreads / 32;
  static constexpr int kLanes = 4, kRows = 32 / kLanes;  ///< of a row; of a warp
  static constexpr int kPiece = 16 / sizeof(T);          ///< columns that a lane loads at a time
  static constexpr int kPieces = kColumns / (kLanes * kPiece);
  static constexpr int kOfLane = kPieces * kPiece;  ///< columns of a lane
  static_assert(kThreads == kColumns && kRows == 8);

  /// CTAs an SM, for the register allocator: 3 warps of each of the 4 schedulers, so 168 registers; with rows of float32, which
  /// take 64 themselves, 2. For wide heads sm_75 needs four registers more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr bool kFits = kOneSlice;
#else
  static constexpr bool kFits = true;
#endif
  static constexpr int kMinCtas = sizeof(T) == 4 || !kFits ? 2 : 3;

  struct Shared {
    alignas(16) float k[kColumns];
    alignas(16) float v[kColumns];
    float sums[kWarps][2 * kColumns];  ///< of dK, then dV
  };
  /// A lane's columns of a row.
  struct Columns {
    uint4 words[kPieces];
  };
  /// A row of queries in the order of the key's entries: the lane's, or none where `entry` lies behind the last.
  struct Place {
    int entry, head;  ///< of the group
  };

  const BackwardArgs& args;
  const tile::AttentionParams& p;
  Shared& s;
  tile::SequenceSpan span;
  int batch, head, slice;  // head: of keys
  int j = 0, entries = 0;
  const int32_t* queries = nullptr;  ///< null: the queries share their list
  float sums[2 * kOfLane];           ///< of dK, then dV

  __device__ __forceinline__ BwdListKeys(const BackwardArgs& a, Shared& shared)
      : args(a),
        p(a.p),
        s(shared),
        span(tile::sequence_span(a.p, static_cast<int>(blockIdx.z))),
        batch(static_cast<int>(blockIdx.z)),
        head(static_cast<int>(blockIdx.y) / list_key_slices(a.p)),
        slice(static_cast<int>(blockIdx.y) % list_key_slices(a.p)) {}

  __device__ __forceinline__ void run() {
    for (j = static_cast<int>(blockIdx.x); j < span.length_k; j += static_cast<int>(gridDim.x)) {
#pragma unroll
      for (float& sum : sums) sum = 0;
      find_queries();
      if (kOneSlice) load_key();
      __syncthreads();  // the key's row is in shared memory, and sums of the key before are no longer read
      add_rows();
      add_rows_of_warp();
      __syncthreads();  // the sums of all warps are complete, and the key's row is no longer read
      finish();
    }
  }

  __device__ __forceinline__ void find_queries() {
    entries = 0;
    if (j >= span.used_k) return;
    const ListInverse& inverse = args.inverse;
    const int64_t key = inverse.row(args.key_rows_before(span, batch) + j, inverse.heads == 1 ? 0 : head);
    entries = inverse.count_of(key);
    queries = inverse.queries + inverse.starts[key];
    if (queries_share_list(p)) {  // an entry of the list, and so of each query
      entries *= span.used_q;
      queries = nullptr;
    }
  }
  __device__ __forceinline__ int query_of(int entry) const {
    if (entry >= entries) return 0;
    return queries != nullptr ? __ldg(queries + entry) : entry % span.used_q;
  }

  __device__ __forceinline__ const T* key_row(const tile::RowsView& view) const {
    return reinterpret_cast<const T*>(view.data) + view.offset(batch, span.row_k + j, head);
  }
  __device__ __forceinline__ void load_key() const {
    const int column = static_cast<int>(threadIdx.x);
    s.k[column] = column < p.head_dim ? to_float(__ldg(key_row(p.k) + column)) : 0.0f;
    s.v[column] = column < p.head_dim_v ? to_float(__ldg(key_row(p.v) + column)) : 0.0f;
  }

  static __device__ __forceinline__ int lane() {
    return static_cast<int>(threadIdx.x) % 32;
  }
  static __device__ __forceinline__ int warp() {
    return static_cast<int>(threadIdx.x) / 32;
  }
  /// The lane's first column of a piece in a slice.
  static __device__ __forceinline__ int column_of(int piece) {
    return (piece * kLanes + lane() % kLanes) * kPiece;
  }

  __device__ __forceinline__ void add_rows() {
    const int first = warp() * kRows + lane() / kLanes;
    Place at{first / p.group, first % p.group};
    int query = query_of(at.entry);
#pragma unroll 1
    while (__any_sync(~0u, at.entry < entries)) {
      const Place next = after(at);
      const int next_query = query_of(next.entry);  // arrives while this one is in work
      add_row(at, query);
      at = next;
      query = next_query;
    }
  }
  __device__ __forceinline__ Place after(Place at) const {
    constexpr int kStep = kWarps * kRows;
    at.entry += kStep / p.group;
    at.head += kStep % p.group;
    if (at.head >= p.group) {
      at.head -= p.group;
      ++at.entry;
    }
    return at;
  }

  /// Adds what the lane's row gives.
  __device__ __forceinline__ void add_row(const Place& at, int query) {
    const tile::Span32 seen = tile::keys_of(p, span, query);
    const bool used = at.entry < entries && j >= seen.begin && j < seen.end;
    const int head_q = head * p.group + at.head;
    Columns q{}, d_o{};
    float dot = 0, d_weight = 0;
    if (used) {
      dot = product(p.q, p.k, p.head_dim, aligned(tile::kAlignedQ | tile::kAlignedK), s.k, query, head_q, q);
      d_weight = product(p.d_o, p.v, p.head_dim_v, aligned(tile::kAlignedDO | tile::kAlignedV), s.v, query,
                         head_q, d_o);
    }
    dot = over_lanes(dot);
    d_weight = over_lanes(d_weight);
    if (!used) return;
    float weight, d_score;
    weigh(query, head_q, dot, d_weight, weight, d_score);
    if (d_score != 0)
      accumulate(d_score, kOneSlice ? q : columns_of_slice(p.q, p.head_dim, tile::kAlignedQ, query, head_q),
                 sums);
    if (weight != 0)
      accumulate(weight,
                 kOneSlice ? d_o : columns_of_slice(p.d_o, p.head_dim_v, tile::kAlignedDO, query, head_q),
                 sums + kOfLane);
  }
  __device__ __forceinline__ bool aligned(uint32_t bits) const {
    return (p.aligned16 & bits) == bits;
  }
  static __device__ __forceinline__ float over_lanes(float x) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  /// The lane's part of the dot product of a row and the key; `own`: its columns of the row, where that is one slice. Where it is
  /// several, registers hold no more than one, and the row is read again.
  __device__ __forceinline__ float product(const tile::RowsView& rows, const tile::RowsView& keys,
                                           int columns, bool vector, const float* key_of_slice, int query,
                                           int head_q, Columns& own) const {
    const T* row = row_of(rows, query, head_q);
    float sum = 0;
    if constexpr (kOneSlice) {
      own = load(row, columns, vector);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const T* values = reinterpret_cast<const T*>(&own.words[i]);
#pragma unroll
        for (int e = 0; e < kPiece; ++e) sum = fmaf(to_float(values[e]), key_of_slice[column_of(i) + e], sum);
      }
    } else {
      const T* key = key_row(keys);
#pragma unroll 1
      for (int first = 0; first < columns; first += kColumns) {
        const Columns x = load(row + first, columns - first, vector);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const uint4 y = load_piece(key + first, column_of(i), columns - first, vector);
          const T *a = reinterpret_cast<const T*>(&x.words[i]), *b = reinterpret_cast<const T*>(&y);
#pragma unroll
          for (int e = 0; e < kPiece; ++e) sum = fmaf(to_float(a[e]), to_float(b[e]), sum);
        }
      }
    }
    return sum;
  }
  __device__ __forceinline__ const T* row_of(const tile::RowsView& rows, int query, int head_q) const {
    return reinterpret_cast<const T*>(rows.data) + rows.offset(batch, span.row_q + query, head_q);
  }
  __device__ __forceinline__ Columns columns_of_slice(const tile::RowsView& rows, int columns,
                                                      uint32_t aligned_bit, int query, int head_q) const {
    const int first = slice * kColumns;
    return load(row_of(rows, query, head_q) + first, columns - first, aligned(aligned_bit));
  }
  /// The lane's columns, of which `columns` exist.
  static __device__ __forceinline__ Columns load(const T* row, int columns, bool vector) {
    Columns all;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) all.words[i] = load_piece(row, column_of(i), columns, vector);
    return all;
  }
  static __device__ __forceinline__ uint4 load_piece(const T* row, int column, int columns, bool vector) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (vector) {
      if (column < columns) words = __ldg(reinterpret_cast<const uint4*>(row + column));
    } else {
      T* values = reinterpret_cast<T*>(&words);
#pragma unroll
      for (int e = 0; e < kPiece; ++e)
        if (column + e < columns) values[e] = __ldg(row + column + e);
    }
    return words;
  }

  /// The weight of V that dropout leaves, and dS. A pair that takes no part has 0.
  __device__ __forceinline__ void weigh(int query, int head_q, float dot, float d_weight, float& weight,
                                        float& d_score) const {
    weight = d_score = 0;
    const ScoreRow<T> scores(p, span, batch, head_q, query);
    if (!scores.sees(j)) return;
    const float lse = __ldg(p.lse.data + p.lse.offset(batch, head_q, span.row_q + query));
    const float score = scores.score(dot, j);
    if (score == -INFINITY || lse == -INFINITY) return;
    const float delta = args.delta[(static_cast<int64_t>(batch) * p.heads_q + head_q) * args.rows + query];
    const float softmax = exp_of(score - lse);
    const tile::Dropout dropout = tile::dropout_of(p);
    const bool kept = dropout.threshold == 0 || DropoutRow(dropout, p, batch, head_q, query).keeps(j);
    weight = kept ? softmax * p.dropout_keep_scale : 0.0f;
    if (softmax != 0) d_score = softmax * ((kept ? d_weight * p.dropout_keep_scale : 0.0f) - delta);
    if (d_score != 0 && ScoreOf<T>::has_slope(p)) d_score *= scores.slope(dot, j);
  }

  static __device__ __forceinline__ void accumulate(float factor, const Columns& x, float* to) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const T* values = reinterpret_cast<const T*>(&x.words[i]);
#pragma unroll
      for (int e = 0; e < kPiece; ++e)
        to[i * kPiece + e] = fmaf(factor, to_float(values[e]), to[i * kPiece + e]);
    }
  }

  /// To shared memory: the sums of a warp's eight rows. Lanes swap halves of what they have until each has an eighth.
  __device__ __forceinline__ void add_rows_of_warp() {
    int first = 0;
    swap_halves<kOfLane>(16, first);
    swap_halves<kOfLane / 2>(8, first);
    swap_halves<kOfLane / 4>(4, first);
#pragma unroll
    for (int i = 0; i < 2 * kOfLane / kRows; ++i) {
      const int at = first + i, of_gradient = at % kOfLane;
      s.sums[warp()][at / kOfLane * kColumns + column_of(of_gradient / kPiece) + of_gradient % kPiece] =
          sums[i];
    }
  }

  /// Of 2 kLeft sums from `first` the lane keeps one half, and gets the other lane's part of it.
  template <int kLeft>
  __device__ __forceinline__ void swap_halves(int step, int& first) {
    const bool upper = (lane() & step) != 0;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const float given = upper ? sums[i] : sums[i + kLeft], kept = upper ? sums[i + kLeft] : sums[i];
      sums[i] = kept + __shfl_xor_sync(~0u, given, step);
    }
    if (upper) first += kLeft;
  }

  __device__ __forceinline__ void finish() const {
    const int of_slice = static_cast<int>(threadIdx.x), column = slice * kColumns + of_slice;
    float d_k = 0, d_v = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      d_k += s.sums[w][of_slice];
      d_v += s.sums[w][kColumns + of_slice];
    }
    if (column < p.head_dim)
      store_gradient<T>(p.dk.data, p.dk.offset(batch, span.row_k + j, head) + column, p.dk_is_f32,
                        d_k * p.scale);
    if (column < p.head_dim_v)
      store_gradient<T>(p.dv.data, p.dv.offset(batch, span.row_k + j, head) + column, p.dk_is_f32, d_v);
  }
};

/// T: float, __half or __nv_bfloat16.
template <class T, bool kOneSlice>
__global__ void __launch_bounds__(kSimtThreads, BwdListKeys<T, kOneSlice>::kMinCtas)
    bwd_list_keys(const __grid_constant__ BackwardArgs args) {
  using Keys = BwdListKeys<T, kOneSlice>;
  __shared__ typename Keys::Shared shared;
  Keys(args, shared).run();
}

}  // namespace fovea::cuda
