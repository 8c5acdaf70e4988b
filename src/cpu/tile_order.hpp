// How high the tiles of the forward are, and the order in which threads take them: so that all threads end at about the same time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cpu/scratch.hpp"
#include "tile/kv_range.hpp"

namespace fovea::cpu {

/// Tiles of groups (batch entries and key heads) as threads take them. Under a causal mask the last tile of a group sees the most keys and
/// comes first. Groups come one after the other, so that threads read the same keys; the last ones come together, the last tiles of
/// all of them first, so that what is left for the end is short.
struct TileOrder {
  /// Enough that short tiles even out what long ones leave.
  static constexpr int64_t kLastTilesOfThread = 3;

  int64_t groups, tiles;    ///< tiles of each group
  int64_t groups_together;  ///< at the end

  TileOrder(int64_t all_groups, int64_t tiles_of_group, int64_t threads)
      : groups(all_groups),
        tiles(tiles_of_group),
        groups_together(std::min(groups, ceil_div(kLastTilesOfThread * threads, tiles))) {}
  int64_t count() const { return groups * tiles; }

  struct Place {
    int64_t group, tile;
  };
  /// Of the tile that is taken as number `index`.
  Place at(int64_t index) const {
    const int64_t groups_before = groups - groups_together, last = index - groups_before * tiles;
    if (last < 0) return {index / tiles, tiles - 1 - index % tiles};
    return {groups_before + last % groups_together, tiles - 1 - last / groups_together};
  }
};

/// Panels of a tile, where all tiles are as high but for one panel.
inline tile::Range panels_of_tile(int64_t all_panels, int64_t tiles, int64_t tile) {
  return {all_panels * tile / tiles, all_panels * (tile + 1) / tiles};
}

/// What a tile takes with a key, in rows of queries: its own in steps of `step_rows`, and `read_rows` for the key itself, which is copied or read
/// from a last-level cache.
struct TileCost {
  int64_t step_rows, read_rows;
  int64_t least_panels = 1;  ///< of the highest tiles
};

/// Queries against keys, as tiles divide them.
struct TileWork {
  const AttentionProblem& problem;
  int64_t groups;
  int64_t splits, split_keys;  ///< of the keys; splits are taken one by one
  TileCost cost;

  int64_t rows() const { return problem.seqlen_q * problem.group(); }
};

/// Panels of the highest tiles, at most `most`, with which `threads` threads end first by a rule that was fitted to measurements
/// (docs/kernels/log/cpu.md, "Causal masks on 16 threads"), if causal masks and windows are all that hides keys. No result depends on it.
int64_t panels_of_tiles(const TileWork& work, int64_t most, int64_t threads);

}  // namespace fovea::cpu
