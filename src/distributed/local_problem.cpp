// The definitions of local_problem.hpp.
#include "distributed/local_problem.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "capi/convert.hpp"
#include "core/dropout_place.hpp"
#include "core/status.hpp"
#include "distributed/terms.hpp"

namespace fovea::distributed {
namespace {

std::string text(int64_t number) {
  return std::to_string(number);
}
std::string text(std::string_view part) {
  return std::string(part);
}
std::string text(std::span<const int64_t> sizes) {
  std::string joined = "(";
  for (size_t i = 0; i < sizes.size(); ++i) joined.append(i ? ", " : "").append(text(sizes[i]));
  return joined.append(")");
}
/// Texts and numbers behind each other.
template <class... Part>
std::string join(const Part&... parts) {
  std::string joined;
  (joined.append(text(parts)), ...);
  return joined;
}

// ---- where rows lie ----

/// A list of pieces as what each rank holds; each row of [0, total) once.
Placement read_pieces(const char* argument, const fovea_piece* pieces, int64_t count, int ranks) {
  if (pieces == nullptr || count < 1)
    throw_invalid(argument, pieces == nullptr ? "NULL" : join(count, " pieces"), "a list of pieces",
                  "say which rows lie on which rank");
  Placement placement;
  placement.of_rank.resize(static_cast<size_t>(ranks));
  std::vector<int64_t> next(static_cast<size_t>(ranks), 0);
  std::vector<Range> all;
  for (int64_t i = 0; i < count; ++i) {
    const fovea_piece& piece = pieces[i];
    const std::string name = join(argument, "[", i, "]");
    if (piece.rank < 0 || piece.rank >= ranks)
      throw_invalid(name, join("rank ", int64_t{piece.rank}), join("a rank from 0 to ", int64_t{ranks - 1}),
                    "name a rank of the transport");
    if (piece.begin < 0 || piece.end < piece.begin || piece.end > std::numeric_limits<int32_t>::max())
      throw_invalid(name, join("rows [", piece.begin, ", ", piece.end, ")"), "0 <= begin <= end < 2^31",
                    "give each piece the rows from begin up to end");
    if (piece.begin == piece.end) continue;
    const auto rank = static_cast<size_t>(piece.rank);
    placement.of_rank[rank].push_back({{piece.begin, piece.end}, next[rank]});
    next[rank] += piece.end - piece.begin;
    all.push_back({piece.begin, piece.end});
  }
  std::sort(all.begin(), all.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (const Range& range : all) {
    if (range.begin != placement.total)
      throw_invalid(argument,
                    range.begin < placement.total ? join("row ", range.begin, " in two pieces")
                                                  : join("no piece with row ", placement.total),
                    "each row in one piece", "divide the rows among the ranks");
    placement.total = range.end;
  }
  return placement;
}

/// All rows on every rank.
Placement everywhere(int64_t total, int ranks) {
  Placement placement{total, {}};
  placement.of_rank.assign(static_cast<size_t>(ranks), total > 0 ? Holding{{{0, total}, 0}} : Holding{});
  return placement;
}

void check_starts(const char* argument, const int32_t* starts, int64_t sequences, int64_t total) {
  if (starts[0] != 0)
    throw_invalid(argument, join("a first start of ", int64_t{starts[0]}), "0", "start with the first row");
  for (int64_t i = 0; i < sequences; ++i) {
    if (starts[i + 1] < starts[i])
      throw_invalid(argument, join(int64_t{starts[i + 1]}, " behind ", int64_t{starts[i]}),
                    "starts that do not decrease", "give where each sequence starts, and the end");
  }
  if (starts[sequences] != total)
    throw_invalid(argument, join("an end of ", int64_t{starts[sequences]}),
                  join(total, ", the rows of the pieces"), "give each row to a sequence");
}

std::vector<Sequence> read_sequences(const fovea_distributed_problem& p, const Shape& shape) {
  if (p.num_sequences == 0) return {{{0, shape.queries.total}, {0, shape.keys.total}}};
  if (p.num_sequences < 0)
    throw_invalid("num_sequences", text(p.num_sequences), "0 or more", "0 says one sequence");
  if (p.cu_seqlens_q == nullptr)
    throw_invalid("cu_seqlens_q", "NULL", join(p.num_sequences + 1, " numbers"), "say where sequences start");
  const int32_t* keys = p.cu_seqlens_k != nullptr ? p.cu_seqlens_k : p.cu_seqlens_q;
  check_starts("cu_seqlens_q", p.cu_seqlens_q, p.num_sequences, shape.queries.total);
  check_starts(p.cu_seqlens_k ? "cu_seqlens_k" : "cu_seqlens_q", keys, p.num_sequences, shape.keys.total);
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < p.num_sequences; ++i)
    sequences.push_back({{p.cu_seqlens_q[i], p.cu_seqlens_q[i + 1]}, {keys[i], keys[i + 1]}});
  return sequences;
}

// ---- tensors ----

/// What a tensor of rows, of statistics or of heads (or other single numbers) looks like.
enum class Form : uint8_t { kRows, kStatistic, kHeads };

class TensorReader {
 public:
  TensorReader(const LocalProblem& local, bool packed) : local_(local), packed_(packed) {}

