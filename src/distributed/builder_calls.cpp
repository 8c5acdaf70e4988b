// The part of Builder that plans calls of attention.
#include <algorithm>
#include <array>

#include "capi/run_part.hpp"
#include "core/status.hpp"
#include "distributed/builder.hpp"
#include "distributed/choose.hpp"

namespace fovea::distributed {
namespace {

/// A call as its plan is told of it.
class Description {
 public:
  Description(const LocalProblem& problem, bool packed, int64_t batch)
      : problem_(problem), packed_(packed), batch_(batch) {
    made_.pass = problem.pass;
    made_.scale = problem.scale;
    made_.softcap = problem.softcap;
    made_.dropout = problem.dropout;
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  fovea_problem& problem() { return made_; }

  /// Rows of (batch, rows, heads, elements), or without batch; statistics of (batch, heads, rows), or without.
  const fovea_tensor* rows(const Operand& o, int64_t rows, int64_t heads, int64_t elements) {
    if (!o.present) return nullptr;
    const int64_t bytes = bytes_of(o.type);
    return make(o.type, packed_ ? 1 : 0, 4, {batch_, rows, heads, elements},
                {o.view.stride_batch / bytes, o.view.stride_row / bytes, o.view.stride_head / bytes, 1});
  }
  const fovea_tensor* statistic(const Operand& o, int64_t rows, int64_t heads) {
    if (!o.present) return nullptr;
    const int64_t bytes = bytes_of(o.type);
    return make(o.type, packed_ ? 1 : 0, 3, {batch_, heads, rows, 1},
                {o.view.stride_batch / bytes, o.view.stride_head / bytes, o.view.stride_row / bytes, 1});
  }
  const fovea_tensor* array(void* data, const fovea_dtype& type, int64_t size) {
    fovea_tensor* made = make(type, 0, 1, {size}, {1});
    made->data = data;
    return made;
  }

  /// The terms of a part; where the texts read its numbers, these are the named tensor behind the others.
  void terms(const Terms& terms, const PartOfProblem& part) {
    const TextsOfCall texts = texts_of(terms, part);
    for (const TermTensor& tensor : terms.of(part).tensors) {
      const fovea_tensor* made = described(tensor.part(part), nullptr);
      if (tensor.calls < kNamed) {
        field(tensor.calls) = made;
      } else {
        const auto at = static_cast<size_t>(tensor.calls - kNamed);
        named_[at] = {terms.names[at].c_str(), made, nullptr};
        made_.num_named = std::max(made_.num_named, static_cast<int64_t>(at + 1));
      }
    }
    for (const TermTensor& gradient : terms.gradients) {
      const fovea_tensor* made = described(gradient.part(part), &kFloat32);
      if (gradient.calls == kDBias) {
        made_.dbias = made;
      } else {
        named_[static_cast<size_t>(gradient.calls - kNamedGradient)].gradient = made;
      }
    }
    if (texts.reads_numbers) {
      named_[static_cast<size_t>(made_.num_named++)] = {
          terms.numbers.c_str(), array(nullptr, kInt32, int64_t{expr::kPartNumbers}), nullptr};
      reads_numbers_ = true;
    }
    score_ = texts.score.value_or("");
    sees_ = texts.sees.value_or("");
    made_.score = texts.score ? score_.c_str() : nullptr;
    made_.sees = texts.sees ? sees_.c_str() : nullptr;
    made_.named = made_.num_named > 0 ? named_.data() : nullptr;
    made_.block_q = made_.block_mask ? terms.block_q : 0;
    made_.block_k = made_.block_mask ? terms.block_k : 0;
  }
  bool reads_numbers() const { return reads_numbers_; }

 private:
  const fovea_tensor*& field(Place place) {
    constexpr std::array<const fovea_tensor * fovea_problem::*, kNamed> kFields = {
#define FOVEA_FIELD(Place, name) &fovea_problem::name,
        FOVEA_DISTRIBUTED_TENSORS(FOVEA_FIELD)
#undef FOVEA_FIELD
    };
    return made_.*kFields[place];
  }
  /// Of what a call gives the sums are float32; the caller's tensor may be of another type and order.
  const fovea_tensor* described(const TensorPart& part, const fovea_dtype* compact_type) {
    std::array<int64_t, kMaxRank> strides = part.strides;
    if (compact_type != nullptr) strides = part.compact_strides();
    return make(compact_type != nullptr ? *compact_type : part.type, 0, part.ndim, part.shape, strides);
  }
  /// Without the first `skipped` of `ndim` dimensions.
  fovea_tensor* make(const fovea_dtype& type, int skipped, int ndim, std::array<int64_t, kMaxRank> shape,
                     std::array<int64_t, kMaxRank> strides) {
    Entry& entry = entries_[used_++];
    entry.shape = shape;
    entry.strides = strides;
    entry.tensor.device = problem_.device;
    entry.tensor.ndim = ndim - skipped;
    entry.tensor.dtype = type;
    entry.tensor.shape = entry.shape.data() + skipped;
    entry.tensor.strides = entry.strides.data() + skipped;
    return &entry.tensor;
  }

  struct Entry {
    fovea_tensor tensor{};
    std::array<int64_t, kMaxRank> shape{}, strides{};
  };
  const LocalProblem& problem_;
  bool packed_;
  int64_t batch_;
  fovea_problem made_ = FOVEA_PROBLEM_INIT;
  std::array<Entry, kPlaces + 3>
      entries_;  // starts of sequences, and the numbers of a part, beside the places
  size_t used_ = 0;
  std::array<fovea_named_tensor, FOVEA_MAX_NAMED_TENSORS> named_{};
  std::string score_, sees_;
  bool reads_numbers_ = false;
};

/// Calls with equal keys differ in addresses alone.
std::string key_of(const Call& call, int64_t heads, const std::array<Operand, kPlaces>& operands,
                   const std::optional<PartOfProblem>& part) {
  std::string key;
  const auto append = [&](const auto& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  append(call.q_rows);
  append(call.k_rows);
  append(heads);
  append(call.window.left);
  append(call.window.right);
  append(call.arriving);
  for (const std::vector<int32_t>* starts : {&call.starts_q, &call.starts_k})
    for (const int32_t start : *starts) append(start);
  for (const Operand& o : operands) {
    append(o.present);
    append(o.type.code);
    append(o.type.bits);
    append(o.view.stride_batch);
    append(o.view.stride_row);
    append(o.view.stride_head);
  }
  append(part.has_value());
  if (part) append(part->moved());
  return key;
}

}  // namespace

Attend Builder::plan_of(const Call& call, const Stage& stage, const Operands& o,
                        const std::optional<PartOfProblem>& part) {
  const Shape& shape = p_.shape;
  const bool packed = !call.starts_q.empty();
  const int64_t hq = stage.heads_q.size(), hkv = stage.heads_kv.size();
  Attend attend;
  Description d(p_, packed, packed ? 1 : shape.batch);
  fovea_problem& problem = d.problem();
  const auto queries = [&](Place place, int64_t size) { return d.rows(o[place], call.q_rows, hq, size); };
  const auto keys = [&](Place place, int64_t size) { return d.rows(o[place], call.k_rows, hkv, size); };
  problem.q = queries(kQ, shape.head_dim);
  problem.k = keys(kK, shape.head_dim);
  problem.v = keys(kV, shape.head_dim_v);
  problem.o = queries(kO, shape.head_dim_v);
  problem.lse = d.statistic(o[kLse], call.q_rows, hq);
  if (p_.backward()) {
    problem.d_o = queries(kDO, shape.head_dim_v);
    problem.dlse = d.statistic(o[kDLse], call.q_rows, hq);
    problem.dq = queries(kDQ, shape.head_dim);
    problem.dk = keys(kDK, shape.head_dim);
    problem.dv = keys(kDV, shape.head_dim_v);
    if (o[kDSink].present) problem.dsink = d.array(nullptr, kFloat32, hq);
  }
  if (o[kSink].present) problem.sink = d.array(nullptr, kFloat32, hq);
  if (o[kRngState].present) problem.rng_state = d.array(nullptr, kInt64, kRngStateSize);
  if (packed) {
    const auto starts = static_cast<int64_t>(call.starts_q.size());
    attend.starts_q = options_.memory->keep(call.starts_q.data(), call.starts_q.size() * sizeof(int32_t));
    attend.starts_k = options_.memory->keep(call.starts_k.data(), call.starts_k.size() * sizeof(int32_t));
    problem.cu_seqlens_q = d.array(attend.starts_q.get(), kInt32, starts);
    problem.cu_seqlens_k = d.array(attend.starts_k.get(), kInt32, starts);
    problem.max_seqlen_q = call.longest_q;
    problem.max_seqlen_k = call.longest_k;
  }
  problem.window_left = call.window.left;
  problem.window_right = call.window.right;
  if (part) d.terms(*p_.terms, *part);
  attend.plan = call.arriving > 0 ? capi::plan_part_with_arriving(problem, options_.attention, call.arriving,
                                                                  hkv / arrival_parts())
                                  : capi::plan_part(problem, options_.attention);
  if (!attend.plan) return attend;
  attend.reads_numbers = d.reads_numbers();
  attention_workspace_ = std::max(attention_workspace_, fovea_plan_workspace_size(attend.plan.get()));
  return attend;
}

void Builder::attend(const Call& call, const Stage& stage, const Operands& operands,
                     const std::optional<PartOfProblem>& part) {
  if (p_.shape.batch == 0 || stage.heads_kv.empty()) return;
  add(step_of(call, stage, operands, part));
}

Attend Builder::step_of(const Call& call, const Stage& stage, const Operands& given,
                        const std::optional<PartOfProblem>& part) {
  Operands operands = given;
  if (part) add_terms(*part, operands);
  Attend step;
  if (!options_.only_sizes) {
    const std::string key = key_of(call, stage.heads_kv.size(), operands, part);
    const auto known = plans_.find(key);
    step = known != plans_.end() ? known->second : (plans_[key] = plan_of(call, stage, operands, part));
    if (step.reads_numbers) {
      const auto numbers = part->numbers();
      step.numbers = options_.memory->keep(numbers.data(), sizeof numbers);
    }
  }
  step.operands = operands;
  step.lane = stage.lane;
  const int64_t heads = p_.shape.heads_q;
  step.dropout = {heads, call.sequence * heads + stage.heads_q.begin, call.first_q, call.first_k};
  step.flops = flops_of(p_, call, stage.heads_q.size());
  step.longest_tile = longest_tile_of(p_, call);
  step.copies = copies_of(p_, call, stage.heads_q.size());
  if (operands[kO].type.bits > p_[kO].type.bits) step.copies += part_bytes_of(p_, call, stage.heads_q.size());
  return step;
}

}  // namespace fovea::distributed
