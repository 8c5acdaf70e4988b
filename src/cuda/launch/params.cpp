// Fills AttentionParams from a problem, and the pointers of a run into it.
#include "cuda/launch/params.hpp"

#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "expr/pair_expressions.hpp"
#include "tile/philox.hpp"

namespace fovea::cuda {
namespace {

/// Bytes of one cp.async, ld.global.v4 or st.global.v4.
constexpr int64_t kVectorBytes = 16;

constexpr std::array<std::pair<Role, uint32_t>, 10> kAlignedBits = {{{Role::kQ, tile::kAlignedQ},
                                                                     {Role::kK, tile::kAlignedK},
                                                                     {Role::kV, tile::kAlignedV},
                                                                     {Role::kDO, tile::kAlignedDO},
                                                                     {Role::kO, tile::kAlignedO},
                                                                     {Role::kDQ, tile::kAlignedDQ},
                                                                     {Role::kDK, tile::kAlignedDK},
                                                                     {Role::kDV, tile::kAlignedDV},
                                                                     {Role::kQV, tile::kAlignedQV},
                                                                     {Role::kDBias, tile::kAlignedDBias}}};

// AttentionParams has a field for each role that attention reads or writes, with its name: a pointer, followed by the
// strides that kernels step along (all but that of a contiguous last dimension).

struct View {
  size_t offset;   ///< of the pointer in AttentionParams
  size_t strides;  ///< behind it
};

/// Strides in a field of AttentionParams: 0 for a plain pointer.
template <class Field>
constexpr size_t strides_in() {
  constexpr size_t kWord = sizeof(int64_t);
  static_assert(sizeof(void*) == kWord && sizeof(Field) % kWord == 0);
  return sizeof(Field) / kWord - 1;
}

constexpr std::array<View, kAttentionRoleCount> kViews = [] {
  std::array<View, kAttentionRoleCount> views = {{
#define FOVEA_VIEW(field, Name, forward, backward, meaning) \
  {offsetof(tile::AttentionParams, field), strides_in<decltype(tile::AttentionParams::field)>()},
      FOVEA_ATTENTION_TENSORS(FOVEA_VIEW)
#undef FOVEA_VIEW
  }};
  views[index_of(Role::kAlibi)].strides = 2;  // alibi_batch and alibi_head
  return views;
}();
static_assert(offsetof(tile::AttentionParams, alibi_batch) ==
                  offsetof(tile::AttentionParams, alibi) + sizeof(float*) &&
              offsetof(tile::AttentionParams, alibi_head) ==
                  offsetof(tile::AttentionParams, alibi_batch) + sizeof(int64_t));

constexpr bool has_the_strides_of_the_table() {
  for (size_t i = 0; i < kViews.size(); ++i) {
    const TensorSpec& spec = tensor_table::kTable[i];
    const int strides = spec.dims.rank() - (spec.contiguous ? 1 : 0);
    if (kViews[index_of(spec.role)].strides != static_cast<size_t>(strides)) return false;
  }
  return true;
}
static_assert(has_the_strides_of_the_table(), "kernels step along the dimensions of the table of roles");

char* field_of(tile::AttentionParams& params, Role role) {
  return reinterpret_cast<char*>(&params) + kViews[index_of(role)].offset;
}

/// Whether every row starts at a multiple of 16 bytes from the first and is a multiple of 16 bytes long; and
/// rows are not so far apart that the products of 32 bits by which kernels find them would overflow
/// (warp/shared_tile.cuh).
bool rows_are_vectors(const TensorDesc& t) {
  constexpr int64_t kFarthestRow = int64_t{1} << 30;
  if (t.shape[1] > 1 && t.stride[1] >= kFarthestRow) return false;
  if (t.shape[3] * size_of(t.dtype) % kVectorBytes != 0) return false;
  for (size_t i = 0; i < 3; ++i) {
    if (t.shape[i] > 1 && t.stride[i] * size_of(t.dtype) % kVectorBytes != 0) return false;
  }
  return true;
}

void set_strides(const TensorDesc& t, int64_t (&strides)[expr::kMaxRank]) {
  for (size_t d = 0; d < static_cast<size_t>(t.ndim); ++d) strides[d] = t.stride[d];
}

tile::ExpressionTensors expression_of(const AttentionProblem& p) {
  tile::ExpressionTensors out;
  out.has_score = p.expressions && (p.expressions->score || !(static_cast<float>(p.scale) > 0));
  for (size_t i = 0; i < p.named.size(); ++i) {
    const NamedTensor& named = p.named[i];
    tile::NamedTensor& to = out.at[i];
    for (size_t d = 0; d < expr::kMaxRank; ++d)
      to.extent[d] = d < static_cast<size_t>(named.tensor.ndim) ? static_cast<int>(named.tensor.shape[d]) : 1;
    set_strides(named.tensor, to.stride);
    if (named.gradient.present) set_strides(named.gradient, to.gradient_stride);
  }
  return out;
}

}  // namespace

tile::AttentionParams params_of(const AttentionProblem& p) {
  tile::AttentionParams a;
  for (size_t i = 0; i < kViews.size(); ++i) {
    const auto role = static_cast<Role>(i);
    std::memcpy(field_of(a, role) + sizeof(void*), p[role].stride.data(),
                kViews[i].strides * sizeof(int64_t));
  }
  a.e4m3_queries = p[Role::kQ].dtype == DType::kE4M3;
  a.o_type = p[Role::kO].dtype;
  a.dq_is_f32 = p.has(Role::kDQ) && p[Role::kDQ].dtype == DType::kF32;
  a.dk_is_f32 = p.has(Role::kDK) && p[Role::kDK].dtype == DType::kF32;
  a.bias_type = p[Role::kBias].dtype;
  a.dbias_type = p[Role::kDBias].dtype;
  a.expression = expression_of(p);
  if (p.has(Role::kBlockMask)) {
    a.block_q = static_cast<int>(p.block_q);
    a.block_k = static_cast<int>(p.block_k);
  }

  a.list_size = static_cast<int>(p.list_size);
  a.caches = static_cast<int>(p.caches);
  a.cache_rows = static_cast<int>(std::max<int64_t>(p.cache_rows, 1));
  a.seqlen_q = static_cast<int>(p.seqlen_q);
  a.seqlen_k = static_cast<int>(p.seqlen_k);
  a.total_q = p.total_q;
  a.total_k = p.total_k;
  a.batch = static_cast<int>(p.batch);
  a.heads_q = static_cast<int>(p.heads_q);
  a.heads_kv = static_cast<int>(p.heads_kv);
  a.group = static_cast<int>(p.group());
  a.head_dim = static_cast<int>(p.head_dim);
  a.head_dim_v = static_cast<int>(p.head_dim_v);
  a.scale = static_cast<float>(p.scale);
  a.softcap = static_cast<float>(p.softcap);
  a.window_left = static_cast<int>(p.window_left);
  a.window_right = static_cast<int>(p.window_right);

  const tile::Dropout dropout(p.dropout, 0, 0);
  a.dropout_threshold = dropout.threshold;
  a.dropout_keep_scale = dropout.keep_scale;
  a.rng_state_is_input = p.pass == Pass::kBackward && p.has(Role::kRngState);

  for (const auto& [role, bit] : kAlignedBits) {
    if (p.has(role) && rows_are_vectors(p[role])) a.aligned16 |= bit;
  }
  return a;
}

NamedPlaces named_places_of(const AttentionProblem& p) {
  NamedPlaces places;
  for (size_t i = 0; i < places.size(); ++i)
    places[i] = static_cast<uint8_t>(i < p.named.size() ? p.named[i].place : place_of_named(i));
  return places;
}

void bind(tile::AttentionParams& a, const Buffers& buffers, const NamedPlaces& named) {
  // One copy for each role, at offsets that the compiler knows: a run pays for this.
#define FOVEA_BIND(field, Name, forward, backward, meaning) \
  std::memcpy(static_cast<void*>(&a.field), &buffers.data[index_of(Role::k##Name)], sizeof(void*));
  FOVEA_ATTENTION_TENSORS(FOVEA_BIND)
#undef FOVEA_BIND
  static_assert(tile::kMaxNamedTensors == kMaxNamedTensors);
  for (size_t i = 0; i < kMaxNamedTensors; ++i) {
    a.expression.at[i].data = static_cast<const char*>(buffers.data[named[i]]);
    a.expression.at[i].gradient = static_cast<float*>(buffers.data[place_of_gradient(i)]);
  }
  a.seed = buffers.seed;
  a.offset = buffers.offset;
  const DropoutPlace& place = buffers.dropout;
  tile::Dropout stream;
  stream.begin_at(place.first_query, place.first_key);
  a.dropout_first_row = stream.first_row;
  a.dropout_first_column = stream.first_column;
  a.dropout_first_head = static_cast<uint32_t>(place.head_number(a.heads_q, 0, 0));
  a.dropout_heads = static_cast<uint32_t>(place.head_number(a.heads_q, 1, 0)) - a.dropout_first_head;
  for (const auto& [role, bit] : kAlignedBits) {
    if (reinterpret_cast<uintptr_t>(buffers.data[index_of(role)]) % kVectorBytes != 0) a.aligned16 &= ~bit;
  }
}

}  // namespace fovea::cuda
