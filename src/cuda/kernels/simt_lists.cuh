// Lists of keys on CUDA cores: which rows make a tile, and the keys that a block of entries names.
//
// Rows are (query, head of the group) pairs, as in a packed group. A tile is kListRows of them that share a list: heads of
// one query, or of neighbouring queries where all have the same list. It walks over the entries, 64 at a time, whose keys
// lie in shared memory:
//
//   key >= 0      the position of a key that the first or the last query of the tile can see
//   kNoKey        an entry of -1, or one that causal, window or seqused_k leave out
//   kNoSuchKey    one that no sequence has: scores are NaN
#pragma once

#include "cuda/kernels/simt_tile.cuh"
#include "tile/kv_blocks.hpp"

namespace fovea::cuda {

inline constexpr int kListRows = 8;
inline constexpr int kNoKey = -1, kNoSuchKey = -2;

constexpr bool queries_share_list(const tile::AttentionParams& p) {
  return p.keys.row == 0;
}
/// Tiles of a query where it has a list of its own.
constexpr int list_tiles_of_query(const tile::AttentionParams& p) {
  return tile::ceil_div(p.group, kListRows);
}
/// At least one a (sequence, key head), which also writes the rows that take no part.
constexpr int64_t list_tiles(const tile::AttentionParams& p) {
  const int64_t rows = int64_t{p.seqlen_q} * p.group;
  const int64_t tiles = queries_share_list(p) ? (rows + kListRows - 1) / kListRows
                                              : int64_t{p.seqlen_q} * list_tiles_of_query(p);
  return tiles > 0 ? tiles : 1;
}
constexpr int first_list_row(const tile::AttentionParams& p, int tile) {
  if (queries_share_list(p)) return tile * kListRows;
  const int of_query = list_tiles_of_query(p);
  return tile / of_query * p.group + tile % of_query * kListRows;
}
constexpr int end_list_row(const tile::AttentionParams& p, int row0) {
  const int end = row0 + kListRows, next_query = (row0 / p.group + 1) * p.group;
  return queries_share_list(p) || end < next_query ? end : next_query;
}
constexpr tile::KvBlocks list_blocks(const tile::AttentionParams& p, int entries) {
  return {0, 0, 0, tile::ceil_div(p.list_size, entries)};
}

/// Keys that the tensor holds for the sequence, whether they take part or not.
__device__ __forceinline__ int keys_held(const tile::AttentionParams& p, const tile::SequenceSpan& span,
                                         int batch) {
  if (p.seqused_k == nullptr) return span.used_k;
  return p.cu_seqlens_k != nullptr ? p.cu_seqlens_k[batch + 1] - p.cu_seqlens_k[batch] : p.seqlen_k;
}

/// Writes the keys of the block of entries from `first`. Behind a barrier.
template <class Tile>
__device__ __forceinline__ void name_keys(const tile::AttentionParams& p, typename Tile::Shared& s, int batch,
                                          int head_kv, int first_query, int last_query, int first) {
  const int32_t* list = p.keys.data + p.keys.offset(batch, head_kv, s.span.row_q + first_query);
  const int begin = tile::keys_of(p, s.span, first_query).begin,
            end = tile::keys_of(p, s.span, last_query).end;
  for (int n = static_cast<int>(threadIdx.x); n < Tile::kRows; n += Tile::kThreads) {
    int key = kNoKey;
    if (first + n < p.list_size) {
      const int entry = __ldg(list + first + n);
      if (entry < kNoKey || entry >= keys_held(p, s.span, batch)) {
        key = kNoSuchKey;
      } else if (entry >= begin && entry < end) {
        key = entry;
      }
    }
    s.key[n] = key;
  }
}

/// Copies the rows of the keys that entries from `first` of the block name; in place of none row 0, where there is one,
/// whose weights are 0. Returns whether all values are finite.
template <class Tile, class T, int kCount, int kWidth, int kStride>
__device__ __forceinline__ bool load_named(float* to, const SimtRows& from, const typename Tile::Shared& s,
                                           int first, int used_k, int column) {
  return Tile::template load<T, kCount, kWidth, kStride>(
      to, from, used_k > 0 ? kCount : 0, column,
      [&](int r) { return from.first + max(s.key[first + r], 0) * from.stride; });
}

}  // namespace fovea::cuda
