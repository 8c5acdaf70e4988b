// The part of Builder for keys that arrive while calls over them run: forward, two ranks of one host that copy. A rank computes its
// queries over its own keys and the other's in one call, whose kernel waits for those that are still on their way when it comes to them.
// Nothing is merged. Queries that need own keys alone have a call of their own, which begins on SMs that the other leaves idle at its end.
#include "core/arriving_keys.hpp"
#include "distributed/builder.hpp"
#include "distributed/choose.hpp"

namespace fovea::distributed {
namespace {

/// The first call has the queries that see keys of both ranks, the second, which may be missing, those that see own keys alone.
struct Joined {
  Call both, own;
};

/// Nothing where calls do not fit: `own` has to see its last keys up to a diagonal, or all, and the last of its queries all keys of
/// `other`.
std::optional<Joined> joined_calls(const Call& own, const Call& other) {
  const auto pairs = static_cast<double>(other.q_rows) * static_cast<double>(other.k_rows);
  const int64_t rest = own.q_rows - other.q_rows;
  const bool sees_last = own.window.left < 0 && own.window.right <= 0;
  const bool diagonal = own.window.right == 0;
  if (!own.starts_q.empty() || !other.starts_q.empty() || !sees_last || pairs_of(other) != pairs ||
      rest < 0 || own.q_at + rest != other.q_at || (diagonal && own.k_rows < own.q_rows))
    return std::nullopt;
  Joined joined{own, own};
  joined.both.q_at = other.q_at;
  joined.both.longest_q = joined.both.q_rows = other.q_rows;
  joined.both.longest_k = joined.both.k_rows = own.k_rows + other.k_rows;
  joined.both.arriving = other.k_rows;
  joined.own.longest_q = joined.own.q_rows = rest;
  if (diagonal) joined.own.longest_k = joined.own.k_rows = own.k_rows - other.q_rows;
  return joined;
}

}  // namespace

bool Builder::keys_arrive_in_calls() const {
  return distributed::keys_arrive_in_calls(p_, s_);
}

/// While a part of the heads is computed the next is on its way.
int Builder::arrival_parts() const {
  int parts = kMostHeadParts;
  while (p_.shape.heads_kv % parts != 0) parts /= 2;
  return parts;
}

/// Where the calls of both stages fit and a backend waits for keys, those in their place.
void Builder::join_arriving_keys() {
  const std::vector<Call>&own = stages_[0].calls, &other = stages_[1].calls;
  if (own.size() != 1 || other.size() != 1 || own[0].q_rows != rows_ || other[0].k_rows != stages_[1].rows)
    return;
  const auto joined = joined_calls(own[0], other[0]);
  if (!joined) return;
  Attend both = call_with_arriving(joined->both, other[0]);
  if (!options_.only_sizes && !both.plan) return;
  over_all_keys_.push_back(std::move(both));
  if (joined->own.q_rows > 0) {
    Attend own_alone =
        step_of(joined->own, stages_[0], result_operands(joined->own, stages_[0]), std::nullopt);
    own_alone.lane = Lane::kBeside;
    own_alone.behind = over_all_keys_[0].arriving;
    over_all_keys_.push_back(std::move(own_alone));
  }
  direct_ = true;
}

Attend Builder::call_with_arriving(const Call& call, const Call& other) {
  Attend step = step_of(call, stages_[0], result_operands(call, stages_[0]), std::nullopt);
  if (!options_.only_sizes && !step.plan) return step;
  Arriving arriving;
  arriving.k = at(stages_[1].k, other.k_at);
  arriving.v = at(stages_[1].v, other.k_at);
  arriving.exchange = planned_.size();  // the next one
  arriving.peer = 1 - rank_;
  arriving.first_part = arriving_key_parts(call.arriving) - 1;
  step.arriving = std::make_shared<const Arriving>(arriving);
  arriving.over_copies = std::make_shared<const Attend>(over_copies(call, step, arriving.copies));
  step.arriving = std::make_shared<const Arriving>(std::move(arriving));
  return step;
}

/// The call over copies of the rank's own q, k and v.
Attend Builder::over_copies(const Call& call, const Attend& given, std::vector<PlannedMove>& copies) {
  const Shape& shape = p_.shape;
  Operands operands = given.operands;
  const auto copy = [&](Place place, int64_t rows, int64_t heads, int64_t elements) {
    const Operand from = operands[place];
    operands[place] = rows_operand(rows, heads, elements, from.type);
    copies.push_back({{from.type, from.type, false},
                      -1,
                      {{from.view, operands[place].view, shape.batch, rows, heads, elements}}});
  };
  const int64_t own_keys = call.k_rows - call.arriving;
  copy(kQ, call.q_rows, shape.heads_q, shape.head_dim);
  copy(kK, own_keys, shape.heads_kv, shape.head_dim);
  copy(kV, own_keys, shape.heads_kv, shape.head_dim_v);
  Attend step = step_of(call, stages_[0], operands, std::nullopt);
  step.arriving = given.arriving;
  return step;
}

}  // namespace fovea::distributed
