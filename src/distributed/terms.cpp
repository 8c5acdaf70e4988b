// The definitions of terms.hpp.
#include "distributed/terms.hpp"

#include <algorithm>
#include <bit>

#include "capi/convert.hpp"
#include "core/status.hpp"
#include "expr/parse.hpp"
#include "expr/print.hpp"
#include "expr/problem_terms.hpp"
#include "plan/validate.hpp"

namespace fovea::distributed {
namespace {

using expr::Variable;

/// The terms that tensors of their own say.
struct TermRole {
  Role role;
  Place place;
};
constexpr std::array kTermRoles = {TermRole{Role::kAlibi, kAlibi}, TermRole{Role::kBias, kBias},
                                   TermRole{Role::kMask, kMask}, TermRole{Role::kBlockMask, kBlockMask}};

Place place_of(Role role) {
  const auto* const found = std::find_if(kTermRoles.begin(), kTermRoles.end(),
                                         [&](const TermRole& term) { return term.role == role; });
  return found->place;
}

bool has_terms(const fovea_problem& p) {
  return p.alibi != nullptr || p.bias != nullptr || p.mask != nullptr || p.block_mask != nullptr ||
         p.dbias != nullptr || p.score != nullptr || p.sees != nullptr || p.num_named != 0;
}

fovea_dtype to_c(DType dtype) {
  const DTypeInfo& info = info_of(dtype);
  return {static_cast<uint8_t>(info.code), static_cast<uint8_t>(info.bits), 1};
}

// ---- the whole problem ----

/// The problem as one device would have it, but for memory: what its terms are checked against.
class WholeProblem {
 public:
  WholeProblem(const fovea_problem& local, const LocalProblem& problem, bool packed)
      : shape_(problem.shape), packed_(packed), made_(capi::to_description(local)) {
    dtype_ = made_.tensors[index_of(Role::kQ)].dtype;
    device_ = capi::to_device_type("local.q", problem.device);
    device_id_ = device_ == DeviceType::kCpu ? 0 : problem.device.id;
    const Shape& s = shape_;
    rows(Role::kQ, s.queries.total, s.heads_q, s.head_dim);
    rows(Role::kK, s.keys.total, s.heads_kv, s.head_dim);
    rows(Role::kV, s.keys.total, s.heads_kv, s.head_dim_v);
    rows(Role::kO, s.queries.total, s.heads_q, s.head_dim_v);
    statistic();
    if (problem.backward()) {
      rows(Role::kDO, s.queries.total, s.heads_q, s.head_dim_v);
      rows(Role::kDQ, s.queries.total, s.heads_q, s.head_dim);
      rows(Role::kDK, s.keys.total, s.heads_kv, s.head_dim);
      rows(Role::kDV, s.keys.total, s.heads_kv, s.head_dim_v);
    }
    // Their own reader checks these.
    for (const Role role : {Role::kDLse, Role::kSink, Role::kDSink}) made_.tensors[index_of(role)] = {};
    made_.max_seqlen_q = made_.max_seqlen_k = 0;
    if (packed) sequences();
  }

  const ProblemDescription& description() const { return made_; }

 private:
  void set(Role role, DType dtype, std::initializer_list<int64_t> sizes) {
    TensorDesc t;
    t.present = true;
    t.dtype = dtype;
    t.device = device_;
    t.device_id = device_id_;
    for (const int64_t size : sizes) t.shape[static_cast<size_t>(t.ndim++)] = size;
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(t.shape[d], 1)) t.stride[d] = stride;
    made_.tensors[index_of(role)] = t;
  }
  void rows(Role role, int64_t rows, int64_t heads, int64_t size) {
    if (packed_) return set(role, dtype_, {rows, heads, size});
    set(role, dtype_, {shape_.batch, rows, heads, size});
  }
  void statistic() {
    if (packed_) return set(Role::kLse, DType::kF32, {shape_.heads_q, shape_.queries.total});
    set(Role::kLse, DType::kF32, {shape_.batch, shape_.heads_q, shape_.queries.total});
  }
  void sequences() {
    const auto count = static_cast<int64_t>(shape_.sequences.size());
    set(Role::kCuSeqlensQ, DType::kI32, {count + 1});
    set(Role::kCuSeqlensK, DType::kI32, {count + 1});
    for (const Sequence& s : shape_.sequences) {
      made_.max_seqlen_q = std::max(made_.max_seqlen_q, s.queries.size());
      made_.max_seqlen_k = std::max(made_.max_seqlen_k, s.keys.size());
    }
  }

