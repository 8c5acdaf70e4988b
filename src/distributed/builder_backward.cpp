// The backward of Builder:
//
//   q, d_o, o, lse, dlse to the ranks of a group   (where a group has several)
//   for each stage: its keys arrive while the stage before is computed; dk and dv of a stage go back to the ranks whose keys they
//   are while the next is computed, and are added there
//   dq back to the ranks whose rows they are; gradients of sinks from all to all
//
// Sums over calls and ranks are float32, in a fixed order.
#include "distributed/builder.hpp"

namespace fovea::distributed {
namespace {

constexpr std::array kOfQueries = {kQ, kDO, kO, kLse, kDLse};

}  // namespace

/// Memory of gradients: of a call, of a stage, of this rank's rows.
void Builder::make_gradients() {
  const Shape& shape = p_.shape;
  const bool on_cpu = p_.device.type == FOVEA_CPU;
  part_type_ = on_cpu ? kFloat32 : p_[kQ].type;
  work_[kDQ] = working(kDQ);
  if (!direct_) {
    acc_dq_ = rows_operand(rows_, heads_q_.size(), shape.head_dim, kFloat32);
    part_dq_ = rows_operand(rows_, heads_q_.size(), shape.head_dim, part_type_);
    fill(acc_dq_, shape.batch * rows_ * heads_q_.size() * shape.head_dim, 0);
  }
  std::array<int64_t, kBuffers> most{};
  bool sums = false;
  int64_t largest = 0;
  for (size_t i = 0; i < stages_.size(); ++i) {
    most[i % kBuffers] = std::max(most[i % kBuffers], stages_[i].rows);
    largest = std::max(largest, stages_[i].rows);
    sums |= !stages_[i].direct;
  }
  std::array<Operand, kBuffers> dk, dv;
  for (size_t buffer = 0; buffer < kBuffers; ++buffer) {
    dk[buffer] = rows_operand(most[buffer], heads_kv_.size(), shape.head_dim, kFloat32);
    dv[buffer] = rows_operand(most[buffer], heads_kv_.size(), shape.head_dim_v, kFloat32);
  }
  if (sums) {
    part_dk_ = rows_operand(largest, heads_kv_.size(), shape.head_dim, part_type_);
    part_dv_ = rows_operand(largest, heads_kv_.size(), shape.head_dim_v, part_type_);
  }
  for (size_t i = 0; i < stages_.size(); ++i) {
    Stage& stage = stages_[i];
    stage.dk = dk[i % kBuffers];
    stage.dv = dv[i % kBuffers];
    if (stage.direct) {
      stage.dk.type = s_.groups() == 1 ? p_[kDK].type : part_type_;
      stage.dv.type = s_.groups() == 1 ? p_[kDV].type : part_type_;
    }
    // Rows side by side, whatever stage had the memory before.
    for (const auto& [operand, elements] :
         {std::pair{&stage.dk, shape.head_dim}, {&stage.dv, shape.head_dim_v}}) {
      const int64_t head = elements * operand->type.bits / 8, row = heads_kv_.size() * head;
      operand->view.stride_batch = stage.rows * row;
      operand->view.stride_row = row;
      operand->view.stride_head = head;
    }
  }
  // Rows that no query sees come from nobody.
  const Rows own = rows_of(shape.keys.of_rank[static_cast<size_t>(rank_)]);
  sums_keys_ =
      s_.groups() > 1 || !stages_[0].direct || count(common(own, rows_of(stages_[0].keys))) < local_k_;
  if (!sums_keys_) return;
  acc_dk_ = rows_operand(local_k_, shape.heads_kv, shape.head_dim, kFloat32);
  acc_dv_ = rows_operand(local_k_, shape.heads_kv, shape.head_dim_v, kFloat32);
  const int64_t rows = shape.batch * local_k_ * shape.heads_kv;
  fill(acc_dk_, rows * shape.head_dim, 0);
  fill(acc_dv_, rows * shape.head_dim_v, 0);
}

void Builder::backward() {
  std::vector<Flow> queries;
  for (const Place place : kOfQueries) {
    work_[place] = working(place);
    if (grouped_ && p_.has(place)) queries.push_back(queries_in(place, work_[place]));
  }
  make_gradients();
  start_keys(0, std::move(queries));
  constexpr size_t kNone = ~size_t{0};
  size_t returning = kNone;
  for (int i = 0; i < s_.stages(); ++i) {
    finish_keys(i);
    if (returning != kNone) add(Finish{returning});
    if (i + 1 < s_.stages()) start_keys(i + 1, {});
    const Stage& stage = stages_[static_cast<size_t>(i)];
    if (!stage.direct) {
      const int64_t rows = p_.shape.batch * stage.rows * heads_kv_.size();
      fill(stage.dk, rows * p_.shape.head_dim, 0);
      fill(stage.dv, rows * p_.shape.head_dim_v, 0);
    }
    for (const Call& call : stage.calls) backward_call(call, stage);
    returning = start_gradients(i);
  }
  if (returning != kNone) add(Finish{returning});
  finish_gradients();
  if (p_.has(kDSink)) gradient_of_sinks();
}

Builder::Operands Builder::backward_operands(const Call& call) const {
  Operands operands;
  for (const Place place : kOfQueries) {
    if (p_.has(place)) operands[place] = at(work_[place], call.q_at);
  }
  return operands;
}

void Builder::backward_call(const Call& call, const Stage& stage) {
  const Shape& shape = p_.shape;
  Operands operands = backward_operands(call);
  operands[kK] = at(stage.k, call.k_at);
  operands[kV] = at(stage.v, call.k_at);
  operands[kDQ] = direct_ ? at(work_[kDQ], call.q_at) : part_dq_;
  operands[kDK] = stage.direct ? at(stage.dk, call.k_at) : part_dk_;
  operands[kDV] = stage.direct ? at(stage.dv, call.k_at) : part_dv_;
  attend(call, operands);
  if (!direct_) move(part_dq_, at(acc_dq_, call.q_at), call.q_rows, heads_q_.size(), shape.head_dim, true);
  if (stage.direct) return;
  move(part_dk_, at(stage.dk, call.k_at), call.k_rows, heads_kv_.size(), shape.head_dim, true);
  move(part_dv_, at(stage.dv, call.k_at), call.k_rows, heads_kv_.size(), shape.head_dim_v, true);
}

/// dk and dv of a stage to the sums of the ranks whose keys they are; the exchange that is to be finished.
size_t Builder::start_gradients(int i) {
  const Stage& stage = stages_[static_cast<size_t>(i)];
  const Shape& shape = p_.shape;
  std::vector<Flow> flows;
  for (const auto& [from, to, elements] :
       {std::tuple{stage.dk, sums_keys_ ? acc_dk_ : callers(kDK), shape.head_dim},
        {stage.dv, sums_keys_ ? acc_dv_ : callers(kDV), shape.head_dim_v}}) {
    Flow made = flow(key_sides(i), local_sides(shape.keys, shape.heads_kv), from, to, elements);
    made.arrival.add = sums_keys_;
    flows.push_back(std::move(made));
  }
  const size_t exchange =
      add_exchange(std::move(flows), kGradientMessages + static_cast<size_t>(i) % kBuffers);
  add(Start{exchange});
  return exchange;
}

/// The sums in the caller's types, where the caller has them.
void Builder::finish_gradients() {
  const Shape& shape = p_.shape;
  if (sums_keys_) {
    move(acc_dk_, callers(kDK), local_k_, shape.heads_kv, shape.head_dim, false);
    move(acc_dv_, callers(kDV), local_k_, shape.heads_kv, shape.head_dim_v, false);
  }
  if (!direct_) move(acc_dq_, work_[kDQ], rows_, heads_q_.size(), shape.head_dim, false);
  if (grouped_) exchange_now({queries_out(kDQ, work_[kDQ])});
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
  if (rows_ > 0) {
    Call call;
    call.q_rows = call.longest_q = rows_;
    Operands operands = backward_operands(call);
    operands[kK] = at(callers(kK), 0);
    operands[kV] = at(callers(kV), 0);
    operands[kDQ] = rows_operand(rows_, heads_q_.size(), shape.head_dim, p_[kQ].type);
    operands[kDK] = rows_operand(0, heads_kv_.size(), shape.head_dim, p_[kQ].type);
    operands[kDV] = rows_operand(0, heads_kv_.size(), shape.head_dim_v, p_[kQ].type);
    operands[kSink] = callers(kSink);
    operands[kSink].view = operands[kSink].view.at(0, heads_q_.begin);
    operands[kDSink] = own;
    operands[kDSink].view = own.view.at(0, heads_q_.begin);
    attend(call, operands);
  }
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

}  // namespace fovea::distributed
