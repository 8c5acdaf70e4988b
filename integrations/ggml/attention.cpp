// A node as one problem where Fovea reads the cache in place, and as parts where the cache is converted:
//
//   for each sequence:
//     for each group of key heads:            as many as have their keys in kPanelBytes as float32
//       for each chunk of keys:               one, unless the keys of a single head are more
//         convert K and V of the chunk
//         o, lse = attention over the chunk   merged with the chunks before it
#include "attention.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "convert.hpp"

namespace fovea_ggml {
namespace {

// Converted keys and values at a time: a head of 16,384 keys of 128. It bounds the memory beside the cache; what a thread
// works on at a time, 128 keys, lies in its second-level cache whatever this is.
constexpr int64_t kPanelBytes = int64_t{16} << 20;

fovea_dtype dtype_of(ggml_type type) {
  return type == GGML_TYPE_F16 ? kFloat16 : type == GGML_TYPE_BF16 ? kBfloat16 : kFloat32;
}

void set_strides(const ggml_tensor& t, int batch, int row, int head, int64_t* strides) {
  const size_t size = ggml_type_size(t.type);
  strides[0] = static_cast<int64_t>(t.nb[batch] / size);
  strides[1] = static_cast<int64_t>(t.nb[row] / size);
  strides[2] = static_cast<int64_t>(t.nb[head] / size);
}

MaskView view_of(const Operation& a) {
  if (a.mask == nullptr) return {};
  const ggml_tensor& m = *a.mask;
  const auto stride = [&](int i) { return static_cast<int64_t>(m.nb[i] / sizeof(uint16_t)); };
  return {static_cast<const uint16_t*>(m.data), m.ne[3], m.ne[2], a.queries(), a.keys(), stride(3), stride(2),
          stride(1)};
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9e", x);
  return text;
}

}  // namespace

Attention::Part Attention::whole(const Operation& a) const {
  Part part{0, a.batches(), 0, a.key_heads(), 0, a.keys(), a.k->data, a.v->data,
            {}, {}, nullptr, {}, nullptr, true};
  set_strides(*a.k, 3, 1, 2, part.k_strides);
  set_strides(*a.v, 3, 1, 2, part.v_strides);
  part.o = static_cast<float*>(a.o->data);
  set_strides(*a.o, 3, 2, 1, part.o_strides);
  return part;
}

void Attention::add_queries(const Operation& a, const Part& part, Request& request) const {
  const int64_t size = a.q->ne[0], group = a.heads() / a.key_heads(), first = part.key_head * group;
  const ggml_type type = computed_type(a);
  int64_t strides[3] = {a.queries() * a.heads() * size, a.heads() * size, size};
  if (type == GGML_TYPE_F32) {
    set_strides(*a.q, 3, 1, 2, strides);
    request.buffers.q = static_cast<const float*>(a.q->data) + part.batch * strides[0] + first * strides[2];
  }
  request.tensor(&fovea_problem::q, dtype_of(type), {part.batches, a.queries(), part.key_heads * group, size},
                 {strides[0], strides[1], strides[2], 1});
}

/// What a band is to the keys of the part: nothing but numbers.
void Attention::add_band(const Operation& a, const MaskSummary& mask, const Part& part,
                         Request& request) const {
  if (!mask.causal) return;
  fovea_problem& problem = request.problem;
  if (part.alone) {
    problem.causal = 1;
    problem.window_left = mask.window;
    return;
  }
  // The last query sees `behind` keys behind the part, and so on up the diagonal.
  const int64_t used = mask.used_keys[mask.used_keys.size() == 1 ? 0 : static_cast<size_t>(part.batch)];
  const int64_t behind = std::max<int64_t>(0, used - (part.key + part.keys));
  if (behind > 0) {
    problem.window_right = behind;
  } else {
    problem.causal = 1;
  }
  if (mask.window < 0) return;
  request.sees = "k - q >= " + std::to_string(used - a.queries() - mask.window - part.key);
}

/// The mask as tensors of expressions: classes of blocks, of which those without keys are skipped, and its numbers. Returns
/// what is added to the score.
std::string Attention::add_numbers(const Operation& a, const MaskSummary& mask, const Part& part,
                                   Request& request) const {
  const MaskView view = view_of(a);
  const int64_t group = a.heads() / a.key_heads(), head = part.key_head * group,
                heads = part.key_heads * group;
  const bool by_batch = view.batches > 1, by_head = view.heads > 1;
  const int64_t batch = by_batch ? part.batch : 0, plane = by_head ? head : 0;
  const int64_t batches = by_batch ? part.batches : 1, planes = by_head ? heads : 1;
  const int64_t class_plane = mask.block_rows * mask.block_columns;
  const int64_t columns = (part.keys + kMaskKeys - 1) / kMaskKeys;
  request.named("c",
                mask.blocks.data() + (batch * view.heads + plane) * class_plane + part.key / kMaskKeys,
                kUint8, {batches, planes, mask.block_rows, columns},
                {view.heads * class_plane, class_plane, mask.block_columns, 1});
  request.named("m", view.row(batch, plane, 0) + part.key, kFloat16, {batches, planes, a.queries(), part.keys},
                {view.batch_stride, view.head_stride, view.query_stride, 1});
  const std::string at = by_head ? "[b, h, q" : "[b, 0, q";
  const std::string block = "c" + at + " / 8, k / 32]", element = "m" + at + ", k]";
  if (mask.kind == MaskKind::kZeros) {
    request.sees = block + " == 2 || " + block + " == 1 && " + element + " == 0.0";
    return {};
  }
  request.sees = block + " != 0";
  if (a.max_bias <= 0) return " + " + element;
  request.named("slope", slopes_.data() + head, kFloat32, {heads}, {1});
  return " + slope[h] * " + element;
}

void Attention::add_mask(const Operation& a, const MaskSummary& mask, const Part& part, Request& request) {
  // Rows that a panel does not fill go faster through an expression than through the tiles that softcap takes.
  constexpr int64_t kFewRows = 4;
  std::string score(1, 's');
  if (a.softcap > 0) {
    if (a.queries() * (a.heads() / a.key_heads()) <= kFewRows) {
      score = number(a.softcap) + " * tanh(s / " + number(a.softcap) + ")";
    } else {
      request.problem.softcap = a.softcap;
    }
  }
  if (mask.kind == MaskKind::kBand) {
    add_band(a, mask, part, request);
  } else if (mask.kind != MaskKind::kNone) {
    score += add_numbers(a, mask, part, request);
  }
  if (score.size() > 1) request.score = std::move(score);
  if (mask.kind == MaskKind::kNone) return;
  used_.assign(static_cast<size_t>(part.batches), 0);
  for (int64_t i = 0; i < part.batches; ++i) {
    const int64_t used =
        mask.used_keys[mask.used_keys.size() == 1 ? 0 : static_cast<size_t>(part.batch + i)];
    used_[static_cast<size_t>(i)] = static_cast<int32_t>(std::clamp<int64_t>(used - part.key, 0, part.keys));
  }
  request.tensor(&fovea_problem::seqused_k, kInt32, {part.batches}, {1});
  request.buffers.seqused_k = used_.data();
}

bool Attention::run(const Operation& a, const MaskSummary& mask, const Part& part) {
  const fovea_dtype type = dtype_of(computed_type(a));
  const int64_t group = a.heads() / a.key_heads(), heads = part.key_heads * group, queries = a.queries();
  Request request;
  request.problem.scale = a.scale;
  request.buffers.q = queries_.at_least(0);
  add_queries(a, part, request);
  request.tensor(&fovea_problem::k, type, {part.batches, part.keys, part.key_heads, a.k->ne[0]},
                 {part.k_strides[0], part.k_strides[1], part.k_strides[2], 1});
  request.tensor(&fovea_problem::v, type, {part.batches, part.keys, part.key_heads, a.v->ne[0]},
                 {part.v_strides[0], part.v_strides[1], part.v_strides[2], 1});
  request.tensor(&fovea_problem::o, kFloat32, {part.batches, queries, heads, a.v->ne[0]},
                 {part.o_strides[0], part.o_strides[1], part.o_strides[2], 1});
  request.buffers.k = part.k;
  request.buffers.v = part.v;
  request.buffers.o = part.o;
  if (part.lse != nullptr) {
    request.tensor(&fovea_problem::lse, kFloat32, {1, heads, queries}, {heads * queries, queries, 1});
    request.buffers.lse = part.lse;
  }
  if (a.sinks != nullptr && part.key == 0) {  // of several chunks the first has the sinks
    request.tensor(&fovea_problem::sink, kFloat32, {heads}, {1});
    request.buffers.sink = static_cast<const float*>(a.sinks->data) + part.key_head * group;
  }
  add_mask(a, mask, part, request);
  return plans_.run(request, threads_);
}

bool Attention::merge(const Operation& a, const Part& sum, const Part& part) const {
  const int64_t heads = part.key_heads * (a.heads() / a.key_heads());
  const int64_t o_shape[4] = {1, a.queries(), heads, a.v->ne[0]}, lse_shape[3] = {1, heads, a.queries()};
  int64_t strides[2][4];
  fovea_tensor o[2], lse[2];
  const Part* const parts[2] = {&sum, &part};
  for (int i = 0; i < 2; ++i) {
    std::copy_n(parts[i]->o_strides, 3, strides[i]);
    strides[i][3] = 1;
    o[i] = {parts[i]->o, {FOVEA_CPU, 0}, 4, kFloat32, o_shape, strides[i], 0};
    lse[i] = {parts[i]->lse, {FOVEA_CPU, 0}, 3, kFloat32, lse_shape, nullptr, 0};
  }
  const fovea_tensor *const all_o[2] = {&o[0], &o[1]}, *const all_lse[2] = {&lse[0], &lse[1]};
  return fovea_merge(2, all_o, all_lse, &o[0], &lse[0]) == FOVEA_OK;
}

/// Converts the keys of `part`, computes it, and adds it to what the chunks before it gave. `all` is the node.
bool Attention::compute_chunk(const Operation& a, const MaskSummary& mask, Part part, const Part& all) {
  const int64_t d = a.k->ne[0], d_v = a.v->ne[0], group = a.heads() / a.key_heads();
  const int64_t heads = part.key_heads * group;
  auto* keys = static_cast<float*>(
      panels_.at_least(static_cast<size_t>(part.key_heads * part.keys * (d + d_v)) * sizeof(float)));
  if (keys == nullptr) return false;
  float* values = keys + part.key_heads * part.keys * d;
  to_float32(*a.k, part.batch, part.key_head, part.key_heads, part.key, part.keys, threads_, keys);
  to_float32(*a.v, part.batch, part.key_head, part.key_heads, part.key, part.keys, threads_, values);
  part.k = keys;
  part.v = values;
  const int64_t k_strides[3] = {0, d, part.keys * d}, v_strides[3] = {0, d_v, part.keys * d_v};
  std::copy_n(k_strides, 3, part.k_strides);
  std::copy_n(v_strides, 3, part.v_strides);
  part.o = all.o + part.batch * all.o_strides[0] + part.key_head * group * all.o_strides[2];
  std::copy_n(all.o_strides, 3, part.o_strides);
  if (part.alone) return run(a, mask, part);
  lse_.resize(static_cast<size_t>(2 * heads * a.queries()));
  part.lse = lse_.data();
  if (part.key == 0) return run(a, mask, part);
  const Part sum = part;
  part.lse += heads * a.queries();
  part.o = static_cast<float*>(
      partial_.at_least(static_cast<size_t>(a.queries() * heads * d_v) * sizeof(float)));
  if (part.o == nullptr) return false;
  const int64_t o_strides[3] = {0, heads * d_v, d_v};
  std::copy_n(o_strides, 3, part.o_strides);
  return run(a, mask, part) && merge(a, sum, part);
}

bool Attention::compute_converted(const Operation& a, const MaskSummary& mask) {
  const Part all = whole(a);
  const int64_t key_bytes = (a.k->ne[0] + a.v->ne[0]) * static_cast<int64_t>(sizeof(float));
  // In steps, so that plans serve many tokens of a text that grows.
  constexpr int64_t kStep = 256;
  const int64_t used =
      mask.used_keys.empty()
          ? a.keys()
          : std::min(a.keys(), (*std::max_element(mask.used_keys.begin(), mask.used_keys.end()) + kStep - 1) /
                                   kStep * kStep);
  const int64_t heads =
      std::clamp<int64_t>(kPanelBytes / (key_bytes * std::max<int64_t>(1, used)), 1, a.key_heads());
  // Chunks begin with a block of the mask's classes.
  const int64_t most_keys = std::max(kMaskKeys, kPanelBytes / key_bytes / kMaskKeys * kMaskKeys);
  for (int64_t batch = 0; batch < a.batches(); ++batch) {
    for (int64_t head = 0; head < a.key_heads(); head += heads) {
      for (int64_t key = 0; key == 0 || key < used; key += most_keys) {
        Part part = all;
        part.batch = batch;
        part.batches = 1;
        part.key_head = head;
        part.key_heads = std::min(heads, a.key_heads() - head);
        part.key = key;
        part.keys = std::min(most_keys, used - key);
        part.alone = part.keys == used;
        if (!compute_chunk(a, mask, part, all)) return false;
      }
    }
  }
  return true;
}

bool Attention::compute(const ggml_tensor& node) {
  const Operation a(node);
  const MaskSummary mask = summarise(view_of(a), threads_);
  const ggml_type type = computed_type(a);
  if (a.max_bias > 0) {
    slopes_.resize(static_cast<size_t>(a.heads()));
    for (int64_t h = 0; h < a.heads(); ++h) slopes_[static_cast<size_t>(h)] = a.slope(h);
  }
  if (type != GGML_TYPE_F32) {
    void* queries = queries_.at_least(static_cast<size_t>(ggml_nelements(a.q)) * sizeof(uint16_t));
    if (queries == nullptr) return false;
    queries_as(*a.q, type, threads_, queries);
  }
  if (a.k->type == type && a.v->type == type) return run(a, mask, whole(a));
  return compute_converted(a, mask);
}

}  // namespace fovea_ggml
