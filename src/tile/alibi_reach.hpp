// How far ALiBi lets a query look. Scores are at most B = |scale| max |q| max |k| apart from 0 (Cauchy and Schwarz), and a query whose
// own position is a key, at distance 0, has a maximum of at least -B. So a key at distance n has a weight, relative to that maximum, of at most
// exp(2 B - slope n), which float32 holds as 0 from a distance on: the reach. Kernels pass over blocks that lie beyond it, whose weights and gradients
// are all 0.
#pragma once

#include <cstdint>

#include "tile/attention_params.hpp"
#include "tile/kv_blocks.hpp"

namespace fovea::tile {

/// Largest |q| and |k| of a head, in parts that CTAs of their own find (cuda/kernels/alibi_norms.cuh): bfloat16, rounded up, that of q in the upper
/// half of a word. Infinite where the slope is too small for any reach, or an element is not finite.
struct AlibiNorms {
  static constexpr int kParts =
      8;  ///< of the rows of a head: a multiple of the four that a thread reads at once

  uint32_t* data = nullptr;  ///< (batch, heads_q, kParts)
  bool wanted = false;       ///< whether the launch has them

  static constexpr int64_t size(int64_t batch, int64_t heads) { return batch * heads * kParts; }
  constexpr uint32_t* of_head(const AttentionParams& p, int batch, int head) const {
    return data + (batch * p.heads_q + head) * kParts;
  }
};

/// Beyond all keys: GPUs have room for fewer.
inline constexpr int kEverywhere = 1 << 30;
/// Weights below 2^-126 are 0: 87.4 of the natural logarithm, and some room for rounding.
inline constexpr float kLeastExponent = 90.0f;
/// The same for `most_score`, whose norms and products are rounded.
inline constexpr float kRoundedUp = 1.0f + 1.0f / 1024;

/// The largest distance at which a key may have a weight. `most_score`: B of above. NaN and infinite scores, and slopes that are not above 0, reach
/// everywhere.
constexpr int alibi_reach(float slope, float most_score) {
  if (!(slope > 0)) return kEverywhere;
  const float reach = (2 * kRoundedUp * most_score + kLeastExponent) / slope;
  return reach < static_cast<float>(kEverywhere) ? static_cast<int>(reach) + 1 : kEverywhere;
}

/// Whether each query of a sequence has its own position among the keys that it sees.
constexpr bool sees_own_position(const SequenceSpan& s) {
  return s.used_k >= s.used_q;
}

/// Blocks of `tile` rows that touch [begin, end), too. Neither is below -2^30.
constexpr KvBlocks blocks_within(KvBlocks blocks, int begin, unsigned end, int tile) {
  const auto clamp = [](int x, int low, int high) { return x < low ? low : x > high ? high : x; };
  const int first = clamp(begin < 0 ? 0 : begin / tile, blocks.begin, blocks.end),
            last =
                clamp(static_cast<int>((end + static_cast<unsigned>(tile) - 1) / static_cast<unsigned>(tile)),
                      first, blocks.end);
  const int full_begin = clamp(blocks.full_begin, first, last),
            full_end = clamp(blocks.full_end, first, last);
  if (full_begin >= full_end) return {first, first, first, last};
  return {first, full_begin, full_end, last};
}

/// Of the blocks of keys that queries [query_begin, query_end) see, those in their reach.
constexpr KvBlocks keys_in_reach(const KvBlocks& blocks, const SequenceSpan& s, int query_begin,
                                 int query_end, int reach, int tile_n) {
  if (!sees_own_position(s)) return blocks;
  const int shift = s.used_k - s.used_q;
  return blocks_within(blocks, query_begin + shift - reach, unsigned(query_end + shift) + unsigned(reach),
                       tile_n);
}
/// Of the blocks of queries that see keys [key_begin, key_end), those that have them in their reach.
constexpr KvBlocks queries_in_reach(const KvBlocks& blocks, const SequenceSpan& s, int key_begin, int key_end,
                                    int reach, int tile_m) {
  if (!sees_own_position(s)) return blocks;
  const int shift = s.used_k - s.used_q, end = key_end - shift + reach;
  return blocks_within(blocks, key_begin - shift - reach, end < 0 ? 0u : unsigned(end), tile_m);
}

}  // namespace fovea::tile
