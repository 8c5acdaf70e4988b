// The parameter of the kernel that appends to a cache, and where its rows come from and go. Plain data, as
// tile/attention_params.hpp.
#pragma once

#include <cstdint>

#include "tile/attention_params.hpp"
#include "tile/key_rows.hpp"

namespace fovea::cuda {

/// A (positions, pairs) table of numbers side by side: float32, or of the type of q.
struct AnglesView {
  const char* data = nullptr;
  int64_t row = 0;
};

struct AppendArgs {
  tile::AttentionParams p;  ///< of the problem as it comes: q, the cache, and lengths before
  tile::RowsView k_new, v_new;
  const int32_t* cu_seqlens_k_new = nullptr;  ///< (batch + 1); null: every sequence appends new_rows
  int total_new = 0;                          ///< rows of k_new; those of q fit 32 bits, too
  int new_rows = 0;

  AnglesView cosines, sines;  ///< null: nothing is rotated
  bool angles_are_f32 = false, interleaved = false;
  bool by_row = false;  ///< each query has a position of its own
  int positions = 0, half = 0;
  const int32_t* rotary_positions = nullptr;  ///< (batch); null: seqused_k

  int32_t* lengths = nullptr;  ///< (batch): gets the keys of each sequence
  char* q_rotated = nullptr;   ///< compact; gets the rotated q

  constexpr bool rotates() const { return cosines.data != nullptr; }
};

inline constexpr int kAppendThreads = 128;

/// Heads of rows: those of k_new with v_new, then those of q.
constexpr int heads_to_append(const AppendArgs& args) {
  return args.p.heads_kv + (args.rotates() ? args.p.heads_q : 0);
}
/// x: one CTA at least, for the lengths; at most some waves of the largest chip. y: heads.
template <class Grid>
constexpr Grid append_grid(const AppendArgs& args) {
  constexpr int64_t kMost = 4096, kMostHeads = 65535, kWarps = kAppendThreads / 32;
  const int64_t rows = args.rotates() && args.p.total_q > args.total_new ? args.p.total_q : args.total_new;
  const int64_t ctas = (rows + kWarps - 1) / kWarps, heads = heads_to_append(args);
  return {ctas < 1 ? 1 : ctas < kMost ? ctas : kMost, heads < kMostHeads ? heads : kMostHeads};
}

/// The sequence of row `row`, where sequences of any lengths lie one behind the other from `starts` on: the last that starts at or
/// before it. Rows behind the last sequence belong to none, which the caller sees by its end.
constexpr int sequence_of(const int32_t* starts, int batch, int row) {
  int first = 0, last = batch - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (starts[middle] <= row) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

/// A row of k_new or q: its sequence, and its place in it. Of no sequence: batch is -1.
struct SequenceRow {
  int batch, index;
};
constexpr SequenceRow sequence_row(const int32_t* starts, int batch, int length, int row) {
  if (starts == nullptr) return {row / length, row % length};
  if (batch == 0) return {-1, 0};
  const int b = sequence_of(starts, batch, row);
  if (row < starts[b] || row >= starts[b + 1]) return {-1, 0};
  return {b, row - starts[b]};
}

/// Where row `row` of the keys of sequence b lies: the page or sequence of k, and its row. Page -1 where the cache has no such row,
/// so that nothing else is overwritten.
constexpr tile::PageRow row_to_write(const tile::AttentionParams& p, int b, int row) {
  constexpr tile::PageRow kNone = {-1, 0};
  if (row < 0 || row >= p.seqlen_k) return kNone;
  if (p.page_table.data != nullptr) {
    const tile::PageRow entry = tile::page_entry(p, b, row);
    return entry.page < 0 || entry.page >= p.caches ? kNone : entry;
  }
  const int cache = tile::cache_of(p, b);
  if (p.cache_batch != nullptr && (cache < 0 || cache >= p.caches)) return kNone;
  return {cache, row};
}

}  // namespace fovea::cuda
