// The backward of Builder:
//
//   for each stage: keys, and q, d_o, o, lse, dlse where a group has several ranks, arrive while the stage before is computed; dk and
//   dv (and dq, where a stage has its own heads) go back to the ranks whose rows they are while the next is computed
//   dq back to the ranks whose rows they are; gradients of sinks and of tensors of terms from all to all
//
// Sums over calls and ranks are float32, in a fixed order.
#include "distributed/builder.hpp"

namespace fovea::distributed {
namespace {

constexpr std::array kArrive = {kQ, kDO, kO, kLse, kDLse};
constexpr std::array kOfQueries = {kQ, kDO, kO, kLse, kDLse, kDQ};

}  // namespace

void Builder::backward() {
  make_working_memory(kOfQueries);
  make_gradients();
  pipeline(
      kArrive,
      [&](int i) {
        const Stage& stage = stage_at(i);
        if (!stage.direct) {
          const int64_t rows = p_.shape.batch * stage.rows * stage.heads_kv.size();
          fill(stage.dk, rows * p_.shape.head_dim, 0);
          fill(stage.dv, rows * p_.shape.head_dim_v, 0);
        }
        for (const Call& call : stage.calls) backward_call(call, stage);
      },
      [&] {
        const Stage& stage = stages_.back();
        if (!direct_) move(acc_dq_, stage.work[kDQ], rows_, stage.heads_q.size(), p_.shape.head_dim, false);
      },
      [&](int i) { return start_gradients(i); });
  if (sums_keys_) {
    move(acc_dk_, callers(kDK), local_k_, p_.shape.heads_kv, p_.shape.head_dim, false);
    move(acc_dv_, callers(kDV), local_k_, p_.shape.heads_kv, p_.shape.head_dim_v, false);
  }
  if (p_.has(kDSink)) gradient_of_sinks();
  finish_term_gradients();
}

/// Memory of gradients: of a call, of a stage, of this rank's rows.
void Builder::make_gradients() {
  const Shape& shape = p_.shape;
  const int64_t heads_q = stages_[0].heads_q.size();
  if (!direct_) {
    acc_dq_ = rows_operand(rows_, heads_q, shape.head_dim, kFloat32);
    part_dq_ = rows_operand(rows_, heads_q, shape.head_dim, kFloat32);
    fill(acc_dq_, shape.batch * rows_ * heads_q * shape.head_dim, 0);
  }
  make_stage_gradients();
  make_term_gradients();
  // Rows that no query sees come from nobody.
  const Rows own = rows_of(shape.keys.of_rank[static_cast<size_t>(rank_)]);
  const bool all_seen = count(common(own, rows_of(stages_[0].keys))) == local_k_;
  sums_keys_ = s_.groups() > 1 || !stages_[0].direct || !all_seen;
  if (!sums_keys_) return;
  acc_dk_ = rows_operand(local_k_, shape.heads_kv, shape.head_dim, kFloat32);
  acc_dv_ = rows_operand(local_k_, shape.heads_kv, shape.head_dim_v, kFloat32);
  const int64_t rows = shape.batch * local_k_ * shape.heads_kv;
  fill(acc_dk_, rows * shape.head_dim, 0);
  fill(acc_dv_, rows * shape.head_dim_v, 0);
}

/// dk and dv of two stages at a time: what their calls write, or sums of it.
void Builder::make_stage_gradients() {
  const Shape& shape = p_.shape;
  std::vector<int64_t> rows(buffers_), heads(buffers_);
  int64_t most_rows = 0, most_heads = 0;
  for (size_t i = 0; i < stages_.size(); ++i) {
    rows[i % buffers_] = std::max(rows[i % buffers_], stages_[i].rows);
    heads[i % buffers_] = std::max(heads[i % buffers_], stages_[i].heads_kv.size());
    if (stages_[i].direct) continue;
    most_rows = std::max(most_rows, stages_[i].rows);
    most_heads = std::max(most_heads, stages_[i].heads_kv.size());
  }
  part_dk_ = rows_operand(most_rows, most_heads, shape.head_dim, kFloat32);
  part_dv_ = rows_operand(most_rows, most_heads, shape.head_dim_v, kFloat32);
  std::vector<Operand> dk(buffers_), dv(buffers_);
  for (size_t buffer = 0; buffer < buffers_; ++buffer) {
    dk[buffer] = rows_operand(rows[buffer], heads[buffer], shape.head_dim, kFloat32);
    dv[buffer] = rows_operand(rows[buffer], heads[buffer], shape.head_dim_v, kFloat32);
  }
  for (size_t i = 0; i < stages_.size(); ++i) {
    Stage& stage = stages_[i];
    stage.dk = dk[i % buffers_];
    stage.dv = dv[i % buffers_];
    if (stage.direct && s_.groups() == 1) {  // nothing is added
      stage.dk.type = p_[kDK].type;
      stage.dv.type = p_[kDV].type;
    }
    stage.dk = compact(stage.dk, stage.rows, stage.heads_kv.size(), shape.head_dim);
    stage.dv = compact(stage.dv, stage.rows, stage.heads_kv.size(), shape.head_dim_v);
  }
}

Builder::Operands Builder::backward_operands(const Call& call, const Stage& stage) const {
  Operands operands;
  for (const Place place : kArrive) {
    if (p_.has(place)) operands[place] = at(stage.work[place], call.q_at);
  }
  operands[kRngState] = callers(kRngState);
  return operands;
}

void Builder::backward_call(const Call& call, const Stage& stage) {
  const Shape& shape = p_.shape;
  Operands operands = backward_operands(call, stage);
  operands[kK] = at(stage.k, call.k_at);
  operands[kV] = at(stage.v, call.k_at);
  operands[kDQ] = direct_ ? at(stage.work[kDQ], call.q_at) : part_dq_;
  operands[kDK] = stage.direct ? at(stage.dk, call.k_at) : part_dk_;
  operands[kDV] = stage.direct ? at(stage.dv, call.k_at) : part_dv_;
  const std::optional<PartOfProblem> part = part_of(call, stage);
  attend(call, stage, operands, part);
  if (part) sum_term_gradients(*part);
  if (!direct_)
    move(part_dq_, at(acc_dq_, call.q_at), call.q_rows, stage.heads_q.size(), shape.head_dim, true);
  if (stage.direct) return;
  move(part_dk_, at(stage.dk, call.k_at), call.k_rows, stage.heads_kv.size(), shape.head_dim, true);
  move(part_dv_, at(stage.dv, call.k_at), call.k_rows, stage.heads_kv.size(), shape.head_dim_v, true);
}

/// dk and dv of a stage to the ranks whose keys they are, which sum them; dq once it is whole.
size_t Builder::start_gradients(int i) {
  const Stage& stage = stage_at(i);
  const Shape& shape = p_.shape;
  std::vector<Flow> flows;
  for (const auto& [from, to, elements] :
       {std::tuple{stage.dk, sums_keys_ ? acc_dk_ : callers(kDK), shape.head_dim},
        {stage.dv, sums_keys_ ? acc_dv_ : callers(kDV), shape.head_dim_v}}) {
    Flow made = flow(key_sides(i), local_sides(shape.keys, shape.heads_kv), from, to, elements);
    made.arrival.add = sums_keys_;
    flows.push_back(std::move(made));
  }
  if (queries_travel_ && (s_.stages_are_heads() || i + 1 == s_.stages()))
    flows.push_back(queries_out(kDQ, i));
  const size_t exchange =
      add_exchange(std::move(flows), {Kind::kLeaving, buffer_of(i)}, i + 1 == s_.stages());
  start_leaving(exchange, i);
  return exchange;
}

/// Each rank has those of its rows and heads: a call without keys gives them. All ranks sum what all have, in the order of ranks.
void Builder::gradient_of_sinks() {
  const Shape& shape = p_.shape;
  const int64_t ranks = shape.ranks, heads = shape.heads_q;
  constexpr int64_t kBytes = sizeof(float);
  const auto row_of_heads = [&](int64_t rows) {
    return Operand{{-1, take(rows * heads * kBytes), 0, heads * kBytes, kBytes}, kFloat32, true};
  };
  const Operand own = row_of_heads(1), all = row_of_heads(ranks);
  fill(own, heads, 0);
  add_sink_gradients(own);
  std::vector<Side> from, to;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    from.push_back({{{{rank, rank + 1}, 0}}, {0, 1}});
    to.push_back({{{{0, ranks}, 0}}, {0, 1}});
  }
  Flow rows = flow(from, to, own, all, heads);
  rows.batch = 1;
  exchange_now({std::move(rows)});
  for (int64_t rank = 0; rank < ranks; ++rank)
    add(MoveBoxes{
        {{kFloat32, kFloat32, rank > 0}, -1, {{at(all, rank).view, callers(kDSink).view, 1, 1, heads, 1}}}});
}

/// Of this rank's own rows, all heads: they need no messages.
void Builder::add_sink_gradients(const Operand& into) {
  if (local_q_ == 0) return;
  const Shape& shape = p_.shape;
  Stage all;
  all.heads_q = {0, shape.heads_q};
  all.heads_kv = {0, shape.heads_kv};
  Call call;
  call.q_rows = call.longest_q = local_q_;
  Operands operands;
  for (const Place place : kArrive) {
    if (p_.has(place)) operands[place] = callers(place);
  }
  operands[kK] = callers(kK);
  operands[kV] = callers(kV);
  operands[kDQ] = rows_operand(local_q_, shape.heads_q, shape.head_dim, p_[kQ].type);
  operands[kDK] = rows_operand(0, shape.heads_kv, shape.head_dim, p_[kQ].type);
  operands[kDV] = rows_operand(0, shape.heads_kv, shape.head_dim_v, p_[kQ].type);
  operands[kSink] = callers(kSink);
  operands[kDSink] = into;
  attend(call, all, operands, std::nullopt);
}

}  // namespace fovea::distributed
