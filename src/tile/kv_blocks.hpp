// Which blocks of keys a block of queries visits (the forward), which blocks of queries a block of keys visits
// (the backward), and which of them need no mask. Only causal and window masks count here: bias, masks and
// block masks apply inside every block.
#pragma once

#include "tile/attention_params.hpp"

namespace fovea::tile {

constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

/// The blocks that a tile visits. Those of [begin, full_begin) and [full_end, end) need a mask, those of
/// [full_begin, full_end) need neither mask nor bounds check. begin <= full_begin <= full_end <= end; begin == end when
/// nothing is visible. Without full blocks full_begin == full_end == begin. So the first part is empty unless the window
/// has an edge on its side (window_left in kv_blocks, window_right in q_blocks).
struct KvBlocks {
  int begin = 0, full_begin = 0, full_end = 0, end = 0;

  constexpr bool empty() const { return begin >= end; }
  constexpr int count() const { return empty() ? 0 : end - begin; }
  constexpr bool is_full(int block) const { return full_begin <= block && block < full_end; }
};

/// Blocks of `tile` rows: visited where they touch `any`, full where they lie inside `all`.
constexpr KvBlocks blocks_of(Span32 any, Span32 all, int tile) {
  if (any.empty()) return {};
  KvBlocks blocks{any.begin / tile, 0, 0, ceil_div(any.end, tile)};
  blocks.full_begin = ceil_div(all.begin, tile);
  blocks.full_end = all.end / tile;
  if (blocks.full_begin >= blocks.full_end) blocks.full_begin = blocks.full_end = blocks.begin;
  return blocks;
}

/// Blocks of tile_n keys that the queries [query_begin, query_end) see. The caller clamps the queries to
/// used_q. Where a tile packs the heads of a group (row r is query r / group of head r % group), pass
/// [first row / group, ceil_div(end row, group)).
constexpr KvBlocks kv_blocks(const AttentionParams& p, const SequenceSpan& s, int query_begin, int query_end,
                             int tile_n) {
  if (query_begin >= query_end) return {};
  const Span32 first = keys_of(p, s, query_begin), last = keys_of(p, s, query_end - 1);
  return blocks_of({first.begin, last.end}, {last.begin, first.end}, tile_n);
}

/// Blocks of tile_m rows whose queries see any key of [key_begin, key_end); the caller clamps the keys to
/// used_k. Rows count from the first query of the sequence; where tiles pack the heads of a group,
/// `rows_per_query` is the size of the group.
constexpr KvBlocks q_blocks(const AttentionParams& p, const SequenceSpan& s, int key_begin, int key_end,
                            int tile_m, int rows_per_query = 1) {
  if (key_begin >= key_end) return {};
  const Span32 any = queries_of_any(p, s, key_begin, key_end);
  // An edge of the window moves by one key a query, so the queries that see all of the keys are neighbours.
  const int shift = s.used_k - s.used_q;
  const auto clamp = [&](int x) { return x < 0 ? 0 : (x > s.used_q ? s.used_q : x); };
  const Span32 all = {p.window_right < 0 ? 0 : clamp(key_end - 1 - p.window_right - shift),
                      p.window_left < 0 ? s.used_q : clamp(key_begin + p.window_left + 1 - shift)};
  return blocks_of({any.begin * rows_per_query, any.end * rows_per_query},
                   {all.begin * rows_per_query, all.end * rows_per_query}, tile_m);
}

}  // namespace fovea::tile
