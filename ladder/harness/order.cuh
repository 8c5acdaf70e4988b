// In which order tiles of queries are taken under a causal mask, where a tile takes as long as it sees keys.
#pragma once

#include <algorithm>
#include <numeric>

#include "ladder/harness/launch.cuh"

namespace ladder {

/// `section` sequences at a time, whose keys the L2 cache is to hold; of these the last queries come first,
/// since they see most. What is left joins the last section: too few sequences have too few short tiles to
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
  /// The tile of a block in a round: every other round backwards, so that who had the longest of one gets the
  /// shortest of the next. `tiles` or more: there is none, nor in later rounds.
  __device__ __forceinline__ int tile(int round, int block) const {
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }
};

/// For at most `most_blocks` blocks, which stay. A section is the fewest sequences whose tiles are whole
/// pairs of rounds. Then its size divides two rounds, and tile x of them and tile 2 blocks - 1 - x, which one
/// block gets, are together as long for each x.
inline CausalOrder causal_order(int batch, int seqlen, int tile_rows, int most_blocks) {
  const int tiles_of_sequence = static_cast<int>(blocks_of(seqlen, tile_rows)),
            tiles = batch * tiles_of_sequence;
  const int blocks = std::min(tiles, most_blocks);
  const int section = 2 * blocks / std::gcd(2 * blocks, tiles_of_sequence);
  return {blocks, tiles, tiles_of_sequence, std::min(batch, section), batch, tile_rows};
}

}  // namespace ladder
