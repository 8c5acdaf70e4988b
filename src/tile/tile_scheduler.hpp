// Which CTA does what: maps the linear index of a CTA to a block of rows of one head of one sequence, and to a
// share of its keys. CTAs start in the order of their index, so the order is the schedule: the longest first, so
// that no long one starts late; and heads in sections whose keys and values fit the L2 cache together.
#pragma once

#include <cstdint>

#include "tile/attention_params.hpp"
#include "tile/kv_blocks.hpp"

namespace fovea::tile {

/// The work of a CTA. Packed sequences leave spare CTAs, whose tile is not valid.
struct WorkTile {
  int block = 0;  ///< of rows, within the sequence
  int head = 0, batch = 0;
  int split = 0;
  bool valid = true;
  friend constexpr bool operator==(const WorkTile&, const WorkTile&) = default;
};

/// Whether later blocks of queries see more keys than earlier ones (causal), so that they go first.
constexpr bool later_queries_first(const AttentionParams& p) {
  return p.window_right >= 0;
}

/// The number of whole sections of `section` heads. The heads that are left make one more section, of at least `last`
/// heads: it ends the launch, and while some CTAs work on its longest tiles the others need tiles, too.
constexpr int whole_sections(int64_t heads, int64_t section, int64_t last) {
  return heads > last ? static_cast<int>((heads - last) / section) : 0;
}

/// Of numbers that are not negative, which takes fewer instructions.
constexpr int quotient(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}

/// A head of a sequence.
struct HeadOfSequence {
  int head, batch;
};
/// Number `plane` of all heads of all sequences: the heads of one sequence side by side, or the sequences of one head, so that what
/// sequences share is read once.
constexpr HeadOfSequence head_of_plane(int plane, int heads, int batch, bool sequences_first) {
  if (batch == 1) return {plane, 0};
  const int across = quotient(plane, sequences_first ? batch : heads);
  if (sequences_first) return {across, plane - across * batch};
  return {plane - across * heads, across};
}

/// The blocks of sequences of one length. Indices go section by section; inside a section block by block; for each block
/// over the heads (of one sequence, then the next; with `sequences_first` over the sequences of one head, then the next); and for
/// each of these over the splits.
struct TileGrid {
  int blocks = 0, heads = 0, batch = 0;
  int splits = 1;
  int section = 1;          ///< heads of a section, whose keys and values fit the L2 cache
  int whole = 0;            ///< sections of so many; the heads that are left make the last one
  bool descending = false;  ///< the last block first
  bool sequences_first = false;

  constexpr int64_t count() const { return int64_t{blocks} * heads * batch * splits; }

  /// A CTA finds its tile before its first load, so divisions by 1 are left out, and those of a launch that is one section or one sequence:
  /// 200 of 2,600 clocks (H200).
  constexpr WorkTile at(int index) const {
    int sections = 0;
    if (whole > 0) {
      const int before = quotient(index, section * splits * blocks);
      sections = before < whole ? before : whole;
    }
    const int first_plane = sections * section, rest = index - first_plane * splits * blocks;
    const int width = (sections < whole ? section : heads * batch - first_plane) * splits;
    const int block = quotient(rest, width), in_block = rest - block * width;
    const int in_section = splits == 1 ? in_block : quotient(in_block, splits);
    const HeadOfSequence of = head_of_plane(first_plane + in_section, heads, batch, sequences_first);
    return {descending ? blocks - 1 - block : block, of.head, of.batch, in_block - in_section * splits, true};
  }
};

/// The blocks of packed sequences. Only the device knows the lengths, so it finds the blocks from cu_seqlens. Sequence b
/// gets the indices from floor(first row / tile_rows) + b on. These are at least as many as its blocks, because
/// floor(x + y) >= floor(x) + floor(y), and at most one more, so the number of CTAs follows from the number of rows.
struct PackedBlocks {
  const int32_t* cu_seqlens = nullptr;  ///< (batch + 1)
  int batch = 0;
  /// Rows of the tensor: those after the last sequence count as its own (their outputs are zeros).
  int64_t total = 0;
  int tile_rows = 1;
  int rows_per_query = 1;   ///< the size of the group where tiles pack it
  bool descending = false;  ///< the last block of each sequence first

  /// Indices that cover every block.
  constexpr int count() const { return static_cast<int>(total * rows_per_query / tile_rows) + batch; }

  constexpr int first(int b) const {
    return static_cast<int>(int64_t{cu_seqlens[b]} * rows_per_query / tile_rows) + b;
  }

  /// The sequence and block of an index; head and split are left 0.
  constexpr WorkTile at(int index) const {
    int low = 0, high = batch;  // the sequence is in [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first(middle) <= index) {
        low = middle;
      } else {
        high = middle;
      }
    }
    if (batch == 0 || index < first(low)) return {0, 0, 0, 0, false};
    const int64_t end = low + 1 == batch ? total : int64_t{cu_seqlens[low + 1]};
    const int64_t rows = (end - cu_seqlens[low]) * rows_per_query;
    const int blocks = static_cast<int>((rows + tile_rows - 1) / tile_rows);
    const int block = index - first(low);
    return {descending ? blocks - 1 - block : block, 0, low, 0, block < blocks};
  }
};

/// Packed sequences with heads and splits: a TileGrid over the blocks of all sequences.
struct PackedGrid {
  PackedBlocks sequences;
  int heads = 0;
  int splits = 1;
  int section = 1, whole = 0;

  constexpr int64_t count() const { return int64_t{sequences.count()} * heads * splits; }

  constexpr WorkTile at(int index) const {
    const WorkTile place = TileGrid{sequences.count(), heads, 1, splits, section, whole}.at(index);
    WorkTile tile = sequences.at(place.block);
    tile.head = place.head;
    tile.split = place.split;
    return tile;
  }
};

/// Tiles of queries, of sequences of one length or packed.
struct QueryTiles {
  bool packed = false;
  TileGrid grid;
  PackedGrid packed_grid;

  constexpr int64_t count() const { return packed ? packed_grid.count() : grid.count(); }
  constexpr WorkTile at(int index) const { return packed ? packed_grid.at(index) : grid.at(index); }
};

/// The index that persistent CTA `cta` of `ctas` takes in turn `turn`. Turns go forwards and backwards alternately, so
/// that all CTAs get about the same work from indices in falling order of work. The index may lie behind the last one.
constexpr int snake(int turn, int cta, int ctas) {
  return turn * ctas + (turn % 2 == 0 ? cta : ctas - 1 - cta);
}

/// The blocks of keys of split `split` out of `num_splits`: neighbours, in order, as many as in any other split or one
/// more. The first splits get the blocks that are left over, so only the last ones may be empty.
constexpr KvBlocks split_blocks(const KvBlocks& all, int split, int num_splits) {
  if (num_splits == 1) return all;
  // In 64 bits, because with a 32-bit division ptxas spills registers of fwd_sm90_bf16_d256_softcap (nvcc 13.0).
  const int share = static_cast<int>(int64_t{all.count()} / num_splits);
  const int left_over = all.count() - share * num_splits;
  const int begin = all.begin + split * share + (split < left_over ? split : left_over);
  const int end = begin + share + (split < left_over ? 1 : 0);
  const auto clamp = [&](int x) { return x < begin ? begin : (x > end ? end : x); };
  return {begin, clamp(all.full_begin), clamp(all.full_end), end};
}

}  // namespace fovea::tile
