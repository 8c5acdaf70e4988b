// Weights of one head, four queries and 512 keys at a time, and how cells of a picture pool them.
#include "cli/picture/attention_map.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <thread>

#include "cli/terminal/failure.hpp"
#include "cli/terminal/progress.hpp"

namespace fovea::cli {
namespace {

constexpr int64_t kRowsAtOnce = 4;    // each row of k then serves four queries
constexpr int64_t kKeysAtOnce = 512;  // 4 rows of 512 scores are 8 KB: they stay in the first-level cache

/// exp(x) for x <= 0 or a little above, to about 1e-7 relative, without branches so that compilers vectorise
/// it: 2^n times a polynomial for the rest.
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = x * 1.44269504f + kMagic;
  const float n = shifted - kMagic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) << 23) + 0x3f800000u;
  return p * std::bit_cast<float>(exponent);
}

/// Rows of one head of an array (batch, seqlen, heads, size) as float32.
std::vector<float> rows_of_head(const Array& array, int64_t batch_index, int64_t head) {
  const std::vector<int64_t> shape = full_shape(array.shape, false);
  const size_t seqlen = static_cast<size_t>(shape[1]), size = static_cast<size_t>(shape[3]);
  const size_t heads = static_cast<size_t>(shape[2]);
  std::vector<float> rows(seqlen * size);
  const auto copy = [&](const auto& elements, const auto& decode) {
    for (size_t s = 0; s < seqlen; ++s) {
      const size_t from =
          ((static_cast<size_t>(batch_index) * seqlen + s) * heads + static_cast<size_t>(head)) * size;
      for (size_t d = 0; d < size; ++d) rows[s * size + d] = static_cast<float>(decode(elements[from + d]));
    }
  };
  const auto as_is = [](auto element) { return element; };
  if (array.type == ElementType::f16) {
    copy(array.elements<uint16_t>(), decode_float16);
  } else if (array.type == ElementType::bf16) {
    copy(array.elements<uint16_t>(), decode_bfloat16);
  } else if (array.type == ElementType::e4m3) {
    copy(array.elements<uint8_t>(), decode_e4m3);
  } else if (array.type == ElementType::f32) {
    copy(array.elements<float>(), as_is);
  } else {
    copy(array.elements<double>(), as_is);
  }
  return rows;
}

/// The slice of one sequence and one head, with the array's own strides.
Tensor slice(const Array& array, int64_t batch_index, int64_t head) {
  const std::vector<int64_t> s = full_shape(array.shape, false);
  const size_t offset =
      static_cast<size_t>((batch_index * s[1] * s[2] + head) * s[3]) * io::element_size(array.type);
  const std::array<int64_t, 4> shape = {1, s[1], 1, s[3]};
  const std::array<int64_t, 4> strides = {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1};
  return Tensor(const_cast<std::byte*>(array.bytes.data()) + offset, view(array).dtype(), shape, strides);
}

/// The slice of a bias or mask, whose leading dimensions may be missing or 1.
Tensor slice_of_term(const Array& array, int64_t batch_index, int64_t head) {
  std::array<int64_t, 4> s = {1, 1, 1, 1};
  std::copy_backward(array.shape.begin(), array.shape.end(), s.end());
  const int64_t plane = s[2] * s[3];
  const int64_t index = (s[0] == 1 ? 0 : batch_index) * s[1] + (s[1] == 1 ? 0 : head);
  const std::array<int64_t, 4> shape = {1, 1, s[2], s[3]};
  return Tensor(const_cast<std::byte*>(array.bytes.data()) +
                    static_cast<size_t>(index * plane) * io::element_size(array.type),
                view(array).dtype(), shape);
}

void require_index(const char* option, int64_t index, int64_t count) {
  if (index >= 0 && index < count) return;
  throw Failure(Exit::usage, count > 0 ? fmt::format("{}: got {}, expected 0 to {}", option, index, count - 1)
                                       : fmt::format("{}: the inputs have none", option));
}

/// A bias or mask of shape (batch, heads, queries, keys), each of which may be 1 or missing from the left.
void require_term(const char* name, const std::optional<Array>& term, const std::vector<int64_t>& expected) {
  if (!term) return;
  const std::vector<int64_t>& shape = term->shape;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != 1 && shape[i] != expected[i + 4 - shape.size()]) {
      throw misfit(name, fmt::format("got shape {}, expected {}, or 1 in any of these dimensions",
                                     io::shape_text(shape), io::shape_text(expected)));
    }
  }
}

