// A rule for the height of tiles, from what each takes.
#include "cpu/tile_order.hpp"

#include <limits>

#include "cpu/ops.hpp"

namespace fovea::cpu {
namespace {

// Cores differ: the longest tile, which is taken first, may take so much longer than it would on the others.
constexpr double kSlowCore = 1.25;
// At the end a thread waits for so much of a tile of another.
constexpr double kWaited = 0.25;

/// The tiles of a group, in rows times keys.
struct TileTimes {
  double longest = 0, sum = 0;

  void add(double time) {
    longest = std::max(longest, time);
    sum += time;
  }
};

TileTimes times_of(const TileWork& work, int64_t all_panels, int64_t tiles) {
  const AttentionProblem& p = work.problem;
  const tile::Window window{p.seqlen_q, p.seqlen_k, p.window_left, p.window_right};
  TileTimes times;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const tile::Range panels = panels_of_tile(all_panels, tiles, tile);
    const int64_t first_row = panels.begin * kPanel, end_row = std::min(work.rows(), panels.end * kPanel);
    for (int64_t split = 0; split < work.splits; ++split) {
      const int64_t first_key = split * work.split_keys;
      const int64_t last_key = split + 1 < work.splits ? first_key + work.split_keys : p.seqlen_k;
      const auto keys_of_rows = [&](int64_t begin, int64_t end) {
        const tile::Range keys = window.keys_of_any(begin / p.group(), (end - 1) / p.group() + 1);
        return tile::Range{std::max(keys.begin, first_key), std::min(keys.end, last_key)}.size();
      };
      int64_t time = work.cost.read_rows * keys_of_rows(first_row, end_row);
      for (int64_t row = first_row; row < end_row; row += work.cost.step_rows)
        time += work.cost.step_rows * keys_of_rows(row, std::min(row + work.cost.step_rows, end_row));
      times.add(static_cast<double>(time));
    }
  }
  return times;
}

}  // namespace

int64_t panels_of_tiles(const TileWork& work, int64_t most, int64_t threads) {
  // With more tiles than that a thread, waiting is little, and the highest ones read the fewest keys.
  constexpr int64_t kManyTilesOfThread = 32;
  const int64_t all_panels = ceil_div(work.rows(), kPanel), highest = std::min(most, all_panels);
  if (highest <= 1 || work.groups == 0) return 1;
  int64_t best = highest;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t panels = highest; panels >= work.cost.least_panels; --panels) {
    const int64_t tiles = ceil_div(all_panels, panels);
    if (ceil_div(all_panels, tiles) != panels) continue;  // as many lower tiles do
    const int64_t items = work.groups * tiles * work.splits;
    if (items >= kManyTilesOfThread * threads) break;
    const TileTimes times = times_of(work, all_panels, tiles);
    const double sum = static_cast<double>(work.groups) * times.sum;
    const double time = std::max(kSlowCore * times.longest, sum / static_cast<double>(threads) +
                                                                kWaited * sum / static_cast<double>(items));
    if (time >= least) continue;
    least = time;
    best = panels;
  }
  return best;
}

}  // namespace fovea::cpu
