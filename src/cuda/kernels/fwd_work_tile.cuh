// The work of a forward kernel's CTA or warpgroup, and what the forward kernels share around the mainloop: from
// a row to its query and head, the blocks of keys that rows see, where outputs go, the end of a row, rows that
// are computed again, and rows that take no part.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/args.hpp"
#include "cuda/warp/alibi_reach.cuh"
#include "cuda/warp/any_query.cuh"
#include "cuda/warp/exact_row.cuh"
#include "cuda/warp/online_rows.cuh"
#include "cuda/warp/score_row.cuh"
#include "tile/kv_blocks.hpp"
#include "tile/log2.hpp"

namespace fovea::cuda {

/// A tile of queries of one sequence and head, against one split of the keys. With pack_group its rows are
/// those of all query heads of one key head (ForwardArgs).
struct FwdWorkTile {
  tile::SequenceSpan span;
  int batch, head;         ///< `head` of q, or of k for a packed group
  int split;               ///< the part that it writes where num_splits > 1; -1: none, but o and lse
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

/// Blocks of tile_n keys that rows [first_row, end_row) of a sequence see.
__device__ __forceinline__ tile::KvBlocks key_blocks_of_rows(const ForwardArgs& f,
                                                             const tile::SequenceSpan& span, int first_row,
                                                             int end_row, int tile_n) {
  if (first_row >= end_row) return {};
  return tile::kv_blocks(f.p, span, query_of_row(f, first_row), query_of_row(f, end_row - 1) + 1, tile_n);
}

/// Whether the tile's outputs are a part, to be merged with others.
__device__ __forceinline__ bool writes_part(const ForwardArgs& f, const FwdWorkTile& work) {
  return f.num_splits > 1 && work.split >= 0;
}
/// Index of the row in part_lse, and in part_o of head_dim_v columns.
__device__ __forceinline__ int64_t part_row(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r) {
  if (f.part_rows > 0) {
    const int heads = packed_heads(f);
    return int64_t{work.split} * f.part_rows + r.query * heads + r.head - work.head * heads;
  }
  return ((static_cast<int64_t>(work.split) * f.p.batch + work.batch) * f.p.heads_q + r.head) * f.p.seqlen_q +
         r.query;
}
/// Where the row's outputs go in o, whose elements are T.
template <class T>
__device__ __forceinline__ T* o_row(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r) {
  return reinterpret_cast<T*>(f.p.o.data) + f.p.o.offset(work.batch, work.span.row_q + r.query, r.head);
}
/// Whether outputs are float32: a float32 o, or parts of a split.
__device__ __forceinline__ bool stores_f32(const ForwardArgs& f, const FwdWorkTile& work) {
  return writes_part(f, work) || f.p.o_is_f32();
}
/// Where they go then.
__device__ __forceinline__ float* f32_row(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r) {
  return writes_part(f, work) ? f.part_o + part_row(f, work, r) * f.p.head_dim_v : o_row<float>(f, work, r);
}

/// Writes lse (natural logarithm), or that of this split, which only rows up to used_q have.
__device__ __forceinline__ void write_lse(const ForwardArgs& f, const FwdWorkTile& work, QueryRow r,
                                          float lse) {
  if (writes_part(f, work)) {
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
      used && f.p.sink != nullptr && !writes_part(f, work) ? f.p.sink[r.head] * tile::kLog2e : -INFINITY;
  const RowEnd end = used ? end_of_row(base, sum, sink) : RowEnd{};
  if (writes_lse && (used || !writes_part(f, work))) write_lse(f, work, r, end.lse_log2 * tile::kLn2);
  return end.factor;
}

/// Zeros and -inf for queries that take no part: block `block` of `blocks` of a sequence and head writes its
/// share of those from used_q on, columns [first_column, first_column + columns). `kThreads` threads call it.
template <class T, int kThreads>
__device__ __forceinline__ void write_unused_rows(const ForwardArgs& f, const FwdWorkTile& work, int block,
                                                  int blocks, int first_column, int columns) {
  const tile::AttentionParams& p = f.p;
  const int thread = static_cast<int>(threadIdx.x), heads = packed_heads(f);
  const int share = tile::ceil_div(max(p.seqlen_q, 1), blocks);
  const int begin = max(work.span.used_q, block * share);
  const int end = block + 1 == blocks ? work.span.length_q : min(work.span.length_q, (block + 1) * share);
  for (int i = begin; i < end; ++i) {
    for (int h = 0; h < heads; ++h) {
      const QueryRow r = {i, work.head * heads + h};
      for (int c = thread; c < columns; c += kThreads) {
        if (sizeof(T) == 4 || p.o_is_f32()) {
          o_row<float>(f, work, r)[first_column + c] = 0.0f;
        } else {
          o_row<uint16_t>(f, work, r)[first_column + c] = 0;
        }
      }
      if (thread == 0 && first_column == 0) write_lse(f, work, r, -INFINITY);
    }
  }
}

/// The first thread of the launch leaves the state of dropout's random stream for the backward.
__device__ __forceinline__ void write_rng_state(const tile::AttentionParams& p) {
  const bool first = threadIdx.x == 0 && blockIdx.x + blockIdx.y + blockIdx.z == 0;
  if (!first || p.rng_state == nullptr || p.rng_state_is_input) return;
  p.rng_state[0] = static_cast<int64_t>(p.seed);
  p.rng_state[1] = static_cast<int64_t>(p.offset);
}

/// The key head of a tile.
__device__ __forceinline__ int head_of_keys(const ForwardArgs& f, const FwdWorkTile& work) {
  return f.pack_group ? work.head : work.head / f.p.group;
}

/// What multiplies the products of queries and keys of 8 bits.
__device__ __forceinline__ float descale_of_products(const tile::AttentionParams& p, int batch, int head_kv) {
  return p.q_descale.at(batch, head_kv) * p.k_descale.at(batch, head_kv);
}

/// In the place of ArrivingKeysView in kernels that know no keys in rows of their own.
struct NoArrivingKeys {};

/// In the place of a tile::Dropout: in kernels without dropout, or where it is kept elsewhere.
struct NoDropout {};
__device__ __forceinline__ KeepsAll kept_of_row(const NoDropout&, const tile::AttentionParams&, int,
                                                QueryRow) {
  return {};
}
__device__ __forceinline__ DropoutRow kept_of_row(const tile::Dropout& dropout,
                                                  const tile::AttentionParams& p, int batch, QueryRow r) {
  return {dropout, p, batch, r.head, r.query};
}

/// Computes a row again without matrix products and writes it: columns [first_column, first_column + columns)
/// of O, and lse with first_column = 0. Keys are those of [key_begin, key_end) that the row sees. The whole
/// warp calls it. `dropout`: a tile::Dropout, or NoDropout. Key: the element of k and v. kQv: whether the kernel multiplies qv,
/// where there is one. `arriving`: an ArrivingKeysView, whose rows hold the first keys.
template <class T, int kColumns, class Key = T, bool kQv = false, class Arriving = NoArrivingKeys,
          class Dropout>
__device__ __forceinline__ void write_exact_row(const ForwardArgs& f, const FwdWorkTile& work,
                                                const Dropout& dropout, int row, int first_column,
                                                int columns, int key_begin, int key_end,
                                                const Arriving& arriving = {}) {
  static_assert(!kQv || sizeof(Key) != 1, "products with factors of their own are not added up");
  const tile::AttentionParams& p = f.p;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const QueryRow r = query_row(f, work, row);
  const int head_kv = r.head / p.group;
  const bool used = r.query < work.span.used_q;
  ExactRow<kColumns> exact;
  const float product_scale = sizeof(Key) == 1 ? descale_of_products(p, work.batch, head_kv) : 1.0f,
              value_scale = sizeof(Key) == 1 ? p.v_descale.at(work.batch, head_kv) : 1.0f;
  const auto offset_in = [&](const tile::RowsView& view) {
    return view.offset(work.batch, work.span.row_q + r.query, r.head);
  };
  const auto query_of = [&](const tile::RowsView& view) {
    return reinterpret_cast<const T*>(view.data) + offset_in(view);
  };
  const auto rows_of = [&](const tile::RowsView& view, int column) {
    return tile::key_rows(p, view, work.span, work.batch, head_kv, sizeof(Key), column);
  };
  const auto add_keys = [&](const auto& q, const auto& more, const tile::RowsView& k, const tile::RowsView& v,
                            int begin, int end) {
    exact.template add<T, Key>(p, ScoreRow<T>(p, work.span, work.batch, r.head, r.query),
                               kept_of_row(dropout, p, work.batch, r), q, rows_of(k, 0),
                               rows_of(v, first_column), columns,
                               used ? tile::keys_of(p, work.span, r.query) : tile::Span32{}, begin, end,
                               product_scale, value_scale, more);
  };
  const auto add = [&](const auto& q, const auto& more) {
    if constexpr (std::is_same_v<Arriving, NoArrivingKeys>) {
      add_keys(q, more, p.k, p.v, key_begin, key_end);
    } else {
#pragma unroll 1
      for (int piece = arriving.keys > 0 ? 0 : 1; piece < 2; ++piece) {
        const bool own = piece == 1;
        add_keys(q, more, own ? p.k : arriving.k_rows, own ? p.v : arriving.v_rows,
                 own ? max(key_begin, arriving.keys) : key_begin,
                 own ? key_end : min(key_end, arriving.keys));
      }
    }
  };
  if constexpr (kQv) {
    add(query_of(p.q), ProductsWithValues<T>{p.qv.data == nullptr ? nullptr : query_of(p.qv), rows_of(p.v, 0),
                                             p.head_dim_v});
  } else if constexpr (sizeof(Key) == 1) {
    add(AnyQuery<T>(p.q.data, offset_in(p.q), p.e4m3_queries), NoMoreProducts{});
  } else {
    add(query_of(p.q), NoMoreProducts{});
  }
  const float base = exact.maximum == -INFINITY ? 0.0f : exact.maximum * tile::kLog2e;
  const float factor = finish_row(f, work, r, base, exact.sum, lane == 0 && first_column == 0);
  if (!used && writes_part(f, work)) return;
  const auto store = [&](auto* to) {
#pragma unroll
    for (int n = 0; n < ExactRow<kColumns>::kPerLane; ++n) {
      const int c = lane + 32 * n;
      if (c < columns) to[c] = static_cast<std::remove_pointer_t<decltype(to)>>(exact.o[n] * factor);
    }
  };
  if (sizeof(T) == 4 || stores_f32(f, work)) {
    store(f32_row(f, work, r) + first_column);
  } else {
    store(o_row<T>(f, work, r) + first_column);
  }
}

}  // namespace fovea::cuda