  const Shape& shape_;
  bool packed_;
  ProblemDescription made_;
  DType dtype_{};
  DeviceType device_{};
  int device_id_ = 0;
};

// ---- from the whole problem to terms of calls ----

expr::Dimensions dimensions_of_role(Role role, int ndim) {
  expr::Dimensions dimensions;
  std::array<Variable, kMaxRank> names = {Variable::kB, Variable::kH, Variable::kQ, Variable::kK};
  if (role == Role::kAlibi && ndim == 1) names[0] = Variable::kH;
  for (size_t d = 0; d < static_cast<size_t>(ndim); ++d) dimensions[d].name = names[d];
  return dimensions;
}

class Reader {
 public:
  Reader(const ProblemDescription& given, const AttentionProblem& whole) : given_(given), whole_(whole) {}

  Terms read() {
    made_.block_q = whole_.block_q;
    made_.block_k = whole_.block_k;
    const AttentionProblem cut = with_expressions();
    for (const NamedTensor& named : cut.named)
      made_.names.push_back(made_.names.size() < given_.named.size() ? named.name : unused(named.name));
    made_.numbers = unused("part");
    for (const auto& [name, most] : {std::pair{Variable::kB, whole_.batch},
                                     {Variable::kH, whole_.heads_q},
                                     {Variable::kHk, whole_.heads_kv},
                                     {Variable::kQ, whole_.seqlen_q},
                                     {Variable::kK, whole_.seqlen_k},
                                     {Variable::kNq, whole_.seqlen_q},
                                     {Variable::kNk, whole_.seqlen_k}})
      made_.limits[expr::number_of(name)] =
          static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(most) + 1)) - 1;
    made_.of_sequences = calls(whole_, {Role::kAlibi, Role::kBias, Role::kMask, Role::kBlockMask});
    made_.of_cuts = calls(cut, {Role::kBias, Role::kMask});
    gradients();
    describe();
    return std::move(made_);
  }

 private:
  std::string unused(std::string name) const {
    while (std::find(made_.names.begin(), made_.names.end(), name) != made_.names.end()) name += '_';
    return name;
  }

  /// The problem with ALiBi and block mask in its expressions; their other terms are left to calls as they are.
  AttentionProblem with_expressions() {
    AttentionProblem p = whole_;
    p.softcap = 0;
    for (const Role role : {Role::kBias, Role::kMask}) p.tensors[index_of(role)] = {};
    const auto composed = expr::with_terms_in_expressions(p);
    if (!composed || composed->named.size() >= kMaxNamedTensors) {
      const size_t terms = (p.has(Role::kAlibi) ? 1 : 0) + (p.has(Role::kBlockMask) ? 1 : 0);
      throw_invalid("num_named",
                    std::to_string(p.named.size()) + " tensors" +
                        (terms > 0 ? " beside " + std::to_string(terms) + " of alibi and block_mask" : ""),
                    "at most " + std::to_string(kMaxNamedTensors - 1 - terms) +
                        " over ranks, as the place of a part takes one's place",
                    "put several into one, with an index that chooses");
    }
    return *composed;
  }

  TermsOfCalls calls(const AttentionProblem& p, std::initializer_list<Role> roles) {
    TermsOfCalls made;
    if (p.expressions) made.expressions = *p.expressions;
    std::vector<std::array<bool, kMaxRank>> is_one(p.named.size());
    for (size_t i = 0; i < given_.named.size(); ++i) {
      for (size_t d = 0; d < kMaxRank; ++d) is_one[i][d] = given_.named[i].tensor.shape[d] == 1;
    }
    made.dimensions = expr::dimensions_of(made.expressions, is_one);
    for (size_t i = 0; i < p.named.size(); ++i) named(p, i, made);
    for (const Role role : roles) {
      const TensorDesc& given = given_.tensors[index_of(role)];
      if (!given.present) continue;
      TermTensor term{
          place_of(role), place_of(role), given, dimensions_of_role(role, given.ndim), {1, 1, 1, 1}};
      if (role == Role::kBlockMask) term.block = {1, 1, whole_.block_q, whole_.block_k};
      made.tensors.push_back(term);
    }
    return made;
  }
  /// Those of the caller are as they were given, those of terms in their common form.
  void named(const AttentionProblem& p, size_t i, TermsOfCalls& made) {
    TermTensor term{named_place(i), named_place(i), {}, made.dimensions[i], {1, 1, 1, 1}};
    if (i < given_.named.size()) {
      term.whole = given_.named[i].tensor;
    } else {
      term.callers = place_of(static_cast<Role>(p.named[i].place));
      term.whole = p.named[i].tensor;
    }
    made.tensors.push_back(term);
    for (auto* expression : {&made.expressions.score, &made.expressions.sees}) {
      if (*expression) (*expression)->tensors[i].name = made_.names[i];
    }
  }

  void gradients() {
    const TensorDesc& dbias = given_.tensors[index_of(Role::kDBias)];
    if (whole_.has(Role::kDBias))
      made_.gradients.push_back({kDBias, kDBias, dbias, dimensions_of_role(Role::kBias, 4), {1, 1, 1, 1}});
    for (size_t i = 0; i < given_.named.size(); ++i) {
      const TensorDesc& gradient = given_.named[i].gradient;
      if (!gradient.present) continue;
      const Place place = named_gradient_place(i);
      made_.gradients.push_back({place, place, gradient, made_.of_sequences.dimensions[i], {1, 1, 1, 1}});
    }
  }

  void describe() {
    const auto add = [&](const std::string& part) { made_.text += (made_.text.empty() ? "" : "; ") + part; };
    const auto tensor = [&](const std::string& name, const TensorDesc& t) {
      std::string text = name + " " + std::string(name_of(t.dtype)) + " (";
      for (size_t d = 0; d < static_cast<size_t>(t.ndim); ++d)
        text += (d > 0 ? ", " : "") + std::to_string(t.shape[d]);
      add(text + ")");
    };
    for (const TermRole& term : kTermRoles) {
      const TensorDesc& t = given_.tensors[index_of(term.role)];
      if (t.present) tensor(name_of(term.role), t);
    }
    if (whole_.has(Role::kBlockMask))
      add("blocks of " + std::to_string(whole_.block_q) + " x " + std::to_string(whole_.block_k));
    if (whole_.expressions) {
      for (const auto* expression : {&whole_.expressions->score, &whole_.expressions->sees}) {
        if (*expression) add(std::string(name_of((*expression)->use)) + " " + expr::print(**expression));
      }
    }
    for (const NamedTensor& named : given_.named) tensor(named.name, named.tensor);
    for (const TermTensor& gradient : made_.gradients) {
      const bool is_bias = gradient.callers == kDBias;
      tensor(
          "gradient of " + (is_bias ? std::string("bias") : made_.names[gradient.callers - kNamedGradient]),
          gradient.whole);
    }
  }

  const ProblemDescription& given_;
  const AttentionProblem& whole_;
  Terms made_;
};

}  // namespace

