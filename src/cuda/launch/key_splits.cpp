// Into how many parts the keys of a forward are divided, and which of several kernels, of a backward as well, ends soonest.
#include <algorithm>
#include <cmath>

#include "cuda/launch/schedule.hpp"
#include "cuda/launch/sizes.hpp"

namespace fovea::cuda {
namespace {

/// What a CTA costs beside its blocks of keys (launch, Q, the epilogue), in blocks.
constexpr double kFixedSteps = 2;
/// What the launch that merges costs, in blocks, and each part that it reads for each CTA that wrote it.
constexpr double kMergeSteps = 4, kPartSteps = 0.25;

}  // namespace

int64_t rows_of_parts(const AttentionProblem& p) {
  return saturating_product(p.batch * p.heads_q, p.seqlen_q);
}

bool many_rows(const AttentionProblem& p, const Kernel& kernel) {
  // Steps of decoding have less: a tile a key head and sequence.
  constexpr int64_t kRowsOfTile = 64;
  return kernel.rate > 0 && p.seqlen_q * p.group() > kRowsOfTile && p.arriving_keys == 0;
}

namespace {

/// Tiles of a problem, of `rows` each, and how many keys a forward's have, or queries a backward's.
struct Tiles {
  int64_t count = 0;
  int rows = 0;
  double longest = 0, average = 0, shortest = 0;
};

Tiles tiles_of_forward(const AttentionProblem& p, const Kernel& kernel) {
  const bool pack = packs_group(p, kernel);
  const int64_t heads = pack ? p.heads_kv : p.heads_q, rows = p.seqlen_q * (pack ? p.group() : 1);
  Tiles tiles{.rows = kernel.tile_m};
  tiles.count = heads * (p.packed ? ceil_div(p.total_q * (pack ? p.group() : 1), kernel.tile_m) + p.batch / 2
                                  : p.batch * ceil_div(rows, kernel.tile_m));
  tiles.longest = static_cast<double>(ceil_div(p.seqlen_k, std::max(1, kernel.tile_n))) * kernel.tile_n;
  tiles.average = tiles.longest;
  if (p.window_right >= 0)
    tiles.average = std::max(tiles.longest - static_cast<double>(p.seqlen_q) / 2, tiles.longest / 2);
  if (p.window_left >= 0) {
    const auto wide =
        static_cast<double>(p.window_left + std::max<int64_t>(p.window_right, 0) + kernel.tile_m);
    tiles.longest = std::min(tiles.longest, wide);
    tiles.average = std::min(tiles.average, wide);
  }
  tiles.shortest = p.packed ? 0 : std::max(0.0, tiles.longest - static_cast<double>(p.seqlen_q));
  return tiles;
}

Tiles tiles_of_backward(const AttentionProblem& p, const Kernel& kernel) {
  Tiles tiles{.rows = kernel.tile_n};
  tiles.count = p.heads_kv * (p.packed_k ? ceil_div(p.total_k, kernel.tile_n) + p.batch / 2
                                         : p.batch * ceil_div(p.seqlen_k, kernel.tile_n));
  const auto queries = static_cast<double>(p.seqlen_q), keys = static_cast<double>(p.seqlen_k);
  double longest = queries, average = queries, shortest = queries;
  // The last query sees all keys: the first keys are seen by all queries, or by as many as there are keys.
  if (p.window_right >= 0) {
    longest = std::min(queries, keys);
    average = queries < keys ? queries * (1 - queries / (2 * keys)) : keys / 2;
    shortest = 0;
  }
  if (p.window_left >= 0) {
    const auto wide =
        static_cast<double>(p.window_left + std::max<int64_t>(p.window_right, 0) + kernel.tile_n);
    longest = std::min(longest, wide), average = std::min(average, wide);
  }
  if (p.packed) shortest = 0;
  const auto group = static_cast<double>(p.group());
  tiles.longest = longest * group, tiles.average = average * group, tiles.shortest = shortest * group;
  return tiles;
}

/// In units of time_of_tiles.
class TileTimes {
 public:
  TileTimes(const AttentionProblem& p, const Kernel& kernel, int sm_count)
      : p_(p),
        kernel_(kernel),
        sms_(std::max(1, sm_count)),
        tiles_(kernel.kind == KernelKind::kBackward ? tiles_of_backward(p, kernel)
                                                    : tiles_of_forward(p, kernel)) {}

