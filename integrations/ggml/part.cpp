// Which tensors, numbers and texts say to Fovea what a part of a node is.
#include "part.hpp"

#include <algorithm>
#include <cstdio>
#include <new>
#include <utility>

#include "convert.hpp"

namespace fovea_ggml {
namespace {

fovea_dtype dtype_of(ggml_type type) {
  return type == GGML_TYPE_F16 ? kFloat16 : type == GGML_TYPE_BF16 ? kBfloat16 : kFloat32;
}

void set_strides(const ggml_tensor& t, int batch, int row, int head, int64_t* strides) {
  const size_t size = ggml_type_size(t.type);
  strides[0] = static_cast<int64_t>(t.nb[batch] / size);
  strides[1] = static_cast<int64_t>(t.nb[row] / size);
  strides[2] = static_cast<int64_t>(t.nb[head] / size);
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9e", x);
  return text;
}

}  // namespace

int64_t Work::used_keys(int64_t batch) const {
  if (mask.kind == MaskKind::kNone) return a.keys();
  return mask.used_keys[mask.used_keys.size() == 1 ? 0 : static_cast<size_t>(batch)];
}

int64_t Work::first_key(int64_t batch) const {
  if (mask.kind != MaskKind::kBand || mask.window < 0) return 0;
  return std::max<int64_t>(0, used_keys(batch) - a.queries() - mask.window);
}

Part whole(const Operation& a) {
  Part part;
  part.batches = a.batches();
  part.key_heads = a.key_heads();
  part.keys = a.keys();
  part.k = a.k->data;
  part.v = a.v->data;
  set_strides(*a.k, 3, 1, 2, part.k_strides);
  set_strides(*a.v, 3, 1, 2, part.v_strides);
  part.o = static_cast<float*>(a.o->data);
  set_strides(*a.o, 3, 2, 1, part.o_strides);
  return part;
}

void place_result(const Work& work, Part& part) {
  set_strides(*work.a.o, 3, 2, 1, part.o_strides);
  part.o = static_cast<float*>(work.a.o->data) + part.batch * part.o_strides[0] +
           part.key_head * work.group() * part.o_strides[2];
}

void Worker::add_queries(const Work& work, const Part& part, Request& request) const {
  const Operation& a = work.a;
  const int64_t size = a.q->ne[0], first = part.key_head * work.group();
  int64_t strides[3] = {a.queries() * a.heads() * size, a.heads() * size, size};
  size_t bytes = sizeof(uint16_t);
  const void* queries = work.queries;
  if (queries == nullptr) {
    set_strides(*a.q, 3, 1, 2, strides);
    bytes = sizeof(float);
    queries = a.q->data;
  }
  request.buffers.q = static_cast<const char*>(queries) +
                      static_cast<size_t>(part.batch * strides[0] + first * strides[2]) * bytes;
  request.tensor(&fovea_problem::q, dtype_of(work.type),
                 {part.batches, a.queries(), part.key_heads * work.group(), size},
                 {strides[0], strides[1], strides[2], 1});
}

/// What a band is to the keys of the part: numbers, and no tensor of the size of the mask.
void Worker::add_band(const Work& work, const Part& part, Request& request) {
  const MaskSummary& mask = work.mask;
  if (!mask.causal) return;
  fovea_problem& problem = request.problem;
  const int64_t queries = work.a.queries(), window = mask.window;
  if (part.alone()) {
    problem.causal = 1;
    problem.window_left = window;
    return;
  }
  // The first query sees queries - 1 keys fewer than the last. Keys behind the part are some of those.
  const int64_t used = work.used_keys(part.batch);
  const int64_t behind = std::max<int64_t>(0, used - (part.key + part.keys));
  if (behind == 0) {
    problem.causal = 1;
  } else if (behind < queries - 1) {
    problem.window_right = behind;
  }
  if (window < 0 || part.key >= used - 1 - window) return;
  low_ = static_cast<int32_t>(used - queries - window - part.key);
  request.named("low", &low_, kInt32, {}, {});
  request.sees = "k - q >= low";
}

/// The mask as tensors of expressions: classes of blocks, of which those without keys are skipped, and its numbers. Returns
/// what is added to the score.
std::string Worker::add_numbers(const Work& work, const Part& part, Request& request) const {
  const MaskView& view = work.view;
  const MaskSummary& mask = work.mask;
  const int64_t head = part.key_head * work.group(), heads = part.key_heads * work.group();
  const bool by_batch = view.batches > 1, by_head = view.heads > 1;
  const int64_t batch = by_batch ? part.batch : 0, plane = by_head ? head : 0;
  const int64_t batches = by_batch ? part.batches : 1, planes = by_head ? heads : 1;
  const int64_t class_plane = mask.block_rows * mask.block_columns;
  const int64_t columns = (part.keys + kMaskKeys - 1) / kMaskKeys;
  request.named("c", mask.blocks.data() + (batch * view.heads + plane) * class_plane + part.key / kMaskKeys,
                kUint8, {batches, planes, mask.block_rows, columns},
                {view.heads * class_plane, class_plane, mask.block_columns, 1});
  request.named("m", view.row(batch, plane, 0) + part.key, kFloat16,
                {batches, planes, work.a.queries(), part.keys},
                {view.batch_stride, view.head_stride, view.query_stride, 1});
  const std::string at = by_head ? "[b, h, q" : "[b, 0, q";
  const std::string block =
      "c" + at + " / " + std::to_string(kMaskQueries) + ", k / " + std::to_string(kMaskKeys) + "]";
  const std::string element = "m" + at + ", k]";
  if (mask.kind == MaskKind::kZeros) {
    // Tiles read the numbers themselves, which takes less time than to ask for the classes of blocks.
    if (work.a.rows() > kFewRowsOfExpressions) {
      request.sees = element + " == 0.0";
      return {};
    }
    request.sees = block + " == 2 || " + block + " == 1 && " + element + " == 0.0";
    return {};
  }
  request.sees = block + " != 0";
  if (work.slopes.empty()) return " + " + element;
  request.named("slope", work.slopes.data() + head, kFloat32, {heads}, {1});
  return " + slope[h] * " + element;
}

void Worker::add_mask(const Work& work, const Part& part, Request& request) {
  // So few rows go without tiles, which softcap as a number of the problem needs.
  const Operation& a = work.a;
  const MaskKind kind = work.mask.kind;
  std::string score(1, 's');
  if (a.softcap > 0 && a.rows() <= kFewRowsOfExpressions) {
    score = number(a.softcap) + " * tanh(s / " + number(a.softcap) + ")";
  } else {
    request.problem.softcap = a.softcap;
  }
  if (kind == MaskKind::kBand) {
    add_band(work, part, request);
  } else if (kind != MaskKind::kNone) {
    score += add_numbers(work, part, request);
  }
  if (score.size() > 1) request.score = std::move(score);
  if (kind == MaskKind::kNone) return;
  used_.resize(static_cast<size_t>(part.batches));
  for (int64_t i = 0; i < part.batches; ++i) {
    used_[static_cast<size_t>(i)] =
        static_cast<int32_t>(std::clamp<int64_t>(work.used_keys(part.batch + i) - part.key, 0, part.keys));
  }
  request.tensor(&fovea_problem::seqused_k, kInt32, {part.batches}, {1});
  request.buffers.seqused_k = used_.data();
}

bool Worker::run(const Work& work, const Part& part, int threads) try {
  const Operation& a = work.a;
  const fovea_dtype type = dtype_of(work.type);
  const int64_t heads = part.key_heads * work.group(), queries = a.queries();
  Request request;
  request.problem.scale = a.scale;
  add_queries(work, part, request);
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
  if (a.sinks != nullptr && part.sinks) {
    request.tensor(&fovea_problem::sink, kFloat32, {heads}, {1});
    request.buffers.sink = static_cast<const float*>(a.sinks->data) + part.key_head * work.group();
  }
  add_mask(work, part, request);
  if (plans_.run(request, threads)) return true;
  error_ = fovea_last_error();
  return false;
} catch (const std::bad_alloc&) {  // no exception leaves a region of OpenMP
  error_ = "out of memory";
  return false;
}

bool Worker::run_converted(const Work& work, Part part, int threads) {
  const ggml_type type = work.type;
  const int64_t d = work.a.k->ne[0], d_v = work.a.v->ne[0], count = part.key_heads * part.keys;
  const auto bytes = static_cast<int64_t>(ggml_type_size(type));
  auto* keys = static_cast<char*>(panel_.at_least(static_cast<size_t>(count * (d + d_v) * bytes)));
  if (keys == nullptr) {
    error_ = fovea_last_error();
    return false;
  }
  char* values = keys + count * d * bytes;
  rows_as(type, *work.a.k, part.batch, part.key_head, part.key_heads, part.key, part.keys, threads, keys);
  rows_as(type, *work.a.v, part.batch, part.key_head, part.key_heads, part.key, part.keys, threads, values);
  part.k = keys;
  part.v = values;
  const int64_t k_strides[3] = {0, d, part.keys * d}, v_strides[3] = {0, d_v, part.keys * d_v};
  std::copy_n(k_strides, 3, part.k_strides);
  std::copy_n(v_strides, 3, part.v_strides);
  return run(work, part, threads);
}

namespace {

BlockRows blocks_of(const ggml_tensor& t, const Part& part) {
  BlockRows rows{*block_type_of(t.type), nullptr, t.ne[0], static_cast<int64_t>(t.nb[1]),
                 static_cast<int64_t>(t.nb[2])};
  rows.data = static_cast<const char*>(t.data) + part.key * rows.key_stride +
              part.key_head * rows.head_stride + part.batch * static_cast<int64_t>(t.nb[3]);
  return rows;
}

}  // namespace

bool Worker::run_blocks(const Work& work, const Part& part) try {
  const Operation& a = work.a;
  const int64_t queries = a.queries(), heads = part.key_heads * work.group(),
                first = part.key_head * work.group();
  BlockAttention attention{blocks_of(*a.k, part),
                           blocks_of(*a.v, part),
                           part.keys,
                           part.key_heads,
                           a.rows(),
                           nullptr,
                           a.scale,
                           a.softcap};
  rows_.assign(static_cast<size_t>(heads * queries), {});
  attention.queries = rows_.data();
  const auto* sinks = a.sinks != nullptr && part.sinks ? static_cast<const float*>(a.sinks->data) : nullptr;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < queries; ++i) {
      QueryRow& row = rows_[static_cast<size_t>(h * queries + i)];
      const int64_t head = first + h;
      row.q = reinterpret_cast<const float*>(
          static_cast<const char*>(a.q->data) + static_cast<size_t>(i) * a.q->nb[1] +
          static_cast<size_t>(head) * a.q->nb[2] + static_cast<size_t>(part.batch) * a.q->nb[3]);
      if (a.mask != nullptr) {
        const int64_t batch = work.view.batches > 1 ? part.batch : 0, plane = work.view.heads > 1 ? head : 0;
        row.mask = work.view.row(batch, plane, i) + part.key;
      }
      if (!work.slopes.empty()) row.slope = work.slopes[static_cast<size_t>(head)];
      row.has_sink = sinks != nullptr;
      if (row.has_sink) row.sink = sinks[head];
      row.o = part.o + i * part.o_strides[1] + h * part.o_strides[2];
      if (part.lse != nullptr) row.lse = part.lse + h * queries + i;
    }
  }
  block_ways().front().attend(attention);
  return true;
} catch (const std::bad_alloc&) {  // no exception leaves a region of OpenMP
  error_ = "out of memory";
  return false;
}

}  // namespace fovea_ggml