// ---- parts ----

Range PartOfProblem::of(Variable name) const {
  switch (name) {
    case Variable::kB:
      return batch;
    case Variable::kH:
      return heads_q;
    case Variable::kHk:
      return heads_kv;
    case Variable::kQ:
      return queries;
    case Variable::kK:
      return keys;
    case Variable::kS:
    case Variable::kNq:
    case Variable::kNk:
      break;  // no range of pairs
  }
  return {};
}

std::array<bool, expr::kVariableNames.size()> PartOfProblem::moved() const {
  std::array<bool, expr::kVariableNames.size()> is_moved{};
  for (const Variable name : {Variable::kB, Variable::kH, Variable::kHk})
    is_moved[static_cast<size_t>(name)] = of(name).begin != 0;
  for (const Variable name : {Variable::kQ, Variable::kK, Variable::kNq, Variable::kNk})
    is_moved[static_cast<size_t>(name)] = is_cut;
  return is_moved;
}

std::array<int32_t, expr::kPartNumbers> PartOfProblem::numbers() const {
  std::array<int32_t, expr::kPartNumbers> numbers{};
  for (const Variable name : {Variable::kB, Variable::kH, Variable::kHk, Variable::kQ, Variable::kK})
    numbers[expr::number_of(name)] = static_cast<int32_t>(of(name).begin);
  numbers[expr::number_of(Variable::kNq)] = static_cast<int32_t>(whole_q);
  numbers[expr::number_of(Variable::kNk)] = static_cast<int32_t>(whole_k);
  return numbers;
}

