// A node as one problem where Fovea reads the cache in place. Where the cache is converted, as parts: with many queries
//
//   for each sequence, and each group of key heads whose converted keys fit kPanelBytes:
//     for each stretch of keys that fits (one, but for long caches):
//       convert K and V, with all threads
//       o, lse = attention, with all threads     merged with the stretches before it
//
// and with few queries, where the conversion is most of the work, each thread converts keys into its own cache and uses
// them there:
//
//   in parallel over sequences, key heads and chunks of keys:  convert, o_i, lse_i = attention
//   in parallel over sequences and key heads:                  o = merge of all o_i
//
// Blocks that are read as they are go the same way, without the conversion.
#include "attention.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include "convert.hpp"

namespace fovea_ggml {
namespace {

// Converted keys and values at a time: a head of 16,384 keys of 128. It bounds the memory beside the cache.
constexpr int64_t kPanelBytes = int64_t{16} << 20;
// A chunk lies in half of a second-level cache of 1 MB until it was used.
constexpr int64_t kChunkBytes = int64_t{512} << 10;
// More chunks than this and merging them shows.
constexpr int64_t kMostChunks = 32;
// Rows of so many heads make a stretch of memory that the processor reads ahead: 544 bytes of Q8_0 at head size 128.
constexpr int64_t kMostChunkHeads = 4;
constexpr int64_t kChunkKeys = 128;
// The first keys of a chunk of blocks come from memory without being fetched ahead, 64 of them.
constexpr int64_t kLeastBlockKeys = 256;
// Threads that end early take what others have not begun.
constexpr int64_t kChunksOfThread = 4;

int64_t round_up(int64_t x, int64_t step) {
  return (x + step - 1) / step * step;
}

/// Whether the rows of all heads of a key lie one behind the other.
bool side_by_side(const ggml_tensor& t) {
  return t.nb[2] == ggml_row_size(t.type, t.ne[0]) && t.nb[1] >= t.nb[2] * static_cast<size_t>(t.ne[2]);
}

int64_t bytes_of_key(const Work& work) {
  return (work.a.k->ne[0] + work.a.v->ne[0]) * static_cast<int64_t>(ggml_type_size(work.type));
}

/// Keys that are converted: up to the last that is seen, in steps, so that plans serve many tokens of a text that grows.
int64_t converted_keys(const Work& work, int64_t batch) {
  constexpr int64_t kStep = 256;
  return std::min(work.a.keys(), round_up(work.used_keys(batch), kStep));
}

MaskView view_of(const Operation& a) {
  if (a.mask == nullptr) return {};
  const ggml_tensor& m = *a.mask;
  const auto stride = [&](int i) { return static_cast<int64_t>(m.nb[i] / sizeof(uint16_t)); };
  return {static_cast<const uint16_t*>(m.data),
          m.ne[3],
          m.ne[2],
          a.queries(),
          a.keys(),
          stride(3),
          stride(2),
          stride(1)};
}

fovea_tensor float_tensor(void* data, int ndim, const int64_t* shape, const int64_t* strides) {
  return {data, {FOVEA_CPU, 0}, ndim, kFloat32, shape, strides, 0};
}

/// Results of parts over the same rows, one behind the other.
struct Partials {
  int64_t shape[4];  ///< 1, queries, query heads, size
  float *o, *lse;