  LocalTensor read(Place place, const fovea_tensor* given, Form form, std::array<int64_t, 3> rows_heads_size,
                   std::span<const fovea_dtype> types) const {
    if (given == nullptr) return {};
    const std::string name = join("local.", name_of(place));
    if (given->shape == nullptr) throw_invalid(name, "no shape", "a shape", "fill the tensor");
    const std::vector<int64_t> expected = shape_of(form, rows_heads_size);
    const std::span<const int64_t> shape(given->shape, static_cast<size_t>(std::max(given->ndim, 0)));
    if (!std::equal(shape.begin(), shape.end(), expected.begin(), expected.end()))
      throw_invalid(
          name, join("shape ", shape),
          join(std::span<const int64_t>(expected), form == Form::kHeads ? "" : ", this rank's rows"),
          form == Form::kHeads ? "give that many" : "check the pieces");
    if (given->device.type != local_.device.type || given->device.id != local_.device.id)
      throw_invalid(name, "memory of another device", "memory of the transport's device", "copy the tensor");
    const auto same = [&](const fovea_dtype& t) {
      return t.code == given->dtype.code && t.bits == given->dtype.bits;
    };
    if (std::none_of(types.begin(), types.end(), same))
      throw_invalid(
          name, join("type code ", int64_t{given->dtype.code}, " of ", int64_t{given->dtype.bits}, " bits"),
          place == kRngState ? "int64" : "a type that goes with q's", "convert the tensor");
    LocalTensor t{true, given->dtype, {}, form == Form::kRows ? rows_heads_size[2] : 1};
    t.view = view_of(name, *given, form, expected);
    t.view.place = place;
    return t;
  }

 private:
  std::vector<int64_t> shape_of(Form form, const std::array<int64_t, 3>& s) const {
    if (form == Form::kHeads) return {s[1]};
    std::vector<int64_t> shape =
        form == Form::kRows ? std::vector<int64_t>{s[0], s[1], s[2]} : std::vector<int64_t>{s[1], s[0]};
    if (!packed_) shape.insert(shape.begin(), local_.shape.batch);
    return shape;
  }
  View view_of(const std::string& name, const fovea_tensor& given, Form form,
               const std::vector<int64_t>& shape) const {
    std::vector<int64_t> strides(shape.size(), 1);
    for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    if (given.strides != nullptr) {
      for (size_t i = 0; i < shape.size(); ++i) {
        if (given.strides[i] < 0)
          throw_invalid(name, join("a stride of ", given.strides[i]), "no negative stride",
                        "copy the tensor");
        if (shape[i] != 1) strides[i] = given.strides[i];
      }
    }
    if (form != Form::kStatistic && strides.back() != 1)
      throw_invalid(name, join("a last stride of ", strides.back()), "1: a contiguous last dimension",
                    "copy the tensor");
    const int64_t bytes = given.dtype.bits / 8;
    for (int64_t& stride : strides) stride *= bytes;
    if (form == Form::kHeads) return {-1, 0, 0, 0, strides[0]};
    const size_t first = packed_ ? 0 : 1;
    View view;
    view.stride_batch = packed_ ? 0 : strides[0];
    view.stride_row = strides[first + (form == Form::kRows ? 0 : 1)];
    view.stride_head = strides[first + (form == Form::kRows ? 1 : 0)];
    return view;
  }

