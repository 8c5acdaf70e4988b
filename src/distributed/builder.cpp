// The part of Builder that the two directions share.
#include "distributed/builder.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "core/status.hpp"

namespace fovea::distributed {
Builder::Builder(const LocalProblem& problem, const Schedule& schedule, int rank,
                 const ProgramOptions& options)
    : p_(problem),
      s_(schedule),
      rank_(rank),
      options_(options),
      buffers_(problem.by_copies && schedule.stages_are_heads() ? static_cast<size_t>(schedule.stages()) : 2),
      queries_travel_(schedule.queries_travel()),
      queries_(schedule.queries(rank)),
      rows_(count(queries_)),
      local_q_(count(problem.shape.queries.of_rank[static_cast<size_t>(rank)])),
      local_k_(count(problem.shape.keys.of_rank[static_cast<size_t>(rank)])) {}

void Builder::make_steps() {
  make_stages();
  p_.backward() ? backward() : forward();
}

Program Builder::build() {
  make_steps();
  p_.by_copies ? make_copies() : make_exchanges();
  program_.attention_workspace_size = attention_workspace_;
  return std::move(program_);
}

// ---- workspace ----

int64_t Builder::take(int64_t bytes) {
  const int64_t offset = program_.workspace;
  program_.workspace += aligned(bytes);
  return offset;
}

Operand Builder::rows_operand(int64_t rows, int64_t heads, int64_t elements, const fovea_dtype& type) {
  const int64_t row = heads * elements * bytes_of(type);
  const View view{-1, take(p_.shape.batch * rows * row), rows * row, row, elements * bytes_of(type)};
  return {view, type, true};
}

Operand Builder::statistic_operand(int64_t rows, int64_t heads) {
  constexpr int64_t kBytes = sizeof(float);
  const View view{-1, take(p_.shape.batch * rows * heads * kBytes), rows * heads * kBytes, kBytes,
                  rows * kBytes};
  return {view, kFloat32, true};
}

Operand Builder::compact(Operand operand, int64_t rows, int64_t heads, int64_t elements) {
  operand.view.stride_head = elements * bytes_of(operand.type);
  operand.view.stride_row = heads * operand.view.stride_head;
  operand.view.stride_batch = rows * operand.view.stride_row;
  return operand;
}
Operand Builder::compact_statistic(Operand operand, int64_t rows, int64_t heads) {
  operand.view.stride_row = bytes_of(operand.type);
  operand.view.stride_head = rows * operand.view.stride_row;
  operand.view.stride_batch = heads * operand.view.stride_head;
  return operand;
}

Operand Builder::callers(Place place) const {
  const LocalTensor& tensor = p_[place];
  const Operand own{tensor.view, tensor.type, tensor.present};
  if (!options_.only_sizes || !tensor.present) return own;
  // What methods are weighed by is the same on all ranks: strides of a rank's own tensors are nobody else's.
  switch (place) {
    case kQ:
    case kO:
    case kDO:
    case kDQ:
      return compact(own, local_q_, p_.shape.heads_q, tensor.elements);
    case kK:
    case kV:
    case kDK:
    case kDV:
      return compact(own, local_k_, p_.shape.heads_kv, tensor.elements);
    case kLse:
    case kDLse:
      return compact_statistic(own, local_q_, p_.shape.heads_q);
    default:
      return own;
  }
}

Operand Builder::working(Place place, int64_t heads) {
  const LocalTensor& tensor = p_[place];
  if (!tensor.present) return {};
  if (!queries_travel_) return callers(place);
  const bool statistic = place == kLse || place == kDLse;
  return statistic ? statistic_operand(rows_, heads)
                   : rows_operand(rows_, heads, tensor.elements, tensor.type);
}

Operand Builder::at(const Operand& operand, int64_t row) const {
  return {operand.view.at(row, 0), operand.type, operand.present};
}

// ---- exchanges ----

std::vector<Side> Builder::local_sides(const Placement& placement, int64_t heads) const {
  std::vector<Side> sides;
  for (const Holding& holding : placement.of_rank) sides.push_back({holding, {0, heads}});
  return sides;
}
std::vector<Side> Builder::query_sides(int stage) const {
  std::vector<Side> sides;
  for (int rank = 0; rank < p_.shape.ranks; ++rank)
    sides.push_back({s_.queries(rank), s_.heads_q(rank, stage)});
  return sides;
}
std::vector<Side> Builder::key_sides(int stage) const {
  std::vector<Side> sides;
  for (int rank = 0; rank < p_.shape.ranks; ++rank)
    sides.push_back({s_.keys(rank, stage), s_.heads_kv(rank, stage)});
  return sides;
}

Flow Builder::flow(std::vector<Side> from, std::vector<Side> to, const Operand& mine_from,
                   const Operand& mine_to, int64_t elements) const {
  return {std::move(from), std::move(to), mine_from.view, mine_to.view,
          p_.shape.batch,  elements,      mine_from.type, {mine_from.type, mine_to.type, false}};
}
Flow Builder::queries_in(Place place, int stage) const {
  return flow(local_sides(p_.shape.queries, p_.shape.heads_q), query_sides(stage), callers(place),
              stage_at(stage).work[place], p_[place].elements);
}
Flow Builder::queries_out(Place place, int stage) const {
  return flow(query_sides(stage), local_sides(p_.shape.queries, p_.shape.heads_q),
              stage_at(stage).work[place], callers(place), p_[place].elements);
}

size_t Builder::add_exchange(std::vector<Flow> flows, Region region, bool alone) {
  const bool in_unused =
      std::none_of(planned_.begin(), planned_.end(), [&](const Planned& p) { return p.region == region; });
  planned_.push_back({std::move(flows), region, alone, in_unused});
  return planned_.size() - 1;
}

void Builder::exchange_now(std::vector<Flow> flows) {
  const size_t exchange = add_exchange(std::move(flows), {Kind::kOther, 0}, true);
  add(Start{exchange});
  add(Finish{exchange});
}

template <class SizeOf>
std::map<Builder::Region, int64_t> Builder::make_regions(SizeOf&& size_of) {
  std::map<Region, int64_t> size;
  for (const Planned& planned : planned_)
    size[planned.region] = std::max(size[planned.region], size_of(planned));
  for (auto& [region, bytes] : size) bytes = take(bytes);
  return size;
}

/// Places all messages and makes the exchanges.
void Builder::make_exchanges() {
  // Rows that cost more to pack than a message of theirs costs to start: some microseconds, at the rates of choose.cpp.
  const int64_t least_own = p_.device.type == FOVEA_CPU ? int64_t{1} << 12 : int64_t{1} << 20;
  // Rows of callers' tensors may have to be packed on some ranks, so the sizes that methods are weighed by count them.
  const Packing packing{least_own, false}, most{least_own, options_.only_sizes};
  auto first =
      make_regions([&](const Planned& planned) { return exchange_of(rank_, planned.flows, 0, most).bytes; });
  for (const Planned& planned : planned_)
    program_.exchanges.push_back(exchange_of(rank_, planned.flows, first[planned.region], packing));
}

std::vector<int64_t> Builder::make_landings() {
  auto first = make_regions(
      [&](const Planned& planned) { return landing_bytes(rank_, planned.flows, planned.alone); });
  std::vector<int64_t> landings;
  for (const Planned& planned : planned_) landings.push_back(first[planned.region]);
  return landings;
}

/// The exchanges as copies, for which each rank works out where the others have what they have.
void Builder::make_copies() {
  ProgramOptions sizes;
  sizes.only_sizes = true;
  const auto ranks = static_cast<size_t>(p_.shape.ranks);
  std::vector<std::unique_ptr<Builder>> others(ranks);
  std::vector<std::vector<int64_t>> landings(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (rank == static_cast<size_t>(rank_)) continue;
    others[rank] = std::make_unique<Builder>(p_, s_, static_cast<int>(rank), sizes);
    others[rank]->make_steps();
    landings[rank] = others[rank]->make_landings();
  }
  landings[static_cast<size_t>(rank_)] = make_landings();
  for (size_t i = 0; i < planned_.size(); ++i) {
    std::vector<FlowsOfRank> of_rank;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const Builder& builder = others[rank] ? *others[rank] : *this;
      of_rank.push_back({&builder.planned_[i].flows, landings[rank][i]});
    }
    program_.exchanges.push_back(exchange_by_copies(rank_, of_rank, planned_[i].alone));
    if (planned_[i].parts > 0) program_.exchanges.back().copy_in_parts(planned_[i].parts);
  }
  know_what_is_open();
  keep_rows_together();
}

