// The forward of Builder:
//
//   queries to the ranks of a group   (where a group has several)
//   for each stage: its keys arrive while the stage before is computed; each call's o, lse is merged with those before
//   sinks, and o, lse back to the ranks whose rows they are
#include <bit>
#include <limits>

#include "distributed/builder.hpp"

namespace fovea::distributed {

void Builder::forward() {
  const Shape& shape = p_.shape;
  std::vector<Flow> queries;
  work_[kQ] = working(kQ);
  work_[kO] = working(kO);
  work_[kLse] = working(kLse);
  if (grouped_) queries.push_back(queries_in(kQ, work_[kQ]));
  if (!direct_) {
    acc_o_ = rows_operand(rows_, heads_q_.size(), shape.head_dim_v, kFloat32);
    acc_lse_ = statistic_operand(rows_, heads_q_.size());
    part_o_ = rows_operand(rows_, heads_q_.size(), shape.head_dim_v, kFloat32);
    part_lse_ = statistic_operand(rows_, heads_q_.size());
    const int64_t rows = shape.batch * rows_ * heads_q_.size();
    fill(acc_o_, rows * shape.head_dim_v, 0);
    fill(acc_lse_, rows, std::bit_cast<uint32_t>(-std::numeric_limits<float>::infinity()));
  }
  start_keys(0, std::move(queries));
  for (int i = 0; i < s_.stages(); ++i) {
    finish_keys(i);
    if (i + 1 < s_.stages()) start_keys(i + 1, {});
    const Stage& stage = stages_[static_cast<size_t>(i)];
    for (const Call& call : stage.calls) forward_call(call, stage);
  }
  if (shape.queries_everywhere) return merge_ranks();
  if (!direct_) finish_forward({{acc_o_, acc_lse_}});
  if (!grouped_) return;
  std::vector<Flow> results;
  results.push_back(queries_out(kO, work_[kO]));
  if (p_.has(kLse)) results.push_back(queries_out(kLse, work_[kLse]));
  exchange_now(std::move(results));
}

void Builder::forward_call(const Call& call, const Stage& stage) {
  Operands operands;
  operands[kQ] = at(work_[kQ], call.q_at);
  operands[kK] = at(stage.k, call.k_at);
  operands[kV] = at(stage.v, call.k_at);
  if (direct_) {
    operands[kO] = at(work_[kO], call.q_at);
    operands[kLse] = at(work_[kLse], call.q_at);
    operands[kSink] = callers(kSink);
    if (operands[kSink].present) operands[kSink].view = operands[kSink].view.at(0, heads_q_.begin);
    return attend(call, operands);
  }
  operands[kO] = part_o_;
  operands[kLse] = part_lse_;
  attend(call, operands);
  const Merge::Part sum{at(acc_o_, call.q_at), at(acc_lse_, call.q_at)};
  add(Merge{
      {sum, {part_o_, part_lse_}}, sum, p_.shape.batch, call.q_rows, heads_q_.size(), p_.shape.head_dim_v});
}

/// A sink is a key of its own, with a value of zeros.
Merge::Part Builder::sink_part() {
  Operand zeros{{-1, take(p_.shape.head_dim_v * int64_t{sizeof(float)}), 0, 0, 0}, kFloat32, true};
  fill(zeros, p_.shape.head_dim_v, 0);
  Operand logits = callers(kSink);
  logits.view = logits.view.at(0, heads_q_.begin);
  return {zeros, logits};
}

/// The working o and lse from sums of calls, and sinks.
void Builder::finish_forward(const std::vector<Merge::Part>& sums) {
  std::vector<Merge::Part> parts = sums;
  if (p_.has(kSink)) parts.push_back(sink_part());
  add(Merge{std::move(parts),
            {work_[kO], work_[kLse]},
            p_.shape.batch,
            rows_,
            heads_q_.size(),
            p_.shape.head_dim_v});
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
