// Which keys a query sees under causal and window masks, and which queries see a key. Bottom-right aligned:
// query i of sq stands at key position i + sk - sq.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fovea::tile {

/// Half-open range [begin, end); empty when begin >= end.
struct Range {
  int64_t begin = 0, end = 0;
  constexpr bool empty() const { return begin >= end; }
  constexpr int64_t size() const { return empty() ? 0 : end - begin; }
  constexpr bool contains(int64_t x) const { return begin <= x && x < end; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

/// The band of keys around the diagonal; -1 = unlimited. Causal is right = 0.
struct Window {
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t left = -1, right = -1;

  constexpr int64_t diagonal(int64_t query) const { return query + seqlen_k - seqlen_q; }

  /// Keys that `query` sees.
  constexpr Range keys_of(int64_t query) const {
    return {left < 0 ? 0 : std::clamp<int64_t>(diagonal(query) - left, 0, seqlen_k),
            right < 0 ? seqlen_k : std::clamp<int64_t>(diagonal(query) + right + 1, 0, seqlen_k)};
  }
  /// Keys that any query of [begin, end) sees (the union: ranges move by one key a query).
  constexpr Range keys_of_any(int64_t begin, int64_t end) const {
    return {keys_of(begin).begin, keys_of(end - 1).end};
  }
  /// Keys that every query of [begin, end) sees: blocks inside need no mask.
  constexpr Range keys_of_all(int64_t begin, int64_t end) const {
    return {keys_of(end - 1).begin, keys_of(begin).end};
  }
  /// Queries that see any key of [begin, end).
  constexpr Range queries_of_any(int64_t begin, int64_t end) const {
    const int64_t shift = seqlen_k - seqlen_q;
    return {right < 0 ? 0 : std::clamp<int64_t>(begin - right - shift, 0, seqlen_q),
            left < 0 ? seqlen_q : std::clamp<int64_t>(end - 1 + left - shift + 1, 0, seqlen_q)};
  }
  /// Pairs (query, key) that the band keeps.
  constexpr double kept_pairs() const {
    double pairs = 0;
    if (left < 0 && right < 0) return static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
    for (int64_t i = 0; i < seqlen_q; ++i) pairs += static_cast<double>(keys_of(i).size());
    return pairs;
  }
};

}  // namespace fovea::tile