  const LocalProblem& local_;
  bool packed_;
};

fovea_dtype type_of_q(const fovea_tensor& q) {
  const fovea_dtype t = q.dtype;
  const bool known = (t.code == FOVEA_CODE_FLOAT && (t.bits == 32 || t.bits == 16)) ||
                     (t.code == FOVEA_CODE_BFLOAT && t.bits == 16);
  if (known && t.lanes == 1) return t;
  throw_invalid("local.q", join("type code ", int64_t{t.code}, " of ", int64_t{t.bits}, " bits"),
                "float32, float16 or bfloat16", "convert the tensors");
}

/// Refuses what a distributed problem has no meaning for yet.
void refuse_other_terms(const fovea_problem& p) {
  const auto refuse = [](const char* what) {
    throw RequestError(Status::kUnsupported, std::string("local.") + what,
                       std::string("local.") + what +
                           ": got one, expected none: distributed problems have scale, causal, window, "
                           "softcap, dropout, sinks, ALiBi, bias, masks and expressions; "
                           "compute the problem on one rank, or leave it out");
  };
#define FOVEA_REFUSE(field, Name, forward, backward, meaning) \
  if (p.field != nullptr && is_other(#field)) refuse(#field);
  const auto is_other = [](const std::string& field) {
    constexpr std::array kKnown = {
#define FOVEA_KNOWN(Place, field) #field,
        FOVEA_DISTRIBUTED_TENSORS(FOVEA_KNOWN)
#undef FOVEA_KNOWN
    };
    return std::find(kKnown.begin(), kKnown.end(), field) == kKnown.end();
  };
  FOVEA_TENSORS(FOVEA_REFUSE)
#undef FOVEA_REFUSE
}

double read_dropout(const fovea_problem& p) {
  if (!(p.dropout >= 0 && p.dropout < 1))
    throw_invalid("local.dropout", std::to_string(p.dropout), "a probability in [0, 1)",
                  "0 drops no weights");
  return p.dropout;
}

void read_sizes(const fovea_problem& p, bool packed, Shape& shape) {
  for (const auto& [name, tensor] : {std::pair{"local.q", p.q}, {"local.k", p.k}, {"local.v", p.v}}) {
    if (tensor == nullptr || tensor->shape == nullptr)
      throw_invalid(name, "NULL", "a tensor", "pass its address, with a shape");
    if (tensor->ndim != (packed ? 3 : 4))
      throw_invalid(name, join(int64_t{tensor->ndim}, " dimensions"),
                    packed ? "3 dimensions (rows, heads, size)" : "4 dimensions (batch, rows, heads, size)",
                    "add the missing dimensions, or give num_sequences for packed rows");
  }
  const size_t heads = packed ? 1 : 2;
  shape.batch = packed ? 1 : p.q->shape[0];
  shape.heads_q = p.q->shape[heads];
  shape.heads_kv = p.k->shape[heads];
  shape.head_dim = p.q->shape[heads + 1];
  shape.head_dim_v = p.v->shape[heads + 1];
  if (shape.heads_kv < 1 || shape.heads_q % shape.heads_kv != 0)
    throw_invalid("local.q", join(shape.heads_q, " heads beside ", shape.heads_kv, " of k"),
                  "a multiple of the heads of k", "repeat or drop heads");
  shape.window = {p.window_left, p.causal ? 0 : p.window_right};
}

void read_tensors(const fovea_problem& p, int rank, bool packed, LocalProblem& local) {
  const fovea_dtype type = type_of_q(*p.q);
  const std::array own{type}, single{kFloat32}, integers{kInt64};
  const std::array either{type, kFloat32};
  const TensorReader reader(local, packed);
  const Shape& s = local.shape;
  const int64_t rows_q = count(s.queries.of_rank[static_cast<size_t>(rank)]);
  const int64_t rows_k = count(s.keys.of_rank[static_cast<size_t>(rank)]);
  const std::array q_size{rows_q, s.heads_q, s.head_dim}, o_size{rows_q, s.heads_q, s.head_dim_v};
  const std::array k_size{rows_k, s.heads_kv, s.head_dim}, v_size{rows_k, s.heads_kv, s.head_dim_v};
  auto& t = local.tensors;
  t[kQ] = reader.read(kQ, p.q, Form::kRows, q_size, own);
  t[kK] = reader.read(kK, p.k, Form::kRows, k_size, own);
  t[kV] = reader.read(kV, p.v, Form::kRows, v_size, own);
  t[kO] = reader.read(kO, p.o, Form::kRows, o_size, either);
  t[kLse] = reader.read(kLse, p.lse, Form::kStatistic, o_size, single);
  t[kSink] = reader.read(kSink, p.sink, Form::kHeads, o_size, single);
  t[kRngState] = reader.read(kRngState, p.rng_state, Form::kHeads, {0, kRngStateSize, 0}, integers);
  if (local.backward()) {
    t[kDO] = reader.read(kDO, p.d_o, Form::kRows, o_size, own);
    t[kDLse] = reader.read(kDLse, p.dlse, Form::kStatistic, o_size, single);
    t[kDQ] = reader.read(kDQ, p.dq, Form::kRows, q_size, either);
    t[kDK] = reader.read(kDK, p.dk, Form::kRows, k_size, either);
    t[kDV] = reader.read(kDV, p.dv, Form::kRows, v_size, either);
    t[kDSink] = reader.read(kDSink, p.dsink, Form::kHeads, o_size, single);
  }
  if (local.terms) {
    for (const auto* tensors : {&local.terms->of_sequences.tensors, &local.terms->gradients}) {
      for (const TermTensor& tensor : *tensors) {
        const TensorPart all = tensor.all();
        t[tensor.callers] = {true, all.type, {tensor.callers, 0, 0, 0, 0}, all.elements()};
      }
    }
  }
  const auto need = [&](std::initializer_list<Place> places) {
    for (const Place place : places) {
      if (!t[place].present)
        throw_invalid(join("local.", name_of(place)), "NULL", "a tensor", "pass its address");
    }
  };
  need({kQ, kK, kV, kO});
  if (local.backward()) need({kLse, kDO, kDQ, kDK, kDV});
  if (t[kDSink].present) need({kSink});
}

}  // namespace

std::string LocalProblem::name(Place place) const {
  if (place < kNamed) return name_of(place);
  const bool is_gradient = place >= kNamedGradient;
  const auto i = static_cast<size_t>(place - (is_gradient ? kNamedGradient : kNamed));
  const bool is_known = terms && i < terms->names.size();
  return "named." + (is_known ? terms->names[i] : std::to_string(i)) + (is_gradient ? ".gradient" : "");
}

LocalProblem read_local_problem(const fovea_distributed_problem& problem, int rank, int ranks,
                                fovea_device device) {
  if (problem.local == nullptr) throw_invalid("local", "NULL", "a problem", "pass this rank's tensors");
  const fovea_problem p = capi::read_problem(problem.local);
  refuse_other_terms(p);
  const bool packed = problem.num_sequences > 0;
  LocalProblem local;
  local.pass = static_cast<fovea_pass>(p.pass);
  local.device = device;
  local.scale = p.scale;
  local.softcap = p.softcap;
  local.dropout = read_dropout(p);
  Shape& shape = local.shape;
  shape.ranks = ranks;
  if (local.dropout > 0) shape.row_multiple = DropoutPlace::kMultiple;
  read_sizes(p, packed, shape);
  if (local.scale == 0) local.scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  if (problem.queries == nullptr) {
    shape.queries_everywhere = true;
    if (local.backward())
      throw_invalid("queries", "NULL", "pieces", "queries on every rank are for the forward alone");
    shape.keys = read_pieces("keys", problem.keys, problem.num_keys, ranks);
    shape.queries = everywhere(p.q->shape[packed ? 0 : 1], ranks);
  } else {
    shape.queries = read_pieces("queries", problem.queries, problem.num_queries, ranks);
    shape.keys = problem.keys ? read_pieces("keys", problem.keys, problem.num_keys, ranks) : shape.queries;
  }
  shape.sequences = read_sequences(problem, shape);
  local.terms = read_terms(p, local, packed);
  shape.joins = !local.terms && local.dropout == 0;
  read_tensors(p, rank, packed, local);
  return local;
}

}  // namespace fovea::distributed
