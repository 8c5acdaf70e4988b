// Shapes, ranks and types of tensors against the table of roles: the definitions of shapes.hpp.
#include "plan/shapes.hpp"

#include <array>

#include "core/status.hpp"
#include "plan/text.hpp"

namespace fovea::plan {
namespace {

int64_t blocks(int64_t rows, int64_t block) {
  return block == 0 ? 0 : rows / block + (rows % block != 0 ? 1 : 0);
}

/// "(batch or 1, heads_q or 1, ...)".
std::string text_of(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < static_cast<size_t>(dims.rank()); ++i) {
    if (i > 0) text += ", ";
    text += name_of(dims.sizes[i]);
    if (dims.broadcasts(i)) text += " or 1";
  }
  return text + ")";
}

/// "3 dimensions (batch, heads_q, seqlen_q)".
std::string rank_text(const Dims& dims) {
  return std::to_string(dims.rank()) + (dims.rank() == 1 ? " dimension " : " dimensions ") + text_of(dims);
}

bool has(const TensorDescs& tensors, Role role) {
  return tensors[index_of(role)].present;
}

/// The dimensions that the other tensors ask for.
const Dims& full_dims(const TensorSpec& spec, const TensorDescs& tensors) {
  if (has_keys(spec) && has(tensors, Role::kPageTable)) return spec.paged;
  if (has_keys(spec) && has(tensors, Role::kCacheBatch)) return spec.cached;
  return has(tensors, spec.packed_by) && spec.packed.rank() > 0 ? spec.packed : spec.dims;
}

std::array<int64_t, kMaxRank> values_of(const AttentionProblem& p, const Dims& dims) {
  std::array<int64_t, kMaxRank> values{};
  for (size_t i = 0; i < values.size(); ++i) values[i] = value_of(p, dims.sizes[i]);
  return values;
}

}  // namespace

int64_t value_of(const AttentionProblem& p, Size size) {
  switch (size) {
    case Size::kNone:
      return 0;
    case Size::kBatch:
      return p.batch;
    case Size::kSeqlenQ:
      return p.seqlen_q;
    case Size::kSeqlenK:
      return p.seqlen_k;
    case Size::kTotalQ:
      return p.total_q;
    case Size::kTotalK:
      return p.total_k;
    case Size::kHeadsQ:
      return p.heads_q;
    case Size::kHeadsKv:
      return p.heads_kv;
    case Size::kHeadDim:
      return p.head_dim;
    case Size::kHeadDimV:
      return p.head_dim_v;
    case Size::kBlocksQ:
      return blocks(p.seqlen_q, p.block_q);
    case Size::kBlocksK:
      return blocks(p.seqlen_k, p.block_k);
    case Size::kStarts:
      return p.batch + 1;
    case Size::kTwo:
      return 2;
    case Size::kCount:
      return p.list_size;
    case Size::kCaches:
    case Size::kPages:
      return p.caches;
    case Size::kPageRows:
      return p.cache_rows;
    case Size::kTableColumns:
      return p.table_columns;
    case Size::kNewRows:
      return p.new_rows;
    case Size::kTotalNew:
      return p.total_new;
    case Size::kPositions:
      return p.positions;
    case Size::kRotaryHalf:
      return p.rotary_half;
  }
  return 0;
}

const Dims* dims_of(const TensorSpec& spec, const TensorDescs& tensors) {
  const TensorDesc& t = tensors[index_of(spec.role)];
  const Dims& full = full_dims(spec, tensors);
  if (t.ndim == full.rank()) return &full;
  return t.ndim == spec.shorter.rank() ? &spec.shorter : nullptr;
}

