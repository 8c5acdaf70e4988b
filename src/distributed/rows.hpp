// Rows of a whole sequence axis: ranges, who holds which, and what moves between two holders.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fovea::distributed {

/// Rows, heads or keys [begin, end).
struct Range {
  int64_t begin = 0, end = 0;
  constexpr int64_t size() const { return end - begin; }
  constexpr bool empty() const { return end <= begin; }
  constexpr Range operator&(const Range& other) const {
    return {std::max(begin, other.begin), std::min(end, other.end)};
  }
  constexpr bool operator==(const Range&) const = default;
};

/// Rows that lie side by side in some memory, from its row `at` on.
struct Held {
  Range rows;
  int64_t at = 0;
  constexpr bool operator==(const Held&) const = default;
};
/// What one memory holds, in the order in which it lies there.
using Holding = std::vector<Held>;

/// Sorted, disjoint, none empty, none that touch.
using Rows = std::vector<Range>;

inline Rows sorted(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  Rows rows;
  for (const Range& range : ranges) {
    if (range.empty()) continue;
    if (!rows.empty() && range.begin <= rows.back().end) {
      rows.back().end = std::max(rows.back().end, range.end);
    } else {
      rows.push_back(range);
    }
  }
  return rows;
}
inline Rows rows_of(const Holding& holding) {
  std::vector<Range> ranges;
  for (const Held& held : holding) ranges.push_back(held.rows);
  return sorted(ranges);
}
inline Rows common(const Rows& a, const Rows& b) {
  Rows both;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const Range range = a[i] & b[j];
    if (!range.empty()) both.push_back(range);
    (a[i].end < b[j].end ? i : j) += 1;
  }
  return both;
}
inline Rows with(Rows rows, const Rows& others) {
  rows.insert(rows.end(), others.begin(), others.end());
  return sorted(std::move(rows));
}
inline Rows without(const Rows& rows, const Rows& others) {
  Rows left = rows;
  for (const Range& other : others) {
    std::vector<Range> parts;
    for (const Range& range : left) {
      parts.push_back({range.begin, std::min(range.end, other.begin)});
      parts.push_back({std::max(range.begin, other.end), range.end});
    }
    left = sorted(std::move(parts));
  }
  return left;
}
inline int64_t count(const Rows& rows) {
  int64_t sum = 0;
  for (const Range& range : rows) sum += range.size();
  return sum;
}
inline int64_t count(const Holding& holding) {
  int64_t sum = 0;
  for (const Held& held : holding) sum += held.rows.size();
  return sum;
}
/// A memory that holds these rows in their order.
inline Holding held_in_order(const Rows& rows) {
  Holding holding;
  int64_t at = 0;
  for (const Range& range : rows) {
    holding.push_back({range, at});
    at += range.size();
  }
  return holding;
}

/// Rows side by side in two memories.
struct Run {
  int64_t from = 0, to = 0, rows = 0;
};
/// The rows that both hold, in the order of `from`.
inline std::vector<Run> runs_between(const Holding& from, const Holding& to) {
  std::vector<Run> runs;
  for (const Held& source : from) {
    for (const Held& target : to) {
      const Range both = source.rows & target.rows;
      if (both.empty()) continue;
      runs.push_back({source.at + both.begin - source.rows.begin, target.at + both.begin - target.rows.begin,
                      both.size()});
    }
  }
  return runs;
}

/// Which rank holds which rows of a sequence axis of `total` rows: each row lies on one rank, or, for an axis that is
/// everywhere, on all.
struct Placement {
  int64_t total = 0;
  std::vector<Holding> of_rank;
};

}  // namespace fovea::distributed
