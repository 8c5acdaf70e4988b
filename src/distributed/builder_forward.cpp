// The forward of Builder:
//
//   for each stage: keys, and queries where a group has several ranks, arrive while the stage before is computed
//   where a query has keys in several calls: each call's o, lse is merged with those before, the last one's on the way to the result
//   sinks, and o, lse back to the ranks whose rows they are
#include <algorithm>
#include <bit>
#include <limits>

#include "distributed/builder.hpp"

namespace fovea::distributed {
namespace {

constexpr std::array kArrive = {kQ};
constexpr std::array kOfQueries = {kQ, kO, kLse};

}  // namespace

void Builder::forward() {
  make_working_memory(kOfQueries);
  if (keys_arrive_in_calls()) join_arriving_keys();
  if (!direct_) make_sums();
  pipeline(
      kArrive,
      [&](int i) {
        if (!over_all_keys_.empty()) {
          if (i == 0)
            std::for_each(over_all_keys_.begin(), over_all_keys_.end(), [&](const Attend& a) { add(a); });
          return;
        }
        for (const Call& call : stage_at(i).calls) forward_call(call, stage_at(i));
      },
      [&] {
        if (!direct_ && !p_.shape.queries_everywhere) finish_sums();
      },
      [&](int i) { return start_results(i); });
  if (p_.shape.queries_everywhere) merge_ranks();
}

/// Memory of two results: the sum, and that of a call. Rows whose first call has them all need no zeros to be added to.
void Builder::make_sums() {
  const Shape& shape = p_.shape;
  const int64_t heads = stages_[0].heads_q.size(), rows = shape.batch * rows_ * heads;
  acc_o_ = rows_operand(rows_, heads, shape.head_dim_v, kFloat32);
  acc_lse_ = statistic_operand(rows_, heads);
  part_o_ = rows_operand(rows_, heads, shape.head_dim_v, kFloat32);
  part_lse_ = statistic_operand(rows_, heads);
  Rows written;
  bool whole = true;
  for (const Stage& stage : stages_) {
    for (const Call& call : stage.calls) {
      const int64_t known = count(common(written, call.queries()));
      whole = whole && (known == 0 || known == call.q_rows);
      written = with(written, call.queries());
    }
  }
  if (whole && count(written) == rows_) return;
  fill(acc_o_, rows * shape.head_dim_v, 0);
  fill(acc_lse_, rows, std::bit_cast<uint32_t>(-std::numeric_limits<float>::infinity()));
  written_ = {{0, rows_}};
}

Builder::Operands Builder::result_operands(const Call& call, const Stage& stage) const {
  Operands operands;
  operands[kQ] = at(stage.work[kQ], call.q_at);
  operands[kK] = at(stage.k, call.k_at);
  operands[kV] = at(stage.v, call.k_at);
  operands[kO] = at(stage.work[kO], call.q_at);
  operands[kLse] = at(stage.work[kLse], call.q_at);
  operands[kSink] = callers(kSink);
  if (operands[kSink].present) operands[kSink].view = operands[kSink].view.at(0, stage.heads_q.begin);
  return operands;
}

void Builder::forward_call(const Call& call, const Stage& stage) {
  Operands operands = result_operands(call, stage);
  if (direct_) return attend(call, stage, operands, part_of(call, stage));
  operands[kSink] = {};
  const bool first = common(written_, call.queries()).empty();
  if (!first) add_pending();
  const Merge::Part into = first ? sum_of(call.queries()[0]) : part_of_rows(call.queries()[0]);
  operands[kO] = into.o;
  operands[kLse] = into.lse;
  attend(call, stage, operands, part_of(call, stage));
  if (first) {
    written_ = with(written_, call.queries());
  } else {
    pending_ = call.queries();
  }
}

Merge::Part Builder::sum_of(const Range& rows) const {
  return {at(acc_o_, rows.begin), at(acc_lse_, rows.begin)};
}
/// Where a call's result for these rows lies.
Merge::Part Builder::part_of_rows(const Range& rows) const {
  return {at(part_o_, rows.begin), at(part_lse_, rows.begin)};
}

/// The result of the last call joins the sum, so that the next call may write its own.
void Builder::add_pending() {
  for (const Range& rows : pending_) merge({sum_of(rows), part_of_rows(rows)}, sum_of(rows), rows);
  pending_.clear();
}

void Builder::merge(std::vector<Merge::Part> parts, const Merge::Part& into, const Range& rows) {
  const Stage& stage = stages_[0];
  add(Merge{std::move(parts), into, p_.shape.batch, rows.size(), stage.heads_q.size(), p_.shape.head_dim_v});
}

/// The working o and lse: the last call's result is added on the way.
void Builder::finish_sums() {
  for (const Range& rows : pending_) finish_forward({sum_of(rows), part_of_rows(rows)}, rows);
  for (const Range& rows : without({{0, rows_}}, pending_)) finish_forward({sum_of(rows)}, rows);
  pending_.clear();
}

/// A sink is a key of its own, with a value of zeros.
Merge::Part Builder::sink_part() {
  const Operand zeros{{-1, take(p_.shape.head_dim_v * int64_t{sizeof(float)}), 0, 0, 0}, kFloat32, true};
  fill(zeros, p_.shape.head_dim_v, 0);
  Operand logits = callers(kSink);
  logits.view = logits.view.at(0, stages_[0].heads_q.begin);
  return {zeros, logits};
}

/// The working o and lse of some rows from parts of them, and sinks.
void Builder::finish_forward(std::vector<Merge::Part> parts, const Range& rows) {
  const Operands& work = stages_[0].work;
  if (p_.has(kSink)) parts.push_back(sink_part());
  merge(std::move(parts), {at(work[kO], rows.begin), at(work[kLse], rows.begin)}, rows);
}

/// o and lse of a stage to the ranks whose rows they are, once they are whole.
size_t Builder::start_results(int i) {
  const bool whole = s_.stages_are_heads() || i + 1 == s_.stages();
  if (!queries_travel_ || !whole) return kNothing;
  std::vector<Flow> results;
  results.push_back(queries_out(kO, i));
  if (p_.has(kLse)) results.push_back(queries_out(kLse, i));
  const size_t exchange =
      add_exchange(std::move(results), {Kind::kLeaving, buffer_of(i)}, i + 1 == s_.stages());
  start_leaving(exchange, i);
  return exchange;
}

/// Queries on every rank: all get the sums of all, and merge them in the order of ranks.
void Builder::merge_ranks() {
  add_pending();
  const Shape& shape = p_.shape;
  const int64_t ranks = shape.ranks;
  const Operand parts_o = rows_operand(ranks * rows_, shape.heads_q, shape.head_dim_v, kFloat32);
  const Operand parts_lse = statistic_operand(ranks * rows_, shape.heads_q);
  std::vector<Side> from, to;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    from.push_back({{{{rank * rows_, (rank + 1) * rows_}, 0}}, {0, shape.heads_q}});
    to.push_back({{{{0, ranks * rows_}, 0}}, {0, shape.heads_q}});
  }
  exchange_now({flow(from, to, acc_o_, parts_o, shape.head_dim_v), flow(from, to, acc_lse_, parts_lse, 1)});
  std::vector<Merge::Part> parts;
  for (int64_t rank = 0; rank < ranks; ++rank)
    parts.push_back({at(parts_o, rank * rows_), at(parts_lse, rank * rows_)});
  finish_forward(std::move(parts), {0, rows_});
}

}  // namespace fovea::distributed