/// The number of one head; 0 without the array, whose shape is (heads) or, for ALiBi, (batch, heads).
float number_of_head(const char* name, const std::optional<Array>& numbers, bool by_batch, int64_t batch,
                     int64_t heads, int64_t batch_index, int64_t head) {
  if (!numbers) return 0;
  by_batch = by_batch && numbers->shape.size() == 2;
  if (numbers->shape != (by_batch ? std::vector<int64_t>{batch, heads} : std::vector<int64_t>{heads})) {
    throw misfit(name, fmt::format("got shape {}, expected one number for each of the {} heads",
                                   io::shape_text(numbers->shape), heads));
  }
  return numbers->elements<float>()[static_cast<size_t>((by_batch ? batch_index * heads : 0) + head)];
}

}  // namespace

AttentionMap::AttentionMap(const Inputs& inputs, const Terms& terms, const Execution& execution,
                           int64_t batch_index, int64_t head)
    : inputs_(inputs), batch_index_(batch_index), head_(head) {
  const std::vector<int64_t> q = full_shape(inputs.q.shape, false), k = full_shape(inputs.k.shape, false);
  require_index("--batch-index", batch_index, q[0]);
  require_index("--head", head, q[2]);
  if (k[0] != q[0] || k[3] != q[3] || k[2] < 1 || q[2] % k[2] != 0) {
    throw misfit("k",
                 fmt::format("got shape {}, expected the batch and head size of q {} and a number of heads "
                             "that divides its",
                             io::shape_text(inputs.k.shape), io::shape_text(inputs.q.shape)));
  }
  const std::vector<int64_t> scores = {q[0], q[2], q[1], k[1]};
  require_term("bias", inputs.bias, scores);
  require_term("mask", inputs.mask, scores);
  slope_ = number_of_head("alibi", inputs.alibi, true, q[0], q[2], batch_index, head);
  const float sink = number_of_head("sink", inputs.sink, false, q[0], q[2], batch_index, head);
  seqlen_q_ = q[1];
  seqlen_k_ = k[1];
  head_dim_ = q[3];
  const int64_t head_kv = head / (q[2] / k[2]);
  compute_lse(terms, execution, head_kv, sink);
  store_rows(terms, head_kv);
}

void AttentionMap::compute_lse(const Terms& terms, const Execution& execution, int64_t head_kv, float sink) {
  Problem problem;
  terms.apply(problem);
  problem.q = slice(inputs_.q, batch_index_, head_);
  problem.k = slice(inputs_.k, batch_index_, head_kv);
  // The lse needs no values: one column of zeros stands for v.
  const std::array<int64_t, 4> o_shape = {1, seqlen_q_, 1, 1}, v_shape = {1, seqlen_k_, 1, 1};
  const std::array<int64_t, 3> lse_shape = {1, 1, seqlen_q_};
  const Array v = io::make_array("v", inputs_.q.type, {seqlen_k_});
  const Array o = io::make_array("o", output_type(inputs_.q.type), {seqlen_q_});
  lse_.resize(static_cast<size_t>(seqlen_q_));
  problem.v = view(v, v_shape);
  problem.o = view(o, o_shape);
  problem.lse = Tensor(lse_.data(), lse_shape);
  if (inputs_.bias) problem.bias = slice_of_term(*inputs_.bias, batch_index_, head_);
  if (inputs_.mask) problem.mask = slice_of_term(*inputs_.mask, batch_index_, head_);
  if (inputs_.alibi) problem.alibi = Tensor(&slope_, {1});
  if (inputs_.sink) problem.sink = Tensor(&sink, {1});
  const Plan plan(problem, execution.options());
  backend_ = plan.backend();
  Workspace workspace(plan);
  plan.run({.q = problem.q.data(),
            .k = problem.k.data(),
            .v = problem.v.data(),
            .o = problem.o.data(),
            .lse = problem.lse.data(),
            .bias = problem.bias.data(),
            .mask = problem.mask.data(),
            .alibi = problem.alibi.data(),
            .sink = problem.sink.data()},
           workspace);
  left_ = problem.window_left;
  right_ = terms.causal ? 0 : problem.window_right;
}

