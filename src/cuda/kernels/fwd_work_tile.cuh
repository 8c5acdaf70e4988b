// The work of a forward kernel's CTA or warpgroup, and what the forward kernels share at the end of a row:
// where it goes, its lse, and rows that are computed again.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/exact_row.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/score_terms.cuh"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// A tile of queries of one sequence and head, against one split of the keys. With pack_group its rows are
/// those of all query heads of one key head (ForwardArgs).
struct FwdWorkTile {
  tile::SequenceSpan span;
  int batch, head, split;  ///< `head` of q, or of k for a packed group
  int first_row, end_row;  ///< [first_row, end_row) exist; may be none
};

/// A row of a tile: query `query` of its sequence, head `head` of q.
struct QueryRow {
  int query, head;
};
__device__ __forceinline__ QueryRow query_row(const ForwardArgs& f, const FwdWorkTile& work, int row) {
  const int query = query_of_row(f, row);
  return {query, f.pack_group ? work.head * f.p.group + row - query * f.p.group : work.head};
}

/// Query heads whose rows a tile packs.
__device__ __forceinline__ int packed_heads(const ForwardArgs& f) {
  return f.pack_group ? f.p.group : 1;
}

/// Index of the row in part_lse, and in part_o of head_dim_v columns.
__device__ __forceinline__ int64_t part_row(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r) {
  return ((static_cast<int64_t>(work.split) * f.p.batch + work.batch) * f.p.heads_q + r.head) * f.p.seqlen_q +
         r.query;
}
/// Where the row's outputs go in o, whose elements are T.
template <class T>
__device__ __forceinline__ T* o_row(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r) {
  return reinterpret_cast<T*>(f.p.o.data) + f.p.o.offset(work.batch, work.span.row_q + r.query, r.head);
}
/// Whether outputs are float32: a float32 o, or parts of a split.
__device__ __forceinline__ bool stores_f32(const ForwardArgs& f) {
  return f.num_splits > 1 || f.p.o_is_f32();
}
/// Where they go then.
__device__ __forceinline__ float* f32_row(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r) {
  return f.num_splits > 1 ? f.part_o + part_row(f, work, r) * f.p.head_dim_v : o_row<float>(f, work, r);
}

/// Writes lse (natural logarithm), or that of this split, which only rows up to used_q have.
__device__ __forceinline__ void write_lse(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r,
                                          float lse) {
  if (f.num_splits > 1) {
    f.part_lse[part_row(f, work, r)] = lse;
  } else if (f.p.lse.data != nullptr) {
    f.p.lse.data[f.p.lse.offset(work.batch, r.head, work.span.row_q + r.query)] = lse;
  }
}

/// Ends a row whose weights, relative to 2^base, add up to `sum`: returns the factor of its outputs, and with
/// `writes_lse` writes lse. Rows from used_q on get zeros and -inf. Of splits, fwd_combine adds the sink and
/// writes the rows from used_q on.
__device__ __forceinline__ float finish_row(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r,
                                            float base, float sum, bool writes_lse) {
  const bool used = r.query < work.span.used_q;
  const float sink =
      used && f.p.sink != nullptr && f.num_splits == 1 ? f.p.sink[r.head] * tile::kLog2e : -INFINITY;
  const RowEnd end = used ? end_of_row(base, sum, sink) : RowEnd{};
  if (writes_lse && (used || f.num_splits == 1)) write_lse(f, work, r, end.lse_log2 * tile::kLn2);
  return end.factor;
}

/// Computes a row again without matrix products and writes it: columns [first_column, first_column + columns)
/// of O, and lse with first_column = 0. Keys are those of [key_begin, key_end) that the row sees. The whole
/// warp calls it.
template <class T, int kColumns>
__device__ __forceinline__ void write_exact_row(const ForwardArgs& f, const FwdWorkTile& work,
                                                const tile::Dropout& dropout, int row, int first_column,
                                                int columns, int key_begin, int key_end) {
  const tile::AttentionParams& p = f.p;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const QueryRow r = query_row(f, work, row);
  const int head_kv = r.head / p.group;
  const bool used = r.query < work.span.used_q;
  ExactRow<kColumns> exact;
  exact.add(
      p, RowTerms<T>(p, work.span, work.batch, r.head, r.query), dropout,
      reinterpret_cast<const T*>(p.q.data) + p.q.offset(work.batch, work.span.row_q + r.query, r.head),
      reinterpret_cast<const T*>(p.k.data) + p.k.offset(work.batch, work.span.row_k, head_kv),
      reinterpret_cast<const T*>(p.v.data) + p.v.offset(work.batch, work.span.row_k, head_kv) + first_column,
      columns, used ? tile::keys_of(p, work.span, r.query) : tile::Span32{}, key_begin, key_end);
  const float base = exact.maximum == -INFINITY ? 0.0f : exact.maximum * tile::kLog2e;
  const float factor = finish_row(f, work, r, base, exact.sum, lane == 0 && first_column == 0);
  if (!used && f.num_splits > 1) return;
#pragma unroll
  for (int c32 = 0; c32 < ExactRow<kColumns>::kPerLane; ++c32) {
    const int c = lane + 32 * c32;
    if (c >= columns) break;
    if (sizeof(T) == 4 || stores_f32(f)) {
      f32_row(f, work, r)[first_column + c] = exact.o[c32] * factor;
    } else {
      o_row<T>(f, work, r)[first_column + c] = static_cast<T>(exact.o[c32] * factor);
    }
  }
}

}  // namespace fovea::cuda
