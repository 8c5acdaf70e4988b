// The order of query tiles under a causal mask, where the time of a tile grows with the keys that it sees.
#pragma once

#include <algorithm>
#include <numeric>

#include "ladder/harness/launch.cuh"

namespace ladder {

/// `section` sequences at a time, whose keys fit the L2 cache; in a section the last queries come first,
/// because they see most. The remainder joins the last section: a few sequences have too few short tiles to
/// end with. Tiles of `tile_rows` queries.
struct CausalOrder {
  int blocks, tiles, tiles_of_sequence, section, batch, tile_rows;

  struct Place {
    int sequence, i0;  ///< and its first query
  };
  __device__ __forceinline__ Place at(int tile) const {
    const int last = batch / section - 1, of_tile = tile / (section * tiles_of_sequence);
    const int from = (of_tile < last ? of_tile : last) * section, inside = tile - from * tiles_of_sequence;
    const int sequences = of_tile < last ? section : batch - from;
    return {from + inside % sequences, (tiles_of_sequence - 1 - inside / sequences) * tile_rows};
  }
  /// The tile of a block in a round. Every other round runs backwards, so that the block with the longest tile
  /// of one gets the shortest of the next. `tiles` or more: no tile is left, nor in later rounds.
  __device__ __forceinline__ int tile(int round, int block) const {
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }
};

/// The order for at most `most_blocks` persistent blocks. A section is the fewest sequences whose tiles are
/// whole pairs of rounds. Then its size divides two rounds, and tile x of them and tile 2 blocks - 1 - x, which one
/// block gets, are together as long for each x.
inline CausalOrder causal_order(int batch, int seqlen, int tile_rows, int most_blocks) {
  const int tiles_of_sequence = static_cast<int>(blocks_of(seqlen, tile_rows)),
            tiles = batch * tiles_of_sequence;
  const int blocks = std::min(tiles, most_blocks);
  const int section = 2 * blocks / std::gcd(2 * blocks, tiles_of_sequence);
  return {blocks, tiles, tiles_of_sequence, std::min(batch, section), batch, tile_rows};
}

}  // namespace ladder