void AttentionMap::store_rows(const Terms& terms, int64_t head_kv) {
  softcap_ = terms.softcap;
  const double scale = terms.scale != 0 ? terms.scale : 1 / std::sqrt(static_cast<double>(head_dim_));
  q_ = rows_of_head(inputs_.q, batch_index_, head_);
  for (float& x : q_) x = static_cast<float>(static_cast<double>(x) * scale);
  const std::vector<float> k_rows = rows_of_head(inputs_.k, batch_index_, head_kv);
  k_transposed_.resize(k_rows.size());
  for (int64_t j = 0; j < seqlen_k_; ++j) {
    for (int64_t d = 0; d < head_dim_; ++d) {
      k_transposed_[static_cast<size_t>(d * seqlen_k_ + j)] = k_rows[static_cast<size_t>(j * head_dim_ + d)];
    }
  }
}

float AttentionMap::element(const Array& array, int64_t query, int64_t key) const {
  std::array<int64_t, 4> s = {1, 1, 1, 1};
  std::copy_backward(array.shape.begin(), array.shape.end(), s.end());
  const std::array<int64_t, 4> index = {batch_index_, head_, query, key};
  int64_t place = 0;
  for (size_t i = 0; i < 4; ++i) place = place * s[i] + (s[i] == 1 ? 0 : index[i]);
  const auto at = static_cast<size_t>(place);
  switch (array.type) {
    case ElementType::f16:
      return decode_float16(array.elements<uint16_t>()[at]);
    case ElementType::bf16:
      return decode_bfloat16(array.elements<uint16_t>()[at]);
    case ElementType::f32:
      return array.elements<float>()[at];
    case ElementType::f64:
      return static_cast<float>(array.elements<double>()[at]);
    default:
      return array.elements<uint8_t>()[at] != 0 ? 1.0f : 0.0f;
  }
}

void AttentionMap::weights(int64_t first_query, int64_t count, Range keys, float* out) const {
  const int64_t n = keys.size();
  std::fill_n(out, kRowsAtOnce * n, 0.0f);
  // Rows beyond `count` repeat the last, so that the loop is one.
  std::array<const float*, kRowsAtOnce> q{};
  for (int64_t r = 0; r < kRowsAtOnce; ++r) {
    q[static_cast<size_t>(r)] = q_.data() + (first_query + std::min(r, count - 1)) * head_dim_;
  }
  float *s0 = out, *s1 = out + n, *s2 = out + 2 * n, *s3 = out + 3 * n;
  for (int64_t d = 0; d < head_dim_; ++d) {
    const float* row = k_transposed_.data() + d * seqlen_k_ + keys.first;
    const float q0 = q[0][d], q1 = q[1][d], q2 = q[2][d], q3 = q[3][d];
    for (int64_t j = 0; j < n; ++j) {
      const float x = row[j];
      s0[j] += q0 * x;
      s1[j] += q1 * x;
      s2[j] += q2 * x;
      s3[j] += q3 * x;
    }
  }
  const auto cap = static_cast<float>(softcap_);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t query = first_query + r;
    const int64_t diagonal = query + seqlen_k_ - seqlen_q_;
    float* s = out + r * n;
    if (cap > 0) {
      for (int64_t j = 0; j < n; ++j) s[j] = cap * std::tanh(s[j] / cap);
    }
    if (inputs_.alibi) {
      for (int64_t j = 0; j < n; ++j)
        s[j] -= slope_ * static_cast<float>(std::abs(diagonal - keys.first - j));
    }
    if (inputs_.bias) {
      for (int64_t j = 0; j < n; ++j) s[j] += element(*inputs_.bias, query, keys.first + j);
    }
    const float lse = lse_[static_cast<size_t>(query)];
    const bool empty = lse == -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < n; ++j) s[j] = fast_exp(s[j] - (empty ? 0.0f : lse));
    const int64_t begin = empty       ? n
                          : left_ < 0 ? 0
                                      : std::clamp<int64_t>(diagonal - left_ - keys.first, 0, n);
    const int64_t end = right_ < 0 ? n : std::clamp<int64_t>(diagonal + right_ + 1 - keys.first, begin, n);
    std::fill(s, s + begin, 0.0f);
    std::fill(s + end, s + n, 0.0f);
    if (inputs_.mask) {
      for (int64_t j = begin; j < end; ++j) {
        if (element(*inputs_.mask, query, keys.first + j) == 0) s[j] = 0;
      }
    }
  }
}