  int64_t o_size() const { return shape[1] * shape[2] * shape[3]; }
  int64_t lse_size() const { return shape[1] * shape[2]; }
  /// Lets `part` write its result as number i.
  void place(int64_t i, Part& part) const {
    const int64_t strides[3] = {o_size(), shape[2] * shape[3], shape[3]};
    std::copy_n(strides, 3, part.o_strides);
    part.o = o + i * o_size();
    part.lse = lse + i * lse_size();
  }
  /// Merges query heads [head, head + heads) of the first `count` into those of `out`, whose lse may be null: not wanted.
  bool merge(int64_t count, const Part& out, int64_t head, int64_t heads) const try {
    const int64_t o_shape[4] = {1, shape[1], heads, shape[3]}, lse_shape[3] = {1, heads, shape[1]};
    const int64_t strides[4] = {o_size(), shape[2] * shape[3], shape[3], 1};
    const int64_t out_strides[4] = {out.o_strides[0], out.o_strides[1], out.o_strides[2], 1};
    std::vector<fovea_tensor> tensors;
    std::vector<const fovea_tensor*> all_o, all_lse;
    tensors.reserve(static_cast<size_t>(2 * count));
    for (int64_t i = 0; i < count; ++i) {
      float *const o_i = o + i * o_size() + head * shape[3], *const lse_i =
                                                                 lse + i * lse_size() + head * shape[1];
      all_o.push_back(&tensors.emplace_back(float_tensor(o_i, 4, o_shape, strides)));
      all_lse.push_back(&tensors.emplace_back(float_tensor(lse_i, 3, lse_shape, nullptr)));
    }
    const fovea_tensor o_out = float_tensor(out.o + head * out.o_strides[2], 4, o_shape, out_strides);
    const fovea_tensor lse_out =
        float_tensor(out.lse == nullptr ? nullptr : out.lse + head * shape[1], 3, lse_shape, nullptr);
    return fovea_merge(static_cast<int32_t>(count), all_o.data(), all_lse.data(), &o_out,
                       out.lse == nullptr ? nullptr : &lse_out, nullptr) == FOVEA_OK;
  } catch (const std::bad_alloc&) {  // no exception leaves a region of OpenMP
    return false;
  }
};

}  // namespace

void Attention::set_threads(int threads) {
  threads_ = std::max(1, threads);
  while (workers_.size() < static_cast<size_t>(threads_)) workers_.emplace_back();
}

bool Attention::failed() {
  error_ = fovea_last_error();
  return false;
}
bool Attention::failed(const Worker& worker) {
  error_ = worker.error();
  return false;
}

/// One stretch of keys after the other, with all threads, merged as they come.
bool Attention::compute_panel(const Work& work, int64_t batch, int64_t key_head, int64_t key_heads) {
  const Operation& a = work.a;
  const int64_t end = converted_keys(work, batch), first = work.first_key(batch) / kMaskKeys * kMaskKeys;
  const int64_t most = std::max(kMaskKeys, kPanelBytes / bytes_of_key(work) / kMaskKeys * kMaskKeys);
  Part result;
  result.batch = batch;
  result.key_head = key_head;
  result.key_heads = key_heads;
  result.key = first;
  place_result(work, result);
  Worker& worker = workers_.front();
  if (end - first <= most) {
    result.keys = end - first;
    return worker.run_converted(work, result, threads_) || failed(worker);
  }
  Partials partials{{1, a.queries(), key_heads * work.group(), a.v->ne[0]}, nullptr, nullptr};
  partials.o = static_cast<float*>(
      partial_.at_least(2 * static_cast<size_t>(partials.o_size() + partials.lse_size()) * sizeof(float)));
  if (partials.o == nullptr) return failed();
  partials.lse = partials.o + 2 * partials.o_size();
  for (int64_t key = first; key < end; key += most) {
    Part part = result;
    part.key = key;
    part.keys = std::min(most, end - key);
    part.sinks = key == first;
    partials.place(key == first ? 0 : 1, part);
    if (!worker.run_converted(work, part, threads_)) return failed(worker);
    if (key == first) continue;
    Part sum = result;
    if (key + most < end) partials.place(0, sum);
    if (!partials.merge(2, sum, 0, partials.shape[2])) return failed();
  }
  return true;
}

bool Attention::compute_panels(const Work& work) {
  const Operation& a = work.a;
  for (int64_t batch = 0; batch < a.batches(); ++batch) {
    const int64_t head_bytes = bytes_of_key(work) * std::max<int64_t>(1, converted_keys(work, batch));
    const int64_t heads = std::clamp<int64_t>(kPanelBytes / head_bytes, 1, a.key_heads());
    for (int64_t head = 0; head < a.key_heads(); head += heads) {
      if (!compute_panel(work, batch, head, std::min(heads, a.key_heads() - head))) return false;
    }
  }
  return true;
}

/// How the keys of a node are divided among threads.
struct Attention::Chunks {
  int64_t heads, keys;  ///< key heads and keys of a chunk
  int64_t groups;       ///< of key heads, counted over all sequences
  int64_t count;        ///< chunks of a group
  Partials first;       ///< results of the first group; those of the next lie behind them

