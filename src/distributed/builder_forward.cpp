// The forward of Builder:
//
//   for each stage: keys, and queries where a group has several ranks, arrive while the stage before is computed
//   where a query has keys in several calls: each call's o, lse is merged with those before
//   sinks, and o, lse back to the ranks whose rows they are
#include <bit>
#include <limits>

#include "distributed/builder.hpp"

namespace fovea::distributed {
namespace {

constexpr std::array kArrive = {kQ};
constexpr std::array kOfQueries = {kQ, kO, kLse};

}  // namespace

void Builder::forward() {
  const Shape& shape = p_.shape;
  make_working_memory(kOfQueries);
  if (!direct_) {
    const int64_t heads = stages_[0].heads_q.size(), rows = shape.batch * rows_ * heads;
    acc_o_ = rows_operand(rows_, heads, shape.head_dim_v, kFloat32);
    acc_lse_ = statistic_operand(rows_, heads);
    part_o_ = rows_operand(rows_, heads, shape.head_dim_v, kFloat32);
    part_lse_ = statistic_operand(rows_, heads);
    fill(acc_o_, rows * shape.head_dim_v, 0);
    fill(acc_lse_, rows, std::bit_cast<uint32_t>(-std::numeric_limits<float>::infinity()));
  }
  pipeline(
      kArrive,
      [&](int i) {
        for (const Call& call : stage_at(i).calls) forward_call(call, stage_at(i));
        if (!direct_ && i + 1 == s_.stages() && !shape.queries_everywhere)
          finish_forward({{acc_o_, acc_lse_}});
      },
      [&](int i) { return start_results(i); });
  if (shape.queries_everywhere) merge_ranks();
}

void Builder::forward_call(const Call& call, const Stage& stage) {
  Operands operands;
  operands[kQ] = at(stage.work[kQ], call.q_at);
  operands[kK] = at(stage.k, call.k_at);
  operands[kV] = at(stage.v, call.k_at);
  if (direct_) {
    operands[kO] = at(stage.work[kO], call.q_at);
    operands[kLse] = at(stage.work[kLse], call.q_at);
    operands[kSink] = callers(kSink);
    if (operands[kSink].present) operands[kSink].view = operands[kSink].view.at(0, stage.heads_q.begin);
    return attend(call, stage, operands, part_of(call, stage));
  }
  operands[kO] = part_o_;
  operands[kLse] = part_lse_;
  attend(call, stage, operands, part_of(call, stage));
  const Merge::Part sum{at(acc_o_, call.q_at), at(acc_lse_, call.q_at)};
  add(Merge{{sum, {part_o_, part_lse_}},
            sum,
            p_.shape.batch,
            call.q_rows,
            stage.heads_q.size(),
            p_.shape.head_dim_v});
}

/// A sink is a key of its own, with a value of zeros.
Merge::Part Builder::sink_part() {
  const Operand zeros{{-1, take(p_.shape.head_dim_v * int64_t{sizeof(float)}), 0, 0, 0}, kFloat32, true};
  fill(zeros, p_.shape.head_dim_v, 0);
  Operand logits = callers(kSink);
  logits.view = logits.view.at(0, stages_[0].heads_q.begin);
  return {zeros, logits};
}

/// The working o and lse from sums of calls, and sinks.
void Builder::finish_forward(const std::vector<Merge::Part>& sums) {
  const Stage& stage = stages_[0];
  std::vector<Merge::Part> parts = sums;
  if (p_.has(kSink)) parts.push_back(sink_part());
  add(Merge{std::move(parts),
            {stage.work[kO], stage.work[kLse]},
            p_.shape.batch,
            rows_,
            stage.heads_q.size(),
            p_.shape.head_dim_v});
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
  finish_forward(parts);
}

}  // namespace fovea::distributed
