// Stream-K for few queries and many keys: the blocks of all tiles, one tile behind the other, in equal shares, one for each CTA
// (Osama et al., "Stream-K", 2023, arXiv 2301.03598; for attention "LeanAttention", 2024, arXiv 2405.10480). Every CTA then
// reads as much as any other, whatever the lengths are.
//
//   sequences    0               1         2
//   tiles        a       b       c    d    e f      heads of a sequence side by side
//   shares       |-----|-----|-----|-----|----|
//
// A unit is a block of keys that a tile sees; a tile that sees none has one unit, so that somebody writes its rows. A tile that
// lies in one share is computed there. Of a tile that is cut each share writes a part; who finds all of them there merges them.
#pragma once

#include <cstdint>

#include "tile/kv_blocks.hpp"

namespace fovea::tile {

/// What a share has of a tile.
struct StreamTile {
  int batch = 0, head = 0;
  int units = 0;           ///< of the tile
  int begin = 0, end = 0;  ///< those in the share

  constexpr bool whole() const { return begin == 0 && end == units; }
};

struct StreamK {
  const int* before = nullptr;  ///< (batch + 1): units of all sequences before each, and of all
  int batch = 0, heads = 0, ctas = 0;

  constexpr int total() const { return before[batch]; }
  /// CTAs that have a share: none is empty.
  constexpr int shares() const { return total() < ctas ? total() : ctas; }
  /// The first unit of a share; of share shares() one behind the last. The first shares have the units that are left over.
  constexpr int first_unit(int share) const {
    const int each = total() / shares(), left_over = total() - each * shares();
    return share * each + (share < left_over ? share : left_over);
  }
  constexpr int share_of(int unit) const {
    const int each = total() / shares(), left_over = total() - each * shares();
    const int of_larger = left_over * (each + 1);
    return unit < of_larger ? unit / (each + 1) : left_over + (unit - of_larger) / each;
  }
  constexpr int units_of_tile(int sequence) const {
    return (before[sequence + 1] - before[sequence]) / heads;
  }

  /// The first tile of a share, which there is.
  constexpr StreamTile first_tile(int share) const {
    const int unit = first_unit(share);
    int low = 0, high = batch;  // the sequence is in [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (before[middle] <= unit ? low : high) = middle;
    }
    const int units = units_of_tile(low), head = (unit - before[low]) / units;
    const int begin = unit - before[low] - head * units, end = begin + first_unit(share + 1) - unit;
    return {low, head, units, begin, end < units ? end : units};
  }
  /// The tile behind `tile` in a share that has `left` more units.
  constexpr StreamTile next_tile(StreamTile tile, int left) const {
    if (++tile.head == heads) {
      tile.head = 0;
      do {
        tile.units = units_of_tile(++tile.batch);
      } while (tile.units == 0);
    }
    tile.begin = 0;
    tile.end = left < tile.units ? left : tile.units;
    return tile;
  }
  /// Where CTA `cta` leaves its part of a tile that is cut: at most two a CTA, of its first tile and its last.
  static constexpr int part(int cta, const StreamTile& tile) { return 2 * cta + (tile.begin == 0 ? 1 : 0); }
  /// Part n of the tile whose first unit CTA `first_cta` has. The CTA with the next share is `lanes` further.
  static constexpr int part_of_tile(int first_cta, int lanes, int n) {
    return n == 0 ? 2 * first_cta + 1 : 2 * (first_cta + n * lanes);
  }
};

/// Units of a sequence whose tiles see `blocks`.
constexpr int stream_units(const KvBlocks& blocks, int heads) {
  const int count = blocks.count();
  return heads * (count > 0 ? count : 1);
}

/// Units [begin, end) of blocks that a tile sees.
constexpr KvBlocks units_of(const KvBlocks& all, int begin, int end) {
  if (all.empty()) return all;
  const int from = all.begin + begin, to = all.begin + end;
  const auto clamp = [&](int x) { return x < from ? from : (x > to ? to : x); };
  return {from, clamp(all.full_begin), clamp(all.full_end), to};
}

/// The same blocks, cut into `each` pieces.
constexpr KvBlocks pieces_of(const KvBlocks& blocks, int each) {
  return {blocks.begin * each, blocks.full_begin * each, blocks.full_end * each, blocks.end * each};
}

}  // namespace fovea::tile
