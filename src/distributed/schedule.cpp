// The definitions of schedule.hpp.
#include "distributed/schedule.hpp"

#include <algorithm>

namespace fovea::distributed {
namespace {

/// Share `index` of `count` of [0, size).
Range share(int64_t size, int index, int count) {
  return {size * index / count, size * (index + 1) / count};
}

bool contains(const Range& outer, const Range& inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

/// Adds a whole sequence behind those of the call.
void append_sequence(Call& call, const Sequence& s) {
  if (call.starts_q.empty()) {
    call.starts_q = {0, static_cast<int32_t>(call.q_rows)};
    call.starts_k = {0, static_cast<int32_t>(call.k_rows)};
  }
  call.q_rows += s.queries.size();
  call.k_rows += s.keys.size();
  call.starts_q.push_back(static_cast<int32_t>(call.q_rows));
  call.starts_k.push_back(static_cast<int32_t>(call.k_rows));
  call.longest_q = std::max(call.longest_q, s.queries.size());
  call.longest_k = std::max(call.longest_k, s.keys.size());
}

Call call_of(const Cut& cut, const Sequence& s, int64_t number, const Held& queries, const Held& keys) {
  Call call{queries.at + cut.queries.begin - queries.rows.begin,
            cut.queries.size(),
            keys.at + cut.keys.begin - keys.rows.begin,
            cut.keys.size(),
            cut.window,
            {},
            {}};
  call.longest_q = call.q_rows;
  call.longest_k = call.k_rows;
  call.sequence = number;
  call.first_q = cut.queries.begin - s.queries.begin;
  call.first_k = cut.keys.begin - s.keys.begin;
  call.whole_q = s.queries.size();
  call.whole_k = s.keys.size();
  return call;
}

/// The sum of i + shift over i in [0, count), each no less than 0 and no more than `most`.
double clamped_sum(int64_t count, int64_t shift, int64_t most) {
  const int64_t first = std::clamp<int64_t>(-shift, 0, count),
                last = std::clamp<int64_t>(most - shift, first, count);
  const auto rising = static_cast<double>(last - first);
  return rising * (static_cast<double>(first + last - 1) / 2 + static_cast<double>(shift)) +
         static_cast<double>(count - last) * static_cast<double>(most);
}

/// Pairs of queries [0, queries) and keys [0, keys) that a window keeps.
double pairs_in_window(int64_t queries, int64_t keys, const Window& window) {
  const int64_t shift = keys - queries;
  const double ends = window.right < 0 ? static_cast<double>(queries) * static_cast<double>(keys)
                                       : clamped_sum(queries, shift + window.right + 1, keys);
  const double begins = window.left < 0 ? 0 : clamped_sum(queries, shift - window.left, keys);
  return ends - begins;
}

bool sees_all(const Call& call) {
  return pairs_in_window(call.q_rows, call.k_rows, call.window) ==
         static_cast<double>(call.q_rows) * static_cast<double>(call.k_rows);
}

/// Whether each query of the call sees the first keys of it, up to a diagonal or the last.
bool sees_first_keys(const Call& call) {
  return call.starts_q.empty() && (call.window.left < 0 || sees_all(call));
}

/// The last key that the first query sees, were there enough keys.
int64_t diagonal_of(const Call& call) {
  return call.k_rows - call.q_rows + call.window.right;
}

void join(Call& call, const Call& other, int64_t q_rows, int64_t k_rows, Window window) {
  call.window = window;
  call.longest_q = call.q_rows = q_rows;
  call.longest_k = call.k_rows = k_rows;
  call.first_q = std::min(call.first_q, other.first_q);
  call.first_k = std::min(call.first_k, other.first_k);
}

/// Adds the keys of `other`, which stand behind the call's, for the same queries.
bool joins_keys(Call& call, const Call& other) {
  if (other.q_at != call.q_at || other.q_rows != call.q_rows || other.k_at != call.k_at + call.k_rows ||
      other.sequence != call.sequence || !sees_all(call) || !sees_first_keys(call) || !sees_first_keys(other))
    return false;
  // The diagonal of both together may not cut into the call's keys.
  if (!sees_all(other) && diagonal_of(other) < -1) return false;
  join(call, other, call.q_rows, call.k_rows + other.k_rows, {-1, sees_all(other) ? -1 : other.window.right});
  return true;
}

/// Adds the queries of `other`, which stand behind the call's and see the same keys or more.
bool joins_queries(Call& call, const Call& other) {
  if (other.q_at != call.q_at + call.q_rows || other.k_at != call.k_at || other.k_rows < call.k_rows ||
      other.sequence != call.sequence || !sees_first_keys(call) || !sees_first_keys(other))
    return false;
  const bool all = sees_all(call) && sees_all(other) && call.k_rows == other.k_rows;
  // The call's last query sees its last key by the diagonal, not because there are no more.
  const bool same_diagonal = call.window.right == 0 && other.window.right >= 0 &&
                             diagonal_of(call) == diagonal_of(other) - call.q_rows;
  if (!all && !same_diagonal) return false;
  join(call, other, call.q_rows + other.q_rows, other.k_rows, {-1, all ? -1 : other.window.right});
  return true;
}

template <class Joins>
std::vector<Call> joined_by(const std::vector<Call>& calls, Joins&& joins) {
  std::vector<Call> fewer;
  for (const Call& call : calls) {
    if (fewer.empty() || !joins(fewer.back(), call)) fewer.push_back(call);
  }
  return fewer;
}

}  // namespace

std::vector<Call> joined(const std::vector<Call>& calls) {
  return joined_by(joined_by(calls, joins_keys), joins_queries);
}

Placement with_borders_at(const Placement& placement, const std::vector<Sequence>& sequences,
                          Range Sequence::*axis, int64_t multiple) {
  const auto moved = [&](int64_t border) {
    const auto behind =
        std::upper_bound(sequences.begin(), sequences.end(), border,
                         [&](int64_t row, const Sequence& s) { return row < (s.*axis).begin; });
    if (behind == sequences.begin()) return border;
    const Range& rows = (*std::prev(behind)).*axis;
    if (border >= rows.end) return border;
    return std::min(rows.end, aligned_down(border + multiple / 2, rows.begin, multiple));
  };
  Placement made{placement.total, {}};
  for (const Holding& holding : placement.of_rank) {
    Holding& own = made.of_rank.emplace_back();
    int64_t at = 0;
    for (const Held& held : holding) {
      const Range rows{moved(held.rows.begin), moved(held.rows.end)};
      if (rows.empty()) continue;
      own.push_back({rows, at});
      at += rows.size();
    }
  }
  return made;
}

std::vector<Call> calls_of(const std::vector<Sequence>& sequences, const Window& window,
                           const Holding& queries, const Holding& keys, int64_t multiple) {
  std::vector<Call> calls;
  for (const Held& q : queries) {
    for (const Held& k : keys) {
      bool open = false;  // whether the last call ends where a whole sequence may follow
      for (size_t number = 0; number < sequences.size(); ++number) {
        const Sequence& s = sequences[number];
        if (s.queries.begin > q.rows.end) break;
        if (s.queries.end < q.rows.begin || (!open && s.queries.empty() && s.keys.empty())) continue;
        const bool whole = contains(q.rows, s.queries) && contains(k.rows, s.keys);
        if (whole && open) {
          append_sequence(calls.back(), s);
        } else if (whole) {
          calls.push_back(call_of({s.queries, s.keys, window}, s, static_cast<int64_t>(number), q, k));
        } else if (const auto made = cut(s, q.rows, k.rows, window, multiple)) {
          calls.push_back(call_of(*made, s, static_cast<int64_t>(number), q, k));
        }
        open = whole;
      }
    }
  }
  std::erase_if(calls, [](const Call& call) { return call.q_rows == 0 || call.k_rows == 0; });
  return calls;
}

bool covers_once(const std::vector<Call>& calls, int64_t Call::*at, int64_t Call::*size, int64_t rows) {
  std::vector<Range> ranges;
  for (const Call& call : calls) ranges.push_back({call.*at, call.*at + call.*size});
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  int64_t next = 0;
  for (const Range& range : ranges) {
    if (range.begin != next) return false;
    next = range.end;
  }
  return next == rows;
}

double pairs_of(const Call& call) {
  if (call.starts_q.empty()) return pairs_in_window(call.q_rows, call.k_rows, call.window);
  double pairs = 0;
  for (size_t i = 1; i < call.starts_q.size(); ++i) {
    pairs += pairs_in_window(call.starts_q[i] - call.starts_q[i - 1], call.starts_k[i] - call.starts_k[i - 1],
                             call.window);
  }
  return pairs;
}

Schedule::Schedule(const Shape& shape, Method method)
    : shape_(shape),
      method_(method),
      queries_(with_borders_at(shape.queries, shape.sequences, &Sequence::queries, shape.row_multiple)),
      keys_(with_borders_at(shape.keys, shape.sequences, &Sequence::keys, shape.row_multiple)),
      queries_lie_(queries_.of_rank == shape.queries.of_rank),
      keys_lie_(keys_.of_rank == shape.keys.of_rank) {}

int Schedule::stages() const {
  // Without keys there is nothing to divide.
  return shape_.queries_everywhere || (stages_are_heads() && shape_.keys.total == 0) ? 1 : method_.stages;
}

Range Schedule::heads_kv(int rank, int stage) const {
  const Range own = share(shape_.heads_kv, rank % method_.heads_ranks, method_.heads_ranks);
  if (!stages_are_heads()) return own;
  const Range part = share(own.size(), stage, stages());
  return {own.begin + part.begin, own.begin + part.end};
}

Holding Schedule::queries(int rank) const {
  if (method_.heads_ranks == 1) return queries_.of_rank[static_cast<size_t>(rank)];
  std::vector<Range> ranges;
  for (int member = 0; member < method_.heads_ranks; ++member) {
    const auto of = static_cast<size_t>(group_of(rank) * method_.heads_ranks + member);
    for (const Held& held : queries_.of_rank[of]) ranges.push_back(held.rows);
  }
  return held_in_order(sorted(ranges));
}

Rows Schedule::seen(int rank) const {
  std::vector<Range> ranges;
  for (const Held& held : queries(rank)) {
    for (const Sequence& s : shape_.sequences)
      ranges.push_back(seen_keys(s, held.rows & s.queries, shape_.window, shape_.row_multiple));
  }
  return sorted(ranges);
}

bool Schedule::is_own(int stage) const {
  if (shape_.queries_everywhere) return true;
  return method_.heads_ranks == 1 && stage == 0 && (method_.stages > 1 || groups() == 1);
}

bool Schedule::in_place(int rank, int stage) const {
  static_cast<void>(rank);
  return is_own(stage) && keys_lie_;
}

Holding Schedule::keys(int rank, int stage) const {
  if (is_own(stage)) return keys_.of_rank[static_cast<size_t>(rank)];
  // Stage 0 of several is the group's own; the other groups follow in the order of their distance, in shares.
  const bool all = stages() == 1 || stages_are_heads();
  const Range distances = all          ? Range{0, groups()}
                          : stage == 0 ? Range{0, 1}
                                       : share(groups() - 1, stage - 1, stages() - 1);
  const int64_t first = !all && stage > 0 ? 1 : 0;
  std::vector<Range> ranges;
  for (int64_t distance = first + distances.begin; distance < first + distances.end; ++distance) {
    const auto owner = (group_of(rank) + distance) % groups();
    for (int member = 0; member < method_.heads_ranks; ++member) {
      const auto of = static_cast<size_t>(owner * method_.heads_ranks + member);
      for (const Held& held : keys_.of_rank[of]) ranges.push_back(held.rows);
    }
  }
  // Whole sequences are one call, whatever their queries see.
  return held_in_order(stages_are_heads() ? sorted(ranges) : common(sorted(ranges), seen(rank)));
}

std::vector<Call> Schedule::calls(int rank, int stage) const {
  if (heads_kv(rank, stage).empty()) return {};
  const std::vector<Call> calls =
      calls_of(shape_.sequences, shape_.window, queries(rank), keys(rank, stage), shape_.row_multiple);
  return shape_.joins ? joined(calls) : calls;
}

double Schedule::pairs(int rank, int stage) const {
  double pairs = 0;
  for (const Call& call : calls(rank, stage)) pairs += pairs_of(call);
  return pairs;
}

}  // namespace fovea::distributed