/// In each run a rank hears of others that they are done with its first exchange and its last one. Who is done with the last has computed
/// all, and memory of what arrives first is free for the next run; who is done with the first has begun the run, and memory in which the
/// last lands is free.
void Builder::know_what_is_open() {
  if (planned_.empty() || planned_.back().region.kind == Kind::kArriving ||
      planned_[0].region.kind != Kind::kArriving)
    return;
  const auto knows = [](Exchange& exchange, const Exchange& heard) {
    exchange.open_at = heard.copied_by;
    for (const PeerCopy& copy : heard.copies) exchange.open_to.push_back(copy.peer);
  };
  Exchange &first = program_.exchanges.front(), &last = program_.exchanges.back();
  for (size_t i = 0; i < planned_.size(); ++i) {
    if (planned_[i].region.kind == Kind::kArriving && planned_[i].in_unused)
      knows(program_.exchanges[i], last);
  }
  if (planned_.back().alone && planned_.back().in_unused) knows(last, first);
}

void Builder::keep_rows_together() {
  if (!s_.stages_are_heads()) return;
  const auto keep = [&](Kind kind, size_t at) {
    std::vector<PlannedMove>& kept = program_.exchanges[at].kept;
    for (size_t i = 0; i < planned_.size(); ++i) {
      if (planned_[i].region.kind == kind) program_.exchanges[i].move_own_rows(rank_, kept);
    }
  };
  for (size_t i = 0; i < planned_.size(); ++i) {
    const Kind kind = planned_[i].region.kind;
    if (planned_[i].alone && kind != Kind::kOther) keep(kind, i);
  }
}