namespace {

/// The tokens of a cell; cells of a range differ by at most one token.
Range tokens_of_cell(Range range, int64_t cell, int64_t cells) {
  return {range.first + range.size() * cell / cells, range.first + range.size() * (cell + 1) / cells};
}

}  // namespace

void AttentionMap::pool_row(Range queries, Range keys, Pooling pooling, float* tile, std::span<double> sums,
                            std::span<float> out) const {
  const auto columns = static_cast<int64_t>(out.size());
  std::fill(sums.begin(), sums.end(), 0.0);
  const int64_t shift = seqlen_k_ - seqlen_q_;
  for (int64_t query = queries.first; query < queries.last; query += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, queries.last - query);
    // Keys that none of these queries sees are not computed.
    const int64_t from = left_ < 0 ? keys.first : std::max(keys.first, query + shift - left_);
    const int64_t to = right_ < 0 ? keys.last : std::min(keys.last, query + count + shift + right_);
    // The cell of key `from`, or the one before it.
    int64_t cell = from >= to ? 0 : (from - keys.first) * columns / keys.size();
    for (int64_t key = from; key < to; key += kKeysAtOnce) {
      const Range tile_keys{key, std::min(key + kKeysAtOnce, to)};
      weights(query, count, tile_keys, tile);
      for (int64_t j = key; j < tile_keys.last;) {
        while (tokens_of_cell(keys, cell, columns).last <= j) ++cell;
        const auto at = static_cast<size_t>(cell);
        const int64_t end = std::min(tokens_of_cell(keys, cell, columns).last, tile_keys.last);
        for (int64_t r = 0; r < count; ++r) {
          const float* const row = tile + r * tile_keys.size();
          const float *const first = row + (j - key), *const last = row + (end - key);
          if (pooling == Pooling::max) {
            out[at] = std::max(out[at], *std::max_element(first, last));
          } else {
            sums[at] = std::accumulate(first, last, sums[at]);
          }
        }
        j = end;
      }
    }
  }
  if (pooling == Pooling::mean) {
    for (size_t c = 0; c < out.size(); ++c) {
      const int64_t weights = queries.size() * tokens_of_cell(keys, static_cast<int64_t>(c), columns).size();
      out[c] = static_cast<float>(sums[c] / static_cast<double>(weights));
    }
  }
}

WeightGrid AttentionMap::pooled(Range queries, Range keys, int64_t rows, int64_t columns, Pooling pooling,
                                int threads) const {
  rows = std::min(rows, queries.size());
  columns = std::min(columns, keys.size());
  const auto width = static_cast<size_t>(columns);
  WeightGrid grid{rows, columns, std::vector<float>(static_cast<size_t>(rows) * width, 0.0f)};
  if (rows == 0 || columns == 0) return grid;

  Progress progress("weights", rows);
  std::atomic<int64_t> next{0};
  // Allocated before threads start: here, too little memory can be reported.
  constexpr size_t kTile = static_cast<size_t>(kRowsAtOnce * kKeysAtOnce);
  const auto num_workers = static_cast<size_t>(std::clamp<int64_t>(threads, 1, rows));
  std::vector<float> tiles(num_workers * kTile);
  std::vector<double> sums(num_workers * width);
  const auto work = [&](size_t worker) {
    for (int64_t row = next++; row < rows; row = next++) {
      pool_row(tokens_of_cell(queries, row, rows), keys, pooling, tiles.data() + worker * kTile,
               std::span(sums).subspan(worker * width, width),
               std::span(grid.values).subspan(static_cast<size_t>(row) * width, width));
      progress.advance();
    }
  };
  std::vector<std::jthread> workers;
  for (size_t worker = 1; worker < num_workers; ++worker) workers.emplace_back(work, worker);
  work(0);
  workers.clear();  // joins
  return grid;
}

}  // namespace fovea::cli