int64_t TensorPart::elements() const {
  int64_t count = 1;
  for (size_t d = 0; d < static_cast<size_t>(ndim); ++d) count *= shape[d];
  return count;
}

std::array<int64_t, kMaxRank> TensorPart::compact_strides() const {
  std::array<int64_t, kMaxRank> made{};
  int64_t next = 1;
  for (size_t d = static_cast<size_t>(ndim); d-- > 0; next *= std::max<int64_t>(shape[d], 1)) made[d] = next;
  return made;
}

TensorPart TermTensor::all() const {
  return {to_c(whole.dtype), whole.ndim, whole.shape, whole.stride, 0};
}

TermTensor TermTensor::compact() const {
  TermTensor made = *this;
  made.whole.dtype = DType::kF32;
  made.whole.stride = all().compact_strides();
  return made;
}

TensorPart TermTensor::part(const PartOfProblem& of) const {
  TensorPart made = all();
  for (size_t d = 0; d < static_cast<size_t>(whole.ndim); ++d) {
    const auto name = dimensions[d].name;
    if (!name || whole.shape[d] == 1) continue;
    const Range range = of.of(*name);
    made.shape[d] = (range.size() + block[d] - 1) / block[d];
    made.offset += range.begin / block[d] * whole.stride[d] * (made.type.bits / 8);
  }
  return made;
}

TextsOfCall texts_of(const Terms& terms, const PartOfProblem& part) {
  const TermsOfCalls& calls = terms.of(part);
  TextsOfCall texts;
  const auto moved = [&](const std::optional<expr::Expression>& whole) -> std::optional<std::string> {
    if (!whole) return std::nullopt;
    const expr::Expression made =
        expr::in_part(*whole, calls.dimensions, {part.moved(), terms.limits, terms.numbers});
    texts.reads_numbers = texts.reads_numbers || made.tensors.size() > whole->tensors.size();
    std::string text = expr::print(made);
    if (text.size() > expr::kMaxTextLength)
      throw_invalid("local." + std::string(name_of(whole->use)),
                    std::to_string(text.size()) + " characters with the numbers of a part",
                    "at most " + std::to_string(expr::kMaxTextLength),
                    "shorten the expression, or set heads_ranks to all ranks, which leaves sequences whole");
    return text;
  };
  texts.score = moved(calls.expressions.score);
  texts.sees = moved(calls.expressions.sees);
  return texts;
}

std::shared_ptr<const Terms> read_terms(const fovea_problem& local, const LocalProblem& problem,
                                        bool packed) {
  if (!has_terms(local)) return nullptr;
  try {
    const WholeProblem whole(local, problem, packed);
    return std::make_shared<const Terms>(
        Reader(whole.description(), plan::validate(whole.description())).read());
  } catch (const RequestError& error) {
    throw RequestError(error.status(), "local." + error.argument(), std::string("local.") + error.what());
  }
}

}  // namespace fovea::distributed