size_t Builder::start_arriving(int i, std::span<const Place> of_queries) {
  const Stage& stage = stage_at(i);
  const Shape& shape = p_.shape;
  std::vector<Flow> flows;
  for (const Place place : of_queries) {
    if (queries_travel_ && p_.has(place) && (i == 0 || s_.stages_are_heads()))
      flows.push_back(queries_in(place, i));
  }
  if (!stage.in_place) {
    const auto from = local_sides(shape.keys, shape.heads_kv), to = key_sides(i);
    flows.push_back(flow(from, to, callers(kK), stage.k, shape.head_dim));
    flows.push_back(flow(from, to, callers(kV), stage.v, shape.head_dim_v));
  }
  if (flows.empty()) return kNothing;
  const size_t exchange = add_exchange(std::move(flows), {Kind::kArriving, buffer_of(i)}, i == 0);
  if (keys_arrive_in_calls()) planned_.back().parts = arrival_parts();
  // The first waits for what the caller's stream does before the run; behind it memory that nothing else uses is free.
  add(Start{exchange, exchange == 0 || !p_.by_copies || buffers_ < stages_.size()});
  return exchange;
}

/// Whether on all ranks the calls of a stage write each row of dk and dv once: messages are of one type then.
bool Builder::calls_own_their_keys(int stage) const {
  for (int rank = 0; rank < p_.shape.ranks; ++rank) {
    if (s_.heads_kv(rank, stage).empty()) continue;
    if (!covers_once(s_.calls(rank, stage), &Call::k_at, &Call::k_rows, count(s_.keys(rank, stage))))
      return false;
  }
  return true;
}

void Builder::make_stages() {
  std::vector<Call> all;
  bool idle = true;  // there are fewer heads than ranks
  for (int i = 0; i < s_.stages(); ++i) {
    Stage stage;
    stage.keys = s_.keys(rank_, i);
    stage.rows = count(stage.keys);
    stage.heads_q = s_.heads_q(rank_, i);
    stage.heads_kv = s_.heads_kv(rank_, i);
    stage.calls = s_.calls(rank_, i);
    stage.in_place = s_.in_place(rank_, i);
    stage.direct = p_.backward() && calls_own_their_keys(i);
    if (all.empty() || !s_.stages_are_heads()) all.insert(all.end(), stage.calls.begin(), stage.calls.end());
    idle &= stage.heads_q.empty();
    stages_.push_back(std::move(stage));
  }
  direct_ = (idle || covers_once(all, &Call::q_at, &Call::q_rows, rows_)) && !p_.shape.queries_everywhere;
}