void check_rank(const TensorSpec& spec, const TensorDescs& tensors) {
  if (dims_of(spec, tensors) != nullptr) return;
  const TensorDesc& t = tensors[index_of(spec.role)];
  const Dims& full = full_dims(spec, tensors);
  const bool is_packed = &full == &spec.packed;
  std::string expected = spec.shorter.rank() > 0 ? rank_text(spec.shorter) + " or " : "";
  expected += rank_text(full);
  if (is_packed) expected += std::string(", as there is ") + name_of(spec.packed_by);
  if (&full == &spec.paged) expected += ", as there is page_table";
  throw_invalid(name_of(spec.role), std::to_string(t.ndim) + " dimensions, " + shape_text(t), expected,
                !is_packed ? spec.remedy
                : spec.packed_by == Role::kCuSeqlensKNew
                    ? "drop the batch dimension, or leave out cu_seqlens_k_new"
                    : "drop the batch dimension, or leave out cu_seqlens_q and cu_seqlens_k");
}

namespace {

/// Those of the tensor: beside a q of 8 bits o has any, and for all but keys its type stands for that of q.
Types types_of(const TensorSpec& spec, const TensorDescs& tensors) {
  const Types& types = spec.types;
  if (!types.also_as || types.as != Role::kQ || tensors[index_of(Role::kQ)].dtype != DType::kE4M3)
    return types;
  if (spec.role == Role::kO) return tensor_table::kReals;
  return is_cache(spec.role) ? types : Types{types.set, Role::kO, true};
}

}  // namespace

void check_dtype(const TensorSpec& spec, const TensorDescs& tensors) {
  const Types types = types_of(spec, tensors);
  const DType type = tensors[index_of(spec.role)].dtype, of_as = tensors[index_of(types.as)].dtype;
  if (types.has(type) || (types.also_as && type == of_as)) return;
  std::string expected;
  if (types.also_as) expected = std::string(name_of(of_as)) + ", the type of " + name_of(types.as);
  int left = __builtin_popcount(types.set);
  for (const DTypeInfo& other : kDTypes) {
    if (!types.has(other.type)) continue;
    --left;
    if (types.also_as && other.type == of_as) continue;
    if (!expected.empty()) expected += types.also_as ? ", or " : left == 0 ? " or " : ", ";
    expected += other.name;
  }
  throw_invalid(name_of(spec.role), name_of(type), expected, "convert the tensor");
}

void check_shape(const AttentionProblem& p, Role role) {
  const TensorDesc& t = p[role];
  if (const TensorSpec& spec = spec_of(role); spec.same_shape) {
    if (t.shape == p[spec.with].shape) return;
    throw_invalid(name_of(role), "shape " + shape_text(t),
                  std::string("the shape of ") + name_of(spec.with) + " = " + shape_text(p[spec.with]),
                  "make it agree with the other tensors");
  }
  const Dims& dims = *dims_of(spec_of(role), p.tensors);
  const std::array<int64_t, kMaxRank> values = values_of(p, dims);
  const auto rank = static_cast<size_t>(t.ndim);
  bool good = true;
  for (size_t i = 0; i < rank; ++i)
    good &= t.shape[i] == values[i] || (dims.broadcasts(i) && t.shape[i] == 1);
  if (good) return;
  throw_invalid(name_of(role), "shape " + shape_text(t),
                text_of(dims) + (dims.broadcast != 0 ? " with the sizes " : " = ") +
                    shape_text(std::span(values).first(rank)),
                dims.broadcast != 0 && p.packed
                    ? "make it agree with batch, heads_q, max_seqlen_q and max_seqlen_k"
                    : "make it agree with the other tensors");
}

void to_common_form(const AttentionProblem& p, Role role, TensorDesc& t) {
  const TensorSpec& spec = spec_of(role);
  if (t.ndim + 1 == spec.dims.rank()) {
    t.shape = {p.batch, t.shape[0], t.shape[1], t.shape[2]};
    t.stride = {0, t.stride[0], t.stride[1], t.stride[2]};
    ++t.ndim;
  }
  for (size_t i = 0; i < static_cast<size_t>(t.ndim); ++i) {
    if (!spec.dims.broadcasts(i)) continue;
    if (t.shape[i] == 1) t.stride[i] = 0;
    t.shape[i] = value_of(p, spec.dims.sizes[i]);
  }
}

}  // namespace fovea::plan
