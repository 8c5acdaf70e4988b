// Parts of an attention problem: the pairs of some rows of queries and some rows of keys of a sequence are a plain problem again,
// with a window of its own.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "distributed/rows.hpp"

namespace fovea::distributed {

/// Which keys a query sees: key j of query i where i + shift - left <= j <= i + shift + right, shift = keys - queries of the
/// sequence. -1: unlimited.
struct Window {
  int64_t left = -1, right = -1;
  constexpr bool operator==(const Window&) const = default;
};

/// One sequence: where its rows lie on the axes of queries and of keys.
struct Sequence {
  Range queries, keys;
  constexpr int64_t shift() const { return keys.size() - queries.size(); }
};

/// The pairs of these queries and keys, aligned as every problem is: the last query sees the last key and `window.right` more.
struct Cut {
  Range queries, keys;  ///< on the axes
  Window window;
};

/// The last position up to `row` that lies a multiple of `multiple` behind `begin`.
constexpr int64_t aligned_down(int64_t row, int64_t begin, int64_t multiple) {
  return row - (row - begin) % multiple;
}

/// The keys that at least one of `queries` sees, on the axis; both within the sequence. They begin a multiple of `multiple` behind
/// its first.
inline Range seen_keys(const Sequence& s, const Range& queries, const Window& window, int64_t multiple = 1) {
  if (queries.empty()) return {s.keys.begin, s.keys.begin};
  // Position of a query among the keys: its diagonal.
  const int64_t first = queries.begin - s.queries.begin + s.shift() + s.keys.begin;
  const int64_t last = queries.end - 1 - s.queries.begin + s.shift() + s.keys.begin;
  Range seen = s.keys;
  if (window.left >= 0) seen.begin = std::max(seen.begin, first - window.left);
  if (window.right >= 0) seen.end = std::min(seen.end, last + window.right + 1);
  if (seen.empty()) return {s.keys.begin, s.keys.begin};
  seen.begin = aligned_down(seen.begin, s.keys.begin, multiple);
  return seen;
}

/// What queries and keys of a sequence have in common, without rows that see none of the keys and keys that none of the queries
/// sees; nothing where no pair is seen. Where `queries` and `keys` begin multiples of `multiple` behind the sequence's first, the cut
/// does.
inline std::optional<Cut> cut(const Sequence& s, const Range& queries, const Range& keys,
                              const Window& window, int64_t multiple = 1) {
  Range q = queries & s.queries, k = keys & s.keys;
  if (q.empty() || k.empty()) return std::nullopt;
  k = k & seen_keys(s, q, window, multiple);
  if (k.empty()) return std::nullopt;
  // A query i is at key i + diagonal.
  const int64_t diagonal = s.keys.begin + s.shift() - s.queries.begin;
  if (window.right >= 0) q.begin = std::max(q.begin, k.begin - diagonal - window.right);
  if (window.left >= 0) q.end = std::min(q.end, k.end - diagonal + window.left);
  if (q.empty()) return std::nullopt;
  q.begin = aligned_down(q.begin, s.queries.begin, multiple);
  // The last query's diagonal lies `beyond` keys behind the last key of the cut, which aligns the cut.
  const int64_t beyond = q.end + diagonal - k.end;
  Cut made{q, k, {}};
  if (window.left >= 0) made.window.left = window.left - beyond;
  if (window.right >= 0) made.window.right = window.right + beyond;
  return made;
}

}  // namespace fovea::distributed