bool Builder::make_lanes() {
  if (!over_all_keys_.empty()) {
    program_.lanes = static_cast<int>(over_all_keys_.size());
    return program_.lanes > 1;
  }
  bool alone = term_gradients_.empty() && buffers_ >= stages_.size() && stages_.size() > 1;
  for (const Stage& stage : stages_) alone = alone && (stage.direct || !p_.backward());
  // Two calls of a forward that are summed write memory of their own.
  const auto of_one_call = [](const Stage& stage) { return stage.calls.size() <= 1; };
  alone = alone && (direct_ || (!p_.backward() && stages_.size() == 2 &&
                                std::all_of(stages_.begin(), stages_.end(), of_one_call)));
  if (!alone || !p_.by_copies) return false;
  for (size_t i = 1; i < stages_.size(); i += 2) stages_[i].lane = Lane::kBeside;
  program_.lanes = 2;
  return true;
}

void Builder::start_leaving(size_t exchange, int stage) {
  const bool last = stage + 1 == s_.stages();
  add(Start{exchange, true, last ? Lane::kCompute : stage_at(stage).lane});
}

/// Memory for what arrives: keys, of which two stages are there at a time, and tensors of queries, as keys where each stage has its own.
void Builder::make_working_memory(std::span<const Place> of_queries) {
  const Shape& shape = p_.shape;
  std::vector<int64_t> rows(buffers_), heads(buffers_);
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (!stages_[i].in_place) rows[i % buffers_] = std::max(rows[i % buffers_], stages_[i].rows);
    heads[i % buffers_] = std::max(heads[i % buffers_], stages_[i].heads_kv.size());
  }
  std::vector<Operand> k(buffers_), v(buffers_);
  std::vector<Operands> work(buffers_);
  for (size_t buffer = 0; buffer < std::min(buffers_, stages_.size()); ++buffer) {
    k[buffer] = rows_operand(rows[buffer], heads[buffer], shape.head_dim, p_[kK].type);
    v[buffer] = rows_operand(rows[buffer], heads[buffer], shape.head_dim_v, p_[kV].type);
    if (buffer > 0 && !s_.stages_are_heads()) continue;
    for (const Place place : of_queries) work[buffer][place] = working(place, heads[buffer] * shape.group());
  }
  for (size_t i = 0; i < stages_.size(); ++i) {
    Stage& stage = stages_[i];
    stage.k = stage.in_place ? callers(kK)
                             : compact(k[i % buffers_], stage.rows, stage.heads_kv.size(), shape.head_dim);
    stage.v = stage.in_place ? callers(kV)
                             : compact(v[i % buffers_], stage.rows, stage.heads_kv.size(), shape.head_dim_v);
    stage.work = work[s_.stages_are_heads() ? i % buffers_ : 0];
    for (const Place place : of_queries) {
      if (!queries_travel_ || !p_.has(place)) continue;
      Operand& operand = stage.work[place];
      const bool statistic = place == kLse || place == kDLse;
      operand = statistic ? compact_statistic(operand, rows_, stage.heads_q.size())
                          : compact(operand, rows_, stage.heads_q.size(), p_[place].elements);
    }
  }
}

// ---- steps ----

void Builder::fill(const Operand& operand, int64_t words, uint32_t word) {
  if (words > 0) add(Fill{operand.view, words, word});
}

void Builder::move(const Operand& from, const Operand& to, int64_t rows, int64_t heads, int64_t elements,
                   bool add_up) {
  if (rows == 0 || heads == 0 || p_.shape.batch == 0) return;
  add(MoveBoxes{
      {{from.type, to.type, add_up}, -1, {{from.view, to.view, p_.shape.batch, rows, heads, elements}}}});
}

Program make_program(const LocalProblem& problem, const Schedule& schedule, int rank,
                     const ProgramOptions& options) {
  return Builder(problem, schedule, rank, options).build();
}

}  // namespace fovea::distributed