  Partials partials_of(int64_t group) const {
    Partials partials = first;
    partials.o += group * count * first.o_size();
    partials.lse += group * count * first.lse_size();
    return partials;
  }
  /// All keys of a group, with its place in the node's result.
  Part part_of(const Work& work, int64_t group) const {
    const int64_t first_head = group * heads;
    Part part;
    part.batch = first_head / work.a.key_heads();
    part.key_head = first_head % work.a.key_heads();
    part.key_heads = heads;
    place_result(work, part);
    return part;
  }
};

/// Chunk number item % chunks.count of group item / chunks.count.
bool Attention::compute_chunk(const Work& work, const Chunks& chunks, int64_t item, Worker& worker) const {
  const int64_t chunk = item % chunks.count, group = item / chunks.count;
  Part part = chunks.part_of(work, group);
  part.key = work.first_key(part.batch) / kMaskKeys * kMaskKeys + chunk * chunks.keys;
  part.keys = std::min(chunks.keys, converted_keys(work, part.batch) - part.key);
  part.sinks = chunk == 0;
  const Partials partials = chunks.partials_of(group);
  if (chunks.count > 1) partials.place(chunk, part);
  if (part.keys > 0 || chunk == 0) {
    return reads_blocks(work.a) ? worker.run_blocks(work, part) : worker.run_converted(work, part, 1);
  }
  std::fill_n(part.lse, partials.lse_size(), -std::numeric_limits<float>::infinity());
  return true;
}

/// Heads whose rows lie side by side in the cache are computed together, as long as every thread has chunks.
Attention::Chunks Attention::chunks_of(const Work& work, int64_t most_keys) const {
  const Operation& a = work.a;
  const bool converts = !reads_blocks(a);
  const auto of_heads = [&](int64_t heads) {
    const int64_t groups = a.batches() * a.key_heads() / heads;
    const int64_t wanted = converts
                               ? kChunkBytes / (bytes_of_key(work) * heads)
                               : std::max(kLeastBlockKeys, most_keys * groups / (kChunksOfThread * threads_));
    const int64_t keys = round_up(std::max(wanted, most_keys / kMostChunks), kChunkKeys);
    return Chunks{heads,
                  keys,
                  groups,
                  (most_keys + keys - 1) / keys,
                  {{1, a.queries(), heads * work.group(), a.v->ne[0]}, nullptr, nullptr}};
  };
  const int64_t all = side_by_side(*a.k) && side_by_side(*a.v) ? a.key_heads() : 1;
  int64_t heads = converts ? std::gcd(a.key_heads(), kMostChunkHeads) : all;
  while (heads > 1 && of_heads(heads).groups * of_heads(heads).count < kChunksOfThread * threads_)
    heads = heads % 2 == 0 ? heads / 2 : 1;
  return of_heads(heads);
}

bool Attention::compute_chunks(const Work& work) {
  const Operation& a = work.a;
  int64_t most = 1;  // keys of a sequence
  for (int64_t batch = 0; batch < a.batches(); ++batch) {
    most = std::max(most, converted_keys(work, batch) - work.first_key(batch) / kMaskKeys * kMaskKeys);
  }
  Chunks chunks = chunks_of(work, most);
  Partials& first = chunks.first;
  const int64_t results = chunks.groups * chunks.count;
  first.o = static_cast<float*>(
      partial_.at_least(static_cast<size_t>(results * (first.o_size() + first.lse_size())) * sizeof(float)));
  if (first.o == nullptr) return failed();
  first.lse = first.o + results * first.o_size();
  std::atomic<const Worker*> stopped{nullptr};
#pragma omp parallel for num_threads(threads_) schedule(dynamic)
  for (int64_t item = 0; item < results; ++item) {
    Worker& worker = workers_[static_cast<size_t>(omp_get_thread_num())];
    if (stopped == nullptr && !compute_chunk(work, chunks, item, worker)) stopped = &worker;
  }
  if (stopped != nullptr) return failed(*stopped);
  if (chunks.count == 1) return true;
  bool merged = true;
#pragma omp parallel for num_threads(threads_) reduction(&& : merged)
  for (int64_t x = 0; x < chunks.groups * chunks.heads; ++x) {
    const int64_t group = x / chunks.heads, head = x % chunks.heads * work.group();
    merged = merged &&
             chunks.partials_of(group).merge(chunks.count, chunks.part_of(work, group), head, work.group());
  }
  if (!merged) error_ = "the parts of the result could not be merged";
  return merged;
}

bool Attention::compute(const ggml_tensor& node) {
  const Operation a(node);
  Work work{a, view_of(a), {}, {}, GGML_TYPE_F32, nullptr};
  work.mask = summarise(work.view, threads_);
  if (a.max_bias > 0) {
    for (int64_t h = 0; h < a.heads(); ++h) work.slopes.push_back(a.slope(h));
  }
  const bool is_band = work.mask.kind == MaskKind::kNone || work.mask.kind == MaskKind::kBand;
  if (reads_blocks(a)) return compute_chunks(work);
  const ggml_type type = work.type = computed_type(a, !is_band || a.softcap > 0);
  if (type != GGML_TYPE_F32) {
    void* queries = queries_.at_least(static_cast<size_t>(ggml_nelements(a.q)) * sizeof(uint16_t));
    if (queries == nullptr) return failed();
    queries_as(*a.q, type, threads_, queries);
    work.queries = queries;
  }
  if (a.k->type == type && a.v->type == type) {
    Worker& worker = workers_.front();
    return worker.run(work, whole(a), threads_) || failed(worker);
  }
  return a.rows() <= kChunkRows ? compute_chunks(work) : compute_panels(work);
}

}  // namespace fovea_ggml