  /// With the keys in `parts`, and the launch that merges them.
  double of_parts(int64_t parts) const {
    const double tiles = static_cast<double>(tiles_.count) * static_cast<double>(parts),
                 share = 1.0 / static_cast<double>(parts);
    const int each = kernel_.ctas_per_sm, slots = sms_ * each;
    const double turns = tiles / slots;
    // A CTA alone on its SM reaches three quarters of what several do.
    constexpr double kAlone = 4.0 / 3.0;
    const double sharing = each == 1 ? 1.0 : std::clamp(std::ceil(tiles / sms_), kAlone, double(each));
    const int rate =
        tiles_.average < tiles_.longest && kernel_.unequal_rate > 0 ? kernel_.unequal_rate : kernel_.rate;
    const auto tile_time = [&](double keys) {
      // Start and end of a tile cost about as much as so many keys of it.
      constexpr double kFixedKeys = 200;
      return tiles_.rows * (keys * share + kFixedKeys) * sharing / rate;
    };
    const double merge = parts == 1 ? 0.0 : time_to_merge(parts);
    // Tiles of one length take whole turns; of many lengths, longest first, they even out, as far as the shortest are short.
    if (tiles_.average == tiles_.longest) return std::ceil(turns) * tile_time(tiles_.longest) + merge;
    return std::max({tile_time(tiles_.longest), turns * tile_time(tiles_.average),
                     std::ceil(turns) * tile_time(tiles_.shortest)}) +
           merge;
  }

 private:
  double time_to_merge(int64_t parts) const {
    // An H200 takes 1 us for 175, 112 and 65 units at head sizes of 64, 128 and 256.
    const double units_of_us = 20000.0 / static_cast<double>(p_.head_dim + 50);
    // A launch, and its parts, which are written and read, at 2.5 TB/s.
    constexpr double kLaunchUs = 4, kBytesOfUs = 2.5e6;
    const auto rows = static_cast<double>(rows_of_parts(p_));
    const double bytes = rows * static_cast<double>(2 * parts * 4 * (p_.head_dim_v + 1) + 2 * p_.head_dim_v);
    return units_of_us * (kLaunchUs + bytes / kBytesOfUs);
  }

  const AttentionProblem& p_;
  const Kernel& kernel_;
  int sms_;
  Tiles tiles_;
};

}  // namespace

int64_t soonest_parts(const AttentionProblem& p, const Kernel& kernel, int sm_count, int64_t largest) {
  const TileTimes times(p, kernel, sm_count);
  constexpr int64_t kMostParts = 8;  // of a row that the merge reads beside others (merge_rows.cuh)
  const int64_t steps = ceil_div(keys_of_tile(p, kernel), std::max(1, kernel.tile_n));
  int64_t best = 1;
  for (int64_t parts = 2; parts <= std::min({kMostParts, steps, largest}); ++parts)
    if (times.of_parts(parts) < times.of_parts(best)) best = parts;
  return best;
}

int64_t largest_parts(const AttentionProblem& p, int64_t most_bytes) {
  return most_bytes / std::max<int64_t>(1, saturating_product(rows_of_parts(p), (p.head_dim_v + 1) * 4));
}

double time_of_tiles(const AttentionProblem& p, const Kernel& kernel, int sm_count, const KeySplits& asked) {
  int64_t parts = 1;
  if (kernel.kind == KernelKind::kForward && kernel.can_split && many_rows(p, kernel)) {
    const int64_t largest = largest_parts(p, asked.batch_invariant ? kMaxPartBytesOfSequence : kMaxPartBytes);
    parts = asked.most > 0 ? std::clamp<int64_t>(asked.most, 1, std::max<int64_t>(1, largest))
                           : soonest_parts(p, kernel, sm_count, largest);
  }
  return TileTimes(p, kernel, sm_count).of_parts(parts);
}

int best_num_splits(int64_t ctas, int64_t steps, int64_t slots, int64_t largest) {
  // What the last wave leaves idle is worth the traffic of parts only where there are few waves. (With 10 of
  // them, parts of a forward of 4 x 32 heads, d64, 4096 keys took a quarter longer on an H200.)
  constexpr int64_t kMostWaves = 2;
  if (ctas <= 0 || steps <= 1 || slots <= 0 || ctas > kMostWaves * slots) return 1;
  const auto cost = [&](int64_t splits) {
    const int64_t waves = ceil_div(ctas * splits, slots);
    const double each = static_cast<double>(ceil_div(steps, splits)) + kFixedSteps;
    const double merge = splits == 1 ? 0.0
                                     : kMergeSteps + kPartSteps * static_cast<double>(splits) *
                                                         static_cast<double>(ceil_div(ctas, slots));
    return static_cast<double>(waves) * each + merge;
  };
  int64_t best = 1;
  const int64_t most = std::min({steps, kMostSplits, largest});
  for (int64_t splits = 2; splits <= most; ++splits) {
    if (cost(splits) < cost(best)) best = splits;
  }
  // Fewer splits whose longest has as many steps: less to merge.
  return static_cast<int>(ceil_div(steps, ceil_div(steps, best)));
}

}  // namespace fovea::cuda
